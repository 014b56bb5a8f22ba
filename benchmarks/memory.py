"""Bytes that each worker holds under each strategy, beside the formula: parameters, gradients, optimizer state, activations.

    python benchmarks/memory.py [--workers 1 2 4] [--only ddp zero1 zero2 fsdp hsdp] [--million 100]

A model of 100 M parameters in float32, and fastai's Adam. What is measured are the storages that live tensors have, each counted once: of the optimizer's
state after a step; of parameters and gradients before it, when the backward has ended; of what the forward saves for the backward, without parameters. The
global batch is the same for any number of workers; the worker that has most counts. Ends with 1 if a ratio is off by more than 5 %.

Apart from that, in MB: the parameters that FSDP has gathered at most at a time in the forward; what DDP keeps in C++ to send gradients; all other tensors that
Python knows of at these moments; and the most that is alive where the backward of a block begins, besides parameters and state at rest: activations, gradients,
gathered parameters. Some 6 minutes on 2 cores, and 12 GB."""
import gc, warnings

warnings.filterwarnings('ignore')
import torch, torch.distributed as dist
from fastai.basics import *
from torch.distributed.tensor import DTensor
from shared import parser, spawned, steps_only
import fastdist.all
from fastdist.comm.collectives import tensors_in
from fastdist.callbacks.fastai_patches import trainer_of

DEPTH, BATCH, CLASSES = 8, 240, 12
KINDS = 'parameters', 'gradients', 'optimizer state', 'activations'
APART = dict(gathered='gathered by FSDP', buckets="DDP's buckets", others='others', backward='most in the backward')


class Block(nn.Sequential):
    def __init__(self, d): super().__init__(nn.Linear(d, 4*d), nn.ReLU(), nn.Linear(4*d, d))


def model(millions):
    d = int((millions*1e6/8/DEPTH)**.5)//12*12  # rows that 2, 3 and 4 workers share evenly
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(CLASSES, d), *[Block(d) for _ in range(DEPTH)], nn.Linear(d, CLASSES))


def storages(ts):
    "Bytes by address, of plain tensors and of the local ones of a DTensor"
    ts = [t.to_local() if isinstance(t, DTensor) else t for t in ts if t is not None]
    return {s.data_ptr(): s.nbytes() for s in (t.detach().untyped_storage() for t in ts) if s.nbytes()}


def total(found): return sum(found.values())


def state_of(opt):
    while hasattr(opt, 'opt'): opt = opt.opt
    return tensors_in([list(s.values()) for s in opt.state.values()])


def alive(): return storages(o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter, DTensor))


class Measures(Callback):
    "Bytes of this worker, in the third step; the backward of the second is looked at while it runs"
    order, run_valid = 1100, False
    def __init__(self): self.bytes, self.hooks, self.saved, self.handles = collections.Counter(), None, {}, []
    def before_batch(self):
        self.now = self.train_iter == 2
        if self.train_iter == 1:
            blocks = [m for m in getattr(self.learn.model, 'model', self.learn.model).modules() if isinstance(m, Block)]
            self.handles = [m.register_forward_hook(lambda m, i, o: self.looks.append(o.register_hook(self.look)) or None) for m in blocks]
            self.looks, self.rest = [], total(storages(self.mine()))+total(storages(state_of(self.opt)))
        if not self.now: return
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t)
        self.hooks.__enter__()
    def look(self, g): self.bytes['backward'] = max(self.bytes['backward'], total(alive())-self.rest)
    def pack(self, t):
        # while a module computes its parameters are plain tensors, gathered by FSDP where they were sharded
        own = storages(p for p in self.mine() if not isinstance(p, DTensor))
        shards = storages(p for p in self.mine() if isinstance(p, DTensor))
        self.bytes['gathered'] = max(self.bytes['gathered'], total(own) if shards else 0)
        self.saved |= {k: v for k, v in storages([t]).items() if k not in own and k not in shards}
        return t
    def mine(self): return list(getattr(self.learn.model, 'model', self.learn.model).parameters())
    def after_pred(self): self.close()
    def close(self):
        if self.hooks is None: return
        self.hooks.__exit__(None, None, None)
        self.hooks = None
        self.bytes['activations'] = total(self.saved)
    def before_step(self):
        for h in self.handles: h.remove()
        self.handles = []
        if not self.now: return
        self.bytes['parameters'], self.bytes['gradients'] = total(storages(self.mine())), total(storages(p.grad for p in self.mine()))
        trainer = trainer_of(self.learn)
        ddp = getattr(getattr(trainer, 'strategy', None), 'ddp', None)
        if ddp is not None: self.bytes['buckets'] = sum(b.buffer().nbytes for b in ddp.reducer._get_zeros_like_grad_buckets())
        self.find_others()
    def after_step(self):
        if not self.now: return
        self.bytes['optimizer state'] = total(storages(state_of(self.opt)))
        self.find_others()
    def find_others(self):
        "What is alive besides: copies that nobody should keep"
        known = storages([*self.mine(), *(p.grad for p in self.mine()), *state_of(self.opt)])
        self.bytes['others'] = max(self.bytes['others'], total({k: v for k, v in alive().items() if k not in known}))


def formulas(strategy, n, p, a):
    "By kind: `n` workers share what the strategy shards"
    shards = dict(ddp=(1, 1, 1), zero1=(1, 1, n), zero2=(1, n, n), fsdp=(n, n, n), hsdp=(n, n, n))[strategy]
    return dict(zip(KINDS, (p/shards[0], p/shards[1], 2*p/shards[2], a/n)))


def worker(rank, world, file, strategies, millions, res):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', f'file://{file}', world_size=world, rank=rank)
    g = torch.Generator().manual_seed(0)
    xs, ys = torch.randn(3*BATCH, CLASSES, generator=g), torch.randint(0, CLASSES, (3*BATCH,), generator=g)
    for nm in strategies:
        dls = DataLoaders(*[TfmdDL(list(zip(xs, ys)), bs=BATCH, num_workers=0) for _ in range(2)])
        cb = Measures()
        learn = steps_only(Learner(dls, model(millions), nn.CrossEntropyLoss(), opt_func=Adam, cbs=cb))
        with learn.distrib_ctx(cpu=True, split_batches=True, strategy=nm): learn.fit(1)
        every = [None]*world
        dist.all_gather_object(every, dict(cb.bytes))
        if rank == 0: res.put((nm, {k: max(o.get(k, 0) for o in every) for k in (*KINDS, *APART)}))
        del learn, cb, dls
        gc.collect()
    dist.destroy_process_group()


def main():
    p = parser(__doc__)
    p.add_argument('--workers', type=int, nargs='+', default=[1, 2, 4])
    p.add_argument('--only', nargs='+', default=['ddp', 'zero1', 'zero2', 'fsdp', 'hsdp'])
    p.add_argument('--million', type=float, default=100)
    a = p.parse_args()
    ps = list(model(a.million).parameters())
    nbytes, unit = 4*sum(p.numel() for p in ps), 4*sum(p.numel() for p in Block(ps[0].shape[0]).parameters())
    (_, alone), = spawned(worker, 1, 1, ['ddp'], a.million)
    acts, off = alone['activations'], []
    print(f'{nbytes/4e6:.1f} M parameters, {nbytes/1e6:.1f} MB; activations of a global batch of {BATCH} in one process: {acts/1e6:.1f} MB; the largest unit: {unit/1e6:.1f} MB\n\n'
          f"| strategy | workers | {' | '.join(f'{k}, MB (of formula)' for k in KINDS)} | {' | '.join(f'{v}, MB' for v in APART.values())} |\n{'|---'*(6+len(APART))}|")
    for n in a.workers:
        for s, got in spawned(worker, n, len(a.only), a.only, a.million):
            want, cells = formulas(s, n, nbytes, acts), []
            for k in KINDS:
                ratio = got[k]/want[k]
                if abs(ratio-1) > .05: off.append(f'{s}, {n} workers, {k}: {ratio:.3f}')
                cells.append(f'{got[k]/1e6:.1f} ({ratio:.3f})')
            print(f"| {s} | {n} | {' | '.join(cells)} | {' | '.join(f'{got[k]/1e6:.1f}' for k in APART)} |", flush=True)
    if off: raise SystemExit('\nnot within 5 % of the formula: '+'; '.join(off))


if __name__ == '__main__': main()
