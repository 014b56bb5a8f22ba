"Batch norm over the global batch by torch's kernels: the numbers of one process, and what is sent"
import pytest, torch

from forked import started
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


def passed(bn, x, g, twice=False):
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
            for a, b in zip([*mine, *grads, *stats], [*(o[cut] for o in want), *rest[0], *rest[1]], strict=True): assert diff(a, b) < tol, (args, twice)


@pytest.mark.parametrize('world', [2, 3])
def test_as_one_process(worlds, world):
    "Shares of one row and of many, in each order of memory; gradients, and gradients of gradients"
    cases = [((shape, torch.float64, last, affine), twice) for shape in SHAPES for last in (False, True)[:1+(len(shape) > 3)] for affine in (True, False)
             for twice in (False, True)]
    check(worlds(world)(shared, cases), cases, 1e-11)
    single = [((shape, torch.float32), False) for shape in SHAPES]
    check(worlds(world)(shared, single), single, 2e-5)


def test_on_gpus(gpu_worlds):
    cases = [((shape, torch.float64, False, affine), twice) for shape in SHAPES[::2] for affine in (True, False) for twice in (False, True)]
    check(gpu_worlds(3)(shared, cases, 'cuda'), cases, 1e-9)


def sent_by_a_layer(size):
    "Bytes of each message of a forward and a backward, in the last of `size` workers, the others of which are pretended"
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from fastdist.model.batchnorm import global_batch_norm, norm_scope_of
    dist.init_process_group('fake', rank=size-1, world_size=size, store=FakeStore())
    sent, counts, real = [], Counter(), dist.all_reduce
    def all_reduce(t, *args, **kwargs):
        sent.append(t.nbytes)
        return real(t, *args, **kwargs)
    dist.all_reduce = all_reduce
    bn, x, g = prepared((7, 5, 6), torch.float32)
    with global_batch_norm(bn), norm_scope_of('global'), counted_collectives(counts): passed(bn, x, g)
    return sent, dict(counts)


def test_what_is_sent():
    "One message forward, one backward, of the same bytes with 2 workers and with 1,024"
    for size in (2, 3, 1024): assert started(sent_by_a_layer, [{}], size) == [([(2*5+1)*8, 2*5*4], {'allreduce': 2})]


def torchs(): return nn.SyncBatchNorm.convert_sync_batchnorm(mlp(True))


@pytest.mark.parametrize('strategy', [None, 'zero2', 'fsdp'])
def test_layers_of_torch_that_are_shared_already(worlds, strategy):
    "A model of a script that had DistributedDataParallel: torch's layers refuse the CPU"
    ctx = dict(split_batches=True, strategy=strategy)
    one, plain = trained(model=torchs), worlds(3)(trained, True, ctx=ctx, bn=True)
    for many, same in zip(worlds(3)(trained, True, ctx=ctx, model=torchs), plain):
        assert diff(one.weights, many.weights) < 1e-7 and not diff(same.weights, many.weights) and same.values == many.values


class WithAct(nn.BatchNorm1d):
    "As models of timm have it: torch's forward once more, with an activation behind it"
    def forward(self, x):
        if self.training: self.num_batches_tracked.add_(1)
        m = 1/float(self.num_batches_tracked) if self.momentum is None else self.momentum
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, m, self.eps).relu()


def own_forward(distrib, momentum, **kwargs):
    def model():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), WithAct(8, momentum=momentum), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    if kwargs.pop('compiled', False):
        from accelerate.utils import TorchDynamoPlugin
        torch._dynamo.reset()
        kwargs['dynamo_plugin'] = TorchDynamoPlugin(backend='aot_eager')
    return trained(distrib, ctx=kwargs, model=model, n=22, bs=5, metrics=accuracy)


@pytest.mark.parametrize('size,momentum,kwargs', [(2, .1, dict(compiled=True)), (3, None, {})])
def test_a_forward_of_its_own(worlds, size, momentum, kwargs):
    "Two workers of three have none, or one, of the last batch"
    one = own_forward(False, momentum)
    for o in worlds(size)(own_forward, True, momentum, split_batches=True, **kwargs):
        assert diff(one.weights, o.weights) < 1e-7 and diff(one.values, o.values) < 1e-6


class Bare(nn.BatchNorm1d):
    def forward(self, x): return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps)


class Again(nn.Module):
    "Computes its activations again, as models of timm do after `set_grad_checkpointing`: torch leaves that forward in its last layer"
    def __init__(self, last):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), last(8))
    def forward(self, x): return x+torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)


def again(distrib, last, **ctx):
    def model():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), Again(last), nn.Linear(8, 3)).double()
    return trained(distrib, ctx=ctx, model=model, n=22, bs=5, lr=.01, metrics=accuracy)


@pytest.mark.parametrize('last', [nn.BatchNorm1d, Bare])
def test_computed_again_by_the_model(worlds, last):
    "Running statistics count a batch twice there, in one process too"
    one = again(False, last)
    for o in worlds(3)(again, True, last, split_batches=True): assert diff(one.weights, o.weights) < 1e-7 and diff(one.values, o.values) < 1e-6


def in_training_mode(n_val, kind):
    "Each worker has other batches to evaluate, and another number of them"
    import fastdist.all
    from strategies import Callback, learner, quiet
    class Trains(Callback):
        def before_validate(self): self.learn.model.train()
    learn = quiet(learner(n=20, n_val=n_val, bn=True, cbs=Trains()))
    try:
        with learn.distrib_ctx(split_batches=True): learn.validate() if kind == 'validate' else learn.fit(1) if kind == 'fit' else learn.get_preds()
    except RuntimeError as e: return str(e)


@pytest.mark.parametrize('kind', ['validate', 'fit', 'get_preds'])
def test_training_mode_in_an_evaluation(world2, kind):
    "Layers mixed the statistics of different batches, and gloo ended the process where a batch was one too many"
    for o in world2(in_training_mode, 13, kind): assert 'a batch norm layer is in training mode in an evaluation' in o and 'm.eval()' in o, o
