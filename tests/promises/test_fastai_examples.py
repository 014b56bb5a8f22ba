"""fastai's own example scripts, in examples/fastai: on 2 and 3 workers they end with the weights, losses, metrics and predictions of one process.

In float64, without dropout and random crops: what is left is the order of sums. As they stand, they run under the launchers."""
import contextlib, importlib, re, sys

import pytest
from harness import ROOT, launched
from learners import *

FOLDER = ROOT/'examples'/'fastai'
NAMES = dict(image_classifier={}, imagenette=dict(epochs=1, min_scale=1., flip=0.), segmentation=dict(bs=16), keypoints=dict(epochs=1), tabular=dict(epochs=1), collab=dict(epochs=1),
             collab_nn=dict(epochs=1, use_nn=True), text_classifier={}, from_pytorch=dict(epochs=1, n=300), dataloader_spawn=dict(num_workers=0, batch_tfms=[]))
FLOAT32 = 'image_classifier', 'segmentation', 'keypoints', 'tabular', 'collab', 'collab_nn', 'text_classifier'  # fastai's flattened losses, and its RNNRegularizer


class Exactly(Callback):
    "Trains in float64 and without dropout, so that the numbers of workers can be compared"
    order = -100
    def before_fit(self):
        from fastai.text.models.awdlstm import EmbeddingDropout, RNNDropout, WeightDropout
        self.learn.model.double()
        for m in self.learn.model.modules():
            if isinstance(m, (nn.Dropout, nn.Dropout2d, RNNDropout)): m.p = 0.
            if isinstance(m, EmbeddingDropout): m.embed_p = 0.
            if isinstance(m, WeightDropout): m.weight_p = 1e-12 # 0 fails in torch 2.15
    before_validate = before_fit
    def before_batch(self):
        double = lambda o: o.double() if isinstance(o, Tensor) and o.is_floating_point() else o
        self.learn.xb, self.learn.yb = tuple(map(double, self.xb)), tuple(map(double, self.yb))
    def after_loss(self): self.learn.loss = self.loss.float() # as fastai's recorder needs it


def ran(name, folder, distrib):
    "A run of the example's `main`, and an evaluation afterwards"
    from fastai.basics import defaults # not this module's, of which workers get a copy
    sys.path.insert(0, str(FOLDER))
    was = defaults.callbacks
    defaults.callbacks = [o for o in was if o is not ProgressCallback]+[Exactly]
    try:
        main = importlib.import_module(name.removesuffix('_nn')).main
        images = folder and name in ('image_classifier', 'imagenette', 'segmentation', 'keypoints', 'dataloader_spawn')
        path = dict(path=folder/'images' if name == 'imagenette' else folder) if images else {}
        with contextlib.redirect_stdout(None): learn = main(split_batches=True, **path, **NAMES[name])
        rec = learn.recorder
        res = SimpleNamespace(weights=weights(learn), losses=[float(o) for o in rec.losses], values=[list(v) for v in rec.values])
        with learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext(), learn.no_bar():
            val = learn.dls.valid
            res.preds = learn.get_preds(**({} if hasattr(val, 'new') else dict(dl=val, reorder=False)))
            res.validated = list(learn.validate())
        return res
    finally:
        sys.path.remove(str(FOLDER))
        defaults.callbacks = was


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "Images of shapes, fewer than the examples draw"
    sys.path.insert(0, str(FOLDER))
    try: return importlib.import_module('shapes').get_shapes(tmp_path_factory.mktemp('shapes'), n=44, size=36)
    finally: sys.path.remove(str(FOLDER))


@pytest.fixture(scope='module')
def one(folder):
    done = {}
    def f(name): return done[name] if name in done else done.setdefault(name, ran(name, folder, False))
    return f


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('world', [2, 3])
def test_numbers_of_one_process(worlds, one, folder, name, world):
    a = one(name)
    for m in worlds(world)(ran, name, folder, True):
        assert diff(a.weights, m.weights) < (1e-6 if name in FLOAT32 else 1e-12)
        for o in ('losses','values','validated'): assert diff(getattr(a, o), getattr(m, o)) < 1e-6*max(1, *a.losses)
        assert max(diff(p, q) for p, q in zip(a.preds, m.preds, strict=True)) < 1e-6
        assert len(a.losses) > 1


PYTHON = [sys.executable]
FASTDIST = [*PYTHON, '-m', 'fastdist', 'launch', '-n', '2']
ACCELERATE = [*PYTHON, '-m', 'accelerate.commands.launch', '--multi_gpu', '--main_process_port', '0', '--num_processes', '2']
NOTEBOOK = 'from accelerate import notebook_launcher; from collab import main; notebook_launcher(main, (1,), num_processes=2)'


@pytest.mark.parametrize('cmd,fits', [
    pytest.param([*FASTDIST, FOLDER/'image_classifier.py', '--path', 'shapes'], 2, id='fastdist-image_classifier'),
    pytest.param([*FASTDIST, FOLDER/'imagenette.py', '--epochs', '1', '--mixup', '0.4', '--path', 'shapes/images'], 1, id='fastdist-imagenette'),
    pytest.param([*ACCELERATE, FOLDER/'tabular.py', '--epochs', '1'], 1, id='accelerate-tabular'),
    pytest.param([*PYTHON, '-c', NOTEBOOK], 1, id='notebook_launcher-collab')])
def test_as_they_stand(cmd, fits, folder, tmp_path):
    "With their augmentations and dropout: each fit shows one table, with numbers in each column"
    (tmp_path/'shapes').symlink_to(folder)
    r = launched(cmd, 120, env={'ACCELERATE_USE_CPU': 'true', 'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': f'{ROOT}:{FOLDER}'}, cwd=tmp_path)
    assert r.returncode == 0 and not r.left, r.stderr[-3000:]
    lines = [o.rpartition('\r')[2] for o in r.stdout.split('\n')]
    assert sum('train_loss' in o for o in lines) == fits, r.stdout
    assert len([o for o in lines if re.match(r'0( +\d+\.\d+){3,} +\d\d:\d\d', o)]) == fits, r.stdout
