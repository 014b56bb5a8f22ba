"P1 for what is reported: metrics of every kind, predictions and what fastai makes of them are those of one process, for any size of the set"
import math

import pytest
from fastai.callback.core import FetchPredsCallback
from fastai.losses import BCEWithLogitsLossFlat, LabelSmoothingCrossEntropyFlat
from table import *

case = Cases()


# Metrics that somebody wrote for one process

class KeepsAll(Metric):
    def reset(self): self.all = []
    def accumulate(self, learn): self.all.append((learn.pred.argmax(1) == learn.y).float())
    @property
    def value(self): return torch.cat(self.all).std(correction=0).item() + len(self.all)


class OfBatches(Metric):
    "Depends on how the set is cut in batches, on their order, on inputs, the loss, and what a callback has set"
    def reset(self): self.s, self.first = 0., None
    def accumulate(self, learn):
        self.first = learn.y[0].item() if self.first is None else self.first
        self.s = self.s*.5 + learn.pred.softmax(-1).max().item()**.5*len(learn.y) + learn.loss.item() + float(learn.x.abs().sum())*(learn.iter+1) + learn.highest + learn.n_iter
    @property
    def value(self): return self.s + 100*self.first


class Highest(Callback):
    def after_pred(self): self.learn.highest = self.pred.max().item()


class MoreThanAnAverage(AvgMetric):
    def reset(self):
        super().reset()
        self.worst = 0.
    def accumulate(self, learn):
        super().accumulate(learn)
        self.worst = max(self.worst, learn.loss.item())
    @property
    def value(self): return self.total/self.count + self.worst


class NoReset(Metric):
    "Goes on over epochs"
    n, total = 0, 0.
    def accumulate(self, learn): self.n, self.total = self.n+len(learn.y), self.total*.5 + learn.pred.mean().item()
    @property
    def value(self): return self.n + self.total


class KeepsLoss(CrossEntropyLossFlat):
    def __call__(self, inp, targ, **kw):
        self.hardest = super().__call__(inp, targ, **kw)*2
        return self.hardest/2


class SumsUp(nn.Module):
    "As one of torchmetrics', which adds up over all workers by itself"
    distributed_available_fn = None
    def __init__(self):
        super().__init__()
        self.n = torch.zeros(())
    def compute(self):
        import torch.distributed as dist
        n, available = self.n.clone(), self.distributed_available_fn or dist.is_initialized
        if available(): dist.all_reduce(n)
        return n.item()


class OfTorchmetrics(Metric):
    def __init__(self): self.all = nn.ModuleDict(dict(n=SumsUp()))
    def reset(self): self.all['n'].n.zero_()
    def accumulate(self, learn): self.all['n'].n += len(learn.y)
    @property
    def value(self): return self.all['n'].compute()


def worst(pred, targ): return pred.max().abs().sqrt()
def stored(): return AccumMetric(lambda p, t: p.float().sum().item(), dim_argmax=-1, name='stored')
METRICS = dict(  # outputs of the model, their shape, the loss, metrics
    classes=(3, (3,), KeepsLoss, lambda: [accuracy, partial(top_k_accuracy, k=2), error_rate, F1Score(average='macro'), MatthewsCorrCoef(), skm_to_fastai(skm_accuracy()), Perplexity(), LossMetric('hardest'),
                                          ValueMetric(lambda: 5e-3, 'value'), worst, AvgMetric(worst), KeepsAll(), OfBatches(), MoreThanAnAverage(accuracy), NoReset(), stored(), OfTorchmetrics()]),
    masks=(27, (3, 3, 3), partial(CrossEntropyLossFlat, axis=1), lambda: [Dice(), DiceMulti(), JaccardCoeff(), foreground_acc]),
    numbers=(1, (1,), MSELossFlat, lambda: [mse, mae, rmse, R2Score(), PearsonCorrCoef()]),
    tags=(3, (3,), BCEWithLogitsLossFlat, lambda: [accuracy_multi, F1ScoreMulti(average='macro'), partial(accuracy_multi, thresh=.3)]),
    words=(24, (6, 4), CrossEntropyLossFlat, lambda: [CorpusBLEUMetric(vocab_sz=4), Perplexity(), accuracy]))


def skm_accuracy():
    from sklearn.metrics import balanced_accuracy_score
    return balanced_accuracy_score


def targets(kind, n, g):
    return dict(classes=lambda: torch.randint(0, 3, (n,), generator=g), masks=lambda: torch.randint(0, 3, (n, 3, 3), generator=g), numbers=lambda: torch.rand(n, 1, generator=g),
                tags=lambda: torch.randint(0, 2, (n, 3), generator=g).float(), words=lambda: torch.randint(0, 4, (n, 6), generator=g))[kind]()


class Shaped(nn.Module):
    def __init__(self, n, shape):
        super().__init__()
        self.lin, self.shape = nn.Linear(4, n), shape
    def forward(self, x): return self.lin(x).view(-1, *self.shape)


def measuring(kind, n, bs, n_train=9):
    def loader(n, bs, seed):
        g = torch.Generator().manual_seed(seed)
        return TfmdDL(list(zip(torch.randn(n, 4, generator=g), targets(kind, n, g))), bs=bs, num_workers=0)
    n_out, shape, loss, metrics = METRICS[kind]
    set_seed(1)
    return quiet(Learner(DataLoaders(loader(n_train, 4, 1), loader(n, bs, 2)), Shaped(n_out, shape), loss_func=loss(), opt_func=SGD, lr=.01, metrics=metrics(), cbs=Highest()))


SIZES = [(1, 4), (2, 5), (3, 1), (7, 3), (13, 13), (31, 6)]


def plain(o): return float(o) if isinstance(o, (int, float, np.number)) else o


def validated(kind, within):
    "Twice, with sets of all sizes, and by a fit"
    warnings.simplefilter('ignore')
    res = {}
    for n, bs in SIZES:
        learn = measuring(kind, n, bs)
        with within(learn):
            try: res[n, bs] = [[plain(o) for o in learn.validate()] for _ in range(2)]
            except (ValueError, ZeroDivisionError) as e: res[n, bs] = type(e).__name__  # a score of one class alone may be an error
    assert sum(not isinstance(o, str) for o in res.values()) >= 4
    learn = measuring(kind, 13, 4)
    with within(learn): learn.fit(2)
    return dict(res, fit=numbers(learn.recorder.values))


for k in METRICS: case(partial(validated, k), name=k, tol=1e-6)


@case
def training_metrics(within):
    "Of shares of rows, of which the last batch has none for some workers"
    learn = quiet(learner(n=22, metrics=[accuracy, F1Score(average='macro'), worst, Perplexity(), stored()]))
    learn.recorder.train_metrics = True
    with within(learn): learn.fit(2)
    return numbers(learn.recorder.values)


OPTIONS = dict(plain={}, train=dict(ds_idx=0), all=dict(with_input=True, with_decoded=True, with_loss=True), act=dict(act=torch.sigmoid), unordered=dict(reorder=False),
               no_preds=dict(with_preds=False, with_loss=True), no_targs=dict(with_targs=False), inner=dict(inner=True))


@case
def predictions(within):
    "By each option, in the order of the set, from a shuffled loader too, and of a test set without targets; and what the script draws next"
    res = {}
    for n, bs in ((1, 4), (2, 1), (13, 3), (24, 6)):
        learn = quiet(learner(n=11, n_val=n, bs=bs))
        with within(learn):
            set_seed(5)
            for k, kw in OPTIONS.items(): res[k, n, bs] = list(learn.get_preds(**kw))
            res['shuffled', n, bs] = list(learn.get_preds(dl=learn.dls.valid.new(shuffle=True)))
            res['test', n, bs] = list(learn.get_preds(dl=learn.dls.valid.new(Items(n+1, seed=5), n=n+1), with_loss=True))
            res['drawn', n, bs] = random.random(), float(np.random.rand()), torch.rand(1).item()
    return res


class TwoOut(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 3).double(), nn.Linear(4, 2).double()
    def forward(self, x): return self.a(x), (self.b(x), self.b(x) > 0), self.b(x).bfloat16()


@case
def activations(within):
    "Those that fastai's losses have, and a model of several outputs"
    res = []
    for loss, shape in (CrossEntropyLossFlat(axis=1), (3, 2, 2)), (BCEWithLogitsLossFlat(), (3,)), (LabelSmoothingCrossEntropyFlat(), (3,)):
        set_seed(1)
        ys = torch.ones(11, *shape) if isinstance(loss, BCEWithLogitsLossFlat) else torch.randint(0, 3, (11, *shape[1:]))
        dls = DataLoaders(*[TfmdDL(list(zip(torch.randn(11, 4), ys)), bs=4, num_workers=0) for _ in range(2)])
        learn = quiet(Learner(dls, Shaped(math.prod(shape), shape), loss_func=loss))
        with within(learn): res.append(list(learn.get_preds(with_decoded=True, with_input=True, with_loss=True)))
    learn = quiet(learner(n=11, bs=4, model=TwoOut, loss=lambda p, y, **kw: F.cross_entropy(p[0], y, **kw).float()))
    with within(learn):
        preds, y = learn.get_preds(act=noop)
        res += [preds[0], preds[1][0], preds[1][1].float(), preds[2].float(), y]
    return res


def strings(o): return [strings(i) for i in o] if isinstance(o, (list, tuple, L)) else o if isinstance(o, Tensor) else str(o)


@case(tol=1e-6)
def interpretation(within):
    "tta, predict, top losses, the confusion matrix, and what is shown: in the context, and after it"
    import matplotlib
    matplotlib.use('agg')
    warnings.simplefilter('ignore')
    from fastai.interpret import ClassificationInterpretation, Interpretation
    from fastai.vision.all import Categorize, PILImage, RandTransform, TensorImage, ToTensor
    class Flip(RandTransform):
        "Always does, so that one worker's is the other's"
        split_idx, p = None, 1.
        def encodes(self, o: TensorImage): return o.flip(-1)
    g = torch.Generator().manual_seed(0)
    pics = [((torch.rand(8, 8, 3, generator=g)*255).byte().numpy(), 'abc'[int(i) % 3]) for i in range(17)]
    set_seed(0)
    dsets = Datasets(pics, [[ItemGetter(0), PILImage.create], [ItemGetter(1), Categorize(vocab=list('abc'))]], splits=[list(range(6)), list(range(6, 17))])
    dls = dsets.dataloaders(bs=3, after_item=[ToTensor()], after_batch=[IntToFloatTensor(), Flip()], num_workers=0, shuffle=False, drop_last=False)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(4, 3))
    learn, res = quiet(Learner(dls, net, loss_func=CrossEntropyLossFlat(), opt_func=SGD, metrics=accuracy)), {}
    def use(key):
        interp = ClassificationInterpretation.from_learner(learn)
        losses, idxs = interp.top_losses(4)
        res[key, 'matrix'], res[key, 'confused'], res[key, 'losses'], res[key, 'idxs'] = interp.confusion_matrix().tolist(), strings(interp.most_confused()), losses, list(map(int, idxs))
        interp.plot_top_losses(2)
        interp.plot_confusion_matrix()
        res[key, 'all losses'], res[key, 'tta'] = Interpretation.from_learner(learn).top_losses()[0], list(learn.tta(n=2))
        res[key, 'predict'] = strings(learn.predict(pics[0]))
        learn.show_results(max_n=4)
        res[key, 'test'] = learn.get_preds(dl=dls.test_dl(pics[:7]), with_decoded=True)[0]
        res[key, 'labelled'] = list(learn.validate(dl=dls.test_dl(pics[:7], with_labels=True)))
    with within(learn):
        learn.fit(1)
        use('in')
    use('after')
    return res


@case
def fetched_in_a_fit(within):
    "By fastai's callback, and by one of the user's"
    res = []
    class Own(Callback):
        def after_epoch(self): res.append(self.learn.get_preds(inner=True)[0])
    learn, fetch = quiet(learner(n=22, n_val=13, bs=4, metrics=accuracy)), FetchPredsCallback(with_input=True)
    with within(learn):
        learn.fit(2, cbs=fetch)
        values = numbers(learn.recorder.values)
        learn.fit(1, cbs=Own())
    return res, list(fetch.preds), values


@case
def losses_of_an_evaluation(within):
    "No mean over samples, over a set of two batches and over one, of which some workers have none"
    res, w = {}, torch.tensor([1., 5., .5]).double()
    def losses():
        yield from dict(ignored=Double(ignore_index=1), weights=Double(weight=w), summed=Double(reduction='sum')).items()
        if within.many:
            from fastdist.all import GlobalBatchLoss
            yield 'whole', GlobalBatchLoss(Double(weight=w))
        else: yield 'whole', Double(weight=w)
    for k, loss in losses():
        for n in (2, 9):
            learn = quiet(learner(n=8, n_val=n, val_bs=5, loss=loss, metrics=accuracy))
            with within(learn): res[k, n] = list(learn.validate())
    return res


@pytest.mark.parametrize('n', [2, 3])
def test_as_one_process(worlds, n): case.check(worlds(n))


@pytest.mark.parametrize('strategy', STRATEGIES[1:])
def test_with_shards(worlds, strategy):
    "Each forward is a collective, and there are not as many batches as steps for each worker"
    case.check(worlds(3), ['words', 'predictions', 'fetched_in_a_fit', 'losses_of_an_evaluation'], **ctx_of(strategy))
