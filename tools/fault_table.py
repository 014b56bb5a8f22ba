"""What does a person read when something fails? Makes each fault in a real run, and prints a table.

    python tools/fault_table.py [--only NAME ...] [--launcher NAME ...] [--workers N ...] [--cold] [--show] [--list]

One row for each fault, launcher and number of workers: seconds from the fault to the end of the command; is the rank named that failed, the
cause, the line of the user's file; is the error on the screen once, and last; does nothing stay (processes, temporary files)? The exit status is 1 where
one of them is no."""
import argparse, os, re, signal, sys, tempfile, textwrap, time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT/'tests'/'support')]
os.environ.setdefault('OMP_NUM_THREADS', '1')
import warm
from harness import WorkerError, launched, processes, wait_for
from launches import LAUNCHERS as COMMANDS


PRELUDE = '''
    import os, signal, sys, time
    from pathlib import Path
    import torch, torch.distributed as dist
    from fastai.basics import *
    from fastdist.all import *
    from fastdist.world.ranks import from_env

    def fault(): # the fault comes now
        if not Path('at').exists(): Path('at').write_text(str(time.time()))

    class Items:
        "A data set; `get` may be replaced"
        def __len__(self): return 32
        def __getitem__(self, i):
            self.get(i)
            x = torch.full((1,), i/32.)
            return x, 3*x+1
        def get(self, i): pass

    def learner(get=None, num_workers=0, create_batch=fa_collate, **kwargs):
        ds,valid = Items(),Items()
        if get is not None: ds.get = get
        dls = DataLoaders.from_dsets(ds, valid, bs=8, num_workers=num_workers, create_batch=create_batch)
        learn = Learner(dls, nn.Linear(1, 1), loss_func=MSELossFlat(), lr=0.01, **kwargs)
        if hasattr(learn, 'progress'): learn.remove_cb(learn.progress)
        return learn

    class In(Callback):
        "Calls `f` in rank `rank`, in event `event` of a batch, in the second epoch"
        def __init__(self, f, event='before_batch', rank=1): setattr(self, event, lambda: f() if get_rank()==rank and self.epoch==1 else None)

    def train():
'''
MAIN = '''
    if __name__=='__main__':
        if 'LAUNCH_N' in os.environ: launch_in_notebook(train, n=int(os.environ['LAUNCH_N']), log_dir='logs')
        else: train()
'''
LOOP = '''
    setup_distrib()
    with fail_together(watchdog=5):
        dist.barrier()
        if get_rank()==1:
            fault()
            {code}
        for i in range(10**6): dist.all_reduce(torch.ones(4))
'''
WAYS = {'fastdist launch': lambda n: [*COMMANDS['fastdist'](n), '--log-dir', 'logs'], 'torchrun': COMMANDS['torchrun'], 'accelerate launch': COMMANDS['accelerate'],
        'launch_in_notebook': COMMANDS['python']}
ALL = list(WAYS)
LAUNCHERS = tuple(ALL[:3])


@dataclass
class Fault:
    name: str  # For `--only`
    code: str  # Body of `train()`; `fault()` in it notes when, and the comment `# here` marks the line that is to be named
    cause: str  # Regular expression of what has to be in the output
    rank: int = 1  # Which has to be named; `None` where all are, or none is
    launchers: tuple = tuple(ALL)
    workers: tuple = (3,)
    during: object = None  # Function of (process, mark, folder), called while the command runs, that makes the fault from outside
    options: tuple = ()  # Of the launcher
    env: dict = None  # Of the command
    top: str = ''  # At the top of the script, below the imports
    status: object = None  # The exit status that the command must have; by default any but 0


def loop(code, rank=1):
    "`code` is run by `rank`, while the others are in a collective"
    code = textwrap.dedent(code).strip().replace('\n', '\n'+' '*12)
    return LOOP.replace('{code}', code).replace('get_rank()==1', f'get_rank()=={rank}')


def in_fit(code, **kwargs):
    "`code` is run in an event of a callback, in a fit"
    args = ', '.join(f'{k}={v!r}' for k, v in kwargs.items())
    return f"""
        def f():
            fault()
            {textwrap.dedent(code).strip().replace(chr(10), chr(10)+' '*12)}
        learn = learner(cbs=In(f{', '+args if args else ''}))
        with learn.distrib_ctx(split_batches=True, watchdog=5): learn.fit(100000)"""


def in_part(put):
    "What `put` has put into the learner raises in rank 1, in a fit"
    return f"""
        def f(*args):
            if get_rank()==1 and learn.epoch==1:
                fault()
                raise ValueError('no disk') # here
        learn = learner()
        {put}
        with learn.distrib_ctx(split_batches=True, watchdog=5): learn.fit(100000)"""


def in_loader(code):
    "`code` is run by a loader process of rank 1"
    return f"""
        def get(i):
            if from_env().rank==1 and i==5:
                fault()
                {code}
        learn = learner(get, num_workers=1)
        with learn.distrib_ctx(split_batches=True, watchdog=5): learn.fit(100000)"""


def apart(one, others, strategy=None):
    "Rank 1 does `one`, `others` something else, in the context"
    return f"""
        learn = learner()
        with learn.distrib_ctx(watchdog=5{f', strategy={strategy!r}' if strategy else ''}):
            learn.fit(1)
            fault()
            if get_rank()==1: {one} # here
            else: {others}"""


def kill_launcher(proc, mark, folder):
    "The launcher is killed, and so can end nobody; notes when its workers, and their loader processes, are gone"
    wait_for(lambda: (folder/'at').exists(), 'the fault')
    proc.kill()
    wait_for(lambda: not set(processes(mark))-{proc.pid}, 'the end of all workers')
    (folder/'ended').write_text(str(time.time()))


def send_launcher(sig):
    "Of `during`: the launcher alone gets a signal, as from a terminal that is closed"
    def send(proc, mark, folder):
        wait_for(lambda: (folder/'at').exists(), 'the fault')
        os.kill(proc.pid, sig)
    return send


def in_dataset(code, **kwargs):
    "`code` is run in the process of rank 1, when it reads its sample 5"
    return in_loader(code).replace('num_workers=1', ', '.join(f'{k}={v}' for k, v in {'num_workers': 0, **kwargs}.items()))


def alone(code):
    "`code` is run by rank 0 before the others have met it"
    return f"""
        if from_env().rank==0:
            fault()
            {code}"""


WAITS = 'has kept the others waiting'
FAULTS = [
    # an exception
    Fault('raises', loop("raise ValueError('no disk') # here"), 'ValueError: no disk'),
    Fault('raises in rank 0', loop("raise ValueError('no disk') # here", 0), 'ValueError: no disk', rank=0),
    Fault('raises before the group', """
        if from_env().rank==1:
            fault()
            raise ValueError('no disk') # here
        setup_distrib()""", 'ValueError: no disk'),
    Fault('raises in a callback', in_fit("raise ValueError('no disk') # here"), r'ValueError: .*\s+no disk'),
    Fault('raises in the forward', in_part('learn.model.register_forward_hook(f)'), r'ValueError: .*\s*no disk'),
    Fault('raises in the loss', in_part('loss = learn.loss_func; learn.loss_func = lambda p, t: f() or loss(p, t)'), r'ValueError: .*\s*no disk'),
    Fault('raises in a metric', in_part('learn.metrics = [lambda p, t: f() or (p-t).abs().mean()]'), r'ValueError: .*\s*no disk'),
    Fault('raises in a data set', in_dataset("raise ValueError('no disk') # here"), 'ValueError: no disk'),
    Fault('raises in a loader process', in_loader("raise ValueError('no disk') # here"), 'ValueError: no disk'),
    Fault('more memory than there is', in_fit('torch.empty(2**50) # here'), r'RuntimeError: .*\s.*memory'),
    Fault('rank0_first fails', """
        def download():
            fault()
            raise OSError('no such host') # here
        rank0_first(download)""", 'OSError: no such host', rank=0),
    Fault('disk full', in_fit("open('/dev/full', 'w', buffering=1).write('weights' + chr(10)) # here", rank=0), r'OSError: .*\s*No space left', rank=0),
    Fault('slow end of rank 0', 'import atexit; atexit.register(time.sleep, 4*(from_env().rank==0))\n' +
          textwrap.dedent(loop("raise ValueError('no disk') # here", 0)), 'ValueError: no disk', rank=0),
    # the end of a process
    Fault('killed', loop('os.kill(os.getpid(), signal.SIGKILL)'), 'signal 9|SIGKILL'),
    Fault('ended by SIGTERM', loop('os.kill(os.getpid(), signal.SIGTERM)'), 'signal 15|SIGTERM'),
    Fault('segmentation fault', loop('import ctypes; ctypes.string_at(0) # here'), 'signal 11|SIGSEGV'),
    Fault('a loader process is killed', in_loader('os.kill(os.getpid(), signal.SIGKILL)'), 'killed by signal: Killed'),
    Fault('sys.exit(3)', loop('sys.exit(3) # here'), 'SystemExit: 3'),
    Fault('sys.exit(0)', loop('sys.exit(0) # here'), 'SystemExit'),
    Fault('os._exit(0)', loop('os._exit(0)'), 'ended (without a traceback|before the function returned)'),
    Fault('returns early', """
        setup_distrib()
        dist.barrier()
        fault()
        if get_rank()==1: return
        while True: dist.all_reduce(torch.ones(4))""", 'does not take part any more'),
    Fault('leaves the group', """
        setup_distrib()
        with fail_together(watchdog=5):
            dist.barrier()
            while get_rank()!=1: dist.all_reduce(torch.ones(4))
        fault()
        teardown_distrib()
        time.sleep(1000)""", 'it has left the process group'),
    # nothing moves
    Fault('sleeps', loop('time.sleep(1000) # here'), WAITS),
    Fault('busy', loop('while True: pass # here'), WAITS),
    Fault('stopped', loop('os.kill(os.getpid(), signal.SIGSTOP)'), WAITS),
    Fault('holds the interpreter lock', loop("""
        import ctypes
        lock, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
        for _ in range(2): libc.pthread_mutex_lock(lock) # here"""), WAITS),  # no signal ends that, as it would a sleep
    Fault('a loader process sleeps', in_loader('time.sleep(1000) # here'), WAITS),
    # waiting for one that does not come
    Fault('rank 0 leaves before the context', alone('return') + """
        setup_distrib()""", 'does not (come|take part) any more: its script has ended', rank=0, launchers=LAUNCHERS),
    Fault('rank 0 leaves between two rank0_first', """
        rank0_first(int)""" + alone('return') + """
        rank0_first(int)""", 'does not take part any more: its script has ended', rank=0, launchers=LAUNCHERS),
    Fault('the launcher is killed', in_fit('pass').replace('learner(', 'learner(num_workers=1, '), '', rank=None, launchers=LAUNCHERS, during=kill_launcher),
    # different calls
    Fault('another collective', loop('dist.broadcast(torch.ones(4), 0) # here'),
          r'(?s)the ranks are at different calls.*in (broadcast.*in all_reduce|all_reduce.*in broadcast)', rank=None),
    Fault('get_preds and validate', apart('learn.get_preds()', 'learn.validate()'), r'get_preds.*validate|validate.*get_preds', rank=None),
    Fault('saves alone', apart("learn.save('m')", 'learn.validate()', 'fsdp'), 'save'),
    Fault('a callback of rank 1 validates alone', in_fit('learn.validate() # here'), f'{WAITS}|has gone on without it'),
    Fault('out of GPU memory', in_fit("raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB') # here"), r'OutOfMemoryError: .*\s+CUDA out of memory'),
    Fault('SIGINT to one rank', loop('os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(1000)'), 'Ctrl-C|KeyboardInterrupt'),
    Fault('raises in a backward', in_fit("""
        class F(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x.clone()
            @staticmethod
            def backward(ctx, g): raise ValueError('no disk') # here
        F.apply(torch.ones(2, requires_grad=True)).sum().backward()"""), r'ValueError: .*\s*no disk'),
    # of the data
    Fault('raises in collate_fn', in_dataset('pass', create_batch='batch'), 'ValueError: no disk', top="""
        def batch(b):
            if from_env().rank==1:
                fault()
                raise ValueError('no disk') # here
            return fa_collate(b)"""),
    Fault('no shared memory', """
        if from_env().rank==1: # a small one, of this process's own
            import ctypes
            libc = ctypes.CDLL(None, use_errno=True)
            for call,*args in ((libc.unshare, 0x20000), (libc.mount, b'none', b'/', None, 0x44000, None), (libc.mount, b'tmpfs', b'/dev/shm', b'tmpfs', 0, b'size=64k')):
                if call(*args): raise OSError(ctypes.get_errno(), 'this row needs root')
        def get(i):
            if from_env().rank==1 and i==5: fault()
        def batch(b): # a view of 4 MB, all of which is sent
            x,y = fa_collate(b)
            return torch.ones(10**6)[:x.numel()].view(x.shape), y
        learn = learner(get, num_workers=1, create_batch=batch)
        with learn.distrib_ctx(split_batches=True, watchdog=5): learn.fit(100000)""", 'shared memory|Bus error|No space left'),
    # of the process
    Fault('the terminal is closed', loop('time.sleep(1000)'), '', rank=None, launchers=LAUNCHERS, during=send_launcher(signal.SIGHUP)),
    # what ends nothing
    Fault('a fork exits in a fit', """
        def f():
            fault()
            if os.fork()==0: sys.exit(3)
            os.wait()
        learn = learner(cbs=In(f))
        with learn.distrib_ctx(split_batches=True, watchdog=5): learn.fit(2)
        if get_rank()==0: print('all is well')""", 'all is well', rank=None, status=0),
]


def script(f):
    "The text of the user's file, and the number of the line to be named, or `None`"
    text = textwrap.dedent(PRELUDE).strip().replace('def train():', f'{textwrap.dedent(f.top)}\ndef train():')
    text += '\n' + textwrap.indent(textwrap.dedent(f.code).strip('\n'), '    ') + '\n' + textwrap.dedent(MAIN)
    return text, next((i for i, o in enumerate(text.splitlines(), 1) if o.rstrip().endswith('# here')), None)


def names_rank(way, r, n, text):
    "Does the output blame rank `r`, rather than mention it?"
    if way == 'fastdist launch': return re.search(rf'^fastdist: (worker|rank) {r} ', text.strip().splitlines()[-1]) is not None
    root = text.partition('Root Cause')[2]  # of torch's summary
    said = re.search(rf'(because|Ctrl-C in) rank {r}\b|rank {r} of {n} |rank {r} has kept|and rank {r} \(host \S+ process \d+\) does not', text)
    return bool(said or re.search(rf'rank\s*: {r} ', root))


def run(f, way, n, show=False):
    "A row of the table: seconds, and what is yes or no, by column"
    text, line = script(f)
    with tempfile.TemporaryDirectory(prefix='ft') as folder:
        folder, tmp = Path(folder)/'work', Path(folder)/'tmp'
        folder.mkdir(), tmp.mkdir()
        (folder/'train.py').write_text(text)
        env = {'ACCELERATE_USE_CPU': None if way == 'fastdist launch' else 'true', 'CUDA_VISIBLE_DEVICES': '', 'TMPDIR': str(tmp), 'PYTHONFAULTHANDLER': None,
               'LAUNCH_N': str(n) if way == 'launch_in_notebook' else None, **(f.env or {})}
        during = f.during and (lambda proc, mark: f.during(proc, mark, folder))
        begin = time.time()
        try: res = launched([*WAYS[way](n), *f.options, 'train.py'], 150, env=env, cwd=folder, during=during)
        except WorkerError as e:
            if show: print(e)
            return 'never', {}
        at = folder/'at'
        files = [o.name for o in tmp.iterdir() if o.name.startswith(('fastdist', 'pymp-'))]
        if f.during is kill_launcher: files = []  # its logs say why
        screen = f'{res.stdout}\n{res.stderr}'
        end = '\n'.join(res.stderr.splitlines()[-5:])
        if show: print(f'--- {f.name}, {way}, {n}: status {res.returncode}, left {res.left} {files}\n{screen}\n---')
        if (folder/'ended').exists(): seconds = f"{float((folder/'ended').read_text())-float(at.read_text()):.1f}"
        else: seconds = f'{begin + res.seconds - float(at.read_text()):.1f}' if at.exists() else '?'
        found = {'status': res.returncode == f.status if f.status is not None else res.returncode not in (0, None),
                 'rank': f.rank is None or names_rank(way, f.rank, n, screen), 'cause': re.search(f.cause, screen) is not None,
                 'line': line is None or re.search(rf'train\.py(:|", line ){line}\b', screen) is not None,
                 'last': way != 'fastdist launch' or 'no disk' not in f.cause or len(re.findall(f.cause, screen)) == 1 and re.search(f.cause, end) is not None,
                 'nothing left': not res.left and not files}
        return seconds, found


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--only', nargs='+', metavar='NAME', help='faults whose name has one of these texts')
    p.add_argument('--launcher', nargs='+', choices=ALL, help='these launchers only')
    p.add_argument('--workers', nargs='+', type=int, metavar='N', help='these numbers of workers, in place of those of the fault')
    p.add_argument('--cold', action='store_true', help='let every process import all by itself, as a user does')
    p.add_argument('--show', action='store_true', help='print what each command printed')
    p.add_argument('--list', action='store_true', help='list the faults')
    a = p.parse_args()
    faults = [f for f in FAULTS if not a.only or any(o in f.name for o in a.only)]
    if not faults: p.error(f'no fault is named like {a.only}')
    if a.list: return print('\n'.join(f.name for f in faults))
    if a.cold: os.environ[warm.COLD] = '1'
    warm.install(all_kinds=True)
    columns, bad = ('status', 'rank', 'cause', 'line', 'last', 'nothing left'), 0
    print(f"| fault | launcher | workers | seconds | {' | '.join(columns)} |\n|{'---|'*(4+len(columns))}", flush=True)
    for f in faults:
        for way in f.launchers:
            if a.launcher and way not in a.launcher: continue
            for n in a.workers or f.workers:
                seconds, found = run(f, way, n, a.show)
                bad += not all(found.get(o) for o in columns)
                print(f"| {f.name} | {way} | {n} | {seconds} | {' | '.join('yes' if found.get(o) else '**no**' for o in columns)} |", flush=True)
    print(f'\n{bad} rows with a no')
    return int(bad > 0)


if __name__ == '__main__': sys.exit(main())
