"Activations that are computed again, kept in CPU memory, and torch.compile, under each strategy: step for step the training without them"
import pytest, torch
from strategies import *


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(9, 6))
    def forward(self, x): return x+self.layers(x)


def blocks(dropout):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), Block(dropout), Block(dropout), nn.Linear(6, 3)).double()


def fitted(ctx, dropout=0., n=20):
    """A fit, of 20 samples one whose last batch is too small for each of three workers to have a share: weights, values, how often a block
    has been computed in training, and how many graphs were compiled"""
    import fastdist.all
    from torch._dynamo import reset  # not as torch._dynamo: cloudpickle would send the module's parts
    from torch._dynamo.utils import counters
    reset()
    compiles = any(o.startswith('dynamo') for o in ctx)
    learn, runs = quiet(learner(n=n, bs=6, model=partial(blocks, dropout), opt=Adam, lr=.01, metrics=accuracy)), []
    with learn.distrib_ctx(**{**dict(split_batches=True), **ctx}):
        h = learn.model[1].layers[0].register_forward_hook(lambda m, *_: runs.append(1) if m.training and not compiles else None)
        graphs = counters['stats']['unique_graphs']
        learn.fit(2)
        graphs = counters['stats']['unique_graphs']-graphs
        h.remove()
        assert torch.isfinite(learn.get_preds()[0]).all()
    assert not any('forward' in vars(m) for m in learn.model.modules())
    return weights(learn), [list(v) for v in learn.recorder.values], len(runs), graphs


def same(a, b): return diff(a[0], b[0]) < 1e-10 and all(diff(v, w) < 1e-6 for v, w in zip(a[1], b[1], strict=True))


WAYS = dict(again=dict(activation_checkpointing=True), classes=dict(activation_checkpointing=Block),
            offload=dict(activation_checkpointing=True, offload_to_cpu=True))


@pytest.mark.parametrize('strategy,way', [('ddp', 'again'), ('zero1', 'classes'), ('zero2', 'offload'), ('fsdp', 'classes')])
def test_computed_again(world3, strategy, way):
    "With the same dropout, and statistics of batch norm that count a batch once"
    plain, again = (world3(fitted, ctx_of(strategy, **kw), .3) for kw in ({}, WAYS[way]))
    for a, b in zip(plain, again): assert same(a, b) and (a[2], b[2]) == (8, 16), (a[2], b[2])


def compiled(strategy, **kwargs):
    from accelerate.utils import TorchDynamoPlugin
    return ctx_of(strategy, dynamo_plugin=TorchDynamoPlugin(**kwargs))


@pytest.mark.parametrize('strategy,backend', [('ddp', 'inductor'), ('zero2', 'aot_eager'), ('fsdp', 'aot_eager')])
def test_compiled(world2, strategy, backend):
    "Batch norm over the global batch is part of the one graph; by inductor, a C++ compiler makes code of it"
    ctx = compiled(strategy, backend=backend, fullgraph=strategy == 'ddp')
    plain, fast = world2(fitted, ctx_of(strategy), n=12), world2(fitted, ctx, n=12, timeout=300)
    for a, b in zip(plain, fast): assert same(a, b) and b[3] > 0 == a[3], (a[3], b[3])


def test_compiled_and_all_else(world2):
    "Computed again, kept in CPU memory, with gradients that wait for a step of two batches"
    steps = dict(gradient_accumulation_steps=2)
    plain, fast = (world2(fitted, ctx_of('ddp', **steps, **kw), timeout=300) for kw in ({},
        dict(dynamo_backend='aot_eager', **WAYS['offload'])))
    for a, b in zip(plain, fast): assert same(a, b) and b[3] > 0


def no_compiler():
    from importlib import import_module
    config = import_module('torch._inductor.config')  # not by an import: cloudpickle would send the module
    with config.patch({'cpp.cxx': ('/no/such/compiler',), 'force_disable_caches': True}):
        try: fitted(dict(dynamo_backend='inductor'))
        except Exception as e: return f'{type(e).__name__}: {e}'


def test_no_compiler(world2):
    "Without a C++ compiler there is an error, and no training without compiling"
    for e in world2(no_compiler): assert 'ompiler' in e, e
