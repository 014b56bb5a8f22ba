"What benchmarks have in common"
import argparse, ctypes, gc, os, statistics, sys, time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT/'tests'/o) for o in ('support', 'contract'))]


def parser(doc): return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def environment(**more):
    "That of a worker: one thread, and this checkout"
    return {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]), **more}


def memory(key):
    "In bytes, from /proc: VmRSS now, VmHWM at its highest"
    return int(next(l for l in open('/proc/self/status') if l.startswith(key)).split()[1])*1024


def tidy():
    "Give the system what no object needs"
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def with_memory(run):
    "(what `run` returns, its seconds, bytes at the highest point above those before)"
    Path('/proc/self/clear_refs').write_text('5')  # VmHWM begins again
    before, begin = memory('VmRSS'), time.perf_counter()
    res = run()
    return res, time.perf_counter()-begin, memory('VmHWM')-before


def fastai_distributed():
    "The module, whose loaders need no GPU any more: their broadcast has a `.cuda()`"
    import fastai.distributed, torch, torch.distributed as dist
    def broadcast(self, t, rank):
        t = torch.as_tensor(t)
        dist.broadcast(t, rank)
        return t.tolist()
    fastai.distributed.DistributedDL._broadcast = broadcast
    return fastai.distributed


def steps_only(learn):
    "Train without a bar, a table and a validation"
    from learners import noop, quiet
    learn._do_epoch_validate = noop
    return quiet(learn)


def spawned(worker, n, count, *args):
    "Yield the `count` results that `n` processes, `worker(rank, n, store, *args, queue)`, put into the queue"
    import tempfile, torch.multiprocessing as mp
    res = mp.get_context('spawn').SimpleQueue()
    with tempfile.TemporaryDirectory() as d:
        ctx = mp.spawn(worker, (n, f'{d}/store', *args, res), nprocs=n, join=False)
        for _ in range(count):
            while res.empty():
                if ctx.join(1): break  # raises what a worker has raised
            yield res.get()
        while not ctx.join(): pass


def spread(ratios, digits=2):
    "As cells of a table: the median, and quartiles"
    low, mid, high = statistics.quantiles(ratios) if len(ratios) > 1 else [*ratios]*3
    return f'{mid:.{digits}f} | {low:.{digits}f} to {high:.{digits}f}'
