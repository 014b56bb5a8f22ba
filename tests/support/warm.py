"""Processes that need not import anything: `python ...` forks from a process that has torch, fastai and fastdist imported (Linux).

`install()` gives `subprocess` and `multiprocessing` of this process a way of starting Python that skips some 6 seconds of imports. What it
starts is as real as any other process: a child of its own of whoever has started it, with the pid, session, streams, signals, folder,
environment and exit status that were asked for; and what it starts itself is started in the same way: a launcher's workers are warm too.

It hides faults of import, so each launcher has at least one test in the `cold` way: with `FASTDIST_TEST_COLD` in its environment.

How: a *seed* is a process that has imported what is needed, has no thread, and does nothing but fork. Each warm process forks a seed for
itself before it runs anything. Asked for a new process, the seed forks twice; the one in between ends, and Linux gives the orphan to the
process that has asked, which is a "child subreaper" meanwhile: so it can wait for it, as for a child of its own.
"""
import array, ctypes, fcntl, importlib, io, json, os, runpy, signal, socket, struct, subprocess, sys, threading, time, types
from contextlib import contextmanager, nullcontext

COLD = 'FASTDIST_TEST_COLD'
SPAWNS = 'FASTDIST_TEST_SPAWNS'  # in the environment: what a launcher's workers start is warm, too
FULL = ('torch', 'torch.distributed.elastic.multiprocessing', 'torch._dynamo', 'pandas', 'matplotlib.pyplot', 'sklearn.datasets',
        'IPython.core.interactiveshell', 'cloudpickle', 'psutil',
        'fastai.basics', 'fastai.callback.all', 'fastai.vision.all', 'fastai.tabular.all', 'accelerate.commands.launch',
        'torch.distributed.run', 'torch.distributed.fsdp', 'torch.distributed.optim', 'torch.utils.tensorboard', 'nbformat',
        *(f'fastdist.{o}' for o in 'all launch.cli launch.check launch.config launch.notebook.launcher launch.slurm launch.logs'.split()))
IN_NOTEBOOK = ('ipykernel', 'notebook.worker', 'nbclient', 'notebook.py')
NAME = 'warm-seed'  # of seeds, in /proc
PAD = 'FASTDIST_TEST_PAD'  # room for the environment and the command line of a warm process, where /proc shows them
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 4, 15, 36
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_libc, _lock, _seeds, _first = ctypes.CDLL(None, use_errno=True), threading.Lock(), {}, []  # `_seeds`: kind -> the line to it
_SIGNALS = [getattr(signal, f'SIG{o}') for o in 'INT TERM HUP QUIT ABRT ALRM USR1 USR2 URG WINCH TSTP TTIN TTOU CONT'.split()]
_owner, _is_warm, _all_kinds = os.getpid(), False, False


def _prctl(option, value):
    if _libc.prctl(option, value, 0, 0, 0): raise OSError(ctypes.get_errno(), f'prctl({option})')


def _send(sock, msg, fds=()):
    data = json.dumps(msg).encode()
    sock.sendmsg([len(data).to_bytes(4, 'big')], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', fds))] if fds else [])
    sock.sendall(data)


def _receive(sock):
    head, ancillary, *_ = sock.recvmsg(4, socket.CMSG_SPACE(64*4))
    if len(head) < 4: raise EOFError
    fds = array.array('i')
    for _, _, data in ancillary: fds.frombytes(data[:len(data) - len(data) % fds.itemsize])
    size, data = int.from_bytes(head, 'big'), b''
    while len(data) < size: data += sock.recv(size-len(data))
    return json.loads(data), list(fds)


# --- the seed

def _serve(sock):
    "Fork a process for each request, until the one that asks has gone; returns in that process, with the request"
    while True:
        try: req, fds = _receive(sock)
        except (EOFError, OSError): os._exit(0)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            if req['within']: _join(*req['within'])
            between = os.getpid()
            is_set, set_ = os.pipe()
            if pid := os.fork():
                os.read(is_set, 1)
                os.write(write, str(pid).encode())
                os._exit(0)
            # before whoever has asked knows of it, who may send a signal to its group
            if req['session']: os.setsid()
            elif req['group'] >= 0: os.setpgid(0, req['group'])
            os.write(set_, b'.'), os.close(is_set), os.close(set_)
            while os.getppid() == between: time.sleep(0.0005)  # it asks who its parent is only when that is settled
            os.close(read), os.close(write), sock.close()
            return req, fds
        os.close(write)
        os.waitpid(between, 0)  # from now on, the new process is a child of the one that has asked
        _send(sock, dict(pid=int(os.read(read, 20))))
        os.close(read)
        for fd in fds: os.close(fd)


def _join(pid, user, group):
    "Go where a process of this user is, into its namespaces and its root: the next fork has that one's processes as well"
    root, *fds = [os.open(f'/proc/{pid}/{o}', os.O_RDONLY) for o in ('root', 'ns/pid', 'ns/net', 'ns/uts', 'ns/mnt')]
    for fd in fds:
        if _libc.setns(fd, 0): raise OSError(ctypes.get_errno(), f'setns into a namespace of process {pid}')
        os.close(fd)
    os.fchdir(root)
    os.chroot('.')
    os.close(root)
    if user:
        os.setgroups([])
        os.setgid(group)
        os.setuid(user)
        _prctl(_PR_SET_DUMPABLE, 1)  # or else /proc is not this user's to read


def _settle(with_thread=True):
    """A seed ends with whom it serves, or with the thread that has made it. It is of the same session and group, as those that it starts
    are to be, and hears no signal that is sent to these"""
    if with_thread: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _libc.prctl(_PR_SET_NAME, NAME.encode(), 0, 0, 0)
    for s in _SIGNALS: signal.signal(s, signal.SIG_IGN)


def _fork_seed():
    "A seed for this process, which has not run anything yet: its end of the line here; in the seed itself, what `_serve` returns"
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        _settle()
        keep = os.dup2(theirs.fileno(), 900)
        for s in (ours, theirs): s.detach()
        null = os.open(os.devnull, os.O_RDWR)
        for i in range(3): os.dup2(null, i)
        os.closerange(3, keep)
        os.closerange(keep+1, 4096)
        return None, _serve(socket.socket(fileno=keep))
    theirs.close()
    return ours, None


def _become(req, fds, kind):
    "Be the process that was asked for, up to its program"
    global _owner, _is_warm
    while True:
        for s in _SIGNALS: signal.signal(s, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _prctl(_PR_SET_PDEATHSIG, 0)
        # out of the way of the numbers that they are to have
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1000) for fd in fds]
        if not _may_start_python(req['env']):
            line = None
            break
        line, asked = _fork_seed()
        if line is not None: break
        req, fds = asked
    own = 2000
    if line is not None:
        own = fcntl.fcntl(line.fileno(), fcntl.F_DUPFD_CLOEXEC, own)
        line.detach()
    os.closerange(0, 1000)
    for target, fd in zip(req['targets'], high): os.dup2(fd, target)
    os.closerange(1000, own)
    os.closerange(own+1, 4096)
    _libc.prctl(_PR_SET_NAME, b'python', 0, 0, 0)
    _owner, _is_warm = os.getpid(), True
    _seeds.clear()
    if line is not None: _seeds[kind] = socket.socket(fileno=own)
    os.chdir(req['cwd'])
    os.umask(req['umask'])
    for k in list(os.environ): del os.environ[k]
    os.environ.update(req['env'])
    _show_in_proc(req['args'], req['env'])
    return req


def _may_start_python(env):
    """A launcher's worker trains, and has no seed of its own, which costs a third of its start: what it starts, if anything, is cold,
    unless the test says that there will be some"""
    return 'LOCAL_RANK' not in env or SPAWNS in env


def _show_in_proc(args, env):
    "Tests, and people, find processes by what /proc says of them"
    with open('/proc/self/stat') as f: arg_start, arg_end, env_start, env_end = map(int, f.read().rpartition(')')[2].split()[45:49])
    for begin, end, text in ((env_start, env_end, [f'{k}={v}' for k, v in env.items()]), (arg_start, arg_end, args)):
        data = b''.join(o.encode('utf-8', 'surrogateescape') + b'\0' for o in text)[:end-begin-1]
        ctypes.memset(begin, 0, end-begin)
        ctypes.memmove(begin, data, len(data))



def _run(options, rest, env):
    "Run the program, as the interpreter does; ends this process"
    import random, warnings
    at_once = bool(env.get('PYTHONUNBUFFERED')) or '-u' in options
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = [
        io.TextIOWrapper(open(fd, 'wb', buffering=0 if at_once else -1, closefd=False), encoding='utf-8', errors=errors,
                         write_through=at_once,
                         line_buffering=fd == 2 or os.isatty(fd)) for fd, errors in ((1, 'strict'), (2, 'backslashreplace'))]
    if env.get('PYTHONFAULTHANDLER'):
        import faulthandler
        faulthandler.enable(file=2)
    filters = [*filter(None, env.get('PYTHONWARNINGS', '').split(',')), *(b for a, b in zip(options, options[1:]) if a == '-W')]
    warnings.filters[:] = _FIRST_FILTERS
    for o in filters: warnings._setoption(o)
    # what a fresh process has of its own
    random.seed()
    if np := sys.modules.get('numpy'): np.random.seed()
    if torch := sys.modules.get('torch'):
        torch.seed()
        torch.set_num_threads(int(env['OMP_NUM_THREADS']) if env.get('OMP_NUM_THREADS', '').isdecimal() else len(os.sched_getaffinity(0)))
    if m := sys.modules.get('tempfile'): m.tempdir = None  # it is that of TMPDIR
    if (m := sys.modules.get('matplotlib')) and env.get('MPLBACKEND'): m.rcParams['backend'] = env['MPLBACKEND']
    path = [o for o in env.get('PYTHONPATH', '').split(os.pathsep) if o]
    sys.path[:] = [*path, *(o for o in _FIRST_PATH if o not in path)]
    importlib.invalidate_caches()
    if any(os.path.exists(os.path.join(o, 'sitecustomize.py')) for o in path):
        sys.modules.pop('sitecustomize', None)
        import sitecustomize
    main = types.ModuleType('__main__')
    main.__builtins__, sys.modules['__main__'] = __builtins__, main
    code = 0
    try: _exec(main, *rest)
    except SystemExit as e:
        code = 0 if e.code is None else e.code if isinstance(e.code, int) else 1
        if not isinstance(e.code, (int, type(None))): print(e.code, file=sys.stderr)
    except BaseException as e:
        code, tb = None if isinstance(e, KeyboardInterrupt) else 1, e.__traceback__.tb_next.tb_next  # without this module's
        sys.excepthook(type(e), e.with_traceback(tb), tb)
    _end(main, code)


def _exec(main, program, *args):
    if program == '-c':
        sys.argv = ['-c', *args[1:]]
        sys.path.insert(0, '')
        exec(compile(args[0], '<string>', 'exec'), main.__dict__)
    elif program == '-m':
        sys.argv = ['-m', *args[1:]]
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(args[0], None)  # it would be warned of
        runpy._run_module_as_main(args[0])
    else:
        sys.argv = [program, *args]
        sys.path.insert(0, os.path.dirname(os.path.realpath(program)))
        main.__file__, main.__cached__ = os.path.abspath(program), None
        try:
            with open(program, 'rb') as f: code = compile(f.read(), main.__file__, 'exec')
        except OSError as e:
            print(f"{sys.executable}: can't open file {main.__file__!r}: [Errno {e.errno}] {e.strerror}", file=sys.stderr)
            sys.exit(2)
        main.__loader__ = importlib.machinery.SourceFileLoader('__main__', main.__file__)
        exec(code, main.__dict__)


def _end(main, code):
    """What the interpreter does at its end, but for taking each module apart: that takes a second, and copies the memory that is shared
    with the seed"""
    import atexit, gc
    threading._shutdown()
    atexit._run_exitfuncs()
    main.__dict__.clear()
    gc.collect()
    for o in (sys.stdout, sys.stderr):
        try: o.flush()
        except (OSError, ValueError): code = code or 120
    if code is not None: os._exit(code & 0xff)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt that nobody has caught
    os.kill(os.getpid(), signal.SIGINT)


def _import(names):
    import warnings
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for o in names:
            try: importlib.import_module(o)
            except ImportError: pass  # whoever needs it will say so


@contextmanager
def _as_in_a_notebook():
    "fastai and fastprogress look for the shell of a notebook when they are imported, and then no more"
    import builtins
    builtins.get_ipython = type('ZMQInteractiveShell', (), {})
    try: yield
    finally: del builtins.get_ipython


def _use_huge_pages():
    """Put memory into pages of 2 MB where Linux can (6.1 and newer): a fork copies a third of the page table then, and takes a third of
    the time"""
    advise, collapse = 14, 25  # MADV_HUGEPAGE, MADV_COLLAPSE
    with open('/proc/self/maps') as f: areas = [o.split() for o in f]
    for where, access, _, _, file, *_ in areas:
        begin, end = (int(o, 16) for o in where.split('-'))
        if access != 'rw-p' or file != '0' or end - begin < 1 << 21: continue
        for advice in (advise, collapse): _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end-begin), advice)  # what cannot be, stays


def _spare_the_forks():
    """What each process would do again, of what the imports have made: find out which file is whose module's, and take libraries of
    operators apart at its end"""
    import inspect, weakref
    inspect.getmodule(sys._getframe())
    # it would be looked for among all modules, for each frame of each stack: torch's rendezvous took 0.7 CPU-seconds for that
    inspect.modulesbyfile['<frozen runpy>'] = 'runpy'
    for o in weakref.finalize._registry: o.atexit = False


def _main():
    "The first seed: `python warm.py KIND FD`"
    global _FIRST_PATH, _FIRST_FILTERS
    import gc, warnings
    kind, sock = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [o for o in sys.path if o and os.path.abspath(o) != here]
    given = os.environ.get('PYTHONPATH', '').split(os.pathsep)
    _FIRST_PATH, _FIRST_FILTERS = [o for o in sys.path if o not in given], warnings.filters[:]
    sys.modules['warm'] = me = sys.modules['__main__']  # for programs that start others
    me.__name__ = 'warm'
    # C code may hold on to what it found in the first environment, which `_show_in_proc` writes over
    for k, v in list(os.environ.items()): os.environ[k] = v
    os.environ.update(OMP_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1')
    with _as_in_a_notebook() if kind == 'notebook' else nullcontext(): _import(FULL)
    threads = os.listdir('/proc/self/task')
    assert len(threads) == 1, f'the imports have started threads, which a fork loses: {threads}'
    _spare_the_forks()
    gc.collect()
    gc.freeze()
    _use_huge_pages()
    _settle(with_thread=False)  # a notebook's cells run in a thread of that notebook: the seed serves the next one as well
    _send(sock, 'ready')
    req, fds = _serve(sock)
    req = _become(req, fds, kind)
    install()
    _run(req['options'], req['rest'], req['env'])


# --- the process that asks

_OPTIONS = {'-u': 0, '-W': 1, '-B': 0, '-I': None, '-E': None}


def _parse(args):
    "(options of the interpreter, the rest) if `args` start Python in a way that is known here"
    args = [os.fsdecode(o) for o in args]
    if not args: return
    if not _is_python(args[0]):
        try:
            with open(args[0], 'rb') as f: first = f.readline().strip()
        except OSError: return
        return ([], args) if first[:2] == b'#!' and _is_python(os.fsdecode(first[2:])) else None
    i = 1
    while i < len(args) and args[i].startswith('-') and args[i] not in ('-c', '-m'):
        if _OPTIONS.get(args[i]) is None: return
        i += 1 + _OPTIONS[args[i]]
    if i >= len(args): return
    return args[1:i], args[i:]


def _is_python(path):
    "Under any of its names: `python3` in the same environment is the same"
    if path == sys.executable: return True
    return os.path.dirname(path) == os.path.dirname(sys.executable) and os.path.realpath(path) == os.path.realpath(sys.executable)


def _kind(rest): return 'notebook' if any(o in ' '.join(rest[:3]) for o in IN_NOTEBOOK) else 'script'


def _seed(kind):
    "The line to the seed; it is started at the first call"
    if kind in _seeds: return _seeds[kind]
    if _is_warm and not _all_kinds: return next(iter(_seeds.values()), None)  # it has one, of its own kind, or none
    ours, theirs = socket.socketpair()
    os.set_inheritable(theirs.fileno(), True)
    path = os.pathsep.join(o for o in (ROOT, os.environ.get('PYTHONPATH')) if o)
    env = {**os.environ, 'PYTHONPATH': path, PAD: 'x'*30000, COLD: '1'}
    # nobody waits for it: it ends with this process
    _first.append(subprocess.Popen([sys.executable, os.path.abspath(__file__), kind, str(theirs.fileno()), 'x'*6000],
                                   pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL))
    theirs.close()
    _receive(ours)
    _seeds[kind] = ours
    return ours


@contextmanager
def _undisturbed():
    "A signal comes before or after, as with a fork that is one step: a handler's exception would leave a process that nobody knows"
    if threading.current_thread() is not threading.main_thread(): yield; return
    came, signals = [], (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {s: signal.signal(s, lambda s, _: came.append(s)) for s in signals if callable(signal.getsignal(s))}
    try: yield
    finally:
        for s, h in old.items(): signal.signal(s, h)
        for s in came: signal.raise_signal(s)


def start(args, env, cwd, targets, fds, session=False, group=-1, umask=-1, within=None):
    """Start Python with `args` (a list), `fds` being its file descriptors `targets`: its pid; `None` where this is not to be, or can't be,
    warm. `within` is the (pid, user, group) of another process: it starts in the namespaces and root of that one, and as its user"""
    # the seed serves none that was forked from this process
    if COLD in env or os.getpid() != _owner or not (parsed := _parse(args)): return
    if umask < 0:
        umask = os.umask(0)
        os.umask(umask)
    with _lock:
        sock = _seed(_kind(parsed[1]))
        if sock is None: return
        with _undisturbed():
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            _send(sock, dict(args=[os.fsdecode(o) for o in args], options=parsed[0], rest=parsed[1], env=env, cwd=cwd, targets=targets,
                             session=session, group=group, umask=umask, within=within), fds)
            pid = _receive(sock)[0]['pid']
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)
    return pid


# --- processes of other hosts (namespaces, see hosts.py), whose `python` is client.py

COLD_STATUS = 1 << 30  # "run it yourself"


def door(path):
    "Start what the clients at the socket `path` ask for, until our standard input ends"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print('ready', flush=True)

    def accept():
        while True: threading.Thread(target=_attend, args=(listener.accept()[0],), daemon=True).start()
    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


def _attend(conn):
    req, fds = _receive(conn)
    peer = struct.unpack('3i', conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    pid = start(req['args'], req['env'], req['cwd'], [0, 1, 2], fds, session=True, umask=req['umask'], within=peer)
    for fd in fds: os.close(fd)
    if pid is None: return conn.sendall(struct.pack('>i', COLD_STATUS))
    threading.Thread(target=_pass_on, args=(conn, pid), daemon=True).start()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try: conn.sendall(struct.pack('>i', status))
    except OSError: pass  # nobody is there to hear it


def _pass_on(conn, pid):
    "Signals that a client gets go to its process; if it is killed, so is that, with what it has started"
    import psutil
    try:
        while signals := conn.recv(16):
            for s in signals: os.kill(pid, s)
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except (ProcessLookupError, psutil.NoSuchProcess): return  # it has ended
    for p in family:
        try: p.kill()
        except psutil.NoSuchProcess: pass


def install(all_kinds=False):
    "From now on this process starts Python in the warm way. It makes seeds of `all_kinds`, or has the one that was made for it"
    import inspect, multiprocessing.util
    global _all_kinds
    _all_kinds = _all_kinds or all_kinds
    cold, names = subprocess.Popen._execute_child, list(inspect.signature(subprocess.Popen._execute_child).parameters)
    if hasattr(cold, 'cold'): return

    def execute_child(self, *args):
        a = dict(zip(names[1:], args))
        argv = a['args']
        # a program that has no path is looked for by the operating system
        plain = not (isinstance(argv, (str, bytes)) or a['shell'] or a['preexec_fn'] or not a['close_fds']
                     or a['executable'] not in (None, argv[0]) or any(a[o] is not None for o in ('gid', 'gids', 'uid')))
        pid = None
        if plain:
            env = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if a['env'] is None else a['env']).items()}
            streams = [a[o] if a[o] != -1 else i for i, o in enumerate(('p2cread', 'c2pwrite', 'errwrite'))]
            passed = sorted(map(int, a['pass_fds']))
            cwd = os.path.abspath(os.fsdecode(a['cwd'])) if a['cwd'] is not None else os.getcwd()
            pid = start(argv, env, cwd, [0, 1, 2, *passed], [*streams, *passed], bool(a['start_new_session']), a.get('process_group', -1),
                        a['umask'])
        if pid is None: return cold(self, *args)
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*(a[o] for o in ('p2cread', 'p2cwrite', 'c2pread', 'c2pwrite', 'errread', 'errwrite')))
    execute_child.cold = cold
    subprocess.Popen._execute_child = execute_child

    cold_spawn = multiprocessing.util.spawnv_passfds

    def spawn(path, args, passfds):
        fds = sorted({0, 1, 2, *map(int, passfds)})
        pid = start([os.fsdecode(path), *map(os.fsdecode, args[1:])], dict(os.environ), os.getcwd(), fds, fds)
        return cold_spawn(path, args, passfds) if pid is None else pid
    multiprocessing.util.spawnv_passfds = spawn

    import psutil
    children = psutil.Process.children
    if hasattr(children, 'all'): return

    def without_seeds(self, recursive=False):
        def is_seed(p):
            try: return p.name() == NAME
            except psutil.Error: return False
        return [p for p in children(self, recursive) if not is_seed(p)]
    without_seeds.all = children
    psutil.Process.children = without_seeds


# --- what nbdev calls

def in_notebooks(cells):
    """nbdev's `test_setup`: what the cells of notebooks start is warm, too; each process that runs notebooks makes a seed when it first
    needs one"""
    install(all_kinds=True)
    # a warm process finds the package by this alone, whatever the environment has installed
    os.environ['PYTHONPATH'] = os.pathsep.join(o for o in (ROOT, os.environ.get('PYTHONPATH')) if o)
    os.register_at_fork(after_in_child=_own)


def _own():
    "A process that was forked from another: a seed serves none but whoever has made it"
    global _owner
    _owner = os.getpid()
    _seeds.clear()


if __name__ == '__main__': _main()
