"fastai's own callbacks beside one process: loggers, half precision, hooks. (The contract has others.)"
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


def fitted(distrib, nm):
    "In half precision, which fastai leaves out on a CPU, but for what its callback does around the step"
    from fastai.callback.channelslast import ChannelsLast
    from fastai.callback.training import GradientClip
    warnings.simplefilter('ignore')
    cbs = [ChannelsLast()] if nm == 'to_bf16' else [GradientClip(.05), GradientAccumulation(10)]
    learn = quiet(learner(n=23, bs=5, metrics=accuracy, cbs=cbs, model=conv, dtype=torch.float32, loss=CrossEntropyLossFlat()))
    getattr(learn, nm)()
    with ctx_of(learn, distrib): learn.fit(2)
    return weights(learn), [float(o) for o in learn.recorder.losses], [[o for o in v if not isinstance(o, str)] for v in learn.recorder.values]


@pytest.mark.parametrize('nm', ['to_fp16', 'to_bf16'])
def test_half_precision(world2, nm):
    w, losses, values = fitted(False, nm)
    for w1, l1, v1 in world2(fitted, True, nm): assert diff(w, w1) < 2e-6 and diff(losses, l1) < 2e-6 and diff(values, v1) < 2e-6


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


def with_runs(ranks, folder, **run):
    "A fit in which these ranks have a run of W&B's open"
    import os, fastdist.all, wandb
    from fastdist.world import get_rank
    os.environ.update(WANDB_MODE='offline', WANDB_SILENT='true')
    if get_rank() in ranks: wandb.init(project='test', dir=str(folder), **run)
    try:
        learn = quiet(learner())
        with learn.distrib_ctx(): learn.fit(2)
    finally: wandb.finish()


@pytest.mark.parametrize('ranks,run,said', [([0, 1], {}, 1), ([0, 1], dict(group='workers'), 0), ([0], {}, 0)], ids=['all', 'a group', 'rank 0'])
def test_a_run_in_each_worker(world2, tmp_path, ranks, run, said):
    "Is told, once, unless they are a group of W&B's, which are one run a worker"
    world2(with_runs, ranks, tmp_path, **run)
    assert [o.count('rank 1 has a run of wandb open') for o in world2.output] == [0, said], world2.output


def looked_at(distrib, **ctx):
    from fastai.callback.data import CollectDataCallback
    from fastai.callback.hook import hook_outputs
    learn = quiet(learner(n=21, n_val=13, bs=4, dtype=torch.float32, model=conv, loss=CrossEntropyLossFlat(), shuffle=False))
    data = CollectDataCallback()
    with ctx_of(learn, distrib, **ctx):
        learn.fit(1, cbs=data)
        with hook_outputs([learn.model[1]]) as h: preds = learn.get_preds()[0]
        shape = h.stored[0].shape
        text = str(learn.summary()).split('Callbacks:')[0].split('Total params')[1].split('Optimizer')[0] # the batch it takes is this worker's share
    return shape[1:], len(preds), text


def test_hooks_and_summary(world3):
    "The last batch has a sample for one worker of three"
    want = looked_at(False)
    for strategy in 'ddp', 'fsdp':
        for got in world3(looked_at, True, strategy=strategy): assert got == want


def refused():
    from fastai.callback.fp16 import NonNativeMixedPrecision
    learn = quiet(learner(n=21, dtype=torch.float32, cbs=NonNativeMixedPrecision()))
    try:
        with ctx_of(learn, True): learn.fit(1)
    except ValueError as e: return str(e)


def test_refused(world2): assert all('use learn.to_fp16()' in o for o in world2(refused))
