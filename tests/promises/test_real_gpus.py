"What only a GPU that is there can show: where the host waits, what ends a collective of nccl, and what is compiled. Skipped where there is none"
import contextlib, os, signal, time, traceback, warnings

import pytest
from forked import started
from harness import free_port
from learners import *
from strategies import ctx_of
import real_gpus


@contextlib.contextmanager
def host_waits(found):
    "Append to `found` (file, line, function) of the innermost frame of fastai or fastdist at each place where the host waits for the GPU, as torch says it"
    import fastai, fastdist
    folders = tuple(os.path.dirname(o.__file__)+os.sep for o in (fastai, fastdist))
    def note(message, *args, **kwargs):
        if 'called a synchronizing' not in str(message): return
        for f in reversed(traceback.extract_stack()):
            if f.filename.startswith(folders): return found.append((f.filename.rpartition('site-packages/')[2], f.lineno, f.name))
        found.append(('other', 0, ''))
    with warnings.catch_warnings():
        warnings.simplefilter('always')
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode('warn')
        try: yield
        finally: torch.cuda.set_sync_debug_mode('default')


class Steps(Callback):
    "Where the host waits from the end of the third batch to that of the sixth, loader and all"
    order = 2000
    def before_train(self): self.found, self.stack = [], contextlib.ExitStack()
    def after_batch(self):
        if not self.training: return
        if self.iter == 2: self.stack.enter_context(host_waits(self.found))
        if self.iter == 5: self.stack.close()


def waits(ctx):
    import fastdist.all
    learn = quiet(learner(n=12*9, bs=12, n_val=6, lr=0.05, bn=True, opt=Adam, dtype=torch.float32, cbs=Steps()))
    learn.dls.to(torch.device('cuda', torch.cuda.current_device()))
    with learn.distrib_ctx(**ctx): learn.fit(1)
    return learn.steps.found


@pytest.mark.parametrize('strategy', ['ddp', 'zero1', 'zero2', 'fsdp'])
def test_the_host_waits_for_batches_alone(real_gpu_worlds, strategy):
    "Where a batch is copied from memory that is not pinned the host waits for it, for features and labels; elsewhere nowhere"
    for found in real_gpu_worlds(2)(waits, ctx_of(strategy)):
        assert 0 < len(found) <= 6 and {name for _, _, name in found} <= {'to_device', '_inner'}, found


def over_links(url, fn, r):
    "What `fn` raises in each of 3 workers, and how many seconds after"
    import torch.distributed as dist
    real_gpus.share(3)
    from fastdist.world import RemoteError, distributed_init, fail_together
    distributed_init(init_method=url, rank=r, world_size=3)
    t = torch.ones(4, device='cuda')
    try:
        with fail_together(watchdog=600 if fn is killed else 5):
            dist.all_reduce(t)
            torch.cuda.synchronize()
            begin = time.monotonic()
            fn(r, t)
    except RemoteError as e: return e.rank, e.kind, time.monotonic()-begin, str(e)


def over_three(fn):
    url = f'tcp://127.0.0.1:{free_port()}'
    return started(lambda: over_links(url, fn, int(os.environ['I'])), [{'I': str(i), **real_gpus.shown()} for i in range(3)], timeout=120)


def killed(rank, t):
    import torch.distributed as dist
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(t)
    print(t.sum().item())


def parted(rank, t):
    import torch.distributed as dist
    if rank == 2: dist.broadcast(t, 0)
    dist.all_reduce(t)
    print(t.sum().item())


def test_a_killed_worker(real_gpu_worlds):
    "The others wait for the GPU, in `.item()`"
    res = over_three(killed)
    assert res[1] is None
    for r in (0, 2): assert res[r][:2] == (1, 'ended') and res[r][2] < 60 and 'rank 1 (host' in res[r][3], res[r]


def test_workers_that_part_ways(real_gpu_worlds):
    for o in over_three(parted): assert o[1] == 'stalled' and 'the ranks are at different calls' in o[3], o


def compiled(ctx, added):
    "Weights and losses of one worker, of all, and of all where the model is compiled; with `added` gradients are added up over two batches, by an optimizer that then drops them"
    import fastdist.all
    res = []
    for c in (None, ctx, {**ctx, 'dynamo_backend': 'inductor'}):
        more = dict(opt=partial(OptimWrapper, opt=torch.optim.SGD), cbs=GradientAccumulation(12)) if added else {}
        learn = quiet(learner(n=24, bs=6, n_val=6, lr=0.05, bn=True, dtype=torch.float32, shuffle=False, **more))
        learn.dls.to(torch.device('cuda', torch.cuda.current_device()))
        with contextlib.nullcontext() if c is None else learn.distrib_ctx(**c): learn.fit(2)
        res.append((weights(learn), [float(o) for o in learn.recorder.losses]))
    return res


@pytest.mark.parametrize('added', [False, True])
def test_compiled(real_gpu_worlds, added):
    "By inductor"
    for alone, plain, fast in real_gpu_worlds(2)(compiled, ctx_of('ddp'), added):
        for o in (plain, fast): assert diff(o[0], alone[0]) < 1e-4 and diff(o[1], alone[1]) < 1e-4, (o[1], alone[1])


def limits():
    import torch.distributed as dist
    import fastdist.all
    from fastdist.world import setup_distrib
    setup_distrib()
    def now(): return [dist.group.WORLD._get_backend(torch.device(o)).options._timeout.total_seconds() for o in ('cuda', 'cpu')]
    learn, before = quiet(learner()), now()
    with learn.distrib_ctx(watchdog=3600): inside = now()
    return before, inside, now()


def test_time_limits(real_gpu_worlds):
    for before, inside, after in real_gpu_worlds(2)(limits): assert before == after and min(inside) > 3600 > max(before), (before, inside, after)
