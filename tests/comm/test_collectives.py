"What workers say to each other: in worlds of 1, 2 and 3, in subgroups, and when they do not make the same calls"
import io, operator, pickle, random
from functools import reduce

import numpy as np
import pytest
import torch

SIZES = 1, 2, 3


class Here:
    "A world of one: this process, with no process group"
    def __call__(self, fn, *args): return [fn(*args)]


@pytest.fixture(params=SIZES, ids=lambda n: f'world{n}')
def world(request, worlds):
    w = Here() if request.param == 1 else worlds(request.param)
    w.size = request.param
    return w


def start():
    "(module, rank, world size), in a process group where there are several workers"
    import os
    from types import SimpleNamespace
    import fastdist.comm.collectives
    from fastdist.world.ranks import get_rank, get_world_size
    talk = SimpleNamespace(**vars(fastdist.comm.collectives))
    if int(os.environ.get('WORLD_SIZE', 1)) > 1:
        from fastdist.world import init_group
        init_group()
    return talk, get_rank(), get_world_size()


def error(fn):
    "(type, text) of what `fn` raises"
    try: return 'no error', fn()
    except Exception as e: return type(e).__name__, str(e)


def same(a, b):
    "Of the same type, dtype and value, all through"
    if type(a) is not type(b): return False
    if isinstance(a, dict): return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol={torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(a.dtype, 1e-6), equal_nan=True)
    if isinstance(a, (np.ndarray, np.generic)): return a.dtype == b.dtype and a.shape == b.shape and bool(np.allclose(a, b, rtol=1e-6, equal_nan=True))
    return a == b or a != a and b != b


# Objects

def gather_objects():
    talk, rank, n = start()
    import datetime
    from pathlib import Path
    mine = [rank, None, 'é', b'\0'*rank, {1, 2}, Path('x'), datetime.date(2020, 1, 1), 10**50, (), {'a': [rank]}]
    return talk.all_gather_list(mine) == [[r, None, 'é', b'\0'*r, {1, 2}, Path('x'), datetime.date(2020, 1, 1), 10**50, (), {'a': [r]}] for r in range(n)]


def test_gather_objects(world): assert world(gather_objects) == [True]*world.size


def frame_limit():
    "One collective while it fits, two beyond: the sizes at which a pickle of its own becomes a second collective"
    import torch.distributed as dist
    talk, rank, n = start()
    seen, calls = [], []
    single = 'all_gather_single' if hasattr(dist, 'all_gather_single') else 'all_gather_into_tensor'  # as torch before 2.13 has it
    for nm in ('all_gather', single, 'broadcast', 'all_reduce'):
        def counted(*a, _f=getattr(dist, nm), _nm=nm, **k):
            calls.append('gather' if _nm == single else _nm)
            return _f(*a, **k)
        seen.append((nm, getattr(dist, nm)))
        setattr(dist, nm, counted)
    res = []
    try:
        for size in range(1, 1100, 3):
            calls.clear()
            talk.all_gather_list(b'x'*size)
            res.append(len(calls))
        calls.clear(); talk.agree(True); talk.all_reduce(torch.ones(10)); talk.all_reduce_dict(dict(loss=1., n=3)); talk.broadcast_object(1)
        few = list(calls)
        calls.clear(); talk.all_reduce(torch.ones(10000))
        one = list(calls)
        calls.clear(); talk.all_reduce_dict({i: torch.ones(1000) for i in range(5)})
        together = list(calls)
    finally:
        for nm, f in seen: setattr(dist, nm, f)
    return res, few, one, together


def test_number_of_collectives(world2):
    for res, few, one, together in world2(frame_limit):
        assert set(res) == {1, 2} and res == sorted(res)
        assert few == ['gather', 'gather', 'all_reduce', 'gather', 'gather'] and one == ['gather', 'all_reduce']
        assert together.count('all_reduce') == 1 and len(together) <= 3


def max_sizes():
    talk, rank, n = start()
    mine, size = b'x'*(2000 if rank == 0 else 10), len(pickle.dumps(b'x'*2000, 5))
    return [error(lambda: talk.all_gather_list(mine, max_size=s)) for s in (size, size-1, 20)] + [error(lambda: talk.all_gather_list('é'*2000, max_size=100)), talk.all_gather_list(rank)], size


def test_max_size(world3):
    for (fits, less, small, both, after), size in world3(max_sizes):
        assert fits[0] == 'no error' and [len(o) for o in fits[1]] == [2000, 10, 10]
        assert less[0] == 'ValueError' and f'rank 0 has {size} bytes, which is more than max_size={size-1}' in less[1]
        assert small[0] == 'ValueError' and 'rank 0 has' in small[1] and 'ranks 1, 2 have' in small[1]
        assert both[0] == 'ValueError' and 'ranks 0, 1, 2 have' in both[1]
        assert after == [0, 1, 2]


class Trap:
    "Can be pickled, but not made again"
    def __reduce__(self): return (operator.truediv, (1, 0))


def bad_pickles():
    talk, rank, n = start()
    res = [error(lambda: talk.all_gather_list((lambda: 0) if rank == 1 else 'fine')),
           error(lambda: talk.all_gather_list(lambda: 0)),
           error(lambda: talk.broadcast_object((lambda: 0) if rank == 0 else None))]
    trap = Trap() if rank == 1 else 'x'*3000
    res.append(error(lambda: talk.all_gather_list(trap)))
    return rank, res, talk.all_gather_list(rank)


def test_bad_pickles(world3):
    for rank, (one, every, broadcast, trap), after in world3(bad_pickles):
        assert after == [0, 1, 2]
        assert {o[0] for o in (one, every, broadcast)} == {'PicklingError'}
        assert ('rank 1: function cannot be pickled' in one[1]) and ('rank 1 failed in all_gather_list (' in one[1]) == (rank != 1)
        assert f'rank {rank}: function cannot be pickled' in every[1]
        assert 'rank 0: ' in broadcast[1]
        assert trap[0] == 'UnpicklingError' and f'rank {rank} cannot unpickle what rank 1 has sent by all_gather_list: division by zero' in trap[1]


def broadcasts():
    talk, rank, n = start()
    res = []
    for size in (1, 900, 1100, 50000):
        for src in range(n):
            mine = (rank, 'x'*size)
            res.append(talk.broadcast_object(mine, src=src) == (src, 'x'*size))
        res.append(talk.broadcast_object(mine if rank == 0 else None) == (0, 'x'*size))
    return res


@pytest.mark.sizes
def test_broadcast(world):
    for res in world(broadcasts): assert all(res)


# Tensors

def reference(ts, op):
    if op == 'mean': return reduce(torch.add, ts)/len(ts)
    return reduce({'sum': torch.add, 'max': torch.maximum, 'min': torch.minimum}[op], ts)


def reduce_tensors():
    talk, rank, n = start()
    bad = []
    dtypes = 'float16 bfloat16 float32 float64 uint8 int64'.split()
    for dtype in [getattr(torch, o) for o in dtypes]:
        for shape in ((), (2, 0, 3), (3, 5), (100, 40)):
            for op in ('sum', 'mean', 'max', 'min'):
                if op == 'mean' and not dtype.is_floating_point: continue
                every = [(torch.rand(shape, generator=torch.Generator().manual_seed(r))*40).to(dtype) for r in range(n)]
                for way in ('plain', 'strided', 'transposed'):
                    t = every[rank].clone()
                    if way == 'strided': t = torch.stack([t, t], -1)[..., 0]
                    if way == 'transposed': t = t.mT.contiguous().mT if t.ndim > 1 else t
                    res = talk.all_reduce(t, op=op)
                    want = reference(every, op).to(dtype)
                    if res is not t or t.dtype != dtype or not torch.allclose(t.double(), want.double(), rtol=2e-2 if dtype.itemsize == 2 else 1e-6):
                        bad.append((str(dtype), shape, op, way))
    return bad


@pytest.mark.sizes
def test_all_reduce(world): assert world(reduce_tensors) == [[]]*world.size


def reduce_differing():
    talk, rank, n = start()
    E = error
    res = [E(lambda: talk.all_reduce(torch.ones(2 if rank else 3, 500))), E(lambda: talk.all_reduce(torch.ones(2, dtype=torch.float64 if rank else torch.float32))),
           E(lambda: talk.all_reduce(torch.ones(2) if rank else torch.ones(2000))),
           E(lambda: talk.all_reduce(torch.ones(2).int(), op='mean')), E(lambda: talk.all_reduce(torch.ones(2).bool())),
           E(lambda: talk.all_reduce(torch.ones(2), op='avg')), E(lambda: talk.all_reduce([1])), E(lambda: talk.all_reduce(torch.eye(2).to_sparse())), E(lambda: talk.all_reduce(torch.ones(2, device='meta')))]
    one = E(lambda: talk.all_reduce(torch.ones(2) if rank else 'no tensor'))
    return rank, res, one, talk.all_reduce(torch.ones(2000))[0].item()


def test_all_reduce_errors(world3):
    for rank, res, one, after in world3(reduce_differing):
        assert after == 3.
        assert res[0][0] == 'ValueError' and 'rank 0 has torch.float32 of shape (3, 500), ranks 1, 2 have torch.float32 of shape (2, 500)' in res[0][1] and 'all_gather_list' in res[0][1]
        assert res[1][0] == 'ValueError' and 'ranks 1, 2 have torch.float64' in res[1][1] and res[2][0] == 'ValueError'
        assert [o[0] for o in res[3:]] == ['TypeError', 'TypeError', 'ValueError', 'TypeError', 'TypeError', 'TypeError']
        assert '.float()' in res[3][1] and '.int()' in res[4][1] and "'sum', 'mean', 'max', 'min'" in res[5][1]
        assert one[0] == 'TypeError' and "rank 0: tensor is str 'no tensor'" in one[1] and ('rank 0 failed in all_reduce(op=' in one[1]) == (rank != 0)


# Dicts

KINDS = dict(float16=torch.float16, bfloat16=torch.bfloat16, float32=torch.float32, float64=torch.float64, int64=torch.int64)


def dicts(r):
    "What rank `r` has: numbers, and tensors of several dtypes and shapes; the keys are in another order in each rank"
    rnd = torch.Generator().manual_seed(r)
    tensor = lambda dtype, shape: (torch.rand(shape, generator=rnd)*40).to(dtype)
    d = dict(int=r-1, huge=10**40+r, float=r/8, np_float=np.float32(r), np_int=np.int64(r), flag=r > 0)
    d = {**d, **{f'{nm}{shape}': tensor(dtype, shape) for nm, dtype in KINDS.items() for shape in ((), (3,), (2, 0), (30, 41))}, "it's": 1, (2, 'x'): 2, None: 3}
    pairs = list(d.items())
    random.Random(r).shuffle(pairs)
    return dict(pairs)


def reduce_dicts():
    talk, rank, n = start()
    bad = []
    for op in ('sum', 'mean', 'max', 'min'):
        every = [{k: v for k, v in dicts(r).items() if op != 'mean' or not isinstance(v, torch.Tensor) or v.is_floating_point()} for r in range(n)]
        res = talk.all_reduce_dict(every[rank], op=op)
        if list(res) != list(every[rank]): bad.append((op, 'the order of keys'))
        for k, v in res.items():
            vs = [o[k] for o in every]
            want = reference(vs, op).to(vs[0].dtype) if isinstance(v, torch.Tensor) else sum(vs) if op == 'sum' else sum(vs)/n if op == 'mean' else max(vs) if op == 'max' else min(vs)
            if not same(v, want): bad.append((op, k, v, want))
    return bad


@pytest.mark.sizes
def test_all_reduce_dict(world): assert world(reduce_dicts) == [[]]*world.size


def same_bits():
    talk, rank, n = start()
    torch.manual_seed(rank)
    d = talk.all_reduce_dict(dict(f=0.1+rank, t=torch.rand(3), b=torch.rand(5000)), op='mean')
    return (d['f'], d['t'].numpy().tobytes(), d['b'].numpy().tobytes())


def test_same_bits_in_all_workers(world3): assert len(set(world3(same_bits))) == 1


def reduce_structures():
    talk, rank, n = start()
    E, R = error, lambda a, b: E(lambda: talk.all_reduce_dict(b if rank == 1 else a))
    res = [R(dict(a=1, b=2), dict(a=1)), R(dict(a=1), dict(a=torch.ones(1))), R(dict(t=torch.ones(2)), dict(t=torch.ones(3))),
           R(dict(t=torch.ones(2000)), dict(t=torch.ones(2000).double())), R(dict(a=1), {'a': 1, 'x'*3000: 2})]
    values = [E(lambda: talk.all_reduce_dict(o)) for o in (dict(a='x'), dict(b=None), dict(a=[1]), dict(a=dict(b=1)), dict(a=np.ones(2)), dict(t=torch.eye(2).to_sparse()), [1, 2])]
    one = R(dict(a=1), dict(a='x'))
    ops = [E(lambda: talk.all_reduce_dict(dict(t=torch.ones(2).int()), op='mean')), E(lambda: talk.all_reduce_dict(dict(t=torch.ones(2)*1j))), E(lambda: talk.all_reduce_dict(dict(a=1), op='avg'))]
    return rank, res, values, one, ops, talk.all_reduce_dict(dict(n=1))


def test_all_reduce_dict_errors(world3):
    for rank, res, values, one, ops, after in world3(reduce_structures):
        assert after == dict(n=3) and [o[0] for o in res] == ['ValueError']*5
        assert "data['b'] differs: ranks 0, 2 have a number, rank 1 has nothing" in res[0][1] and "data['a'] differs" in res[1][1]
        assert "data['t'] differs: ranks 0, 2 have torch.float32 of shape (2,), rank 1 has torch.float32 of shape (3,)" in res[2][1]
        assert "'xxx" in res[4][1]
        assert [o[0] for o in values] == ['TypeError']*7
        for o, p in zip(values, ("data['a'] is str 'x'", "data['b'] is NoneType None", "data['a'] is list [1]", "data['a'] is dict", "data['a'] is ndarray", "data['t'] is Tensor of layout torch.sparse_coo", 'data is list')):
            assert f'rank {rank}: {p}' in o[1]
        assert one[0] == 'TypeError' and "rank 1: data['a'] is str 'x'" in one[1] and ('rank 1 failed in' in one[1]) == (rank != 1)
        assert [o[0] for o in ops] == ['TypeError', 'TypeError', 'ValueError']


# Decisions

def agrees():
    talk, rank, n = start()
    from itertools import product
    bad = []
    for votes in product([True, False], repeat=n):
        got = {how: talk.agree(votes[rank], how) for how in ('any', 'all', 'rank0')}
        if got != dict(any=any(votes), all=all(votes), rank0=votes[0]) or {type(o) for o in got.values()} != {bool}: bad.append((votes, got))
    truthy = talk.agree([1] if rank == 0 else ''), talk.agree(torch.tensor(True), 'all'), talk.agree(np.bool_(False))
    return bad, truthy, error(lambda: talk.agree(True, 'most')), error(lambda: talk.agree(torch.ones(2))), error(lambda: talk.agree(True, 'most' if rank == 0 else 'any'))


@pytest.mark.sizes
def test_agree(world):
    for bad, truthy, how, value, one in world(agrees):
        assert not bad and truthy == (True, True, False)
        assert how[0] == 'ValueError' and "'any', 'all', 'rank0'" in how[1] and value[0] == 'RuntimeError' and one[0] == 'ValueError'


# Out of step

def out_of_step():
    talk, rank, n = start()
    calls = dict(all_gather_list=lambda: talk.all_gather_list('x'*3000), broadcast=lambda: talk.broadcast_object('x'*3000),
                 all_reduce=lambda: talk.all_reduce(torch.ones(1000)), all_reduce_max=lambda: talk.all_reduce(torch.ones(1000), op='max'),
                 all_reduce_dict=lambda: talk.all_reduce_dict(dict(t=torch.ones(1000))), agree=lambda: talk.agree(True))
    res = {}
    for a in calls:
        for b in calls:
            if a == b: continue
            e = error(calls[a] if rank == 0 else calls[b])
            after = talk.all_gather_list((a, b)), talk.all_reduce(torch.ones(3000))[0].item()
            res[a, b] = e, after == ([(a, b)]*n, n)
    for nm, f in calls.items(): f()  # each in step again
    return res


def test_out_of_step(world2):
    one, two = world2(out_of_step)
    assert one == two and len(one) == 6*5
    for pair, ((kind, text), after) in one.items():
        assert kind == 'OutOfStep' and after, pair
        assert text.startswith('rank 0 is at ') and ', rank 1 at ' in text and 'test_collectives.py:' in text


# Groups

def subgroups():
    talk, rank, n = start()
    import torch.distributed as dist
    g, other = dist.new_group([0, 2]), dist.new_group([1])
    f = io.StringIO()
    calls = [lambda g: talk.all_gather_list((rank, 'x'*2000), group=g), lambda g: talk.all_reduce(torch.full((2000,), float(rank)), g, op='mean')[0].item(),
             lambda g: talk.all_reduce_dict(dict(a=rank, t=torch.full((2000,), float(rank))), group=g)['t'][0].item(), lambda g: [len(o) for o in talk.all_gather_list(torch.ones(900*(rank+1)), g)],
             lambda g: talk.broadcast_object(rank, group=g), lambda g: talk.broadcast_object('x'*2000+str(rank), src=2, group=g)[2000:],
             lambda g: talk.agree(rank == 2, 'all', group=g), lambda g: talk.agree(rank == 0, 'rank0', g),
             lambda g: talk.print_in_order('hi', group=g, file=f)]
    res = [error(lambda: c(g)) for c in calls]
    alone = [error(lambda: talk.all_gather_list(rank, group=other)), error(lambda: talk.broadcast_object('x'*2000, group=other)), error(lambda: talk.all_reduce(torch.ones(2000), other)[0].item())]
    src = error(lambda: talk.broadcast_object(1, src=1, group=g))
    step = error(lambda: talk.agree(True, group=g) if rank == 0 else talk.all_gather_list(1, group=g))
    differ = error(lambda: talk.all_reduce(torch.ones(rank+1), g))
    large = error(lambda: talk.all_gather_list('x'*99 if rank == 2 else 1, g, max_size=50))
    return res, alone, src, step, differ, large, f.getvalue(), talk.all_gather_list(rank)


def test_subgroups(world3):
    out = world3(subgroups)
    for rank, (res, alone, src, step, differ, large, text, after) in enumerate(out):
        assert after == [0, 1, 2]
        inside, outside = (res, alone) if rank != 1 else (alone, res)
        for kind, msg in [*outside, *([src, step, differ, large] if rank == 1 else [])]: assert kind == 'ValueError' and f'rank {rank} is not in this group' in msg
        assert {o[0] for o in inside} == {'no error'}
        if rank == 1:
            assert [o[1] for o in alone] == [[1], 'x'*2000, 1.]
            continue
        assert [o[1] for o in res] == [[(0, 'x'*2000), (2, 'x'*2000)], 1., 2., [900, 2700], 0, '2', False, True, None]
        assert text == ('' if rank else '[rank 0] hi\n[rank 2] hi\n')
        assert 'src=1 is not in this group: its global ranks are [0, 2]' in src[1] and src[0] == 'ValueError'
        assert step[0] == 'OutOfStep' and 'rank 0 is at agree' in step[1] and 'rank 2 at all_gather_list' in step[1]
        assert 'rank 0 has torch.float32 of shape (1,), rank 2 has torch.float32 of shape (3,)' in differ[1] and 'rank 2 has' in large[1]
