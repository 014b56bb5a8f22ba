"What zero1 and zero2 send: tensors of any shape, and, of zero1, no more messages or Python for a thousand workers than for two"
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


def awkward_fit(ctx=None, nbytes=2**20, opt=Adam):
    from fastdist.strategy import fsdp, zero1
    learn = quiet(learner(n=20, bs=5, n_val=5, opt=opt, lr=0.05, wd=.1, cbs=GradientClip(.5), model=awkward,
                          splitter=lambda m: [[*m.ps], [*m.head.parameters()]]))
    with put.object(zero1, '_at_once', nbytes), put.object(fsdp, '_at_once', nbytes), contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx):
        learn.freeze()
        learn.fit(1)
        learn.unfreeze()
        learn.fit(1)
    return weights(learn), state_of(learn.opt)


@pytest.mark.sizes
@pytest.mark.parametrize('size', [2, 3])
def test_awkward_shapes(worlds, size):
    "In one message and in many: weights and optimizer state of one process"
    import fastdist.all
    one = {o: awkward_fit(opt=o) for o in (Adam, Lamb)}
    for i, (strategy, nbytes) in enumerate(itertools.product(('zero1', 'zero2'), (2**20, 64))):
        opt = (Adam, Lamb)[(i+size) % 2]
        for w, state in worlds(size)(awkward_fit, dict(strategy=strategy, split_batches=True), nbytes, opt):
            assert diff(one[opt][0], w) < 1e-7 and diff(one[opt][1], state) < 1e-6, (strategy, nbytes)


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
