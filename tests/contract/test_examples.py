"P1: fastai's own example scripts, in examples/fastai, on 2 workers or on 3. In float64, without dropout and random crops: what is left is the order of sums"
import importlib, sys

import pytest
from harness import ROOT
from table import *

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


@pytest.mark.parametrize('n,name', [(2+i % 2, o) for i, o in enumerate(NAMES)])
def test_numbers_of_one_process(worlds, folder, n, name):
    a = ran(name, folder, False)
    for m in worlds(n)(ran, name, folder, True):
        assert diff(a.weights, m.weights) < (1e-6 if name in FLOAT32 else 1e-12)
        for o in ('losses','values','validated'): assert diff(getattr(a, o), getattr(m, o)) < 1e-6*max(1, *a.losses)
        assert max(diff(p, q) for p, q in zip(a.preds, m.preds, strict=True)) < 1e-6
        assert len(a.losses) > 1
