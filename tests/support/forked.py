"""Processes without a launcher: each is told what it is by the environment that a test gives it. They are forked from a server that has
imported fastdist once."""
import multiprocessing, os, pickle, sys, time, traceback
from multiprocessing.connection import wait

import by_value, cloudpickle
from harness import TESTS

SLURM = ('SLURM', 'ENVIRONMENT', 'RANK', 'WORLD_SIZE', 'LOCAL_', 'GROUP_', 'MASTER_', 'TORCHELASTIC', 'ACCELERATE', 'FASTDIST')
_context = None


def run(msg, env, conn):
    for k in [k for k in os.environ if k.startswith(SLURM)]: del os.environ[k]
    os.environ.update(env)
    try:
        fn, args = pickle.loads(msg)
        reply = True, fn(*args)
    except BaseException as e: reply = False, (type(e).__name__, str(e), traceback.format_exc())
    conn.send_bytes(by_value.dumps(reply))
    conn.close()
    import atexit
    atexit._run_exitfuncs()  # multiprocessing would leave them out
    os._exit(0)


def start(fn, envs, *args):
    "Processes that call `fn(*args)`, one for each dict in `envs`, and the lines on which they reply"
    global _context
    if _context is None:
        os.environ.setdefault('OMP_NUM_THREADS', '1')
        _context = multiprocessing.get_context('forkserver')
        _context.set_forkserver_preload(['fastdist.world', 'forked'])
    module = sys.modules[fn.__module__]
    if (getattr(module, '__file__', None) or '').startswith(str(TESTS)): cloudpickle.register_pickle_by_value(module)
    msg, procs, lines = by_value.dumps((fn, args)), [], []
    for env in envs:
        ours, theirs = _context.Pipe(duplex=False)
        p = _context.Process(target=run, args=(msg, {'RES_OPTIONS': 'timeout:1 attempts:1', **env}, theirs))
        p.start()
        theirs.close()
        procs.append(p)
        lines.append(ours)
    return procs, lines


def started(fn, envs, *args, timeout=300):
    "What `fn(*args)` returned in each process, or (name of the exception, text, traceback) as a tuple; `None` where it died"
    procs, lines = start(fn, envs, *args)
    end, res = time.monotonic() + timeout, [None]*len(envs)
    pending = dict(enumerate(lines))
    try:
        while pending and time.monotonic() < end:
            ready = wait(list(pending.values()), 0.5)
            for i in [i for i, line in pending.items() if line in ready]:
                try: res[i] = pickle.loads(lines[i].recv_bytes())[1]
                except EOFError: pass
                del pending[i]
        assert not pending, f'processes {list(pending)} did not end within {timeout} s; the others: {res}'
        for p in procs: p.join(15)
        assert not any(p.is_alive() for p in procs), 'processes have replied, and have not ended'
        return res
    finally:
        for p in procs:
            if p.is_alive(): p.kill()
            p.join()
