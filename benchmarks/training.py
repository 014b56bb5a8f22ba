"""What a training step costs on 2 workers, beside the same loop written by hand, Accelerate, Lightning Fabric (where it is installed) and `fastai.distributed`.

    python benchmarks/training.py [--rounds 7] [--sizes tiny small]

A network of linear layers over gloo, one thread each, in two sizes: a step of some 5 ms and of some 30 ms. Each way has two processes of its own, which stay; in
a round they train an epoch each, one way after the other, in another order each time. An epoch is all of it: loader, forward, backward, step, recording of the
loss. By hand it is DistributedDataParallel with fastai's optimizer and loader. Medians over rounds of the milliseconds of a step, by the clock and of rank 0's
CPU, and of the ratio to the epoch by hand of the same round, with quartiles."""
import argparse, importlib.util, os, random, statistics, subprocess, sys, tempfile, time, warnings
from pathlib import Path

import shared
from harness import free_port

SIZES = {'tiny': (192, 6, 64, 100), 'small': (512, 8, 128, 40)}  # width, layers, samples of a worker's batch, steps
WORKERS = 2


def parts(size):
    "(model, features, targets, batch size of a worker): the same in all ways"
    import torch
    from torch import nn
    width, depth, bs, steps = SIZES[size]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    n = bs*WORKERS*steps
    model = nn.Sequential(*[o for _ in range(depth) for o in (nn.Linear(width, width), nn.ReLU())], nn.Linear(width, 10))
    return model, torch.randn(n, width), torch.randint(0, 10, (n,)), bs


def learner(size, factor=1):
    from fastai.basics import CrossEntropyLossFlat, DataLoaders, Learner, SGD, TfmdDL, partial
    model, xs, ys, bs = parts(size)
    dls = DataLoaders(*[TfmdDL(list(zip(xs, ys)), bs=bs*factor, num_workers=0) for _ in range(2)])
    return shared.steps_only(Learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=partial(SGD, mom=0.9), lr=1e-3))


def in_context(learn, **kwargs):
    ctx = learn.distrib_ctx(cpu=True, **kwargs)
    ctx.__enter__()
    def epoch():
        assert ctx is not None  # it would end when nobody has it
        learn.fit(1)
    return epoch


def one_process(size):
    learn = learner(size, WORKERS)
    return lambda: learn.fit(1)


def fastdist(size):
    import fastdist.all
    return in_context(learner(size), sync_bn=False)


def monitored(size):
    from fastdist.all import DistMonitor
    learn = learner(size)
    learn.add_cb(DistMonitor())
    return in_context(learn, sync_bn=False)


def fastai_distributed(size):
    shared.fastai_distributed()
    return in_context(learner(size), sync_bn=False)


def loop(model, opt, dl, backward):
    from torch.nn.functional import cross_entropy
    model.train()
    for x, y in dl:
        loss = cross_entropy(model(x), y)
        backward(loss)
        opt.step()
        opt.zero_grad()
    return loss.item()


def by_hand(size):
    import torch.distributed as dist
    from fastai.basics import SGD, TfmdDL
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group('gloo')
    model, xs, ys, bs = parts(size)
    mine = slice(dist.get_rank(), None, WORKERS)
    dl, opt = TfmdDL(list(zip(xs[mine], ys[mine])), bs=bs, num_workers=0), SGD(model.parameters(), lr=1e-3, mom=0.9)
    model = DistributedDataParallel(model)
    return lambda: loop(model, opt, dl, lambda loss: loss.backward())


def torch_parts(size):
    import torch
    model, xs, ys, bs = parts(size)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), torch.utils.data.DataLoader(list(zip(xs, ys)), batch_size=bs)


def accelerate(size):
    from accelerate import Accelerator
    a = Accelerator(cpu=True)
    model, opt, dl = a.prepare(*torch_parts(size))
    return lambda: loop(model, opt, dl, a.backward)


def fabric(size):
    from lightning_fabric import Fabric
    f = Fabric(accelerator='cpu', devices=WORKERS, strategy='ddp')
    f.launch()
    model, opt, dl = torch_parts(size)
    model, opt = f.setup(model, opt)
    dl = f.setup_dataloaders(dl)
    return lambda: loop(model, opt, dl, f.backward)


def learner_on_ddp(size):
    "fastai's `Learner` without any help"
    import torch.distributed as dist
    from fastai.basics import DataLoaders, TfmdDL
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group('gloo')
    learn = learner(size)
    mine = slice(dist.get_rank(), None, WORKERS)
    learn.dls = DataLoaders(*[TfmdDL(o.dataset[mine], bs=o.bs, num_workers=0) for o in learn.dls.loaders])
    learn.create_opt()
    learn.model = DistributedDataParallel(learn.model)
    return lambda: learn.fit(1)


WAYS = {'by hand': by_hand, 'fastdist': fastdist, 'with DistMonitor': monitored, 'Learner over DDP': learner_on_ddp, 'Accelerate': accelerate, 'Lightning Fabric': fabric, 'fastai.distributed': fastai_distributed,
        'one process': one_process}


def child(make):
    "One worker: what `make` returns, once for each line of rank 0's input; it prints the seconds by the clock and of its CPU, and what that returns, if it is a number"
    warnings.filterwarnings('ignore')
    epoch = make()
    import torch, torch.distributed as dist
    def barrier():
        if dist.is_initialized(): dist.all_reduce(torch.zeros(1))
    while True:
        more = torch.tensor([bool(sys.stdin.readline())]) if os.environ['RANK'] == '0' else torch.zeros(1, dtype=torch.bool)
        if dist.is_initialized(): dist.broadcast(more, 0)
        if not more: os._exit(0)
        barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        res = epoch()
        barrier()
        if os.environ['RANK'] == '0': print('took', time.perf_counter()-wall, time.process_time()-cpu, *([res] if isinstance(res, int) else []), flush=True)


class Way:
    "The processes of a way of training"
    def __init__(self, name, size, folder, script):
        n = 1 if name == 'one process' else WORKERS
        env = shared.environment(ACCELERATE_USE_CPU='true', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port()), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n))
        self.log = open(Path(folder)/f'{name}-{size}.log', 'w+')
        self.ps = [subprocess.Popen([sys.executable, script, '--child', name, '--sizes', size], env={**env, 'RANK': str(r), 'LOCAL_RANK': str(r)}, text=True,
                                    stdin=subprocess.PIPE, stdout=self.log if r else subprocess.PIPE, stderr=self.log) for r in range(n)]
    def epoch(self):
        "Seconds of an epoch: (by the clock, of rank 0's CPU)"
        self.ps[0].stdin.write('\n')
        self.ps[0].stdin.flush()
        while line := self.ps[0].stdout.readline():
            if line.startswith('took '): return [float(o) for o in line.split()[1:]]
        self.log.seek(0)
        sys.exit(self.log.read()[-3000:])
    def end(self):
        self.ps[0].stdin.close()
        for p in self.ps:
            try: p.wait(20)
            except subprocess.TimeoutExpired: p.kill()


def measure(size, rounds, names, script=__file__):
    res = {o: [] for o in names}
    with tempfile.TemporaryDirectory() as d:
        ways = {o: Way(o, size, d, script) for o in names}
        try:
            for w in ways.values(): w.epoch()  # buckets, first allocations
            for _ in range(rounds):
                for o in random.sample(names, len(names)): res[o].append(ways[o].epoch())
        finally:
            for w in ways.values(): w.end()
    return res


def beside(base, times):
    "Of the ratio to `times` in each round, as cells of a table: the median, and quartiles"
    return shared.spread([b[0]/t[0] for b, t in zip(base, times)])


if __name__ == '__main__':
    p = shared.parser(__doc__)
    p.add_argument('--rounds', type=int, default=7)
    p.add_argument('--sizes', nargs='+', default=list(SIZES), choices=list(SIZES))
    p.add_argument('--child', help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.child: child(lambda: WAYS[a.child](a.sizes[0]))
    names = [o for o in WAYS if o != 'Lightning Fabric' or importlib.util.find_spec('lightning_fabric')]
    for size in a.sizes:
        steps, res = SIZES[size][3], measure(size, a.rounds, names)
        print(f'\n{size}, {a.rounds} rounds of {steps} steps, {WORKERS} workers\n\n| | ms a step | CPU ms a step | by hand / this | quartiles |\n|---|---|---|---|---|')
        for name, rs in res.items():
            ms = [statistics.median(o)/steps*1e3 for o in zip(*rs)]
            print(f'| {name} | {ms[0]:.1f} | {ms[1]:.1f} | {beside(res["by hand"], rs)} |', flush=True)
