"""One process that trains on several GPUs: the numbers of one of them. Where there are none they are pretended (support/fakegpu)."""
import pytest
from fastai.callback.training import BnFreeze
from fastai.layers import ConvLayer
from fastai.vision.models.unet import DynamicUnet
from learners import *

# GPUs ('dp': the strategy, which takes all), samples, those of a batch: some parts are of one row, and some batches of fewer rows than GPUs
WAYS = dict(two=([0, 1], 8, 3), three=([0, 1, 2], 12, 7), frozen=([0, 1, 2], 13, 5), all=(None, 13, 5), even=([0, 1, 2], 12, 6))
WAYS |= {'dp': ('dp', 11, 8), 'even dp': ('dp', 12, 6)}


class Table(nn.Module):
    "With a table, and a batch norm whose running statistics are plain means"
    def __init__(self):
        super().__init__()
        self.table, self.body = nn.Embedding(7, 5), nn.Linear(4, 5)
        self.norm, self.head = nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3)
    def forward(self, x): return self.head(self.norm(self.table((x[:, 0].abs()*3).long().clamp(max=6))+self.body(x)))


class Pixels(nn.Module):
    "fastai's U-Net, whose blocks read what hooks keep, and which has no hooks more once it is deleted"
    def __init__(self):
        super().__init__()
        self.unet = DynamicUnet(nn.Sequential(ConvLayer(1, 4, stride=2), ConvLayer(4, 6, stride=2)), 3, (16, 16))
    def forward(self, x): return self.unet(x[:, None, :, None].expand(-1, 1, 4, 4).repeat(1, 1, 4, 4)).mean((2, 3))


def no_statistics():
    "Batch norm that has the batch's statistics in evaluation, too"
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.ReLU(), nn.Linear(6, 3)).double()


class WithAct(nn.BatchNorm1d):
    "As models of timm have it: torch's forward once more, with an activation behind it"
    def forward(self, x):
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training or self.running_mean is None, .1, self.eps).relu()


def own_forward(): return nn.Sequential(nn.Linear(4, 6), WithAct(6), WithAct(6, track_running_stats=False), nn.Linear(6, 3)).double()


MODELS = dict(own_forward=own_forward, norm=partial(mlp, True), table=lambda: Table().double(), unet=lambda: Pixels().double(), no_statistics=no_statistics)


def around(learn, gpus, **kwargs):
    if gpus == 'dp': return learn.distrib_ctx(strategy='dp', **kwargs)
    return learn.parallel_ctx(gpus and gpus[:torch.cuda.device_count()], **kwargs)


def layers(learn): return [(type(m), len(m._forward_hooks)) for m in learn.model.modules()]


def trained_on(model, way, one=False, **kwargs):
    "What comes of two fits, a validation and predictions, on one GPU or on those of the `way`"
    import fastdist.all
    torch.manual_seed(3)
    gpus, n, bs = WAYS[way]
    learn = quiet(learner(n=n, n_val=n, bs=bs, lr=.05, opt=Adam, metrics=accuracy, model=MODELS[model]))
    learn.dls.to(torch.device('cuda', 0))
    res, had = SimpleNamespace(), layers(learn)
    with contextlib.nullcontext() if one else around(learn, gpus, **kwargs):
        learn.fit_one_cycle(1, .05)
        res.first = [float(o) for o in learn.recorder.losses]
        learn.fit(1, cbs=[GradientAccumulation(2*bs), BnFreeze()] if way == 'frozen' else None)
        res.losses, res.values = [float(o) for o in learn.recorder.losses], [list(o) for o in learn.recorder.values]
        res.validated, res.preds = list(learn.validate()), [o.cpu() for o in learn.get_preds()]
    assert layers(learn) == had and 'parallel_trainer' not in vars(learn)
    res.weights = weights(learn)
    return res


def both(model, way): return trained_on(model, way, one=True), trained_on(model, way)


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('model', MODELS)
def test_numbers_of_one_gpu(gpu_worlds, model, way):
    "In parallel_ctx, and with strategy='dp'; the model has its own layers and hooks afterwards"
    [(one, many)] = gpu_worlds(1)(both, model, way)
    assert diff(one.weights, many.weights) < 1e-10
    for o in 'first', 'losses', 'values', 'validated': assert diff(getattr(one, o), getattr(many, o)) < 1e-6
    for a, b in zip(one.preds, many.preds, strict=True): assert diff(a, b) < 1e-10


class Kinds(Callback):
    "Of numbers that a layer computes, on any GPU"
    def before_fit(self):
        self.seen = set()
        self.hook = self.learn.model[0].register_forward_hook(lambda m, i, o: self.seen.add(str(o.dtype)))
    def after_fit(self): self.hook.remove()


def half():
    import fastdist.all
    res = []
    for to in 'to_fp16', 'to_bf16':
        for sync_bn in True, False:
            learn = quiet(learner(n=12, bs=6, bn=True, dtype=torch.float32, cbs=Kinds()))
            learn.dls.to(torch.device('cuda', 0))
            with getattr(learn, to)().parallel_ctx([0, 1], sync_bn=sync_bn): learn.fit(1)
            res.append(learn.kinds.seen)
    return res


def test_half_precision(fake_gpu_worlds):
    "A thread of each GPU's has that which was asked for: of itself it has float16, which to_bf16 does not scale gradients for"
    assert fake_gpu_worlds(1)(half) == [[{'torch.float16'}]*2+[{'torch.bfloat16'}]*2]


def apart():
    one = trained_on('norm', 'even', one=True)
    return one, *[trained_on('norm', way, sync_bn=False) for way in ('even', 'even dp')]


def test_statistics_of_each_part(fake_gpu_worlds):
    "sync_bn=False: as torch's DataParallel has them"
    [(one, many, again)] = fake_gpu_worlds(1)(apart)
    assert diff(one.weights, many.weights) > 1e-3 and diff(many.weights, again.weights) == 0


class Fails(nn.Module):
    "The part of GPU 1 fails before its batch norm, or leaves it out: the others wait there for it"
    def __init__(self, how):
        super().__init__()
        self.first, self.norm, self.last, self.how = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), how
    def forward(self, x):
        mine = x.device.index == 1
        if self.how == 'error' and mine: raise ZeroDivisionError('in a part')
        x = self.first(x)
        return self.last(x if self.how == 'left out' and mine else self.norm(x))


def failing(how):
    import fastdist.all
    learn = quiet(learner(n=10, bs=5, model=lambda: Fails(how).double()))
    learn.dls.to(torch.device('cuda', 0))
    model, text = learn.model, None
    with learn.parallel_ctx([0, 1, 2]):
        try: learn.fit(1)
        except Exception as e: text = f'{type(e).__name__}: {e}'
        learn.model.how = ''
        learn.fit(1)
        return text, learn.model is model, len(learn.recorder.losses)


def test_a_part_that_fails(fake_gpu_worlds):
    "The others, which wait for its batch norm, end with it; the next fit trains"
    [(text, same, n)] = fake_gpu_worlds(1)(failing, 'error')
    assert text.startswith('ZeroDivisionError: ') and 'in a part' in text and same and n == 2
    [(text, same, n)] = fake_gpu_worlds(1)(failing, 'left out')
    assert text.startswith('RuntimeError: ') and 'waits for the one of GPU 1' in text and 'sync_bn=False' in text and same and n == 2


def refused():
    import fastdist.all
    res = []
    def text(f):
        try: f()
        except Exception as e: res.append(f'{type(e).__name__}: {e}')
    learn = quiet(learner(n=9, bs=4))
    learn.dls.to(torch.device('cuda', 0))
    text(lambda: learn.to_parallel(sync_bn=1))
    text(lambda: learn.to_parallel([0, 9]))
    learn.model.reset = noop
    for gpus in [0, 1], [0]:
        with learn.parallel_ctx(gpus): text(lambda: learn.fit(1))
    return res


def test_what_cannot_be(fake_gpu_worlds):
    "Two arguments, and a model with a state from batch to batch, unless one GPU has it all"
    [(sync, gpu, state)] = fake_gpu_worlds(1)(refused)
    assert sync.startswith('ValueError: ') and 'sync_bn=1' in sync and gpu.startswith('ValueError: ') and '[9]' in gpu
    assert state.startswith('ValueError: ') and 'Sequential' in state and 'distrib_ctx' in state


class FailsLast(Callback):
    order = 1001 # after what takes the place of the model
    def before_batch(self): raise KeyError('a bug')


@pytest.mark.parametrize('gpus', [None, 'dp'])
def test_failed_before_the_forward(gpus):
    "The learner has its model again"
    from fastdist.all import ParallelTrainer
    learn = quiet(learner())
    model = learn.model
    with pytest.raises(KeyError): learn.fit(1, cbs=[ParallelTrainer(None), FailsLast()])
    assert learn.model is model
    with pytest.raises(KeyError), around(learn, gpus): learn.fit(1, cbs=FailsLast())
    assert learn.model is model


class Evaluates(Callback):
    "Evaluates after the first batch, and after the first epoch"
    order, busy = 70, False
    def once(self, at):
        if self.busy or at in vars(self): return
        setattr(self, at, True)
        self.busy = True
        was = {k: getattr(self.learn, k) for k in ('epoch', 'train_iter', 'pct_train', 'dl', 'iter', 'n_iter', 'training')}
        self.learn.validate()
        for k, v in was.items(): setattr(self.learn, k, v)
        self.learn.model.train(self.training)
        self.busy = False
    def after_batch(self):
        if self.training: self.once('in_epoch')
    def after_epoch(self): self.once('behind_it')


def test_an_evaluation_in_a_fit():
    "The fit goes on, with the numbers that it has without `parallel_ctx`"
    import fastdist.all
    one, learn = quiet(learner(cbs=Evaluates())), quiet(learner(cbs=Evaluates()))
    one.fit(2)
    with learn.parallel_ctx(): learn.fit(2)
    assert diff({k: v.cpu() for k, v in one.model.state_dict().items()}, {k: v.cpu() for k, v in learn.model.state_dict().items()}) < 1e-12


class Looks(Callback):
    "Passes over the first batch, and evaluates within the fit"
    def before_batch(self):
        if self.training and self.learn.train_iter == 0 and self.iter == 0: raise CancelBatchException()
    def after_train(self): self.learn.get_preds()


def looked(ctx=None):
    import fastdist.all
    learn = quiet(learner(n=11, bs=4, cbs=Looks()))
    with contextlib.nullcontext() if ctx is None else getattr(learn, ctx[0])(**ctx[1]): learn.fit(2)
    return weights(learn)


@pytest.mark.parametrize('ctx', [('parallel_ctx', {}), ('distrib_ctx', dict(strategy='dp'))], ids=['context', 'dp'])
def test_a_first_batch_without_a_forward_and_an_evaluation_in_the_fit(ctx):
    "The end of the evaluation dropped what the fit went on with; here on the CPU"
    assert diff(looked(), looked(ctx)) == 0
