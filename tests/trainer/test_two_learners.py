"Two learners whose contexts are nested: of one model, of parts of one, and of models of their own"
import functools, pytest
from strategies import *

PAIRS = [('ddp', 'ddp'), ('ddp', 'zero1'), ('zero1', 'ddp'), ('zero2', 'zero2'), ('ddp', 'fsdp'), ('fsdp', 'fsdp'), ('zero2', 'ddp')]
WORK = [p for p in PAIRS if set(p) <= {'ddp', 'zero1'} or p == ('zero2', 'zero2')]


def both(shared, strategies=None):
    "(weights of both, losses) of fits in turn; `shared` says what of the first model the second has"
    import fastdist.all
    warnings.simplefilter('ignore')
    def bn():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)).double()
    set_seed(1)
    kw = dict(n=18, n_val=5, bs=4, lr=0.05)
    one = quiet(learner(model=bn, opt=partial(SGD, mom=0.9), **kw))
    second = dict(all=lambda: one.model, head=lambda: nn.Sequential(nn.Linear(4, 7).double(), nn.ReLU(), one.model[-1]), nothing=bn)[shared]()
    two = quiet(learner(model=lambda: second, opt=Adam, **kw))
    def ctx(learn, i): return learn.distrib_ctx(strategy=strategies[i], split_batches=True) if strategies else contextlib.nullcontext()
    set_seed(2)
    with ctx(one, 0):
        one.fit(1)
        with ctx(two, 1):
            two.fit(1)
            one.fit(1)
            two.fit(1)
            losses = [*two.validate(), *one.validate()]
        one.fit(1)
    two.fit(1)
    return {**weights(one), **{f'two.{k}': v for k, v in weights(two).items()}}, losses


@functools.cache
def in_one(shared): return both(shared)


def agree(one, got):
    "Weights, which are of 64 bits, and losses, which fastai keeps in 32"
    return diff(one[0], got[0]) < 1e-9 and diff(one[1], got[1]) < 2e-6


def tried(shared, strategies):
    try: return both(shared, strategies)
    except Exception as e: return type(e).__name__, str(e)


@pytest.mark.parametrize('pair,shared', [(o, ('all', 'head')[i % 2]) for i, o in enumerate(PAIRS)], ids=lambda o: o if isinstance(o, str) else '-'.join(o))
def test_of_one_model(world2, pair, shared):
    "Trains both as one process does, or says at once that these strategies cannot"
    for rank, got in enumerate(world2(tried, shared, pair)):
        if pair in WORK: assert agree(in_one(shared), got)
        else:
            assert got[0] == 'ValueError' and got[1].startswith(f"rank {rank}: strategy={pair[1]!r} is not accepted: ") and f"strategy={pair[0]!r}" in got[1], got


@pytest.mark.parametrize('pair', [('fsdp', 'ddp'), ('zero2', 'fsdp')], ids='-'.join)
def test_of_their_own_models(world3, pair):
    for got in world3(both, 'nothing', pair): assert agree(in_one('nothing'), got)
