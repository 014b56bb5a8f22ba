"Workers whose models are not the same are found out, all at once; those whose models are the same are left in peace"
import contextlib

import pytest, torch

from harness import WorkerError
from learners import *

SPLIT = dict(split_batches=True)


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


def two_groups(m): return [params(m[:2]), params(m[2:])]


class Shifted(nn.Module):
    "Has a buffer that no forward changes"
    def __init__(self):
        super().__init__()
        self.register_buffer('shift', torch.tensor([1., 2., 3.], dtype=torch.float64), persistent=False)
    def forward(self, x): return x+self.shift


class Rows(nn.Module):
    "Instance norm with running statistics, over rows of 8"
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True, dtype=torch.float64)
    def forward(self, x): return self.norm(x.view(-1, 2, 4)).view(-1, 8)


def with_bn(*more):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), *more, nn.Linear(8, 3), Shifted()).double()


def with_dropout(): return with_bn(nn.Dropout(0.5))
def with_rows(): return with_bn(Rows())


@contextlib.contextmanager
def checks_seen():
    "The text that goes with each check"
    import fastdist.callbacks.divergence as d
    real, seen = d.check_same, []
    def check_same(*args, **kwargs):
        seen.append(kwargs['when'])
        return real(*args, **kwargs)
    d.check_same = check_same
    try: yield seen
    finally: d.check_same = real


def fitted(every, fit='fit', cbs=None, ctx=None, **kwargs):
    "Weights and losses, and the checks"
    import fastdist.all
    from fastdist.callbacks.divergence import DivergenceCheck
    learn = quiet(learner(**{**dict(n=22, bs=5, model=with_bn, wd=0.01, splitter=two_groups, cbs=cbs and cbs()), **kwargs}))
    if every: learn.add_cb(DivergenceCheck(every=every))
    was = list(learn.cbs)
    with checks_seen() as seen, learn.distrib_ctx(**{**SPLIT, **(ctx or {})}):
        learn.fit(2)
        if fit == 'frozen':
            learn.freeze()
            learn.fit(1)
            learn.unfreeze()
            learn.fit(1, slice(0.01, 0.1))
        if fit == 'finder': learn.lr_find(num_it=20, show_plot=False)
    assert list(learn.cbs) == was
    return weights(learn), [float(o) for o in learn.recorder.losses], seen


CASES = dict(sgd={}, adam=dict(opt=Adam), wrapped=dict(opt=partial(OptimWrapper, opt=torch.optim.AdamW)), own_bn=dict(n=24, bs=12, ctx=dict(sync_bn=False)),
             dropout=dict(model=with_dropout), rows=dict(model=with_rows), frozen=dict(fit='frozen', opt=Adam), finder=dict(fit='finder'),
             steps=dict(ctx=dict(gradient_accumulation_steps=2)), own_bn_steps=dict(n=36, bs=6, ctx=dict(gradient_accumulation_steps=3, sync_bn=False)),
             fastais=dict(cbs=partial(GradientAccumulation, 10)), uneven=dict(n=11, bs=2, model=mlp))


@pytest.mark.parametrize('case', list(CASES))
def test_nothing_to_find(world, case):
    "Nor anything changed: weights and losses are the same to the last bit"
    for (w, l, none), (w1, l1, seen) in zip(world(fitted, None, **CASES[case]), world(fitted, 1, **CASES[case])):
        assert diff(w, w1) == diff(l, l1) == 0 and none == [] and seen


def test_counts_steps(world2):
    "Not batches; from the beginning of each fit. 22 samples in batches of 5 are 5 steps, or 3 of two batches"
    at = lambda every, **kw: [int(o.split()[2]) if 'before' in o else o for o in world2(fitted, every, **kw)[0][2]]
    last = lambda n: f'after step {n} of the fit, the last of epoch {0 if n < 6 else 1}'
    assert at(2) == [2, 4, last(5), 6, 8, 10, last(10)]
    assert at(100) == [last(5), last(10)]
    ends = [f'after step {n} of the fit, the last of epoch {e}' for e, n in enumerate((3, 6))]
    assert at(2, ctx=dict(gradient_accumulation_steps=2)) == [2, ends[0], 4, 6, ends[1]]


def collectives():
    import collections
    from fastdist.callbacks.divergence import check_same
    from fastdist.world import init_group
    init_group()
    with counted_collectives(collections.Counter()) as counts: check_same(with_bn())
    return dict(counts)


def test_one_message(world2): assert world2(collectives) == [{'allreduce': 1}]*2


def flipped(t):
    "The last bit of the last element of `t`, which is changed in place"
    t.view(-1)[-1:].view(torch.uint8)[0] ^= 1

def nan(t): t.view(-1)[0] = float('nan')
def swapped(t): t.view(-1)[[0, 1]] = t.view(-1)[[1, 0]]
def signed(t): t.view(-1)[0] = -0.
def more(t): t += 1
def zeroed(t): t.view(-1)[0] = 0.


FAULTS = dict(flipped=('parameters', '0.weight', flipped), nan=('parameters', '3.bias', nan), swapped=('parameters', '0.weight', swapped),
              signed=('parameters', '3.weight', signed), frozen=('parameters', '1.weight', lambda t: t.requires_grad_(False)),
              grad=('gradients', '3.weight', flipped), grad_nan=('gradients', '0.bias', nan),
              stats=('buffers', '1.running_var', flipped), count=('buffers', '1.num_batches_tracked', more), shift=('buffers', '4.shift', swapped))


def found(fault, who, every, sync_bn=True):
    "The error of a fit in which rank `who`'s tensor is changed before the third step; its bits and norm; a fit after that"
    import torch.distributed as dist
    import fastdist.all
    from fastdist.callbacks.divergence import DivergenceCheck, DivergenceError, tensor_hash
    kind, nm, change = FAULTS[fault]
    learn = quiet(learner(n=24, bs=6, model=with_bn, cbs=DivergenceCheck(every=every)))
    value = None
    class Fault(Callback):
        run_valid = False
        def before_step(self):
            nonlocal value
            if self.train_iter != 2: return
            with torch.no_grad():
                t = self.learn.model.get_buffer(nm) if kind == 'buffers' else self.learn.model.get_parameter(nm)
                if kind == 'gradients': t = t.grad
                if fault == 'signed': zeroed(t) # in all
                if dist.get_rank() == who: change(t)
                value = f'{tensor_hash(t.detach()).item()%2**64:016x}', repr(t.double().norm().item())
    learn.add_cb(Fault())
    cbs = list(learn.cbs)
    text, step = None, None
    try:
        with learn.distrib_ctx(**SPLIT, sync_bn=sync_bn): learn.fit(1)
    except DivergenceError as e: text, step = str(e), learn.train_iter
    assert list(learn.cbs) == cbs and type(learn.model[1]) is nn.BatchNorm1d
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == dist.get_world_size()
    learn.remove_cb(Fault)
    learn.model.requires_grad_()
    learn.opt = None
    with learn.distrib_ctx(**SPLIT): learn.fit(1) # which begins with rank 0's model
    return text, step, value


@pytest.mark.parametrize('fault', list(FAULTS))
def test_found(world, fault):
    "At the third step, in all workers, with each one's values"
    kind, nm, _ = FAULTS[fault]
    who = world.n-1
    res = world(found, fault, who, 3)
    text = res[0][0]
    assert [o[:2] for o in res] == [(text, 2)]*world.n, res
    assert f"not have the same model before step 3 of the fit (epoch 0): 1 of 16 tensors differ, first the {kind[:-1]} {nm!r}: rank" in text
    for r, (_, _, (bits, norm)) in enumerate(res): assert f'hash {bits}, norm {norm}' in text, (r, text)
    assert f'rank {who} has ' in text and text.count('frozen, hash') == (fault == 'frozen')
    assert fault == 'frozen' or len({o[2][0] for o in res}) == 2


def test_rank_0_is_the_odd_one(world3):
    text, = {o[0] for o in world3(found, 'flipped', 0, 3)}
    assert 'rank 0 has ' in text and 'ranks 1, 2 have ' in text


def test_found_at_the_end_of_an_epoch(world2):
    "Between two checks of steps: parameters and the buffers of global batch norm; of other buffers all workers have rank 0's by then"
    for fault in ('flipped', 'stats'):
        text, = {o[0] for o in world2(found, fault, 1, 100)}
        assert 'after step 4 of the fit, the last of epoch 0' in text and 'gradient ' not in text.split('Look for')[0]
    assert [o[0] for o in world2(found, 'shift', 1, 100)] == [None]*2
    assert [o[0] for o in world2(found, 'stats', 1, 3, sync_bn=False)] == [None]*2


def errors():
    "A loop without fastai; what is told of models that were not built alike"
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from fastdist.callbacks.divergence import DivergenceError, check_same
    from fastdist.world import get_rank, init_group
    init_group()
    last = get_rank() == dist.get_world_size()-1
    def error(model, *args, **kwargs):
        try: check_same(model, *args, **kwargs)
        except DivergenceError as e: return str(e)
    res = {}

    model = with_bn()
    ddp, opt = DistributedDataParallel(model, broadcast_buffers=False), torch.optim.Adam(model.parameters())
    torch.manual_seed(get_rank())
    for i in range(3):
        ddp(torch.randn(6, 4).double()).square().mean().backward()
        assert error(ddp, buffers=False) is None and error(ddp, buffers=lambda m: not isinstance(m, nn.BatchNorm1d)) is None
        if i < 2:
            opt.step()
            opt.zero_grad()
    res['stats'] = error(ddp, when='in the loop')
    if last: model[0].bias.grad = None
    assert error(ddp, grads=False, buffers=False) is None
    res['no grad'] = error(ddp, buffers=False)

    def one(change, **kwargs):
        torch.manual_seed(0)
        m = nn.Linear(3, 2)
        if last: change(m)
        return error(m, **kwargs)
    res['more'] = one(lambda m: m.register_parameter('extra', nn.Parameter(torch.ones(2))))
    res['less'] = one(lambda m: m.register_parameter('bias', None))
    res['shape'] = one(lambda m: setattr(m, 'weight', nn.Parameter(m.weight.detach().view(3, 2))))
    res['dtype'] = one(lambda m: setattr(m, 'bias', nn.Parameter(m.bias.detach().view(torch.int32), requires_grad=False)))
    res['buffer'] = one(lambda m: m.register_buffer('extra', torch.ones(2)))
    assert one(lambda m: m.register_buffer('extra', torch.ones(2)), buffers=False) is None
    def layout(m): m.weight = nn.Parameter(m.weight.detach().t().contiguous().t()) # other strides, the same values
    assert one(layout) is None

    torch.manual_seed(0)
    m = nn.Embedding(5, 2, sparse=True)
    ddp = DistributedDataParallel(m)
    ddp(torch.tensor([get_rank(), 2])).sum().backward()
    res['sparse'] = error(m)
    if last: m.weight.grad = m.weight.grad*2
    res['sparse, other'] = error(m)

    pair = dist.new_group([0, dist.get_world_size()-1])
    if dist.get_world_size() == 3: res['pair'] = one(flip_bias, group=pair)
    return res


def flip_bias(m): flipped(m.bias.data)


def test_plain_loop(world):
    every, n = world(errors), world.n-1
    last = f'rank {n} has '
    if n == 2: assert every[1].pop('pair') is None # it is not in the group
    pair = {o.pop('pair', None) for o in (every[0], every[n])}
    assert all(o == every[0] for o in every)
    res = every[0]
    def check(k, *texts):
        for o in texts: assert o in res[k], res[k]
    check('stats', 'model in the loop: 2 of 16 tensors differ, first the buffer', "running_mean'")
    check('no grad', '1 of 12 tensors differ, first the gradient', "0.bias'", f'{last}None', ' float64[8], hash')
    check('more', '2 of 6 tensors', "parameter 'extra'", ' nothing', f'{last}float32[2], hash')
    check('less', "parameter 'bias'", f'{last}nothing')
    check('shape', "'weight'", ' float32[2, 3]', f'{last}float32[3, 2]')
    check('dtype', "'bias'", f'{last}int32[2], frozen')
    check('buffer', "1 of 5 tensors differ, first the buffer 'extra'", ' nothing')
    assert res['sparse'] is None
    check('sparse, other', '1 of 2 tensors differ, first the gradient', last)
    if n == 2:
        text, = pair
        assert last in text and 'rank 1' not in text


def shards():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from fastdist.callbacks.divergence import DivergenceError, check_same
    from fastdist.world import get_rank, get_world_size, init_group
    init_group()
    mesh = init_device_mesh('cpu', (get_world_size(),))
    def raises(kind, value):
        m = nn.Module()
        m.weight = nn.Parameter(DTensor.from_local(torch.full((2, 2), float(value)), mesh, [kind], run_check=False))
        m.weight.grad = DTensor.from_local(torch.ones(2, 2), mesh, [kind], run_check=False)
        try: check_same(m)
        except DivergenceError as e: return str(e)
    return raises(Shard(0), get_rank()), raises(Replicate(), 3), raises(Replicate(), get_rank())


def test_shards_are_left_out(world2):
    for shard, same, other in world2(shards):
        assert shard is None and same is None and "norm 0.0, rank 1 has float32[2, 2], hash" in other and "norm 2.0" in other


def outside():
    "Without a context, and in one process, it does nothing: workers may have come apart, or have a fit alone"
    import fastdist.all
    from fastdist.callbacks.divergence import DivergenceCheck
    from fastdist.world import get_rank, init_group
    init_group()
    learn = quiet(learner(n=22, bs=5, cbs=DivergenceCheck(every=1)))
    if get_rank() == 0: learn.fit(1)


def test_outside_of_a_context(world2): world2(outside)


def alone():
    import fastdist.all
    from fastdist.callbacks.divergence import DivergenceCheck
    from fastdist.world import get_rank
    learn = quiet(learner(n=22, bs=5, cbs=DivergenceCheck(every=1) if get_rank() == 0 else None))
    with learn.distrib_ctx(**SPLIT): learn.fit(1)


def test_in_one_worker_only(world2):
    with pytest.raises(WorkerError) as e: world2(alone, grace=2)
    assert 'not all workers have the callback DivergenceCheck' in e.value.problems[0]
