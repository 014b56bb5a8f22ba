"""Real processes for tests (Linux only).

`World(n)` keeps n workers of torchrun alive, so that many tests share one start: `world(fn, *args)` runs `fn` on every rank.
`launched(cmd, timeout)` runs any command to its end and says which processes it left behind.
"""
import os, pickle, queue, re, resource, secrets, shutil, signal, socket, subprocess, sys, tempfile, threading, time
from dataclasses import dataclass
from multiprocessing.connection import Listener, wait
from pathlib import Path

import by_value, cloudpickle
import warm

SUPPORT = Path(__file__).resolve().parent
TESTS, ROOT = SUPPORT.parent, SUPPORT.parent.parent
MARK = 'FASTDIST_TEST_MARK'  # every process we start carries it, and so do its children, whatever session they move to
_LAUNCH_VARS = ('RANK', 'LOCAL_RANK', 'GROUP_RANK', 'ROLE_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')


class WorkerError(RuntimeError):
    "Some ranks gave no result; `problems` has the text of each of them, by rank: its traceback, or its stacks where it was stuck"
    def __init__(self, msg, problems=None):
        super().__init__(msg)
        self.problems = problems or {}


def _env(mark, extra=None):
    """The environment without what an earlier launch, or an Accelerator made in this process, has left in it, and with `extra`, where
    `None` takes a variable away"""
    foreign = 'TORCHELASTIC_', 'ACCELERATE_', 'FSDP_', 'SLURM_'
    env = {k: v for k, v in os.environ.items() if k not in _LAUNCH_VARS and not k.startswith(foreign)}
    path = os.pathsep.join(p for p in (str(ROOT), env.get('PYTHONPATH')) if p)
    # RES_OPTIONS: torch asks for the name of each address that it connects to; a name server that does not answer costs 5 s otherwise
    env = {'RES_OPTIONS': 'timeout:1 attempts:1', **env, 'OMP_NUM_THREADS': '1', 'PYTHONUNBUFFERED': '1', 'PYTHONFAULTHANDLER': '1',
           'PYTHONPATH': path, **(extra or {}), MARK: mark}
    return {k: v for k, v in env.items() if v is not None}


def warnings_in(text):
    """Lines that warn of what a user has not written; not those of fastai's import, which `fastdist launch` hides, and of a kernel without
    ipywidgets"""
    lines = [o for o in text.splitlines() if re.search(r'Warning|OMP_NUM_THREADS|^\[[WE]\d{4} ', o)]
    return [o for o in lines if 'torch.jit.script' not in o and 'IProgress' not in o]


def processes(mark, sid=None, variable=MARK):
    "The living processes, as `{pid: command line}`, that carry `mark` in this `variable` of their environment or belong to session `sid`"
    found = {}
    for p in Path('/proc').iterdir():
        if not p.name.isdigit() or int(p.name) == os.getpid(): continue
        try:
            name, _, fields = (p/'stat').read_text().partition('(')[2].rpartition(')')
            state, _, _, session = fields.split()[:4]
            if state in 'ZX' or name == warm.NAME: continue  # a seed ends with the process that it serves
            if int(session) == sid or f'{variable}={mark}'.encode() in (p/'environ').read_bytes().split(b'\0'):
                found[int(p.name)] = (p/'cmdline').read_bytes().replace(b'\0', b' ').decode(errors='replace').strip()
        except OSError: pass  # it ended while we looked, or is not ours to read
    return dict(sorted(found.items()))


_held = []


def free_port():
    """A port of this machine that nobody else is given while the tests run: it stays bound, but does not listen, so that a process with
    SO_REUSEADDR, as stores have it, can take it"""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(('127.0.0.1', 0))
    _held.append(s)
    return s.getsockname()[1]


def wait_for(cond, what, seconds=120):
    "Wait until `cond()` is true, and return it; an error if that takes so long that it never will"
    end = time.monotonic() + seconds
    while not (res := cond()):
        assert time.monotonic() < end, f'never: {what}'
        time.sleep(0.05)
    return res


def _signal(pid, sig):
    try: os.kill(pid, sig)
    except ProcessLookupError: pass


def _kill_all(mark, sid=None, variable=MARK):
    for _ in range(50):  # again, until nothing is found: a process may have been starting another
        if not (found := processes(mark, sid, variable)): return
        for pid in found: _signal(pid, signal.SIGKILL)
        time.sleep(0.1)
    raise RuntimeError(f'could not kill {found}')


def _tail(text, n=60): return '\n'.join(text.splitlines()[-n:])


class World:
    """`n` workers of torchrun, started at the first call and, after one of them was stuck or died, again at the next; `env` is more of
    their environment"""
    def __init__(self, n, env=None):
        self.n, self.env, self.proc, self.store, self.output, self.starts = n, env or {}, None, None, [], 0

    def start(self, timeout=180):
        self.mark, key, self.dir = secrets.token_hex(8), secrets.token_bytes(16), Path(tempfile.mkdtemp(prefix='fastdist'))
        listener, lines = Listener(str(self.dir/'line'), 'AF_UNIX', backlog=self.n, authkey=key), queue.SimpleQueue()
        # `accept` has no timeout: it waits in a thread of its own, so that torchrun's death is seen here
        threading.Thread(target=lambda: [lines.put(listener.accept()) for _ in range(self.n)], daemon=True).start()
        cmd = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(self.n),
               '--log-dir', str(self.dir/'elastic'), str(SUPPORT/'worker.py'), str(self.dir)]
        with open(self.dir/'torchrun.log', 'wb') as log:
            # its own folder as cwd: what a Learner saves beside itself must not end up in the checkout
            self.proc = subprocess.Popen(cmd, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.dir,
                                         env=_env(self.mark, {'FASTDIST_TEST_KEY': key.hex(), **self.env}))
        self.lines, self.pids, end = {}, {}, time.monotonic() + timeout
        try:
            while len(self.lines) < self.n:
                try:
                    line = lines.get(timeout=0.2)
                    rank, pid = line.recv()
                    self.lines[rank], self.pids[rank] = line, pid
                except queue.Empty:
                    if self.proc.poll() is not None or time.monotonic() > end:
                        logs = '\n'.join(f'--- {f.name}\n{_tail(f.read_text())}' for f in sorted(self.dir.glob('*.log')))
                        raise WorkerError(f'the world of {self.n} did not start\n{logs}') from None
        except BaseException:
            self.stop()
            raise
        listener.close()
        self.starts += 1

    def stop(self):
        "End the world; nothing of it is left running"
        if self.proc is None: return
        for line in self.lines.values(): line.close()  # workers leave when their line ends, and torchrun after them
        try: self.proc.wait(3)
        except subprocess.TimeoutExpired: pass
        _kill_all(self.mark, self.proc.pid)
        self.proc.wait()
        shutil.rmtree(self.dir, ignore_errors=True)
        self.proc = self.store = None

    def _dead(self, rank):
        try: return (Path('/proc')/str(self.pids[rank])/'stat').read_text().rpartition(')')[2].split()[0] in 'ZX'
        except OSError: return True

    def _stacks(self, rank):
        "Where the threads of a worker are now"
        file = self.dir/f'rank{rank}.stacks'
        size = file.stat().st_size
        _signal(self.pids[rank], signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.1)
            if file.stat().st_size > size: break
        time.sleep(0.1)
        return file.read_bytes()[size:].decode(errors='replace')

    def __call__(self, fn, *args, timeout=300, grace=60, **kwargs):
        """The results of `fn(*args, **kwargs)`, by rank, within `timeout` seconds. Ranks have `grace` seconds to end after another
        raised or died. What they printed is in `output`, by rank, afterwards."""
        for m in list(sys.modules.values()):  # test modules travel by value: workers need not, and must not, import them
            file = getattr(m, '__dict__', {}).get('__file__') or ''
            if file.startswith(f'{TESTS}{os.sep}') and m.__name__ not in ('harness', 'warm', '__main__'):
                cloudpickle.register_pickle_by_value(m)
        if self.proc and any(map(self._dead, self.pids)): self.stop()
        if not self.proc: self.start()
        if not self.store:
            # A group made again over the store of one that ended finds its addresses there, and hangs. So each call has a new store, held
            # by this process and reached like that of torchrun's agent. Within one call nothing is different from a script under torchrun.
            from fastdist.world.rendezvous import loopback_store
            self.store = loopback_store()
        msg = by_value.dumps(({'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(self.store.port)}, fn, args, kwargs))
        try: return self._call(msg, timeout, grace)
        except WorkerError: raise
        except BaseException:  # Ctrl-C: the answers still to come would be taken for those of the next call
            self.stop()
            raise

    def _call(self, msg, timeout, grace):
        logs = [self.dir/f'rank{r}.log' for r in range(self.n)]
        sizes = [f.stat().st_size for f in logs]
        replies, dead, begin, begin_grace = {}, set(), time.monotonic(), None
        for line in self.lines.values():
            try: line.send_bytes(msg)
            except OSError: pass  # found dead below
        while pending := set(range(self.n)) - set(replies) - dead:
            now = time.monotonic()
            if now > begin + timeout or (begin_grace and now > begin_grace + grace): break
            ready = wait([self.lines[r] for r in pending], 0.2)
            for r in pending:
                try:
                    if self.lines[r] in ready:
                        init, reply = self.lines[r].recv()
                        replies[r] = (init, *pickle.loads(reply))
                    # not by the end of the line alone: a child of the worker may hold it open
                    elif self._dead(r) and not self.lines[r].poll(): dead.add(r)
                except (EOFError, OSError): dead.add(r)
            if not begin_grace and (dead or not all(ok for _, ok, _ in replies.values())): begin_grace = time.monotonic()

        seconds = time.monotonic() - begin
        problems = {r: value for r, (_, ok, value) in replies.items() if not ok}
        problems.update({r: 'died without a result (the launcher ends the others when one dies: see its log for which was first)'
                         for r in dead})
        problems.update({r: f'stuck: no result after {seconds:.0f} s; its stacks:\n{self._stacks(r)}' for r in pending})
        self.output = [f.read_bytes()[s:].decode(errors='replace') for f, s in zip(logs, sizes)]
        text = ''.join(f'\n=== rank {r} of {self.n}: {p}\n--- printed by rank {r}\n{_tail(self.output[r])}'
                       for r, p in sorted(problems.items()))
        # A group that some ranks have left, or that a failed call may have left out of step, would fail the next test for this one's sake
        inits = {init for init, *_ in replies.values()}
        if dead or pending or len(inits) > 1 or (problems and True in inits):
            if dead:  # torchrun's own report has the exit code or the signal: let it finish
                try: self.proc.wait(5)
                except subprocess.TimeoutExpired: pass
                text += f"\n--- launcher\n{_tail((self.dir/'torchrun.log').read_text(errors='replace'))}"
            self.stop()
        elif True not in inits: self.store = None  # a group that lives on in the workers needs it
        if problems: raise WorkerError(f'{len(problems)} of {self.n} ranks failed{text}', problems)
        return [replies[r][2] for r in range(self.n)]


class Worlds:
    "The worlds of a session: `worlds(n)` is that of n workers, which starts at its first call"
    def __init__(self, env=None): self.made, self.env = {}, env
    def __call__(self, n): return self.made.setdefault(n, World(n, self.env))

    def end_groups(self):
        "End the process groups that the last test has left, so that the next one finds what it would find alone"
        def end():
            import torch.distributed as dist
            from fastdist.world import teardown_distrib
            teardown_distrib()
            if dist.is_initialized(): dist.destroy_process_group()  # one that fastdist has not made
        for w in self.made.values():
            if w.proc and w.store: w(end)

    def stop(self):
        for w in self.made.values(): w.stop()


@dataclass
class Launched:
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    left: dict  # pid -> command line of the processes that were alive when `grace` seconds had passed after its end; they are killed by now


def launched(cmd, timeout, env=None, cwd=None, during=None, grace=10):
    """Run `cmd` (a list) in a session of its own; `during(process, mark)` is called meanwhile. Past `timeout` seconds: the Python stacks of
    all its processes, their end, and a `WorkerError`."""
    mark, begin = secrets.token_hex(8), time.monotonic()
    # files, not pipes: a child left behind would hold a pipe open, and we would wait for it
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        proc = subprocess.Popen(list(map(str, cmd)), stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                                cwd=cwd, env=_env(mark, env))
        try:
            if during: during(proc, mark)
            try: proc.wait(timeout)
            except subprocess.TimeoutExpired:
                # PYTHONFAULTHANDLER answers SIGABRT with the stacks. The launcher, the oldest, goes first: it would end the others unheard.
                for pid in processes(mark, proc.pid):
                    try: resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
                    except OSError: continue
                    _signal(pid, signal.SIGABRT)
                    time.sleep(0.2)
                text = f'--- stdout\n{_tail(_read(out))}\n--- stderr\n{_tail(_read(err), 200)}'
                raise WorkerError(f'{cmd} did not end in {timeout} s\n{text}') from None
            seconds = time.monotonic() - begin
            while (left := processes(mark, proc.pid)) and time.monotonic() < begin + seconds + grace: time.sleep(0.05)
            return Launched(proc.returncode, _read(out), _read(err), seconds, left)
        finally:
            _kill_all(mark, proc.pid)
            proc.wait()


def _read(file):
    file.seek(0)
    return file.read().decode(errors='replace')
