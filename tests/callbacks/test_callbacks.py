"fastai's own callbacks on 2 workers, beside one process: the table in the docs, row by row"
import contextlib, warnings

import pytest, torch

from learners import *


def ctx_of(learn, distrib, **kwargs):
    if not distrib: return contextlib.nullcontext()
    import fastdist.all
    return learn.distrib_ctx(split_batches=True, **kwargs)


def conv():
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def frozen_bn():
    m = conv()
    for p in m[2].parameters(): p.requires_grad_(False)
    return m


def noisy(model=None): return dict(model=model or conv, dtype=torch.float32, loss=CrossEntropyLossFlat())


def change(nm):
    "(callbacks, changes to the learner, how to build it)"
    from fastai.callback.channelslast import ChannelsLast
    from fastai.callback.hook import ActivationStats
    from fastai.callback.training import BnFreeze, GradientClip
    from fastai.callback.tracker import TerminateOnNaNCallback
    return dict(
        none=lambda: ([], None, noisy()), fp16=lambda: ([], 'to_fp16', noisy()), bf16=lambda: ([], 'to_bf16', noisy()),
        BnFreeze=lambda: ([BnFreeze()], None, noisy(frozen_bn)), ChannelsLast=lambda: ([ChannelsLast()], None, noisy()),
        GradientClip=lambda: ([GradientClip(0.05)], None, noisy()), GradientAccumulation=lambda: ([GradientAccumulation(10)], None, noisy()),
        fp16_clip_accumulate=lambda: ([GradientClip(0.05), GradientAccumulation(10)], 'to_fp16', noisy()),
        TerminateOnNaN=lambda: ([TerminateOnNaNCallback()], None, noisy()))[nm]()


def fitted(distrib, nm):
    warnings.simplefilter('ignore')
    cbs, to, kw = change(nm)
    learn = quiet(learner(n=23, bs=5, metrics=accuracy, cbs=cbs, **kw))
    if to: getattr(learn, to)()
    with ctx_of(learn, distrib): learn.fit(2)
    return weights(learn), [float(o) for o in learn.recorder.losses], [[o for o in v if not isinstance(o, str)] for v in learn.recorder.values]


EXACT = ['none', 'fp16', 'bf16', 'BnFreeze', 'ChannelsLast', 'GradientClip', 'GradientAccumulation', 'fp16_clip_accumulate', 'TerminateOnNaN']


@pytest.mark.parametrize('nm', EXACT)
def test_as_in_one_process(world2, nm):
    w, losses, values = fitted(False, nm)
    for w1, l1, v1 in world2(fitted, True, nm): assert diff(w, w1) < 2e-6 and diff(losses, l1) < 2e-6 and diff(values, v1) < 2e-6


def in_two_fits(distrib, strategy):
    from fastai.callback.channelslast import ChannelsLast
    def model(): return nn.Sequential(nn.Unflatten(1, (2, 2, 1)), nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    learn = quiet(learner(n=13, bs=5, cbs=ChannelsLast(), **noisy(model)))
    with ctx_of(learn, distrib, strategy=strategy):
        learn.fit(1)
        learn.get_preds()
        learn.fit(1)
    learn.fit(1)
    return weights(learn), learn.model[1].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize('strategy', ['zero2', 'fsdp'])
def test_channels_last_with_shards(world2, strategy):
    w, last = in_two_fits(False, strategy)
    for w1, last1 in world2(in_two_fits, True, strategy): assert diff(w, w1) < 2e-6 and last and last1


def mixed(nm):
    from fastai.callback.mixup import CutMix, MixUp
    learn = quiet(learner(n=23, bs=5, metrics=accuracy, dtype=torch.float32, model=conv, loss=CrossEntropyLossFlat(), cbs=(CutMix if nm == 'CutMix' else MixUp)(0.4)))
    if nm == 'CutMix': # it cuts pictures
        learn.model = nn.Sequential(nn.Flatten(), *learn.model)
        for dl in learn.dls.loaders: dl.dataset.x = dl.dataset.x.view(-1, 1, 2, 2)
    with ctx_of(learn, True): learn.fit(3)
    return weights(learn), [float(o) for o in learn.recorder.losses], learn.recorder.values[-1][:3]


@pytest.mark.parametrize('nm', ['MixUp', 'CutMix'])
def test_augmentations_that_mix(world2, nm):
    "What is mixed is drawn by each worker for its share: workers end alike, not as one process, which draws once for a batch"
    a, b = world2(mixed, nm)
    assert diff(a[0], b[0]) == 0 and a[1:] == b[1:] and all(o == o for o in a[1])


def logged(distrib, folder, gpus=False):
    "Files of the loggers, and who wrote them"
    warnings.simplefilter('ignore')
    import os
    os.environ.update(WANDB_MODE='offline', WANDB_SILENT='true', WANDB_DIR=str(folder))
    import wandb
    from fastai.callback.progress import CSVLogger
    from fastai.callback.tensorboard import TensorBoardCallback
    import fastai.callback.wandb as fw
    from fastdist.callbacks.loggers import is_logger
    from fastdist.world import get_rank
    init_args = fw.init_args # of fastcore 2.2, which fails on numbers: with it fastai 2.8.12's callback works nowhere
    fw.init_args = lambda o: init_args(o) if hasattr(o, '__dict__') else {}
    class MyLogger(CSVLogger):
        "As a user would derive one; here it also evaluates, which must not wait for other workers"
        def after_epoch(self):
            self.seen = len(self.learn.get_preds(inner=True)[0])
            if self.epoch == 0: # as a fit's end, and as one of its own, of which the others know nothing
                learn = self.learn
                with learn.removed_cbs([o for o in learn.cbs if is_logger(o)]): learn.validate()
    learn = learner(n=23, n_val=13, bs=4, metrics=accuracy, path=folder, dtype=torch.float32, loss=CrossEntropyLossFlat())
    learn.remove_cbs(learn._grab_cbs(ProgressCallback))
    if gpus: learn.dls.to(torch.device('cuda', torch.cuda.current_device()))
    before = list(learn.cbs)
    if get_rank() == 0: wandb.init(project='test', dir=str(folder))
    mine = MyLogger('mine.csv')
    with ctx_of(learn, distrib):
        with learn.no_logging(): learn.fit(2, cbs=[CSVLogger(), mine, TensorBoardCallback(log_dir=f'{folder}/tb', trace_model=False, log_preds=False)])
        with learn.no_logging(): learn.fit(1, cbs=fw.WandbCallback(log=None, log_preds=False, log_model=False))
        learn.fit(1, cbs=ProgressCallback())
        loss = float(learn.validate()[0])
    if get_rank() == 0: wandb.finish()
    return list(learn.cbs) == before, getattr(mine, 'seen', None), loss


def csv(folder): return [line.rsplit(',', 1)[0] for line in (folder/'history.csv').read_text().splitlines()]


@pytest.mark.parametrize('gpus', [False, True])
def test_loggers(request, gpus, tmp_path):
    one, many = tmp_path/'one', tmp_path/'many'
    for o in (one, many): o.mkdir()
    want, got = logged(False, one), request.getfixturevalue('gpu_worlds' if gpus else 'worlds')(2)(logged, True, many, gpus)
    assert want[0] and all(o[0] for o in got) and want[1] == 13 and [o[1] for o in got] == [13, None]
    assert all(abs(o[2]-want[2]) < 1e-6 for o in got)
    a, b = csv(one), csv(many)
    assert len(a) == len(b) == 3 and a[0] == b[0]
    for x, y in zip(a[1:], b[1:]): assert diff([float(o) for o in x.split(',')], [float(o) for o in y.split(',')]) < 1e-5
    for o in (one, many): assert len(list((o/'tb').glob('events*'))) == 1 and len(list((o/'wandb').glob('offline-run*'))) == 1


def predictions_logged(folder):
    "W&B's callback fetches predictions, in rank 0 alone"
    warnings.simplefilter('ignore')
    import os
    os.environ.update(WANDB_MODE='offline', WANDB_SILENT='true')
    from fastai.callback.core import FetchPredsCallback
    from fastdist.world import get_rank
    from fastdist.callbacks.loggers import is_logger
    class AddsAnother(Callback):
        "As WandbCallback(log_preds=True) does"
        def before_fit(self):
            self.fetch = FetchPredsCallback(with_input=True)
            self.learn.add_cb(self.fetch)
        def after_fit(self): self.learn.remove_cb(self.fetch)
    AddsAnother.__module__ = 'fastai.callback.wandb' # one of those that are in rank 0 alone
    learn = quiet(learner(n=23, n_val=13, bs=4, metrics=accuracy))
    cb = AddsAnother()
    with ctx_of(learn, True): learn.fit(2, cbs=cb)
    return len(cb.fetch.preds[1]) if get_rank() == 0 else hasattr(cb, 'fetch'), weights(learn)


def test_predictions_for_a_logger(world2, tmp_path):
    (n, w0), (has, w1) = world2(predictions_logged, tmp_path)
    assert n == 13 and not has and diff(w0, w1) == 0


def looked_at(distrib):
    from fastai.callback.data import CollectDataCallback
    from fastai.callback.hook import ActivationStats, hook_outputs
    learn = quiet(learner(n=21, n_val=13, bs=4, dtype=torch.float32, model=conv, loss=CrossEntropyLossFlat(), shuffle=False))
    stats, data = ActivationStats(with_hist=True), CollectDataCallback()
    with ctx_of(learn, distrib):
        learn.fit(1, cbs=[stats, data])
        with hook_outputs([learn.model[1]]) as h: preds = learn.get_preds()[0]
        shape = h.stored[0].shape
        text = str(learn.summary()).split('Callbacks:')[0].split('Total params')[1].split('Optimizer')[0] # the batch it takes is this worker's share
    return shape[1:], len(preds), text, [[[v for v in d.values() if not isinstance(v, torch.Tensor)] + d['hist'].tolist() for d in o] for o in stats.stats], [sorted(d) for d in stats.stats[0]], len(data.data)


def test_hooks_and_summary(world3):
    "`ActivationStats` of whole batches; the last one has a sample for one worker of three"
    want = looked_at(False)
    for got in world3(looked_at, True): assert got[:3] == want[:3] and diff(got[3], want[3]) < 2e-6 and got[4] == want[4] and len(got[3]) == 6


class SecondLater(nn.Module):
    "Its second layer does not run in the first batch"
    def __init__(self):
        super().__init__()
        self.a, self.b, self.n = nn.Linear(4, 3), nn.Linear(4, 3), 0
    def forward(self, x):
        self.n += 1
        return self.a(x)+(self.b(x) if self.n > 1 else 0.*(self.b.weight.sum()+self.b.bias.sum()))


def stats_of(distrib, alone=False):
    from fastai.callback.hook import ActivationStats
    from fastdist.world import get_rank
    torch.manual_seed(3)
    learn = quiet(learner(n=22, bs=4, model=lambda: SecondLater().double()))
    stats = ActivationStats()
    with ctx_of(learn, distrib): learn.fit(1, cbs=[stats] if not alone or get_rank() == 0 else [])
    return [[d and d['mean'] for d in o] for o in getattr(stats, 'stats', [])]


def test_stats_of_a_layer_that_has_not_run_and_of_one_worker(world2):
    want = stats_of(False)
    assert want[0][1] is None and all(d is not None for o in want[1:] for d in o)
    for got in world2(stats_of, True): assert got[0][1] is None and diff(got[0][0], want[0][0]) < 2e-6 and diff(got[1:], want[1:]) < 2e-6
    assert [len(o) for o in world2(stats_of, True, alone=True)] == [len(want), 0] # the other waited for the watchdog


def refused():
    from fastai.callback.fp16 import NonNativeMixedPrecision
    learn = quiet(learner(n=21, dtype=torch.float32, cbs=NonNativeMixedPrecision()))
    try:
        with ctx_of(learn, True): learn.fit(1)
    except ValueError as e: return str(e)


def test_refused(world2): assert all('use learn.to_fp16()' in o for o in world2(refused))


def stats_in_rank_0():
    from fastai.callback.hook import ActivationStats
    from fastdist.world import get_rank
    import fastdist.all
    learn, stats = quiet(learner(n=24, bs=6)), ActivationStats()
    with learn.distrib_ctx(split_batches=True, watchdog=20): learn.fit(1, cbs=stats if get_rank() == 0 else None)
    return weights(learn), len(getattr(stats, 'stats', ()))


def test_activation_stats_of_one_worker(world2):
    "Those of its share: nobody waits for them"
    (a, n), (b, none) = world2(stats_in_rank_0)
    assert diff(a, b) == 0 and (n, none) == (4, 0)


def named_alike(kinds):
    "A model has attributes of the names that our callbacks set: fastai warns of each, where a callback asks whether the learner has it"
    import tempfile
    from fastdist.all import DivergenceCheck, Resume
    from fastdist.world import get_world_size, rank0_read
    for kind in kinds:
        learn = quiet(learner(n=23, bs=5))
        with tempfile.TemporaryDirectory() as folder:
            folder = rank0_read(lambda: folder)
            cbs = dict(check=lambda: [DivergenceCheck(every=2)], resume=lambda: [Resume(folder, every=2)], steps=list)[kind]()
            kw = dict(gradient_accumulation_steps=2) if kind == 'steps' else {}
            with learn.distrib_ctx(**kw):
                for o in [*cbs, *learn.cbs]:
                    if type(o).__module__.startswith('fastdist'): vars(learn.model).update({k: 0 for k in vars(o) if k != 'learn' and not hasattr(learn.model, k)})
                with warnings.catch_warnings():
                    warnings.simplefilter('error')
                    learn.fit(1, cbs=cbs)
    return get_world_size()


@pytest.mark.parametrize('world', [1, 2])
def test_model_has_the_same_names(worlds, world):
    kinds = ['check', 'resume', 'steps']
    assert (worlds(world)(named_alike, kinds) if world > 1 else [named_alike(kinds)]) == [world]*world
