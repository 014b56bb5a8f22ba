"""Step time of each strategy, beside hand-written torch code for the same strategy.

    python benchmarks/strategies.py [--steps 40] [--only ddp zero1 zero2 fsdp hsdp] [--limit 1.02]

A Transformer encoder of 11 M parameters, 2 workers over gloo. In a fit of fastdist, each step has a step of the other code beside it, on the same batch,
in the same processes, so that both meet the same machine; they take turns in being the first, and workers wait for each other before each step. A step is
all from before_batch to after_batch, without the loader. Medians of both, the ratio of the medians, and median and quartiles of the ratios of neighbours. That both
train the same is shown by their weights after the last step. 'zero2' has no counterpart in torch with whole parameters: it is held beside `fully_shard` that
does not let go of them between forward and backward. Ends with 1 if a ratio is above the limit. Some 5 minutes on 2 cores."""
import statistics, tempfile, time, warnings

warnings.filterwarnings('ignore')
import torch, torch.distributed as dist, torch.multiprocessing as mp
from fastai.basics import *
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from shared import parser, spread, steps_only
import fastdist.all

LR, VOCAB, DIM, LEN, CLASSES = 1e-4, 1000, 384, 32, 10


class Encoder(nn.Module):
    def __init__(self, depth=6):
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, CLASSES)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(DIM, 6, 4*DIM, dropout=0., batch_first=True) for _ in range(depth)])
    def forward(self, x):
        x = self.emb(x)
        for b in self.blocks: x = b(x)
        return self.head(x.mean(1))


def model():
    torch.manual_seed(0)
    return Encoder()


def torch_adamw(ps): return torch.optim.AdamW(ps, lr=LR)

# By hand: the model that is called, and the optimizer; `units` are the names of the modules that fastdist shards, of which the root is the last
def ddp(m, units): return DistributedDataParallel(m), Adam(list(m.parameters()), lr=LR)
def zero1(m, units): return DistributedDataParallel(m), ZeroRedundancyOptimizer(m.parameters(), torch.optim.AdamW, lr=LR)
def sharded(m, units, **kwargs):
    for u in units: fully_shard(m.get_submodule(u) if u else m, **kwargs)
    return m, torch_adamw(m.parameters())
def zero2(m, units): return sharded(m, units, reshard_after_forward=False)
def fsdp(m, units): return sharded(m, units)
def hsdp(m, units): return sharded(m, units, mesh=init_device_mesh('cpu', (1, dist.get_world_size()), mesh_dim_names=('replicate', 'shard')))

STRATEGIES = dict(ddp=(ddp, partial(Adam)), **{f.__name__: (f, partial(OptimWrapper, opt=torch.optim.AdamW)) for f in (zero1, zero2, fsdp, hsdp)})


def full(m): return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten() for p in m.parameters()])


class ByHand(Callback):
    "Beside each step of a fit, one of `make`'s, in turns before and after it; seconds of both"
    order, run_valid = 2000, False
    def __init__(self, make): self.make, self.peer, self.net, self.theirs, self.ours = make, model(), None, [], []
    def by_hand(self):
        if self.net is None:
            units = [n for n, m in self.learn.model.named_modules() if isinstance(m, FSDPModule)]
            units = units or [f'blocks.{i}' for i in range(len(self.peer.blocks))]+['']
            self.net, self.opt = self.make(self.peer, [u for u in units if u]+[''])
        dist.barrier()
        begin = time.perf_counter()
        loss = nn.functional.cross_entropy(self.net(self.x), self.y)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        self.theirs.append(time.perf_counter()-begin)
    def after_batch(self):
        self.ours.append(time.perf_counter()-self.began)
        if len(self.theirs) < len(self.ours): self.by_hand()


class Begin(Callback):
    "Before all other callbacks of a batch"
    order, run_valid = -1000, False
    def __init__(self, by_hand): self.by_hand = by_hand
    def before_batch(self):
        if len(self.by_hand.ours)%2: self.by_hand.by_hand()
        dist.barrier()
        self.by_hand.began = time.perf_counter()


def worker(rank, world, file, steps, only, limit, bs, res):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group('gloo', f'file://{file}', world_size=world, rank=rank)
    xs, ys = torch.randint(0, VOCAB, (steps*bs*world, LEN)), torch.randint(0, CLASSES, (steps*bs*world,))
    if rank == 0: print(f"{sum(p.numel() for p in model().parameters())/1e6:.1f} M parameters, {world} workers, {bs} x {LEN} tokens each, {steps} steps\n\n"
                        "| strategy | by hand, ms | fastdist, ms | ratio | of neighbours | quartiles | largest difference of a weight |\n|---|---|---|---|---|---|---|")
    worst = 0
    for nm in only:
        make, opt_func = STRATEGIES[nm]
        dls = DataLoaders(*[TfmdDL(list(zip(xs, ys)), bs=bs, num_workers=0) for _ in range(2)])
        cb = ByHand(make)
        learn = steps_only(Learner(dls, model(), nn.CrossEntropyLoss(), lr=LR, opt_func=opt_func, wd_bn_bias=True, cbs=[cb, Begin(cb)]))
        with learn.distrib_ctx(cpu=True, strategy=nm): learn.fit(1)
        ours, theirs = cb.ours[4:], cb.theirs[4:]  # the first make buckets, and optimizer state
        a, b, ratios = statistics.median(ours), statistics.median(theirs), spread([a/b for a, b in zip(ours, theirs)], 3)
        diff = (full(learn.model)-full(cb.peer)).abs().max().item()
        worst = max(worst, a/b)
        if rank == 0: print(f'| {nm} | {b*1e3:.0f} | {a*1e3:.0f} | {a/b:.3f} | {ratios} | {diff:.1e} |', flush=True)
        del learn, cb
    if rank == 0: res.put(worst)
    dist.destroy_process_group()


if __name__ == '__main__':
    p = parser(__doc__)
    p.add_argument('--steps', type=int, default=40)
    p.add_argument('--bs', type=int, default=8, help='samples of each worker')
    p.add_argument('--workers', type=int, default=2)
    p.add_argument('--only', nargs='+', default=list(STRATEGIES), choices=list(STRATEGIES))
    p.add_argument('--limit', type=float, default=1.02)
    a = p.parse_args()
    res = mp.get_context('spawn').SimpleQueue()
    with tempfile.TemporaryDirectory() as d: mp.spawn(worker, (a.workers, f'{d}/store', a.steps, a.only, a.limit, a.bs, res), nprocs=a.workers)
    if (worst := res.get()) > a.limit: raise SystemExit(f'{worst:.3f} is above {a.limit}')
