"Workers whose models are not the same are found out by `DivergenceCheck`, all at once; those whose models are the same are left in peace"
import pytest, torch

from learners import *

SPLIT = dict(split_batches=True)


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


class Shifted(nn.Module):
    "Has a buffer that no forward changes"
    def __init__(self):
        super().__init__()
        self.register_buffer('shift', torch.tensor([1., 2., 3.], dtype=torch.float64), persistent=False)
    def forward(self, x): return x+self.shift


def with_bn(dropout=0.):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 3), Shifted()).double()


def fitted(check):
    "Weights and losses, with a check in each step or without"
    import fastdist.all
    from fastdist.callbacks.divergence import DivergenceCheck
    learn = quiet(learner(n=22, bs=5, model=partial(with_bn, .5), wd=0.01, splitter=lambda m: [params(m[:2]), params(m[2:])]))
    if check: learn.add_cb(DivergenceCheck(every=1))
    with learn.distrib_ctx(**SPLIT):
        learn.freeze()
        learn.fit(1)
        learn.unfreeze()
        learn.fit(1, slice(0.01, 0.1))
        learn.lr_find(num_it=20, show_plot=False)
    return weights(learn), [float(o) for o in learn.recorder.losses]


def test_nothing_to_find(world):
    "Nor anything changed: weights and losses are the same to the last bit"
    for (w, l), (w1, l1) in zip(world(fitted, False), world(fitted, True)): assert diff(w, w1) == diff(l, l1) == 0


def collectives():
    import collections
    from fastdist.callbacks.divergence import check_same
    from fastdist.world import init_group
    init_group()
    with counted_collectives(collections.Counter()) as counts: check_same(with_bn())
    return dict(counts)


def test_one_message(world2): assert world2(collectives) == [{'allreduce': 1}]*2


def flipped(t):
    "The last bit of the last element of `t`, which is changed in place"
    t.view(-1)[-1:].view(torch.uint8)[0] ^= 1

def swapped(t): t.view(-1)[[0, 1]] = t.view(-1)[[1, 0]]


FAULTS = dict(flipped=('parameter', '0.weight', flipped), frozen=('parameter', '1.weight', lambda t: t.requires_grad_(False)),
              grad=('gradient', '3.weight', flipped), shift=('buffer', '4.shift', swapped))


def found(fault):
    "The error of a fit in which the last rank's tensor is changed before the third step, and in which batch it comes; a fit after that begins with rank 0's model"
    import fastdist.all
    from fastdist.callbacks.divergence import DivergenceCheck, DivergenceError
    from fastdist.world import get_rank, get_world_size
    kind, nm, change = FAULTS[fault]
    class Fault(Callback):
        run_valid = False
        def before_step(self):
            if self.train_iter != 2 or get_rank() != get_world_size()-1: return
            t = self.learn.model.get_buffer(nm) if kind == 'buffer' else self.learn.model.get_parameter(nm)
            with torch.no_grad(): change(t.grad if kind == 'gradient' else t)
    learn, text, step = quiet(learner(n=24, bs=6, model=with_bn, cbs=[DivergenceCheck(every=3), Fault()])), None, None
    try:
        with learn.distrib_ctx(**SPLIT): learn.fit(1)
    except DivergenceError as e: text, step = str(e), learn.train_iter
    learn.remove_cb(Fault)
    learn.model.requires_grad_()
    learn.opt = None
    with learn.distrib_ctx(**SPLIT): learn.fit(1)
    return text, step


@pytest.mark.parametrize('fault', FAULTS)
def test_found(world, fault):
    "At the third step, in all workers, by the name of the tensor and by who has which"
    res = world(found, fault)
    text = res[0][0]
    assert res == [(text, 2)]*world.n and 'before step 3 of the fit (epoch 0)' in text and '{} {!r}: rank'.format(*FAULTS[fault][:2]) in text, res
    assert f'rank {world.n-1} has ' in text and ('rank 0 has ' in text if world.n == 2 else 'ranks 0, 1 have ' in text), text
