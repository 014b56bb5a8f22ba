"Loaders in fits: language models, random numbers, the order that workers share, and looks at a loader. (contract/test_every_loader.py has each kind beside one process.)"
import contextlib

import pytest
from loaders import *


def flat(o): return [t for v in o for t in (flat(v) if isinstance(v, (list, tuple, L)) else [v])]


def texts_in_turn(distrib, k=1):
    "A language model's fits, and an evaluation of its training set, each of which shuffles the texts from the order that they had"
    set_seed(7)
    learn, rows = KINDS['language_model'](k), []
    def predicted(): return flat(learn.get_preds(ds_idx=0, act=noop))
    if distrib: import fastdist.all
    for _ in range(2):
        with learn.distrib_ctx() if distrib else contextlib.nullcontext():
            learn.fit(1)
            learn.validate(ds_idx=0)
            learn.fit(1)
            rows.append(predicted())
    rows.append(predicted())
    return weights(learn), list(learn.dls.train.items.idxs), rows[1:]


def test_texts_of_a_language_model_stay_in_order(world2):
    "Between epochs and contexts, with batches of the workers' own as in one process with the large batch; and all rows are predicted"
    want, order, _ = texts_in_turn(False, 2)
    for got, mine, rows in world2(texts_in_turn, True):
        assert mine == order and diff(want, got) < 1e-6
        for a, b in zip(*rows, strict=True): assert diff(a, b) < 1e-6


def validated(distrib):
    "Validation of a language model by losses that are no mean over words, or count some only"
    set_seed(7)
    learn = KINDS['language_model'](1)
    class Masks(Callback):
        "As of a masked language model: few words count, and in some batches none of a worker's rows"
        def after_pred(self):
            x, y = self.xb[0], self.yb[0].clone()
            y[x > self.iter % 5] = -100
            self.learn.yb = (y,)
    if distrib: import fastdist.all
    def whole(f): return fastdist.all.GlobalBatchLoss(f) if distrib else f
    losses = dict(ignored=CE(ignore_index=3), weighted=CE(weight=torch.arange(1., 12).double()), summed=CE(reduction='sum'), masked=CE(), whole=whole(CE(ignore_index=3)))
    with learn.distrib_ctx() if distrib else contextlib.nullcontext():
        res = {}
        for name, learn.loss_func in losses.items(): res[name] = [float(o) for o in learn.validate(cbs=Masks() if name == 'masked' else None)]
    return res


def test_losses_of_a_language_model(world3):
    want = validated(False)
    for got in world3(validated, True):
        for name, values in want.items(): assert diff(values, got[name]) < 1e-5*max(values), name  # perplexity enlarges the rounding of float32


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


def tabular_test_set(distrib):
    set_seed(1)
    learn = tabular(1)
    df = pd.DataFrame(dict(a=list('xyzzyxx'), b=np.linspace(0, 1, 7), c=np.linspace(1, 0, 7)))
    if distrib: import fastdist.all
    with (learn.distrib_ctx() if distrib else contextlib.nullcontext()):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            to = learn.dls.train_ds.new(df)
            to.process()
            preds, targs = learn.get_preds(dl=learn.dls.valid.new(to, bs=3))
    return preds, targs


def test_a_test_set_without_targets(world3):
    one, _ = tabular_test_set(False)
    for preds, targs in world3(tabular_test_set, True): assert targs is None and diff(one, preds) < 1e-6


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


