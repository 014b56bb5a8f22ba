"What a share of a batch weighs in the loss: losses of one's own, targets that callbacks make, samples that are left out, a backward of a callback's own"
import pytest
from learners import *
import torch.nn.functional as F


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


W = torch.tensor([1., 3., .5], dtype=torch.float64)
def ce(p, y, **kwargs): return F.cross_entropy(p, y, **kwargs).float()  # as fastai's recorder needs it; computed in float64
def weighted(p, y): return ((W[y]*F.cross_entropy(p, y, reduction='none')).sum() / W[y].sum()).float()
def declared(p, y): return weighted(p, y)
declared.loss_divisor = lambda y: W[y].sum()
def added(p, y): return ce(p, y, reduction='sum')
def declared_sum(p, y): return added(p, y)/5
declared_sum.reduction = 'sum'
def declared_mean(p, y): return ce(p, y)
declared_mean.loss_divisor = None
def rmse(p, y): return (p.sum(1)-y).square().mean().sqrt().float()
def viewed(p, y): return rmse(p.view(-1).view(-1, 3), y)
def contrast(p, y): return torch.log_softmax(p@p.T, 1).diag().mean().neg().float() + ce(p, y)


class Combined:
    "A mean and a sum, as CombinedLoss of fastai's documentation is"
    def __call__(self, p, y):
        q = F.one_hot(y, 3)
        return ce(p, y) + (1 - 2*(p.softmax(1)*q).sum(1)/(p.softmax(1)+q).sum(1)).sum().float()*.3
    def decodes(self, x): return x.argmax(1)


class Marks(Callback):
    "Some labels do not count"
    def before_batch(self): self.learn.yb = (torch.where(self.x[:, 0] > .3, -100, self.y),)


class Drops(Callback):
    "Some samples are left out"
    def before_batch(self):
        kept = self.x[:, 0] < .3
        if kept.any(): self.learn.xb, self.learn.yb = (self.x[kept],), (self.y[kept],)


class DropsShares(Callback):
    "All samples of some shares are left out, and not of a batch"
    def before_batch(self):
        kept = self.x[:, 0] < .9
        self.learn.xb, self.learn.yb = (self.x[kept],), (self.y[kept],)


class Picks(Callback):
    def after_pred(self):
        kept = self.x[:, 1] < .4
        if kept.any(): self.learn.pred, self.learn.yb = self.pred[kept], (self.y[kept],)


class Own(Callback):
    "A backward of its own"
    def __init__(self, what): self.what = what
    def before_backward(self):
        if self.what == 'loss_grad': (self.learn.loss_grad*.5).backward()
        elif self.what == 'loss': self.learn.loss.backward()
        else: self.learn.loss_func(self.pred, *self.yb).backward()
        from fastai.callback.core import CancelBackwardException # not that of another process
        raise CancelBackwardException


class OfModel(Callback):
    "The model makes its loss itself, of the labels that count, and this puts it in the place of the loss function's"
    def after_loss(self):
        self.learn.loss_grad = ce(self.pred, self.y)
        self.learn.loss = self.learn.loss_grad.clone()


def counting(f):
    f.loss_divisor = lambda y: (y!=-100).sum()
    return f


def unused(p, y): return torch.tensor(0.)


class Skips(Items):
    skipped = ()
    def __getitem__(self, i):
        from fastai.data.load import SkipItemException
        if i in self.skipped: raise SkipItemException
        return super().__getitem__(i)


def skipping(*skipped, **kwargs):
    learn = learner(shuffle=False, **kwargs)
    learn.dls.train.dataset.__class__ = type('Skipping', (Skips,), dict(skipped=skipped))
    return learn


class Made(Callback):
    "Targets that only a callback knows"
    def before_batch(self): self.learn.yb = ((self.x[:, 0] > 0).long(),)


class OnlyX(Items):
    def __getitem__(self, i): return super().__getitem__(i)[:1]


def only_x():
    learn = learner(n=22, cbs=Made(), bs=6)
    for dl in learn.dls.loaders: dl.dataset.__class__ = OnlyX
    return learn


def whole(f):
    from fastdist.metrics.losses import GlobalBatchLoss
    return GlobalBatchLoss(f)


def run(make, distrib=True, **ctx):
    "Weights, losses and values of the learner that `make` returns"
    import fastdist.all
    learn = quiet(make())
    learn.metrics, learn.recorder.train_metrics = L(AvgMetric(accuracy)), True
    with learn.distrib_ctx(**{**dict(split_batches=True), **ctx}) if distrib else contextlib.nullcontext(): learn.fit(1)
    return weights(learn), [float(o) for o in learn.recorder.losses], [list(v) for v in learn.recorder.values]


# The contract has losses that are plain, weighted, summed or ignore labels, and what callbacks add to them
CASES = dict(
    marks=lambda: learner(n=22, cbs=Marks()), marks_weights=lambda: learner(n=22, loss=Double(weight=W), cbs=Marks()),
    of_model=lambda: learner(n=22, loss=counting(partial(unused)), cbs=[Marks(), OfModel()]),
    drops=lambda: learner(n=22, cbs=Drops(), bs=11), picks=lambda: learner(n=22, cbs=Picks(), bs=11), made=only_x,
    drops_shares=lambda: learner(n=22, cbs=DropsShares(), bs=3), drops_acc=lambda: learner(n=22, cbs=[Drops(), GradientAccumulation(9)], bs=11),
    own=lambda: learner(n=22, cbs=Own('loss_grad')), own_loss=lambda: learner(n=22, cbs=Own('loss')), own_new=lambda: learner(n=22, cbs=Own('new')),
    own_sum=lambda: learner(n=22, cbs=Own('loss_grad'), loss=declared_sum), own_acc=lambda: learner(n=22, bs=5, cbs=[Own('loss_grad'), GradientAccumulation(9)]),
    skip_one=lambda: skipping(21, n=22), skip_many=lambda: skipping(*range(1, 22, 3), n=22, bs=22), skip_share=lambda: skipping(1, 4, n=5, bs=5, bn=True))


def run_all(names, **kwargs): return {k: run(CASES[k], **kwargs) for k in names}


def compared(world, names, tol=2e-7, **ctx):
    one = run_all(names, distrib=False)
    for every in world(run_all, names, **ctx):
        off = {k: [diff(a, b) for a, b in zip(one[k], every[k])] for k in names}
        assert all(o[0] < tol and max(o[1:]) < 2e-6 for o in off.values()), {k: o for k, o in off.items() if o[0] >= tol or max(o[1:]) >= 2e-6}


@pytest.mark.sizes
def test_as_one_process(world):
    "Each by two workers or by three; where a share is empty, or there is one sample a worker, by both"
    both = ['drops_shares', 'skip_share', 'skip_many']
    compared(world, [o for i, o in enumerate(CASES) if i % 2 == world.n % 2 or o in both])


def test_losses_that_nothing_is_said_of(world):
    "are computed for the global batch where that is small"
    losses = dict(weighted=weighted, combined=Combined(), added=added, contrast=contrast, rmse=rmse, viewed=viewed, mean=ce)
    def run_losses(distrib=True): return {k: run(lambda: learner(n=22, loss=f, bs=6, opt=partial(SGD, mom=.9)), distrib)[:2] for k, f in losses.items()}
    one = run_losses(False)
    for every in world(run_losses):
        for k in losses: assert diff(one[k][0], every[k][0]) < 2e-7 and diff(one[k][1], every[k][1]) < 2e-6, k


def wide():
    torch.manual_seed(3)
    return nn.Linear(4, 200_000).double()


def refused(*losses):
    "What is said of these losses, where predictions are large"
    import fastdist.all
    res = []
    for f in losses:
        learn = quiet(learner(n=12, loss=f, bs=6, model=wide))
        try:
            with learn.distrib_ctx(split_batches=True): learn.fit(1)
            res.append('')
        except Exception as e: res.append(str(e))
    return res


def wide_mean(p, y): return (p[:, :3]-y[:, None]).square().mean().float()
def told_mean(p, y): return wide_mean(p, y)
told_mean.loss_divisor = None


def test_refused(world2):
    "Losses of which nobody knows what they are, and whose predictions are too large to be gathered unasked"
    for texts in world2(refused, rmse, wide_mean, told_mean):
        assert 'nobody knows the loss function rmse' in texts[0] and 'rmse.loss_divisor = a function of the targets' in texts[0] and 'GlobalBatchLoss(' in texts[0], texts
        assert 'wide_mean.loss_divisor = None' in texts[1] and texts[2] == '', texts


def of_model(loss, cbs):
    import fastdist.all
    learn = quiet(learner(n=22, loss=loss, bs=6, cbs=cbs))
    try:
        with learn.distrib_ctx(split_batches=True): learn.fit(1)
    except Exception as e: return str(e)


def test_a_loss_that_a_model_makes(world2):
    "Where labels are left out of it, and nobody says what it divides by"
    for every in world2(of_model, unused, [Marks(), OfModel()]): assert 'a callback has put another loss' in every and 'loss_divisor = a function of the targets' in every, every
    assert world2(of_model, unused, [OfModel()])==[None, None]


def counted():
    import fastdist.all
    res = {}
    for k in ('mean', 'declared', 'own_mean', 'marks'):
        learn = quiet(learner(n=22, loss=dict(declared=declared, own_mean=declared_mean).get(k), cbs=Marks() if k == 'marks' else None))
        with counted_collectives(collections.Counter()) as counts, learn.distrib_ctx(split_batches=True):
            learn.fit(1)
            before = counts['allreduce']
            learn.fit(2)
        res[k] = counts['allreduce'] - before
    return res


def test_messages(world2):
    "A mean over samples costs no message, nor do targets that a callback changes; a divisor costs one in each of 10 steps"
    for n in world2(counted): assert n['own_mean'] == n['mean'] == n['marks'] and n['declared'] == n['mean'] + 10, n


def single(f): return quiet(learner(n=12, loss=f, dtype=torch.float32))


def mixed():
    from fastai.callback.mixup import MixUp
    import fastdist.all
    learn = single(whole(CrossEntropyLossFlat()))
    with learn.distrib_ctx(split_batches=True):
        losses = learn.get_preds(with_loss=True)[-1]
        with pytest.raises(ValueError) as e: learn.fit(1, cbs=MixUp())
    return losses, str(e.value)


def test_the_loss_of_each_sample(world2):
    one = single(CrossEntropyLossFlat()).get_preds(with_loss=True)[-1]
    for losses, text in world2(mixed): assert diff(one, losses) < 1e-6 and 'MixUp and CutMix' in text and 'learn.loss_func = CrossEntropyLossFlat' in text
