"P1: what people train, and with what, ends with the weights, losses and numbers of one process"
import pytest
from fastai.callback.rnn import rnn_cbs
from fastai.callback.training import BnFreeze
from table import *

case = Cases()


# Models with batch norm of every kind

class Kinds(nn.Module):
    "Over 3 and 4 dimensions, without affine parameters, with a cumulative average, and without running statistics"
    def __init__(self):
        super().__init__()
        self.conv, self.bn1 = nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3, affine=False)
        self.bn2, self.bn3, self.lin = nn.BatchNorm2d(3, momentum=None), nn.BatchNorm2d(3, track_running_stats=False), nn.Linear(9, 3)
    def forward(self, x): return self.lin(self.bn3(self.bn2(self.bn1(self.conv(x[:, None]))[..., None])).view(x.shape[0], -1))


class WithAct(nn.BatchNorm1d):
    "As models of timm have it: torch's forward once more, with an activation behind it"
    def forward(self, x):
        if self.training: self.num_batches_tracked.add_(1)
        m = 1/float(self.num_batches_tracked) if self.momentum is None else self.momentum
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, m, self.eps).relu()


class Recomputed(nn.Module):
    "As models of timm do after `set_grad_checkpointing`; running statistics count a batch twice, in one process too"
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
    def forward(self, x): return x+torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)


def stack(*layers):
    "A model of `(class, arguments)`, or of a linear layer `(in, out)`"
    def make(c, *args): return c(*args) if callable(c) else nn.Linear(c, *args)
    return lambda: (torch.manual_seed(3), nn.Sequential(*[make(*o) for o in layers]).double())[1]


class NormedLoss(nn.Module):
    "Batch norm in a loss, with running statistics or without"
    def __init__(self, track):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, affine=False, track_running_stats=track).double()
    def forward(self, p, y): return ce(self.norm.train(not self.norm.track_running_stats or torch.is_grad_enabled())(p), y)


class Teaches(Callback):
    "Averages of the model, with batch norm in training mode, whose predictions the model is to have"
    def before_fit(self): self.mean, self.more = deepcopy(self.learn.model), dict(slow=deepcopy(self.learn.model))
    def after_loss(self):
        if not self.training: return
        with torch.no_grad(): t = self.mean(self.x)*.7 + self.more['slow'](self.x)*.3
        self.learn.loss_grad = self.learn.loss_grad + (self.pred-t).pow(2).mean().float()
    def after_step(self):
        with torch.no_grad():
            for m, w in (self.mean, .1), (self.more['slow'], .01):
                for a, b in zip(m.parameters(), self.learn.model.parameters()): a.lerp_(b, w)


# Losses and callbacks

W = torch.tensor([1., 5., .5], dtype=torch.float64)
def ce(p, y, **kwargs): return F.cross_entropy(p, y, **kwargs).float()  # as fastai's recorder needs it; computed in float64
def weighted(p, y): return ((W[y]*F.cross_entropy(p, y, reduction='none')).sum() / W[y].sum()).float()
weighted.loss_divisor = lambda y: W[y].sum()
def contrast(p, y): return torch.log_softmax(p@p.T, 1).diag().mean().neg().float() + ce(p, y)
def rmse_loss(p, y): return (p.sum(1)-y).square().mean().sqrt().float()
def made_by_model(p, y): return torch.tensor(0.)
made_by_model.loss_divisor = lambda y: (y != -100).sum()


class OfClass:
    "What it divides by is a function of the targets in its class"
    loss_divisor = lambda y: W[y].sum()
    def __call__(self, p, y): return weighted(p, y)


def whole(f):
    from fastdist.all import GlobalBatchLoss
    return GlobalBatchLoss(f)


class Combined:
    "A mean and a sum, as CombinedLoss of fastai's documentation is"
    def __call__(self, p, y):
        q = F.one_hot(y, 3)
        return ce(p, y) + (1 - 2*(p.softmax(1)*q).sum(1)/(p.softmax(1)+q).sum(1)).sum().float()*.3
    def decodes(self, x): return x.argmax(1)


class AddsToLoss(Callback):
    "As fastai's RNNRegularizer does"
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad + 0.5*self.pred.float().pow(2).mean()


class L1(Callback):
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad + .1*sum(p.abs().sum() for p in self.model.parameters()).float()


class ReplacesLoss(Callback):
    def after_loss(self): self.learn.loss_grad = self.learn.loss = self.pred.float().pow(2).mean()


class Marks(Callback):
    "Some labels do not count: of a share, perhaps none"
    def before_batch(self): self.learn.yb = (torch.where(self.x[:, 0] > .3, -100, self.y),)


class OfModel(Callback):
    "The model makes its loss itself, of the labels that count, and this puts it in the place of the loss function's"
    def after_loss(self):
        self.learn.loss_grad = ce(self.pred, self.y)
        self.learn.loss = self.learn.loss_grad.clone()


class Target(Callback):
    "The targets are the outputs of a slow copy of the model, as in BYOL, which stays in training mode in a validation, too"
    def before_fit(self): self.target = deepcopy(self.model).requires_grad_(False)
    def before_batch(self):
        with torch.no_grad(): self.learn.yb = (self.target(self.x),)
    def after_step(self):
        for p, q in zip(self.target.parameters(), self.model.parameters()): p.data.lerp_(q.data, .1)


class Drops(Callback):
    "Samples are left out: all of some shares, and not of a batch"
    def before_batch(self):
        kept = self.x[:, 0] < .9
        self.learn.xb, self.learn.yb = (self.x[kept],), (self.y[kept],)


class Picks(Callback):
    "Some predictions do not count"
    def after_pred(self):
        kept = self.x[:, 1] < .4
        if kept.any(): self.learn.pred, self.learn.yb = self.pred[kept], (self.y[kept],)


class MakesTargets(Callback):
    "Which the data set does not have"
    def before_batch(self): self.learn.yb = ((self.x[:, 0] > 0).long(),)


class OnlyX(Items):
    def __getitem__(self, i): return super().__getitem__(i)[:1]


def only_x():
    learn = learner(n=22, cbs=MakesTargets(), bs=6)
    for dl in learn.dls.loaders: dl.dataset.__class__ = OnlyX
    return learn


class Skips(Items):
    "Some samples cannot be read"
    skipped = ()
    def __getitem__(self, i):
        from fastai.data.load import SkipItemException
        if i in self.skipped: raise SkipItemException
        return super().__getitem__(i)


def skipping(*skipped, **kwargs):
    learn = learner(shuffle=False, **kwargs)
    learn.dls.train.dataset.__class__ = type('Skipping', (Skips,), dict(skipped=skipped))
    return learn


class Aux(Callback):
    "Auxiliary losses with a backward of their own: of the batch's predictions, and of a forward after its backward"
    run_valid = False
    def after_loss(self): (self.pred.pow(2).mean()*.3).backward(retain_graph=True)
    def after_backward(self): (self.learn.model(*self.xb).pow(2).mean()*.3).backward()


class OwnBackward(Callback):
    "In place of fastai's, of the loss as other callbacks have made it"
    run_valid = False
    def before_backward(self):
        from fastai.callback.core import CancelBackwardException  # not this module's, which travels by value
        (self.learn.loss_grad*.5).backward()
        raise CancelBackwardException()


class Sam(Callback):
    "Sharpness-aware minimization: a second forward and backward between those of fastai and the step"
    order, run_valid = 1000, False
    def before_step(self):
        ps = [p for p in self.model.parameters() if p.requires_grad]
        norm = sum(float(p.grad.pow(2).sum()) for p in ps)**0.5
        with torch.no_grad():
            moved = [p.grad*(0.5/norm) for p in ps]
            for p, e in zip(ps, moved): p.add_(e)
        self.learn.opt.zero_grad()
        self.loss_func(self.learn.model(*self.xb), *self.yb).backward()
        with torch.no_grad():
            for p, e in zip(ps, moved): p.sub_(e)


class Cancels(Callback):
    "All workers skip the same batch, backward and step, and leave the second epoch before its end"
    run_valid = False
    def before_batch(self): self._cancel('Batch', 0, 1); self._cancel('Train', 1, 3)
    def before_backward(self): self._cancel('Backward', 0, 2)
    def before_step(self): self._cancel('Step', 0, 3)
    def _cancel(self, what, epoch, i):
        import fastai.callback.core as core  # a module travels by value, and its exceptions would be others
        if (self.epoch, self.iter) == (epoch, i): raise getattr(core, f'Cancel{what}Exception')()


class Scales(MixedPrecision):
    "fastai's `to_fp16`, with a scaler that works on the CPU, and without rounding"
    order = MixedPrecision.order
    def before_fit(self):
        super().before_fit()
        self.autocast, self.learn.scaler = torch.autocast('cpu', enabled=False), torch.amp.GradScaler('cpu', init_scale=2.**10, growth_interval=3)
    def after_fit(self): self.learn.scaler = None


class Spoils(Callback):
    "The first sample of the third batch, which rank 0 has, is infinite: all skip the step, and the scale halves"
    order = -30
    def before_batch(self):
        from fastdist.all import get_rank
        if self.training and self.train_iter == 2 and get_rank() == 0:
            self.learn.xb = (self.x.index_fill(0, torch.tensor([0]), float('inf')),)


class Tags(Items):
    "Six rows and labels a sample"
    def __init__(self, n, *_, seed=0, **__):
        g = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(n, 6, 4, dtype=torch.float64, generator=g), torch.randint(0, 3, (n, 6), generator=g)
class OfTags(OwnDouble):
    def __call__(self, inp, targ, **kwargs): return super().__call__(inp.reshape(-1, 3), targ.reshape(-1), **kwargs)


class MarksTags(Callback):
    "Of some samples more labels count than of others"
    order = -5
    def before_batch(self): self.learn.yb = (torch.where(self.x[..., 0] > self.x[:, :1, 1], -100, self.y),)


class TagsOfModel(Callback):
    "The model makes its loss itself, as Hugging Face's token classifiers do; a callback puts it in the place of the loss function's"
    def after_loss(self):
        self.learn.loss_grad = ce(self.pred.reshape(-1, 3), self.y.reshape(-1))
        self.learn.loss = self.learn.loss_grad.clone()


class Outputs(Callback):
    "The same, where the loss function takes it out of what the model returns"
    def after_pred(self): self.learn.pred = dict(logits=self.pred, loss=ce(self.pred.reshape(-1, 3), self.y.reshape(-1)))
def of_outputs(p, y): return p['loss']


def tags(loss=None, cbs=None):
    learn = learner(n=7, loss=loss or OfTags(), model=stack((4, 3)), cbs=cbs)
    for i, dl in enumerate(learn.dls.loaders): dl.dataset = Tags(7, seed=i)
    return learn


def regression():
    learn = learner(loss=lambda p, y: F.mse_loss(p, y).float(), model=stack((4, 1)), metrics=[mae, rmse])
    learn.dls = dls_of(22, classes=False)
    return learn


def scaled(bn): return lambda: (torch.manual_seed(3), Scaled(bn).double())[1]


def with_opt(name):
    "Tied weights, a parameter that is a number, and batch norm for every other optimizer"
    opts = {**OPTS, **MORE_OPTS}
    return learner(n=22, opt=opts[name], wd=.1, lr=.02, splitter=splitter, model=scaled(list(opts).index(name) % 2 == 0))


LEARNERS = dict(
    **{o: partial(with_opt, o) for o in (*OPTS, *MORE_OPTS) if o not in ('adafactor', 'rmsprop')},  # of which one needs whole parameters, and one enlarges rounding
    drop_last=lambda: learner(n=22, bs=7, drop_last=True),
    processes=lambda: learner(n=13, num_workers=1), regression=regression, tags=tags, clip=lambda: learner(n=22, cbs=GradientClip(.1)),
    accumulate=lambda: learner(n=22, bn=True, cbs=GradientAccumulation(11)),
    clip_accumulate=lambda: learner(cbs=[GradientClip(.1), GradientAccumulation(8)]), norms=lambda: learner(n=21, model=stack((Kinds,))),
    own_forward=lambda: learner(n=22, model=stack((4, 8), (WithAct, 8), (8, 8), (nn.BatchNorm1d, 8), (8, 3))),
    own_forward_mean=lambda: learner(n=22, model=stack((4, 8), (partial(WithAct, momentum=None), 8), (8, 3))),
    recomputed=lambda: learner(n=22, model=stack((4, 8), (Recomputed,), (8, 3)), lr=.01),
    loss_norm=lambda: learner(n=22, loss=NormedLoss(False)), loss_norm_stats=lambda: learner(n=22, bn=True, loss=NormedLoss(True)),
    loss_norm_whole=lambda: learner(n=22, loss=whole(NormedLoss(False))), teacher=lambda: learner(bn=True, cbs=Teaches()),
    frozen_norm=lambda: learner(bn=True, cbs=BnFreeze()), class_weights=lambda: learner(n=22, loss=Double(weight=W)),
    ignore_index=lambda: learner(bs=3, loss=Double(ignore_index=1)), marks=lambda: learner(n=22, cbs=[Marks(), GradientAccumulation(9)]),
    summed=lambda: learner(n=22, loss=Double(reduction='sum'), lr=.01),
    divisor=lambda: learner(n=22, loss=weighted, cbs=GradientAccumulation(9)),
    tags_of_model=lambda: tags(cbs=[MarksTags(), TagsOfModel()]), tags_in_outputs=lambda: tags(of_outputs, [MarksTags(), Outputs()]),
    divisor_of_class=lambda: learner(n=22, loss=OfClass()),
    byol=lambda: learner(n=22, bn=True, loss=lambda p, y: F.mse_loss(p, y).float(), cbs=Target(), metrics=mae),
    combined=lambda: learner(n=22, bn=True, loss=Combined()), contrast=lambda: learner(n=21, loss=contrast),
    unsaid=lambda: learner(n=22, loss=rmse_loss),
    of_model=lambda: learner(n=22, loss=made_by_model, cbs=[Marks(), OfModel()]),
    marks_weights=lambda: learner(n=22, loss=Double(weight=W), cbs=Marks()),
    drops=lambda: learner(n=22, bs=4, cbs=Drops()), drops_accumulate=lambda: learner(n=22, bs=11, cbs=[Drops(), GradientAccumulation(9)]),
    picks=lambda: learner(n=22, bs=11, cbs=Picks()), only_x=only_x, skips_many=lambda: skipping(*range(1, 22, 3), n=22, bs=22),
    skips_share=lambda: skipping(1, 4, n=5, bs=5, bn=True),
    own_backward=lambda: learner(n=22, cbs=[OwnBackward(), GradientAccumulation(9)]),
    aux=lambda: learner(n=22, bn=True, cbs=[Aux(), GradientAccumulation(8)]),
    combined_accumulate=lambda: learner(n=22, loss=whole(Combined()), cbs=[L1(), GradientAccumulation(9)]),
    adds=lambda: learner(n=22, cbs=AddsToLoss()), adds_weights=lambda: learner(n=22, loss=Double(weight=W), cbs=AddsToLoss()),
    l1=lambda: learner(n=22, cbs=L1()), replaces=lambda: learner(n=22, cbs=ReplacesLoss()), sam=lambda: learner(bn=True, cbs=Sam()),
    cancels=lambda: learner(n=24, bn=True, cbs=Cancels()), fp16=lambda: learner(bn=True, cbs=Scales()),
    fp16_infinite=lambda: learner(n=40, opt=partial(SGD, mom=.9), cbs=[Scales(), Spoils(), GradientClip(.05)]))


def fitted(make, within):
    "Two epochs, with metrics of training too"
    learn = quiet(make())
    if not learn.metrics:
        classes = learn.dls.train.dataset[0][-1].dim() == 0
        learn.metrics, learn.recorder.train_metrics = L(AvgMetric(accuracy)) if classes else L(), True
    with within(learn): learn.fit(2)
    return result(learn)


for k, v in LEARNERS.items(): case(partial(fitted, v), name=k)


@case
def any_size(within):
    "Of the set and of a batch; fewer samples than workers"
    return [fitted(lambda: learner(n=n, bs=bs), within) for n, bs in ((1, 1), (1, 8), (2, 5), (3, 1), (7, 3), (13, 13), (16, 5))]


@case
def own_batches(within):
    "split_batches=False: each worker has `bs`, so the numbers are those of one process with `bs` times the number of workers"
    res = []
    for i, (n, drop_last) in enumerate([(38, False), (24, True), (27, False)]):
        learn = quiet(learner(n=n, bs=12//within.n if within.many else 12, val_bs=4, bn=True, drop_last=drop_last))
        with within(learn, split_batches=False): learn.fit(2)
        res.append(result(learn))
    return res


class Graphs(Items):
    "A sample has several rows, each with a target, and a `collate_fn` puts those of a batch one after the other"
    rows = 2, 30, 3, 25, 2, 28
    def __getitem__(self, i): return tuple(o.expand(self.rows[i % 6], *o.shape).mul(torch.arange(1., self.rows[i % 6]+1)[:, None]) for o in super().__getitem__(i))
def one_after_the_other(items): return tuple(map(torch.cat, zip(*items)))


@case
def rows_of_samples(within):
    "Each worker has its own number of rows; the mean in a loss is over those of all, also where gradients are accumulated"
    res = []
    for steps in 1, 2:
        bs = 12//within.n//steps if within.many else 12
        loaders = [torch.utils.data.DataLoader(Graphs(n, classes=False), batch_size=b, collate_fn=one_after_the_other) for n, b in ((20 if steps == 1 else 24, bs), (5, 2))]
        learn = quiet(Learner(DataLoaders(*loaders), stack((4, 1))(), loss_func=lambda p, y: F.mse_loss(p, y).float(), opt_func=SGD, lr=1e-4))
        learn.loss_func.loss_divisor = None
        with within(learn, split_batches=False, gradient_accumulation_steps=steps): learn.fit(2)
        res.append(weights(learn))
    return dict(weights=res)


class Sometimes(nn.Module):
    "Uses a layer for some samples only, so that in some batches one worker does, and another does not; and one never"
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.spare, self.b, self.never = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3), nn.Linear(5, 2)
    def forward(self, x):
        h, which = self.a(x).relu(), x[:, 0] > .8
        return self.b(h+torch.zeros_like(h).masked_scatter(which[:, None], self.spare(h[which])) if which.any() else h)


@case
def used_sometimes(within):
    "What no worker's loss depends on has no gradient: nothing decays it, and nothing is remembered of it"
    res = []
    for opt, acc in (partial(SGD, mom=.9, wd=.1), None), (partial(SGD, mom=.9, wd=.1), 8), (partial(OptimWrapper, opt=torch.optim.AdamW), None):
        learn = quiet(learner(n=20, bs=4, opt=opt, model=lambda: Sometimes().double(), cbs=acc and GradientAccumulation(acc)))
        with within(learn): learn.fit(2)
        res.append(dict(weights=weights(learn), losses=list(learn.recorder.losses), unused=[n for n, p in learn.model.named_parameters() if p.grad is None]))
    return res


@case
def accumulation_argument(within):
    "Two batches to a step are one large batch"
    learn = quiet(learner(n=20, bs=5 if within.many else 10))
    with within(learn, gradient_accumulation_steps=2): learn.fit(2)
    return dict(weights=weights(learn), opt=state_of(learn.opt))


@case
def schedules(within):
    "One-cycle, frozen and unfrozen with discriminative rates, in one context, then in another, then without one; and `lr_find`, in a context and outside"
    learn = quiet(learner(n=22, opt=Adam, wd=.01, model=scaled(True), splitter=splitter))
    with within(learn):
        learn.fit_one_cycle(2, .1)
        learn.freeze()
        learn.fit(1)
        learn.unfreeze()
        learn.fit(1, slice(.01, .1))
        learn.fine_tune(1)
        before, found = weights(learn), learn.lr_find(num_it=12, start_lr=1e-4, show_plot=False).valley
        moved = diff(before, weights(learn))
    with within(learn): learn.fit_flat_cos(1, .05)
    learn.lr_find(num_it=5, show_plot=False)
    learn.fit(1)
    return result(learn, found=found, moved=moved, rates=[learn.opt.hypers[i]['lr'] for i in range(2)])


@case
def trackers(within):
    "The best weights come back; it stops early; the learning rate goes down"
    from fastai.callback.progress import CSVLogger
    from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback
    with shared_folder(within) as path:
        learn, lrs = quiet(learner(bn=True, opt=Adam, lr=.3, metrics=accuracy, path=path)), []
        class Look(Callback):
            def after_batch(self): lrs.append(self.opt.hypers[0]['lr']) if self.training else None
        with within(learn):
            learn.fit(6, cbs=[SaveModelCallback(with_opt=True), EarlyStoppingCallback(patience=3), ReduceLROnPlateau(patience=1, factor=4., min_delta=.1), CSVLogger(), Look()])
        values = numbers(learn.recorder.values)
        table = [[float(o) for o in line.split(',')[:4]] for line in (path/'history.csv').read_text().splitlines()[1:]]
        assert len(set(lrs)) > 1 and values[-1][1] > min(v[1] for v in values) and len(values) < 6
        return result(learn, table=table, lrs=lrs, valid=list(learn.validate()))


@case
def learners_in_turn(within):
    "One after another, of which the last two share a model"
    learns, res = [quiet(learner(n=n, bn=True, opt=o, metrics=accuracy)) for n, o in ((22, SGD), (13, Adam), (23, SGD), (24, SGD))], []
    learns[3].model = learns[2].model
    for learn in learns[:2]:
        with within(learn): learn.fit(1)
        res.append(result(learn))
    with within(learns[2]), within(learns[3]):
        learns[2].fit(1)
        learns[3].fit(1)
    return [*res, result(learns[2]), list(learns[0].validate())]


@case
def the_ways_in(within):
    "`to_distributed`, and the callback given to a fit"
    learn = quiet(learner(n=22))
    if not within.many: learn.fit(1); learn.fit(1)
    else:
        from fastdist.all import DistributedTrainer
        learn.to_distributed(split_batches=True)
        learn.fit(1)
        learn.detach_distributed()
        learn.fit(1, cbs=DistributedTrainer(split_batches=True))
    return result(learn)


class Turns(Callback):
    "Layers that learn in turn, frozen from batch to batch"
    def before_batch(self):
        if self.training:
            for i, m in enumerate(self.learn.model): m.requires_grad_(i % 3 == self.iter % 3 or i == 3)


@case
def frozen_in_turn(within): return fitted(lambda: learner(n=22, bn=True, cbs=Turns()), within)


class Attr(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.knob = mlp(bn=True), 7
    def forward(self, x): return self.body(x)*(self.knob/7)


class Knob(Callback):
    "In a fit, whoever looks at learn.model finds the user's model, and what is set there has its effect"
    def before_fit(self): self.found = self.learn.model
    def before_batch(self): assert self.learn.model is self.found and type(self.learn.model).__name__ == 'Attr'; self.learn.model.knob = 7+self.iter


@case
def users_model(within):
    learn = quiet(learner(n=22, model=Attr, cbs=Knob()))
    model = learn.model
    hook = model.body[0].register_forward_hook(lambda m, i, o: o*1.5)
    with within(learn): learn.fit(1)
    hook.remove()
    assert learn.model is model is learn.knob.found
    return result(learn)


class Noise:
    "Noise in, a small picture out"
    def __init__(self, n):
        g = torch.Generator().manual_seed(1)
        self.z, self.x = torch.randn(n, 100, generator=g), torch.randn(n, 3, 16, 16, generator=g).clamp(-1, 1)
    def __len__(self): return len(self.z)
    def __getitem__(self, i): return self.z[i], self.x[i]


@case(tol=2e-6)
def gan(within):
    "fastai's own, whose callbacks reach into learn.model and freeze one half of it at a time"
    from fastai.vision.gan import FixedGANSwitcher, GANLearner, basic_critic, basic_generator
    set_seed(0)
    dls = DataLoaders(TfmdDL(Noise(18), bs=6, shuffle=True, num_workers=0), TfmdDL(Noise(6), bs=6, num_workers=0))
    generator, critic = basic_generator(16, 3, in_sz=100, n_features=8, n_extra_layers=0), basic_critic(16, 3, n_features=8, n_extra_layers=0, act_cls=partial(nn.LeakyReLU))
    learn = quiet(GANLearner.wgan(dls, generator, critic, opt_func=SGD, lr=1e-3, switch_eval=False, switcher=FixedGANSwitcher(n_crit=1, n_gen=1)))
    before = weights(learn)
    with within(learn): learn.fit(2)
    assert diff(before, weights(learn)) > 1e-4
    return dict(weights=weights(learn))


@case(tol=2e-6)  # Adam divides small gradients by their size
def text_classifier(within):
    "Hidden states from batch to batch, which fastai resets, and its regularizer"
    from fastai.text.models import AWD_LSTM, get_text_classifier
    from fastai.text.models.awdlstm import awd_lstm_clas_split
    config = dict(emb_sz=6, n_hid=7, n_layers=1, pad_token=1, bidir=False, output_p=0., hidden_p=0., input_p=0., embed_p=0., weight_p=1e-12)
    set_seed(7)
    dls = DataLoaders(*[TfmdDL([(torch.randint(2, 11, (7,)), torch.randint(0, 3, ())) for _ in range(n)], bs=5, shuffle=n > 9, num_workers=0) for n in (18, 7)])
    model = get_text_classifier(AWD_LSTM, 11, 3, seq_len=4, config=config, max_len=8, ps=[0.]).double()
    learn = quiet(Learner(dls, model, loss_func=Double(), opt_func=Adam, lr=.02, cbs=rnn_cbs(.1, .1), metrics=accuracy, splitter=awd_lstm_clas_split))
    with within(learn):
        learn.freeze_to(-2)
        learn.fit(1)
        learn.unfreeze()
        learn.fit(1, slice(1e-3, 1e-2))
    return result(learn)


@case
def short_epochs(within):
    from fastai.callback.training import ShortEpochCallback
    learn = quiet(learner(n=22, bn=True, metrics=accuracy))
    with within(learn): learn.fit(2, cbs=ShortEpochCallback(.4, short_valid=True))
    return result(learn)


@case
def ends_by_nan(within):
    "A NaN of one sample, which one worker has, ends the fit of all"
    from fastai.callback.tracker import TerminateOnNaNCallback
    class Spoils(Callback):
        def before_batch(self):
            if self.training and self.epoch == 1 and self.iter == 2: self.learn.xb = (torch.where(self.x == self.dls.train_ds.x[:, 0].max(), float('nan'), self.x),)
    learn = quiet(learner(n=22, shuffle=False, cbs=[Spoils(), TerminateOnNaNCallback()]))
    learn.dls.train_ds.x[11, 0] = 9.
    with within(learn): learn.fit(3)
    return dict(batches=len(learn.recorder.losses), epochs=len(learn.recorder.values))


@case
def decided_by_rank0(within):
    "A metric that is another number in each worker: all record rank 0's, and decide by it"
    from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
    with shared_folder(within) as path:
        odd = ValueMetric(lambda: [3., 1., 2., 2., 2., 2.][learn.epoch] + 10*rank_distrib()*(learn.epoch % 2), 'odd')
        learn = quiet(learner(n=22, metrics=odd, path=path))
        with within(learn): learn.fit(6, cbs=[SaveModelCallback('odd', comp=np.less), EarlyStoppingCallback('odd', comp=np.less, patience=3)])
        return result(learn)


@case
def begins_later(within):
    "As a script does that goes on with a later epoch by itself; and where weights have become nan it is nobody's fault"
    learn = quiet(learner(n=22))
    with within(learn):
        learn.fit(3, start_epoch=1)
        res = result(learn)
        learn.fit(1, lr=float('inf'))
    return dict(res, nan=[bool(p.isnan().all()) for p in learn.model.parameters()])


class Reentrant(nn.Module):
    "A layer is computed again in a backward pass of its own"
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
    def forward(self, x):
        from torch.utils.checkpoint import checkpoint
        return self.c(checkpoint(self.b, self.a(x).relu(), use_reentrant=True))


@case
def reentrant(within):
    res = []
    for strategy in 'ddp', 'fsdp':
        learn = quiet(learner(n=22, model=lambda: Reentrant().double()))
        with within(learn, strategy=strategy): learn.fit(2)
        res.append(weights(learn))
    return res


# Where a share is empty or the sizes are the very thing, and where gradients are averaged, or not, in a way of their own
BOTH = '''any_size own_batches drops skips_share skips_many picks accumulate norms unsaid class_weights sam frozen_in_turn cancels
          fp16_infinite ends_by_nan'''.split()


@pytest.mark.sizes
@pytest.mark.parametrize('world', [2, 3])
def test_as_one_process(worlds, world):
    "Each case by two workers or by three, and some by both"
    case.check(worlds(world), [o for i, o in enumerate(case) if i % 2 == world % 2 or o in BOTH])


# What is drawn at random, or rounded, is the same in all workers, and not that of one process

def agreeing():
    "By name, what all workers must have alike, and the samples that this one has read"
    import fastdist.all
    from fastai.callback.mixup import CutMix, MixUp
    from fastdist.all import get_rank
    res, seen = {}, []
    class Sees(Callback):
        def before_batch(self): seen.extend(map(tuple, self.x.tolist())) if self.training else None
    class Images(Items):
        def __getitem__(self, i): return self.x[i].float().view(1, 2, 2), self.y[i]
    def fit(nm, learn, **ctx):
        with learn.distrib_ctx(**{**dict(split_batches=True), **ctx}): learn.fit(2)
        res[nm] = result(learn)
    for i, cb in enumerate((MixUp(.4), CutMix(.4))):
        set_seed(1)
        dls = DataLoaders(*[TfmdDL(Images(n), bs=5, num_workers=0) for n in (12, 7)])
        fit(('mixup', 'cutmix')[i], quiet(Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), loss_func=CrossEntropyLossFlat(), cbs=cb, metrics=accuracy)))
    fit('dropout', quiet(learner(model=lambda: nn.Sequential(nn.Linear(4, 30), nn.Dropout(.5), nn.Linear(30, 3)).double())))
    fit('bf16', quiet(learner(dtype=torch.float32, cbs=Bf16OnCpu('bf16'), loss=CrossEntropyLossFlat())))
    fit('own batch norm', quiet(learner(n=24, bs=12, bn=True)), sync_bn=False)
    res['random numbers of the script'] = random.random(), float(np.random.rand()), torch.rand(1).item()
    set_seed(int.from_bytes(os.urandom(4), 'little'))  # nobody has seeded it, and each worker has made another model
    odd = nn.Sequential(nn.Flatten(), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)).double().to(memory_format=torch.channels_last)
    odd[2].weight = odd[1].weight
    for i, t in enumerate([torch.bfloat16, torch.bool, torch.int16, torch.complex64]): odd.register_buffer(f'b{i}', (torch.randn(3, 2)*9).to(t).T)
    odd.register_buffer('rank', torch.tensor(get_rank()))
    learn = quiet(Learner(DataLoaders(TfmdDL(Items(20), bs=5, shuffle=True, num_workers=0), TfmdDL(Items(9, seed=1), bs=2, num_workers=0)), odd, loss_func=Double(), opt_func=Adam, metrics=accuracy, cbs=Sees()))
    fit('unseeded', learn)
    return {k: repr(v) if isinstance(v, tuple) else v for k, v in res.items()}, seen, odd[2].weight is odd[1].weight


def test_all_workers_agree(world3):
    (first, _, tied), *others = every = world3(agreeing)
    for res, *_ in others: assert not (faults := differences(first, res, 0)), faults
    assert tied and first['unseeded']['weights']['rank'] == 0 and all(np.isfinite(o['losses']).all() for o in first.values() if isinstance(o, dict))
    assert sorted(o for _, seen, _ in every for o in seen) == sorted([*map(tuple, Items(20).x.tolist())]*2)  # each by one worker in each epoch


# Forwards that put the rows of a batch together

class Mixing(nn.Module):
    "A linear layer, `mix`, which is called with this module and the hidden values, and another linear layer"
    def __init__(self, mix, **layers):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.c, self.mix = nn.Linear(4, 8), nn.Linear(8, 3), mix
        for k, m in layers.items(): setattr(self, k, m)
        self.double()
    def forward(self, x): return self.c(self.mix(self, self.a(x)))


def centred(m, h): return h-h.mean(0)
def centred_together(m, h):
    if not (m.training and torch.distributed.is_initialized()): return centred(m, h)
    from torch.distributed.nn.functional import all_reduce
    return h-all_reduce(h.sum(0))/all_reduce(h.new_tensor([len(h)]))
def attention(m, h): return h+m.att(h[None], h[None], h[None])[0][0]
def deviation(m, h): return h*h.std(0, correction=0).mean()
def noise(m, h): return h+torch.rand_like(h)*.1
def ghost(m, h, rows): return torch.cat([m.bn(o) for o in h.chunk(-(-len(h)//rows))]) if m.training else m.bn(h)


def mixing(nm, many, n=24, bs=8, rows=4, sync_bn=True):
    "Weights, warnings by what they begin with, and the error"
    import fastdist.all
    layers = dict(attention=dict(att=nn.MultiheadAttention(8, 2, batch_first=True))).get(nm, dict(bn=nn.BatchNorm1d(8, track_running_stats=nm == 'ghost')))
    mix = dict(centred=centred, together=centred_together, attention=attention, deviation=deviation, noise=noise, ghost=partial(ghost, rows=rows), norm=lambda m, h: m.bn(h))[nm]
    learn, error = quiet(learner(n=n, bs=bs, model=lambda: Mixing(mix, **layers))), None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        try:
            with learn.distrib_ctx(sync_bn, split_batches=True) if many else contextlib.nullcontext():
                learn.fit(1)
                learn.fit(1)
        except Exception as e: error = type(e).__name__, getattr(e, 'rank', None), str(e)
    return weights(learn), [str(o.message) for o in said if 'rows of a batch' in str(o.message)], error


@pytest.mark.parametrize('world', [2, 3])
def test_rows_mixed(worlds, world):
    "A forward that mixes rows is seen before the first step, and said once; one that draws is not. To add up over the workers in training is exact"
    for nm in ('centred', 'deviation', 'attention', 'together', 'noise', 'norm')[:3 if world == 3 else None]:
        one, _, _ = mixing(nm, False)
        for rank, (many, said, error) in enumerate(worlds(world)(mixing, nm, True)):
            mixes = nm in ('centred', 'deviation', 'attention')
            assert error is None and len(said) == ((mixes or nm == 'together') and rank == 0), (nm, rank, said, error)
            assert (diff(one, many) > 1e-4 if mixes else diff(one, many) < 1e-7 or nm == 'noise'), (nm, diff(one, many))


def test_ghost_batch_norm(world2):
    "Parts of a batch, of which workers may have other numbers, are an error, and not the end of a process; sync_bn=False leaves them to each"
    for args in dict(rows=2), dict(n=18, bs=9):
        for _, _, (kind, _, text) in world2(mixing, 'ghost', True, **args):
            assert kind in ('RuntimeError', 'RemoteError') and 'in parts (ghost batch norm, ' in text and 'sync_bn=False' in text, text
    for _, _, error in world2(mixing, 'ghost', True, n=18, bs=9, sync_bn=False): assert error is None, error
