"Loaders in fits: random numbers, orders that differ, and looks at a loader. (contract/test_every_loader.py has the numbers of each kind.)"
import pytest
from loaders import *


class Draws(Callback):
    "What dropout draws in each training batch"
    def before_fit(self): self.drawn = []
    def after_pred(self):
        if self.training: self.drawn.append(torch.rand(1).item())


def fit_twice():
    import fastdist.all
    learn = quiet(learner(n=22, bs=5, cbs=Draws()))
    res = []
    with learn.distrib_ctx(split_batches=True):
        for seed in (3, 3, None):
            if seed: set_seed(seed)
            learn.fit(1)
            res.append(learn.draws.drawn)
    return res


def test_a_fit_draws_the_same_after_the_same_seed(world3):
    res = world3(fit_twice)
    for first, again, other in res: assert first == again and not set(first) & set(other)
    assert len({v for worker in res for v in worker[0]}) == sum(len(worker[0]) for worker in res)


def own_orders(kind):
    "Each worker draws an order of its own, which it cannot be made to share"
    import fastdist.all
    urandom = lambda n: random.Random(os.urandom(8)).sample(range(n), n)
    class Unshared(Sampler):
        def __init__(self): pass
        def __len__(self): return 22
        def __iter__(self): return iter(urandom(22))
    trn = dl(get_idxs=lambda: urandom(22)) if kind == 'fastai' else TorchDL(Items(22), batch_size=5, sampler=Unshared())
    learn = learn_of(trn, dl(n=5))
    try:
        with learn.distrib_ctx(split_batches=True): learn.fit(1)
    except RuntimeError as e: return str(e)


@pytest.mark.parametrize('kind', ['fastai', 'torch'])
def test_orders_that_differ_are_an_error(world3, kind):
    for msg in world3(own_orders, kind): assert 'has drawn another order (22 samples) than rank 0 (22 samples)' in msg and 'keep the generator as an attribute' in msg


def looked_at():
    "What people do with a loader: in rank 0 alone, without a message"
    import fastdist.all, matplotlib
    matplotlib.use('agg')
    from fastdist.all import get_rank
    set_seed(1)
    learn = vision(1)
    with learn.distrib_ctx(split_batches=True):
        if get_rank() == 0:
            learn.dls.show_batch()
            dl = learn.dls.train
            assert len(dl.one_batch()[0]) == 3 and dl.n == 22 and dl.bs == 5 and len(dl.dataset) == 22 and len(dl.new(bs=2)) == 11
            learn.summary()
        learn.fit(1)
    return weights(learn)


def test_looking_at_a_loader_in_one_rank(world2):
    a, b = world2(looked_at)
    assert diff(a, b) == 0
