"Activations that are computed again, and torch.compile: step for step the training without them. (strategy/test_strategy_models.py has both with each strategy)"
import pytest, torch

from learners import *


def with_bn(dropout):
    torch.manual_seed(3)
    block = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(16, 8))
    return nn.Sequential(nn.Linear(4, 8), block, nn.Linear(8, 3)).double()


def fitted(dropout=0., backend=None, n=20, **ctx):
    "A fit whose last batch, of 20 samples, is too small for each of three workers to have a share: weights, values, and how many graphs were compiled"
    import fastdist.all
    from accelerate.utils import TorchDynamoPlugin
    from torch._dynamo import reset  # not as torch._dynamo: cloudpickle would send the module's parts
    from torch._dynamo.utils import counters
    reset()
    learn, graphs = quiet(learner(n=n, bs=6, model=partial(with_bn, dropout), lr=0.01, metrics=accuracy)), counters['stats']['unique_graphs']
    if backend: ctx['dynamo_plugin'] = TorchDynamoPlugin(backend=backend, fullgraph=True)
    with learn.distrib_ctx(split_batches=True, **ctx):
        learn.fit(2)
        assert torch.isfinite(learn.get_preds()[0]).all()
    assert not any('forward' in vars(m) for m in learn.model.modules())
    return weights(learn), [list(v) for v in learn.recorder.values], counters['stats']['unique_graphs']-graphs


def same(a, b): return diff(a[0], b[0]) < 1e-10 and all(diff(v, w) < 1e-6 for v, w in zip(a[1], b[1], strict=True))


def test_recomputed(world3):
    "The same dropout, and statistics of batch norm that count a batch once"
    for want, got in zip(world3(fitted, .3), world3(fitted, .3, activation_checkpointing=True)): assert same(want, got)


@pytest.mark.parametrize('backend,n', [('aot_eager', 20), ('inductor', 12)])
def test_compiled(world3, backend, n):
    "Batch norm over the global batch is part of the one graph; by inductor, a C++ compiler makes code of it"
    for want, got in zip(world3(fitted, n=n), world3(fitted, backend=backend, n=n)): assert same(want, got) and got[2] > 0


def no_compiler():
    "The error without a C++ compiler"
    from importlib import import_module
    config = import_module('torch._inductor.config') # not by an import: cloudpickle would send the module
    with config.patch({'cpp.cxx': ('/no/such/compiler',), 'force_disable_caches': True}):
        try: fitted(backend='inductor')
        except Exception as e: return f'{type(e).__name__}: {e}'


def test_no_compiler(world2):
    "Without a C++ compiler there is an error, and no training without compiling"
    for e in world2(no_compiler): assert 'ompiler' in e, e
