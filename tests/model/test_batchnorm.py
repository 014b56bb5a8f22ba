"Batch norm over the global batch by torch's kernels: the numbers of one process, and what is sent"
import pytest, torch

from learners import *

SHAPES = [(7, 5), (7, 5, 6), (7, 5, 3, 2), (7, 5, 2, 3, 2)]  # samples, channels, ...


def prepared(shape, dtype=torch.float64, last=False, affine=True, cut=slice(None), device='cpu'):
    "A layer, the rows `cut` of its input, and of the gradient of its output"
    torch.manual_seed(0)
    bn = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)](shape[1], affine=affine)
    for o in bn.parameters(): nn.init.uniform_(o, 0.5, 1.5)
    x, g = torch.randn(2, *shape).double()
    x = x*torch.linspace(0.5, 3, shape[1]).view(1, -1, *[1]*(len(shape)-2)) + 3
    order = torch.contiguous_format if not last else torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    x, g = (o[cut].to(device, dtype).contiguous(memory_format=order) for o in (x, g))
    return bn.to(device, dtype), x.requires_grad_(), g


def passed(bn, x, g, twice):
    "Output, gradient of the input, gradients of the parameters, and running statistics; with `twice`, gradients of those of the input"
    y = bn(x)
    if twice:
        gx, = torch.autograd.grad((y*g).sum(), x, create_graph=True)
        (gx**3).sum().backward()
    else: y.backward(g)
    return [o.detach().cpu() for o in (y, x.grad)], [p.grad.cpu() for p in bn.parameters() if p.grad is not None], [bn.running_mean.cpu(), bn.running_var.cpu()]


def shared(cases, device='cpu'):
    "The same for this worker's rows, the first of which has one alone; gradients of parameters are summed over workers"
    import torch.distributed as dist
    from fastdist.all import setup_distrib, teardown_distrib
    from fastdist.model.batchnorm import global_batch_norm, norm_scope_of
    setup_distrib()
    rank, size, res = dist.get_rank(), dist.get_world_size(), []
    cut = slice(0, 1) if rank == 0 else slice(1+(rank-1)*6//(size-1), 1+rank*6//(size-1))
    for args, twice in cases:
        bn, x, g = prepared(*args, cut=cut, device=torch.device('cuda', torch.cuda.current_device()) if device == 'cuda' else device)
        with global_batch_norm(bn), norm_scope_of('global'): mine, grads, stats = passed(bn, x, g, twice)
        for o in grads: dist.all_reduce(o)
        res.append((mine, grads, stats))
    teardown_distrib()
    return cut, res


def alone(args, twice):
    bn, x, g = prepared(*args)
    return passed(bn, x, g, twice)


def check(results, cases, tol):
    for cut, res in results:
        for (args, twice), (mine, grads, stats) in zip(cases, res, strict=True):
            want, *rest = alone(args, twice)
            for a, b in zip([*mine, *grads, *stats], [*(o[cut] for o in want), *rest[0], *rest[1]], strict=True): assert diff(a, b) < tol*(10 if twice else 1)*max(1, b.abs().max()), (args, twice)


@pytest.mark.parametrize('world', [2, 3])
def test_as_one_process(worlds, world):
    "Shares of one row and of many, in each order of memory; gradients, and gradients of gradients"
    cases = [((shape, torch.float64, last, affine), twice) for shape in SHAPES for last in (False, True)[:1+(len(shape) > 3)] for affine in (True, False)
             for twice in (False, True)]
    check(worlds(world)(shared, cases), cases, 1e-13)
    single = [((shape, torch.float32), False) for shape in SHAPES]
    check(worlds(world)(shared, single), single, 2e-5)


def test_on_gpus(gpu_worlds):
    cases = [((shape, torch.float64, False, affine), False) for shape in SHAPES[::2] for affine in (True, False)]
    check(gpu_worlds(3)(shared, cases, 'cuda'), cases, 1e-9)


def torchs(): return nn.SyncBatchNorm.convert_sync_batchnorm(mlp(True))


@pytest.mark.parametrize('strategy', [None, 'fsdp'])
def test_layers_of_torch_that_are_shared_already(worlds, strategy):
    "A model of a script that had DistributedDataParallel: torch's layers refuse the CPU"
    ctx = dict(split_batches=True, strategy=strategy)
    one, plain = trained(model=torchs), worlds(3)(trained, True, ctx=ctx, bn=True)
    for many, same in zip(worlds(3)(trained, True, ctx=ctx, model=torchs), plain):
        assert diff(one.weights, many.weights) < 1e-7 and not diff(same.weights, many.weights) and same.values == many.values


def in_training_mode(many):
    "Each worker has other batches to evaluate, and another number of them: the losses, and what is said"
    from strategies import Callback, learner, quiet
    class Trains(Callback):
        def before_validate(self): self.learn.model.train()
    learn = quiet(learner(n=20, n_val=13, bn=True, cbs=Trains()))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        if not many: learn.fit(1)
        else:
            import fastdist.all
            with learn.distrib_ctx(split_batches=True): learn.fit(1)
    return [float(o) for o in learn.recorder.values[0]], [str(o.message) for o in said if 'in training mode in an evaluation' in str(o.message)]


def test_training_mode_in_an_evaluation(world2):
    "Each batch is normalized by its own statistics, as in one process, with one warning"
    one, _ = in_training_mode(False)
    for rank, (many, said) in enumerate(world2(in_training_mode, True)): assert diff(one, many) < 1e-6 and len(said) == (rank == 0), (one, many, said)
