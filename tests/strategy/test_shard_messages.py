"What zero1 and zero2 send: tensors of any shape, and no more messages, bytes or Python for a thousand workers than for two"
import collections, itertools, sys
from unittest.mock import patch as put

import pytest
from fastai.callback.training import GradientClip
from forked import started
from learners import *
from strategies import state_of

# a number alone, one row, fewer rows than workers, primes
SHAPES = (), (1,), (2,), (7,), (1, 5), (2, 1, 3), (13, 2), (3, 4), (5, 1, 1, 2)


class Awkward(nn.Module):
    "A parameter of each of `SHAPES`, one of which has the strides of another, and the largest stands between two buckets"
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.ps = nn.ParameterList([nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64)) for s in SHAPES])
        self.ps.append(nn.Parameter(torch.randn(5, 7, generator=g, dtype=torch.float64).t()))
        self.head = nn.Linear(4, 3).double()
    def forward(self, x): return self.head(x)*(1 + .1*sum((p.flatten()*(i+1)+x.mean(1, True)).sin().sum(1, True) for i, p in enumerate(self.ps)))


def awkward():
    torch.manual_seed(3)
    return Awkward()


@contextlib.contextmanager
def sent_as(rows, nbytes):
    "Messages of `nbytes` at most; in `rows` of each worker, as other backends than gloo have them"
    from fastdist.comm import collectives as pack
    from fastdist.strategy.shards import sharding
    by_gloo = (lambda *_: False) if rows else sharding._by_gloo
    with put.object(sharding, '_by_gloo', by_gloo), put.object(sharding, 'bucket_bytes', nbytes), put.object(pack, 'bucket_bytes', nbytes): yield


def awkward_fit(ctx=None, rows=False, nbytes=2**20, opt=Adam):
    learn = quiet(learner(n=20, bs=5, n_val=5, opt=opt, lr=0.05, wd=.1, cbs=GradientClip(.5), model=awkward,
                          splitter=lambda m: [[*m.ps], [*m.head.parameters()]]))
    with contextlib.nullcontext() if ctx is None else sent_as(rows, nbytes), contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx):
        learn.freeze()
        learn.fit(1)
        learn.unfreeze()
        learn.fit(1)
    return weights(learn), state_of(learn.opt)


@pytest.mark.sizes
@pytest.mark.parametrize('size', [2, 3])
def test_awkward_shapes(worlds, size):
    "In one message and in many, whole and in rows: weights and optimizer state of one process"
    import fastdist.all
    one = {o: awkward_fit(opt=o) for o in (Adam, Lamb)}
    # a way of sending meets each size with one of the strategies
    for i, (rows, nbytes) in enumerate(itertools.product((False, True), (2**20, 64))):
        strategy, opt = ('zero1', 'zero2')[(i+size) % 2], (Adam, Lamb)[i//2]
        for w, state in worlds(size)(awkward_fit, dict(strategy=strategy, split_batches=True), rows, nbytes, opt):
            assert diff(one[opt][0], w) < 1e-7 and diff(one[opt][1], state) < 1e-6, (strategy, rows, nbytes)


def sums_and_rows(rows, nbytes):
    "What is added up, and what is gathered, of several types: differences to what it should be"
    import torch.distributed as dist
    from fastdist.strategy.shards import sharding
    from fastdist.world import setup_distrib
    setup_distrib()
    rank, n = dist.get_rank(), dist.get_world_size()
    rows_of, res = sharding.Rows(sharding.mesh_of('cpu')), []
    def make(r, dtype): return [torch.randn(s, generator=torch.Generator().manual_seed(10*r+i)).to(dtype) for i, s in enumerate(SHAPES)]
    with sent_as(rows, nbytes):
        for dtype in (torch.float64, torch.complex128, torch.bfloat16):
            every = [make(r, dtype) for r in range(n)]
            mine = [t if t.dim() else t.expand(n) for t in every[rank]]
            want, found = [sum(o) for o in zip(*every)], {id(t): [] for t in mine}
            for m in sharding.row_messages(mine, rows_of):
                m.reduce()
                m.work.wait()
                for t, (o, _) in zip(m.ts, m.mine(m.flat)): found[id(t)].append(o)
            for w, t in zip(want, mine):
                own = rows_of.of(w) if w.dim() else w[None]
                res.append((torch.cat(found[id(t)])-own).abs().max().item() if len(own) else 0.)
        for dtype in (torch.float64, torch.complex64, torch.bfloat16, torch.int64, torch.bool):
            whole = make(0, dtype)
            ts = [torch.zeros_like(t) for t in whole if t.dim()]
            for t, w in zip(ts, [t for t in whole if t.dim()]): rows_of.of(t).copy_(rows_of.of(w))
            sharding.send_rows(ts, rows_of)
            res += [float(not t.equal(w)) for t, w in zip(ts, [t for t in whole if t.dim()])]
            res += [float(not o.equal(w)) for o, w in zip(sharding.gather_rows([*map(rows_of.of, whole)], [w.shape for w in whole], rows_of), whole)]
    return res


@pytest.mark.sizes
@pytest.mark.parametrize('size', [2, 3])
def test_messages_add_up(worlds, size):
    for rows, nbytes in itertools.product((False, True), (2**20, 64)):
        for res in worlds(size)(sums_and_rows, rows, nbytes):
            k = 3*len(SHAPES)
            assert max(res[:2*k//3]) < 1e-12 and max(res[2*k//3:k]) < .1 and not any(res[k:]), (rows, nbytes, res)


def as_one_of(size, rank, shapes):
    "Of a step with torch's fake process group: messages and their bytes, calls of Python functions; what is sharded of the gradients"
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from fastdist.strategy.shards.sharding import local
    from fastdist.strategy.zero import ShardedGradients
    dist.init_process_group('fake', store=FakeStore(), rank=rank, world_size=size)
    model, strategy, sent = nn.ParameterList([nn.Parameter(torch.zeros(s)) for s in shapes]), ShardedGradients(), []
    strategy.setup(SimpleNamespace(model=model, cbs=[]), torch.device('cpu'))
    strategy.set_opt(opt := Adam(model.parameters(), lr=0.1))
    strategy._add_hooks([False]*len(shapes))
    PG, calls = dist.ProcessGroup, collections.Counter()
    for nm in ('allreduce', 'broadcast', 'reduce', 'allgather', 'all_gather_single', '_allgather_base', 'reduce_scatter_single', '_reduce_scatter_base'):
        def call(self, *args, _nm=nm, _was=vars(PG)[nm], **kwargs):
            t = args[0] if _nm in ('allreduce', 'broadcast', 'reduce') else args[1]
            sent.append((_nm, t.nbytes if isinstance(t, torch.Tensor) else sum(o.nbytes for o in t)))
            return _was(self, *args, **kwargs)
        setattr(PG, nm, call)
    def count(frame, event, arg):
        if event in ('call', 'c_call'): calls[event] += 1
    for i in range(4):
        sent.clear()
        calls.clear()
        for p in model: p.grad = torch.ones_like(p)
        if i == 3: sys.setprofile(count)
        strategy.begin_backward()
        strategy._finish()
        held = sum(local(p.grad).numel() for p in model)
        opt.step()
        sys.setprofile(None)
    return sent, dict(calls), held


def of_worlds(shapes): return {o: started(as_one_of, [{}], *o, shapes)[0] for o in ((2, 0), (2, 1), (1024, 0), (1024, 1023))}


def test_a_thousand_workers_cost_what_two_do():
    "Two messages a bucket; their bytes, padded to as many rows for each worker; calls, of Python and of C from Python, the same number"
    shapes = (5001, 8), (4096,), (2,), ()
    res = of_worlds(shapes)
    for (size, rank), (sent, calls, held) in res.items():
        share = sum(-(-n//size)*w for n, w in ((5001, 8), (4096, 1), (2, 1)))
        assert sent == [('reduce_scatter_single', (share+1)*size*4), ('all_gather_single', share*4)], (size, rank, sent)
        assert held <= share+1
        assert calls == res[2, 0][1], (size, rank, calls, res[2, 0][1])


def test_few_rows_are_sent_whole():
    "1,024 workers, of which 10 have a row: what is sent are all rows, once, and no padding"
    for (size, rank), (sent, _, held) in of_worlds([(10, 100)]).items():
        assert sent == ([('allreduce', 4000), ('allreduce', 4000)] if size == 1024 else [('reduce_scatter_single', 4000), ('all_gather_single', 2000)])
        assert held == (500 if size == 2 else 0 if rank else 100)


def owned_by_one_of(size, rank, shapes):
    "Of a step of zero1 with torch's fake process group: messages and their bytes, calls of Python and C; numbers that the optimizer remembers"
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from fastdist.strategy.zero1 import Zero1
    dist.init_process_group('fake', store=FakeStore(), rank=rank, world_size=size)
    model, strategy, sent, calls = nn.ParameterList([nn.Parameter(torch.zeros(s)) for s in shapes]), Zero1(), [], collections.Counter()
    strategy.setup(SimpleNamespace(model=model, cbs=[]), torch.device('cpu'))
    strategy.set_opt(opt := Adam(model.parameters(), lr=0.1))
    for nm in ('allreduce', 'broadcast', 'allgather', 'all_gather_single', '_allgather_base'):
        def call(self, *args, _nm=nm, _was=vars(dist.ProcessGroup)[nm], **kwargs):
            t = args[0] if _nm in ('allreduce', 'broadcast') else args[1]
            sent.append((_nm, t.nbytes if isinstance(t, torch.Tensor) else sum(o.nbytes for o in t)))
            return _was(self, *args, **kwargs)
        setattr(dist.ProcessGroup, nm, call)
    def count(frame, event, arg): calls[event] += event in ('call', 'c_call')
    for i in range(4):
        sent.clear()
        for p in model: p.grad = torch.ones_like(p)
        if i == 3: sys.setprofile(count)
        opt.step()
        sys.setprofile(None)
    return sent, sum(calls.values()), sum(o['grad_avg'].numel() for o in opt.state.values() if 'grad_avg' in o)


def test_owners_among_a_thousand_cost_what_they_do_among_two():
    "One message, padded where that sends no more than twice what there is, and of all there is otherwise"
    shapes = [(100, 8), (90, 8), (10, 8), ()]
    res = {o: started(owned_by_one_of, [{}], *o, shapes)[0] for o in ((2, 0), (2, 1), (1024, 0), (1024, 1023))}
    for (size, rank), (sent, _, _) in res.items(): assert sent == ([('all_gather_single', 4*801)] if size == 2 else [('allreduce', 4*1601)]), (size, rank, sent)
    assert [sum(res[2, r][2] for r in (0, 1)), res[1024, 0][2], res[1024, 1023][2]] == [1601, 800, 0]
    assert res[1024, 0][1] <= res[2, 0][1]*1.05
