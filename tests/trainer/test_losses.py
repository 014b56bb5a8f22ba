"What is said of a loss that is no mean over samples, and what it costs. (contract/test_training.py has the numbers.)"
import pytest
from learners import *
import torch.nn.functional as F

W = torch.tensor([1., 3., .5], dtype=torch.float64)
def weighted(p, y): return ((W[y]*F.cross_entropy(p, y, reduction='none')).sum() / W[y].sum()).float()
weighted.loss_divisor = lambda y: W[y].sum()
def mean(p, y): return F.cross_entropy(p, y).float()
mean.loss_divisor = None
def rmse(p, y): return (p.sum(1)-y).square().mean().sqrt().float()
def wide_mean(p, y): return (p[:, :3]-y[:, None]).square().mean().float()
def told_mean(p, y): return wide_mean(p, y)
told_mean.loss_divisor = None
def unused(p, y): return torch.tensor(0.)
def contrastive(p, y): return torch.log_softmax(p@p.T, 1).diag().mean().neg().float()


class Views(Callback):
    "Two views of each sample, one after the other"
    def before_batch(self): self.learn.xb, self.learn.yb = (torch.cat([self.x, self.x.flip(1)]),), (self.y.repeat(2),)


class Marks(Callback):
    "Some labels do not count"
    def before_batch(self): self.learn.yb = (torch.where(self.x[:, 0] > .3, -100, self.y),)


class OfModel(Callback):
    "The model makes its loss itself, and this puts it in the place of the loss function's"
    def after_loss(self):
        self.learn.loss_grad = F.cross_entropy(self.pred, self.y).float()
        self.learn.loss = self.learn.loss_grad.clone()


def wide():
    torch.manual_seed(3)
    return nn.Linear(4, 200_000).double()


def errors():
    "What is said, by case, in a fit over the whole"
    import fastdist.all
    from fastai.callback.mixup import MixUp
    res = {}
    def tried(name, loss, dtype=torch.float64, **kwargs):
        learn = quiet(learner(n=12, loss=loss, bs=6, dtype=dtype, **kwargs))
        try:
            with learn.distrib_ctx(split_batches=True): learn.fit(1)
        except Exception as e: res[name] = str(e)
    for f in rmse, wide_mean, told_mean: tried(f.__name__, f, model=wide)
    tried('of model', unused, cbs=OfModel())
    tried('of model, marks', unused, cbs=[Marks(), OfModel()])
    tried('views', contrastive, cbs=Views())
    tried('mixup', fastdist.all.GlobalBatchLoss(CrossEntropyLossFlat()), dtype=torch.float32, cbs=MixUp())
    return res


TEXTS = {'rmse': ('nobody knows the loss function rmse', 'rmse.loss_divisor = a function of the targets', 'GlobalBatchLoss('),
         'wide_mean': ('wide_mean.loss_divisor = None',),
         'of model, marks': ('a callback has put another loss', 'loss_divisor = a function of the targets'),
         'views': ('of a batch of 3 have 6 rows', '[batch, views, ...]'),
         'mixup': ('MixUp and CutMix', 'learn.loss_func = CrossEntropyLossFlat')}


def test_errors(world2):
    """Losses of which nobody knows what they are, and whose predictions are too large to be gathered unasked; or which leave out labels, or
    mix them"""
    for res in world2(errors):
        assert res.keys() == TEXTS.keys(), res
        for k, texts in TEXTS.items(): assert all(o in res[k] for o in texts), (k, res[k])


def counted():
    import fastdist.all
    res = {}
    for k, loss in dict(known=None, divisor=weighted, mean=mean, marks=None).items():
        learn = quiet(learner(n=22, loss=loss, cbs=Marks() if k == 'marks' else None))
        with counted_collectives(collections.Counter()) as counts, learn.distrib_ctx(split_batches=True):
            learn.fit(1)
            before = counts['allreduce']
            learn.fit(2)
        res[k] = counts['allreduce'] - before
    return res


def test_messages(world2):
    "A mean over samples costs no message, nor do targets that a callback changes; a divisor costs one in each of 10 steps"
    for n in world2(counted): assert n['mean'] == n['known'] == n['marks'] and n['divisor'] == n['known'] + 10, n


def losses_of_samples(f, distrib):
    import fastdist.all
    learn = quiet(learner(n=12, loss=fastdist.all.GlobalBatchLoss(f) if distrib else f, dtype=torch.float32))
    with learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext(): return learn.get_preds(with_loss=True)[-1]


def test_the_loss_of_each_sample(world2):
    one = losses_of_samples(CrossEntropyLossFlat(), False)
    for losses in world2(losses_of_samples, CrossEntropyLossFlat(), True): assert diff(one, losses) < 1e-6


def gathering(p, y, always=True):
    "A mean over the samples that it gathers from all workers by itself: in training alone, or in an evaluation too"
    import torch.distributed as dist
    loss = F.cross_entropy(p, y)
    if not dist.is_initialized() or not (always or torch.is_grad_enabled()): return loss.float()
    sums = torch.stack([loss.detach()*len(y), torch.tensor(float(len(y)), dtype=torch.float64)])
    dist.all_reduce(sums)
    return (loss-loss.detach()+sums[0]/sums[1]).float()


def gathers(always, distrib=True):
    import fastdist.all
    loss = partial(gathering, always=always)
    loss.loss_divisor = None
    learn = quiet(learner(n=24, bs=6, loss=loss))
    try:
        with learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext(): learn.fit(2)
    except RuntimeError as e: return str(e)
    return list(learn.recorder.values[-1])


@pytest.mark.parametrize('size', [2, 3])
def test_a_loss_that_gathers_by_itself(worlds, size):
    "In an evaluation workers have different batches, which it would mix: an error, unless it does so in training alone"
    for o in worlds(size)(gathers, True): assert 'the loss function makes a collective of its own' in o and 'torch.is_grad_enabled()' in o, o
    want = gathers(False, distrib=False)
    for o in worlds(size)(gathers, False): assert diff(want, o) < 1e-6
