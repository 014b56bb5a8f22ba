"""What the end of a step with zero1 and zero2 takes of this worker, by the number of workers: Python, messages, bytes sent, bytes held.

    python benchmarks/shards.py [--workers 2 64 1024] [--only zero1 zero2] [--arch resnet50] [--steps 3]

No message is sent: torch's fake process group takes them, as rank 0 and as the last of so many workers, so what is left is what this worker does by itself, by
one thread. ms are CPU time, the least of the steps: `reduce` is what zero2 does to send the gradients of all parameters to those that step them, `step` the
optimizer's (fastai's Adam) with what is sent after it. `enter` and `leave` are the strategy's own part of a context. Messages and MB are of one step: MB is
what this worker hands to collectives (with zero1, gradients go by DistributedDataParallel, and are not counted). `shard` is what it holds of gradients and
optimizer state that are sharded, beside a worker's even share of them."""
import multiprocessing, time, warnings

warnings.filterwarnings('ignore')
import torch, torch.distributed as dist, torchvision
from fastai.basics import *
from shared import parser
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from fastdist.strategy.zero import ShardedGradients
from fastdist.strategy.zero1 import Zero1

NAMES = 'allreduce', 'broadcast', 'reduce', 'allgather', 'all_gather_single', '_allgather_base', 'reduce_scatter_single', '_reduce_scatter_base'


def counted(sent):
    "Let `sent` have (name, bytes) of each message from here on"
    PG = dist.ProcessGroup
    for nm in (o for o in NAMES if o in vars(PG)):
        def call(self, *args, _nm=nm, _was=vars(PG)[nm], **kwargs):
            t = args[0] if _nm in ('allreduce', 'broadcast', 'reduce') else args[1]
            sent.append((_nm, (t[0] if isinstance(t, list) else t).nbytes))
            return _was(self, *args, **kwargs)
        setattr(PG, nm, call)


def nbytes(ts): return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in ts if t.numel()}.values())


def local(t): return t.to_local() if isinstance(t, DTensor) else t


class Gradients(ShardedGradients):
    "Without a forward: gradients are given"
    def reduce(self):
        trained = self.trained_params()
        if trained != self.trained: self._add_hooks(trained)
        self.begin_backward()
        self._finish()


def one(word, arch, size, rank, steps):
    torch.set_num_threads(1)
    dist.init_process_group('fake', store=FakeStore(), rank=rank, world_size=size)
    model = getattr(torchvision.models, arch)()
    ps, res, sent = list(model.parameters()), {}, []
    strategy, opt = dict(zero1=Zero1, zero2=Gradients)[word](), Adam(model.parameters(), lr=1e-3)
    def timed(nm, f):
        begin = time.process_time()
        f()
        res[nm] = min(res.get(nm, math.inf), (time.process_time()-begin)*1e3)
    def enter():
        strategy.setup(SimpleNamespace(model=model, cbs=[]), torch.device('cpu'))
        strategy.set_opt(opt)
    timed('enter', enter)
    counted(sent)
    for _ in range(steps):
        for p in ps: p.grad = torch.zeros_like(p)
        sent.clear()
        if word == 'zero2': timed('reduce', strategy.reduce)
        timed('step', opt.step)
    res['messages'], res['MB'] = len(sent), sum(o[1] for o in sent)/1e6
    held = [v for s in opt.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    even = 2*sum(p.nbytes for p in ps)
    if word == 'zero2': held, even = held+[local(p.grad) for p in ps], even*1.5
    res['shard'] = f'{nbytes(map(local, held))/1e6:.3f} ({even/1e6/size:.3f})'
    timed('leave', lambda: strategy.close())
    return res


def main():
    p = parser(__doc__)
    p.add_argument('--workers', type=int, nargs='+', default=[2, 64, 1024])
    p.add_argument('--only', nargs='+', default=['zero1', 'zero2'], choices=['zero1', 'zero2'])
    p.add_argument('--arch', default='resnet50')
    p.add_argument('--steps', type=int, default=3)
    a = p.parse_args()
    heads = 'strategy', 'workers', 'rank', 'enter, ms', 'reduce, ms', 'step, ms', 'leave, ms', 'messages', 'MB', 'shard, MB (even)'
    print(f"| {' | '.join(heads)} |\n{'|---'*len(heads)}|")
    spawn = multiprocessing.get_context('spawn')
    for word in a.only:
        for size in a.workers:
            for rank in (0, size-1):
                with spawn.Pool(1) as pool: r = pool.apply(one, (word, a.arch, size, rank, a.steps))
                cells = [f"{r[k]:.0f}" if k in r else '' for k in ('enter', 'reduce', 'step', 'leave')]
                print(f"| {word} | {size:,} | {rank:,} | {' | '.join(cells)} | {r['messages']} | {r['MB']:.1f} | {r['shard']} |", flush=True)


if __name__ == '__main__': main()
