"One rank of the test world that `harness.World` starts under torchrun. Runs the functions it is sent until the parent closes the line."
import faulthandler, gc, os, pickle, queue, shutil, signal, sys, threading, traceback
from multiprocessing.connection import Client
from pathlib import Path

import by_value


def main(folder):
    rank = os.environ['RANK']
    log = os.open(folder/f'rank{rank}.log', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # faulthandler writes from the signal handler itself, so it answers even when Python code cannot run
    faulthandler.register(signal.SIGUSR1, file=open(folder/f'rank{rank}.stacks', 'ab', 0), all_threads=True)
    import fastai.basics, fastai.callback.all, torch.distributed as dist  # once, here, and not in every call
    if library := os.environ.get('FASTDIST_TEST_GPUS'):
        if library != 'real':
            import fakegpu
            fakegpu.install(library)
    try: import fastdist.all
    except Exception: traceback.print_exc()  # into the log: a test that needs it fails by itself, and shows this

    if library == 'real':
        import real_gpus
        real_gpus.share(int(os.environ['WORLD_SIZE']))
    fastai.basics.defaults.cpus = 0  # as in conftest.py: a loader has processes where a test says so

    conn = Client(str(folder/'line'), 'AF_UNIX', authkey=bytes.fromhex(os.environ['FASTDIST_TEST_KEY']))
    conn.send((int(rank), os.getpid()))
    calls = queue.SimpleQueue()

    def listen():
        # A thread, so that a worker that is stuck in a call goes too when the parent closes the line, or is killed
        try:
            while True: calls.put(conn.recv_bytes())
        except (EOFError, OSError):
            if rank == '0': shutil.rmtree(folder, ignore_errors=True)  # a parent that was killed could not
            os._exit(0)

    def run(msg):
        try:
            env, fn, args, kwargs = pickle.loads(msg)
            os.environ.update(env)
            return by_value.dumps((True, fn(*args, **kwargs)))
        except BaseException:  # SystemExit as well: only a process that really dies counts as dead
            return by_value.dumps((False, traceback.format_exc()))

    gc.freeze()  # what the imports made stays: no need to look at it after every call
    threading.Thread(target=listen, daemon=True).start()
    while True:
        reply = run(calls.get())
        gc.collect()  # what one test left in a cycle must not be finalised in the middle of the next
        # what stays is modules that were imported late (torch's compiler: 200,000 objects), which each look of the collector's would go
        # through
        if not dist.is_initialized(): gc.freeze()
        conn.send((dist.is_initialized(), reply))


if __name__ == '__main__': main(Path(sys.argv[1]))
