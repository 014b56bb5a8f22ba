"Activations that are computed again in the backward pass: the same training to rounding, in every mode of having the model on many workers"
import contextlib, pickle

import pytest, torch

from learners import *


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


class Residual(nn.Module):
    "Takes and returns a tuple"
    def __init__(self, n, bn):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n, 11), *([nn.BatchNorm1d(11)] if bn else []), nn.Tanh(), nn.Linear(11, n))
    def forward(self, xs, *, scale=1.): return xs[0] + self.layers(xs[0])*scale, xs[1]+1


class Deep(nn.Module):
    "Blocks in a list, between layers of the model's own"
    def __init__(self, bn=False, n=5, repeat=1):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks, self.last, self.repeat = nn.Linear(4, n), nn.ModuleList(Residual(n, bn) for _ in range(3)), nn.Linear(n, 3), repeat
        self.double()
    def forward(self, x):
        xs = self.first(x), 0
        for _ in range(self.repeat):
            for b in self.blocks: xs = b(xs, scale=.5)
        return self.last(xs[0])


def batches(steps=3, n=12):
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=g, dtype=torch.float64), torch.randn(n, 3, generator=g, dtype=torch.float64)) for _ in range(steps)]


def trained_raw(recompute=True, wrap=None, bn=False, lr=0.1, repeat=1, offload=False, before=True):
    "The weights after a few steps, each worker with its part of the batch; and how many times a block ran in a step"
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from fastdist.model.units import checkpoint_activations
    from fastdist.model.batchnorm import global_batch_norm, norm_scope_of
    from fastdist.model.units import units
    from fastdist.world import get_rank, get_world_size
    if wrap and not dist.is_initialized(): dist.init_process_group('gloo')
    rank, size = (get_rank(), get_world_size()) if wrap else (0, 1)
    model, runs = Deep(bn, repeat=repeat), []
    model.blocks[0].layers[0].register_forward_pre_hook(lambda *_: runs.append(1))
    norms = contextlib.ExitStack()
    if wrap:
        norms.enter_context(global_batch_norm(model))
        norms.enter_context(norm_scope_of('global'))
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    def put():
        undo = checkpoint_activations(model, Residual, offload_to_cpu=offload) if recompute else noop
        assert list(model.state_dict()) == keys and [type(m) for m in model.modules()] == classes
        return undo
    undo, fwd = put() if before else noop, model
    if wrap == 'fsdp':
        blocks = units(model, min_numel=1)
        assert blocks == list(model.blocks)
        for b in blocks: fully_shard(b)
        fully_shard(model)
    if wrap == 'ddp': fwd = DistributedDataParallel(model, broadcast_buffers=False)
    if not before:
        classes = [type(m) for m in model.modules()]
        undo = put()
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for x, y in batches():
        runs.clear()
        F.mse_loss(fwd(x.chunk(size)[rank]), y.chunk(size)[rank]).backward()
        opt.step()
        opt.zero_grad()
    n_runs = len(runs)
    model.eval()
    runs.clear()
    with torch.no_grad(): fwd(x)
    assert len(runs) == repeat
    undo()
    norms.close()
    assert not any({'forward', '__getstate__'} & vars(m).keys() for m in model.modules())
    full = lambda t: (t.full_tensor() if hasattr(t, 'full_tensor') else t).detach().clone()
    return {k: full(v) for k, v in model.state_dict().items()}, n_runs


@pytest.mark.parametrize('bn', [False, True], ids=['plain', 'bn'])
@pytest.mark.parametrize('wrap', ['ddp', 'fsdp'])
def test_wrapped(world, wrap, bn):
    "Under DDP and FSDP, with one's own hooks before and after: the weights and running statistics of one process without"
    want, n = trained_raw(recompute=False, bn=bn)
    assert n == 1
    for before, offload in [(True, False), (False, True)]:
        for got, n in world(trained_raw, wrap=wrap, bn=bn, before=before, offload=offload):
            assert n == 2  # once more, in the backward pass
            assert diff(got, want) < 1e-12
    assert diff(world(trained_raw, recompute=False, wrap=wrap, bn=bn)[0][0], want) < 1e-12


def test_blocks_used_twice(world2):
    "A sharded block that runs twice in a forward pass is gathered, and computed again, for each"
    want, _ = trained_raw(recompute=False, repeat=2)
    for wrap in ('ddp', 'fsdp'):
        for got, n in world2(trained_raw, wrap=wrap, repeat=2):
            assert n == 4 and diff(got, want) < 1e-12


def with_dropout():
    torch.manual_seed(3)
    block = lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 8))
    return nn.Sequential(nn.Linear(4, 8), *[block() for _ in range(3)], nn.Linear(8, 3)).double()


def fit_recomputed(modules=None):
    "A fit in the context, with dropout, and batch norm in what is computed again"
    import fastdist.all
    from fastdist.model.units import checkpoint_activations
    learn = quiet(learner(n=23, bs=6, model=with_dropout, opt=Adam, lr=0.01))
    undo = checkpoint_activations(learn.model, modules) if modules else noop
    with learn.distrib_ctx():
        learn.fit(2)
        copied = 'forward' in vars(pickle.loads(pickle.dumps(learn.model))[1][1])
    undo()
    assert not copied
    return weights(learn)


def test_fit(world):
    "A learner's fit: the same dropout, the same statistics, step for step"
    want = world(fit_recomputed)
    assert diff(want[0], want[1]) == 0
    for modules in (True, nn.BatchNorm1d):
        for got, w in zip(world(fit_recomputed, modules), want): assert diff(got, w) < 1e-12
