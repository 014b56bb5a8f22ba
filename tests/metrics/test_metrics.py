"P1 for what is reported: each metric, of any kind, is that of one process"
import collections, contextlib, itertools, math, warnings
from dataclasses import dataclass

import pytest, torch

from learners import *

SIZES = [(1, 4), (2, 5), (3, 1), (7, 3), (13, 13), (31, 6), (64, 16)]


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


class KeepsAll(Metric):
    "As somebody writes one for one process"
    def __init__(self): self.f = lambda o: o
    def reset(self): self.all = []
    def accumulate(self, learn): self.all.append((learn.pred.argmax(1) == learn.y).float())
    @property
    def value(self): return torch.cat(self.all).std(correction=0).item() + len(self.all)


class MoreThanAnAverage(AvgMetric):
    def reset(self):
        super().reset()
        self.worst = 0.
    def accumulate(self, learn):
        super().accumulate(learn)
        self.worst = max(self.worst, learn.loss.item())
    @property
    def value(self): return self.total/self.count + self.worst


class Reads(Metric):
    "Reads inputs and the number of the batch"
    def reset(self): self.s = 0.
    def accumulate(self, learn): self.s += float(learn.x.abs().sum())*(learn.iter+1) + float(learn.xb[0][0, 0])
    @property
    def value(self): return self.s


class LastTarget(Metric):
    "Depends on the order of the batches"
    def reset(self): self.first = self.last = None
    def accumulate(self, learn):
        if self.first is None: self.first = learn.y[0].item()
        self.last = learn.y[-1].item()
    @property
    def value(self): return dict(first=self.first, last=self.last)


class OfStored(AccumMetric):
    def accumulate(self, learn):
        super().accumulate(learn)
        self.n = getattr(self, 'n', 0) + 1
    def reset(self):
        super().reset()
        self.n = 0
    @property
    def value(self): return super().value + self.n


class NoReset(Metric):
    "Goes on over epochs"
    n, total = 0, 0.
    def accumulate(self, learn):
        self.n += len(learn.y)
        self.total = self.total*.5 + learn.pred.mean().item()
    @property
    def value(self): return self.n + self.total


class OfCallback(Metric):
    "Reads what a callback sets for each batch, and what changes with it"
    def reset(self): self.s = 0.
    def accumulate(self, learn): self.s = self.s*.5 + learn.highest + learn.iter + len(learn.dl) + learn.n_iter
    @property
    def value(self): return self.s


class Highest(Callback):
    def after_pred(self): self.learn.highest = self.pred.max().item()


class Nothing(Metric):
    def accumulate(self, learn): pass
    @property
    def value(self): return None


class KeepsLoss(CrossEntropyLossFlat):
    def __call__(self, inp, targ, **kw):
        self.hardest = super().__call__(inp, targ, **kw)*2
        return self.hardest/2


@dataclass
class Within:
    "A function with a setting, which as a dataclass has no hash"
    eps: float
    __name__ = 'within'
    def __call__(self, pred, targ): return ((pred-targ).abs() < self.eps).float().mean()


def batch_worst(pred, targ): return pred.max().abs().sqrt()


def data(kind, n, seed=5):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g)
    y = dict(classes=lambda: torch.randint(0, 3, (n,), generator=g), masks=lambda: torch.randint(0, 3, (n, 3, 3), generator=g), numbers=lambda: torch.rand(n, 1, generator=g)+.1,
             tags=lambda: torch.randint(0, 2, (n, 3), generator=g).float(), words=lambda: torch.randint(0, 4, (n, 6), generator=g), binary=lambda: torch.randint(0, 2, (n,), generator=g))[kind]()
    return list(zip(x, y))


def kinds():
    from fastai.losses import BCEWithLogitsLossFlat
    one = dict(
        classes=(3, None, lambda: KeepsLoss(), lambda: [accuracy, partial(top_k_accuracy, k=2), error_rate, F1Score(average='macro'), MatthewsCorrCoef(), CohenKappa(),
            BalancedAccuracy(), Perplexity(), LossMetric('hardest'), ValueMetric(lambda: 5e-3, 'value'), AvgMetric(batch_worst), KeepsAll(), MoreThanAnAverage(accuracy), Reads(), LastTarget(), NoReset(), OfCallback(),
            OfStored(lambda p, t: p.float().sum().item(), dim_argmax=-1, name='stored'), Nothing()]),
        masks=(27, (3, 3, 3), lambda: CrossEntropyLossFlat(axis=1), lambda: [Dice(), JaccardCoeff(), DiceMulti(), JaccardCoeffMulti(), foreground_acc]),
        numbers=(1, None, lambda: MSELossFlat(), lambda: [mse, mae, msle_, Within(.5), rmse, R2Score(), ExplainedVariance(), PearsonCorrCoef(), SpearmanCorrCoef()]),
        binary=(2, None, lambda: CrossEntropyLossFlat(), lambda: [RocAucBinary(), APScoreBinary(), accuracy]),
        tags=(3, None, lambda: BCEWithLogitsLossFlat(), lambda: [accuracy_multi, F1ScoreMulti(average='macro'), HammingLossMulti(), partial(accuracy_multi, thresh=0.3), HammingLossMulti(thresh=0.7)]),
        words=(24, (6, 4), lambda: CrossEntropyLossFlat(), lambda: [CorpusBLEUMetric(vocab_sz=4), Perplexity(), accuracy]))
    return one


def msle_(inp, targ): return (inp.abs().log1p()-targ.log1p()).pow(2).mean()


class Shaped(nn.Module):
    def __init__(self, n, shape):
        super().__init__()
        self.lin, self.shape = nn.Linear(4, n), shape
    def forward(self, x): return self.lin(x) if self.shape is None else self.lin(x).view(-1, *self.shape)


def make(kind, n, bs, n_trn=9, **kwargs):
    out, shape, loss, mets = kinds()[kind]
    set_seed(1)
    dls = DataLoaders(TfmdDL(data(kind, n_trn, 1), bs=4, num_workers=0), TfmdDL(data(kind, n, 2), bs=bs, num_workers=0))
    return quiet(Learner(dls, Shaped(out, shape), loss_func=loss(), opt_func=SGD, lr=0.01, metrics=mets(), cbs=Highest(), **kwargs))


def values(distrib, kind, sizes, fits=False, train_metrics=False, ctx=None, keep=16):
    warnings.simplefilter('ignore')
    from fastdist.metrics.metrics import EpochTotals
    EpochTotals.__init__.__defaults__ = keep,
    res = []
    if distrib: import fastdist.all
    for n, bs in sizes:
        learn = make(kind, n, bs)
        learn.recorder.train_metrics = train_metrics
        if train_metrics: learn.metrics = L(m for m in learn.metrics if not isinstance(m, OfCallback)) # in training callbacks see a share
        with learn.distrib_ctx(**(ctx or {})) if distrib else contextlib.nullcontext():
            try:
                if fits:
                    learn.fit(2)
                    res.append([[o for o in v if not isinstance(o, str)] for v in learn.recorder.values])
                else: res.append([list(learn.validate()), list(learn.validate())])
            except Exception as e: res.append(type(e).__name__) # a score of one class alone may be an error
    return res


def close(a, b, tol=1e-6):
    if isinstance(a, dict): return a == b
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(close(x, y, tol) for x, y in zip(a, b))
    if a is None or isinstance(a, str): return a == b
    return a != a and b != b or abs(a-b) <= tol*max(abs(a), 1e-3)


@pytest.mark.parametrize('keep', [16, 1], ids=['at the end', 'as it goes on'])
@pytest.mark.parametrize('kind', ['classes', 'masks', 'numbers'])
def test_training_metrics(world, kind, keep):
    "Of shares of rows, of which the last batch has none for some workers: what only sums over samples is summed, all else is fed again with whole batches"
    want = values(False, kind, [(7, 3)], fits=True, train_metrics=True)
    for got in world(values, True, kind, [(7, 3)], fits=True, train_metrics=True, ctx=dict(split_batches=True), keep=keep):
        assert close(want, got, 3e-6), [(i, x, y) for i, (x, y) in enumerate(zip(want[0][0], got[0][0])) if not close(x, y, 3e-6)]


def chunks(n):
    "Gathered in one chunk and in many"
    from fastdist.comm.gather import gather_chunks, gather_tensors, in_turn
    from fastdist.world import get_rank, get_world_size, init_group
    init_group()
    rank, size = get_rank(), get_world_size()
    mine = [(torch.full((3, i % 4), float(i)), {'odd': torch.full((1, 2), 1.)[:, 0], 'name': f'{i}', 'flag': torch.tensor(i % 2 == 0)}, torch.tensor([i]).bfloat16()) for i in range(n)][rank::size]
    res = []
    for nbytes in (2**26, 100, 1):
        parts = list(gather_chunks(mine, nbytes=nbytes))
        res.append((len(parts), [(t[2].item(), t[0].shape[1], t[1]['name'], t[1]['flag'].item(), t[0].sum().item()) for p in parts for t in in_turn(p)]))
    to = gather_tensors(mine, dst=size-1)
    return res, None if to is None else len(in_turn(to))


@pytest.mark.parametrize('n', [0, 1, 2, 7, 20])
def test_gathered_in_chunks(world, n):
    got = world(chunks, n)
    for res, to in got:
        for k, items in res: assert items == [(i, i % 4, f'{i}', i % 2 == 0, 3.*i*(i % 4)) for i in range(n)]
        assert res[0][0] == (n > 0) and res[2][0] >= res[1][0] >= res[0][0] and (n < 20 or res[2][0] > 3)
    assert [to for _, to in got] == [None]*(len(got)-1) + [n]


def concatenated(n):
    "In one tensor: what differs from what it should be"
    from fastdist.comm.gather import concat_in_turn, same_rows
    from fastdist.world import get_rank, get_world_size, init_group
    init_group()
    rank, size, res = get_rank(), get_world_size(), []
    kinds = dict(dtypes=[torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.complex64], shapes=[(), (3,), (2, 1, 4), (0,)])
    for dtype, shape in itertools.product(*kinds.values()):
        every = [(torch.arange(r*math.prod(shape), dtype=torch.float64).view(r, *shape)+i).to(dtype) for i, r in enumerate(([0, 5, 2, 4, 7, 1]*n)[:n])]  # where a worker's first is empty, too
        got, want = concat_in_turn(every[rank::size], same_rows(every[rank::size])), torch.cat(every)
        if not (got.dtype == want.dtype and got.equal(want)): res.append((dtype, shape))
    return res


@pytest.mark.parametrize('n', [3, 4, 7, 20])
def test_concatenated_in_turn(world, n): assert world(concatenated, n) == [[]]*world.n


def double_mean(pred, targ): return (pred.double().argmax(1) == targ).double().mean()
def count_right(pred, targ): return (pred.argmax(1) == targ).sum()
class Text(AvgMetric):
    "Its sum is none that a message adds up"
    def reset(self): super().reset(); self.total = 0j


def summed(distrib, n):
    "Values and sums, with counts of what a validation sends"
    learn = quiet(learner(n=8, n_val=n, val_bs=4, metrics=[accuracy, AvgMetric(double_mean), AvgMetric(count_right), AvgLoss()]))
    if distrib: import fastdist.all
    with learn.distrib_ctx() if distrib else contextlib.nullcontext(), counted_collectives(collections.Counter()) as counts:
        res = list(learn.validate())
        counts = dict(counts)
        sums = [(float(m.total), m.count) for m in learn.recorder._valid_mets]
        learn.metrics = L(Text(accuracy))
        return res, sums, list(learn.validate()), counts


@pytest.mark.parametrize('n', [5, 13])
def test_sums_are_gathered_by_nobody(world, n):
    "By messages whose size is the same for any number of workers, also where some have no batch; what cannot be added up so is gathered as before"
    res, sums, odd, _ = summed(False, n)
    for r, s, o, counts in world(summed, True, n):
        assert r == pytest.approx(res, abs=1e-6) and counts == {'allreduce': 4}, counts
        assert [x[1:] for x in s] == [x[1:] for x in sums] and [x[0] for x in s] == pytest.approx([x[0] for x in sums], abs=1e-6)
        assert o == pytest.approx(odd, abs=1e-6)


def calls_of_fastais_tensor(n):
    "How often fastai's tensors ask what to do with a function of torch's, in a validation of `n` batches of each worker"
    import fastdist.all
    from fastdist.world import get_world_size
    learn = quiet(learner(n=8, n_val=n*2*get_world_size(), val_bs=2, metrics=[accuracy, error_rate], dtype=torch.float32, loss=CrossEntropyLossFlat()))
    real, counts = TensorBase.__dict__['__torch_function__'], collections.Counter()
    def counted(cls, f, *args, **kwargs):
        counts[getattr(f, '__name__', f)] += 1
        return real.__func__(cls, f, *args, **kwargs)
    with learn.distrib_ctx():
        TensorBase.__torch_function__ = classmethod(counted)
        try: learn.validate()
        finally: TensorBase.__torch_function__ = real
    return sum(counts.values()), dict(counts)


def test_no_batch_computes_with_fastais_tensors(world):
    "Each of whose functions goes through Python"
    for few, many in zip(world(calls_of_fastais_tensor, 2), world(calls_of_fastais_tensor, 7)): assert few[0] == many[0] <= 2, many


def apart(how):
    "What each worker raises where rank 1 is elsewhere than where metrics are put together; and that they go on"
    from fastdist.fault.cancel import Decisions
    from fastdist.metrics.metrics import EpochTotals
    from fastdist.world import get_rank
    import fastdist.all
    learn = quiet(learner(n=8, n_val=13, metrics=accuracy))
    odd = get_rank() == 1
    def error(f):
        try: f()
        except Exception as e: return f'{type(e).__name__}: {e}'
    with learn.distrib_ctx(watchdog=30):
        learn.validate()
        learn.training = False
        if how == 'other metrics':
            if odd: learn.metrics = L(AvgMetric(accuracy), AvgMetric(double_mean))
            return error(learn.validate), None
        totals = EpochTotals(learn)
        there = dict(fit=lambda: Decisions(learn).begin('a fit')).get(how, lambda: totals.combine(False))
        return error(there if odd else lambda: totals.combine(False)), error(lambda: learn.fit(1))


@pytest.mark.parametrize('how, other', [('fit', 'a fit ('), ('other metrics', 'the metrics (sum: AvgLoss AvgMetric AvgMetric) (')])
def test_workers_apart(world, how, other):
    for text, after in world(apart, how):
        assert text.startswith('OutOfStep: ') and f'rank 1 at {other}' in text and 'at the metrics (sum: AvgLoss AvgMetric) (' in text, text
        assert after is None and (text.count('test_metrics.py:') == 2 or how == 'other metrics'), (text, after)
