"What workers say to each other: in worlds of 1, 2 and 3, in subgroups, and when they do not make the same calls"
import io, operator, os, pickle, random
from collections import Counter
from functools import reduce
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learners import counted_collectives


class Here:
    "A world of one: this process, with no process group"
    def __call__(self, fn, *args): return [fn(*args)]


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f'world{n}')
def world(request, worlds):
    w = Here() if request.param == 1 else worlds(request.param)
    w.size = request.param
    return w


def start():
    "(module, rank, world size), in a process group where there are several workers"
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


# Objects

def gather_objects():
    talk, rank, n = start()
    import datetime
    from pathlib import Path
    def of(r): return [r, None, 'é', b'\0'*r, {1, 2}, Path('x'), datetime.date(2020, 1, 1), 10**50, (), {'a': [r]}]
    return talk.all_gather_list(of(rank)) == [of(r) for r in range(n)]


def test_gather_objects(world): assert world(gather_objects) == [True]*world.size


def numbers_of_collectives():
    talk, _, _ = start()
    with counted_collectives(Counter()) as counts:
        def number(f):
            before = counts.total()
            f()
            return counts.total()-before
        return [number(f) for f in (lambda: talk.all_gather_list('x'), lambda: talk.broadcast_object(1),
                                    lambda: talk.all_reduce_dict(dict(loss=1., n=3)),
                                    lambda: talk.all_gather_list('x'*5000), lambda: talk.all_reduce(torch.ones(10000)),
                                    lambda: talk.all_reduce_dict({i: torch.ones(1000) for i in range(5)}))]


def test_number_of_collectives(world2):
    "One for what is small; one more for what is large, and that goes together"
    for res in world2(numbers_of_collectives): assert res == [1, 1, 1, 2, 2, 2], res


def max_sizes():
    talk, rank, _ = start()
    mine, size = b'x'*(2000 if rank == 0 else 10), len(pickle.dumps(b'x'*2000, 5))
    fits, less = (error(lambda: talk.all_gather_list(mine, max_size=n)) for n in (size, size-1))
    return fits[0], less, talk.all_gather_list(rank), size


def test_max_size(world3):
    for fits, less, after, size in world3(max_sizes):
        assert fits == 'no error' and less[0] == 'ValueError'
        assert f'rank 0 has {size} bytes, which is more than max_size={size-1}' in less[1] and after == [0, 1, 2]


class Trap:
    "Can be pickled, but not made again"
    def __reduce__(self): return (operator.truediv, (1, 0))


def bad_pickles():
    talk, rank, _ = start()
    res = [error(lambda: talk.all_gather_list((lambda: 0) if rank == 1 else 'fine')),
           error(lambda: talk.broadcast_object((lambda: 0) if rank == 0 else None)),
           error(lambda: talk.all_gather_list(Trap() if rank == 1 else 'x'*3000))]
    return res, talk.all_gather_list(rank)


def test_bad_pickles(world3):
    "The same error in all"
    for rank, ((one, broadcast, trap), after) in enumerate(world3(bad_pickles)):
        assert one[0] == broadcast[0] == 'PicklingError' and 'rank 1: function cannot be pickled' in one[1] and 'rank 0: ' in broadcast[1]
        assert trap[0] == 'UnpicklingError'
        assert f'rank {rank} cannot unpickle what rank 1 has sent by all_gather_list: division by zero' in trap[1]
        assert after == [0, 1, 2]


def broadcasts():
    talk, rank, n = start()
    res = [talk.broadcast_object((rank, 'x'*size), src=src) == (src, 'x'*size) for size in (1, 50000) for src in range(n)]
    return res + [talk.broadcast_object(None if rank else 5) == 5]


@pytest.mark.sizes
def test_broadcast(world):
    for res in world(broadcasts): assert all(res)


# Tensors and dicts

KINDS = dict(float16=torch.float16, bfloat16=torch.bfloat16, float32=torch.float32, float64=torch.float64, int64=torch.int64)
OPS = 'sum', 'mean', 'max', 'min'


def reference(vs, op):
    if not isinstance(vs[0], torch.Tensor): return dict(sum=sum(vs), mean=sum(vs)/len(vs), max=max(vs), min=min(vs))[op]
    res = reduce({'sum': torch.add, 'mean': torch.add, 'max': torch.maximum, 'min': torch.minimum}[op], vs)
    return (res/len(vs) if op == 'mean' else res).to(vs[0].dtype)


def same(a, b):
    "Of the same type, dtype and value"
    if type(a) is not type(b): return False
    if isinstance(a, np.generic): return a.dtype == b.dtype and bool(np.allclose(a, b, rtol=1e-6))
    if not isinstance(a, torch.Tensor): return a == b
    rtol = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(a.dtype, 1e-6)
    return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=rtol)


def values(r, op):
    "What rank `r` has: numbers, and tensors of several dtypes and shapes; the keys are in another order in each rank"
    rnd = torch.Generator().manual_seed(r)
    tensors = {f'{nm}{shape}': (torch.rand(shape, generator=rnd)*40).to(dtype)
               for nm, dtype in KINDS.items() for shape in ((), (3,), (2, 0), (30, 41))}
    d = dict(int=r-1, huge=10**40+r, float=r/8, np_float=np.float32(r), np_int=np.int64(r), flag=r > 0, **tensors)
    pairs = [(k, v) for k, v in d.items() if op != 'mean' or not k.startswith('int64')]
    random.Random(r).shuffle(pairs)
    return dict(pairs)


def reduce_values():
    "What is not as it should be: of a dict, of each of its tensors by itself, and of one that is not contiguous"
    talk, rank, n = start()
    bad = []
    for op in OPS:
        every = [values(r, op) for r in range(n)]
        res = talk.all_reduce_dict(every[rank], op=op)
        if list(res) != list(every[rank]): bad.append((op, 'the order of keys'))
        for k in sorted(res):
            want = reference([o[k] for o in every], op)
            if not same(res[k], want): bad.append((op, k, res[k], want))
            if not isinstance(want, torch.Tensor): continue
            strided = torch.stack([every[rank][k]]*2, -1)[..., 0]
            if talk.all_reduce(strided, op=op) is not strided or not same(strided, want): bad.append((op, k, 'alone'))
    return bad


@pytest.mark.sizes
def test_reductions(world): assert world(reduce_values) == [[]]*world.size


def same_bits():
    talk, rank, _ = start()
    torch.manual_seed(rank)
    d = talk.all_reduce_dict(dict(f=0.1+rank, t=torch.rand(3), b=torch.rand(5000)), op='mean')
    return d['f'], d['t'].numpy().tobytes(), d['b'].numpy().tobytes()


def test_same_bits_in_all_workers(world3): assert len(set(world3(same_bits))) == 1


def not_reduced():
    "What is other in one rank; and what nobody can reduce"
    talk, rank, _ = start()
    def dicts(a, b): return error(lambda: talk.all_reduce_dict(b if rank == 1 else a))
    def tensors(a, b): return error(lambda: talk.all_reduce(b if rank == 1 else a))
    res = [tensors(torch.ones(3, 500), torch.ones(2, 500)), tensors(torch.ones(2), torch.ones(2).double()),
           dicts(dict(a=1, b=2), dict(a=1)), dicts(dict(a=1), dict(a=torch.ones(1))),
           tensors(torch.ones(2), 'no tensor'), dicts(dict(a=1), dict(a='x'))]
    alone = [error(lambda: talk.all_reduce(torch.ones(2).int(), op='mean')), error(lambda: talk.all_reduce(torch.ones(2).bool())),
             error(lambda: talk.all_reduce_dict(dict(b=None))),
             error(lambda: talk.all_reduce_dict([1, 2])), error(lambda: talk.all_reduce(torch.ones(2), op='avg'))]
    return res, alone, talk.all_reduce(torch.ones(2000))[0].item()


def test_not_reduced(world3):
    "The same error in all, which says who has what; and all go on"
    for rank, (res, alone, after) in enumerate(world3(not_reduced)):
        assert [o[0] for o in res] == ['ValueError']*4 + ['TypeError']*2, (res, alone)
        assert [o[0] for o in alone] == ['TypeError']*4 + ['ValueError'] and after == 3., (res, alone)
        texts = ('ranks 0, 2 have torch.float32 of shape (3, 500), rank 1 has torch.float32 of shape (2, 500)', 'rank 1 has torch.float64',
                 "data['b'] differs: ranks 0, 2 have a number, rank 1 has nothing", "data['a'] differs",
                 "rank 1: tensor is str 'no tensor'",
                 "rank 1: data['a'] is str 'x'")
        for (_, text), says in zip(res, texts): assert says in text, text
        assert '.float()' in alone[0][1] and '.int()' in alone[1][1] and f"rank {rank}: data['b'] is NoneType None" in alone[2][1]


# Decisions, and being out of step

def out_of_step():
    talk, rank, n = start()
    calls = dict(all_gather_list=lambda: talk.all_gather_list('x'*3000), broadcast=lambda: talk.broadcast_object('x'*3000),
                 all_reduce=lambda: talk.all_reduce(torch.ones(1000)), all_reduce_max=lambda: talk.all_reduce(torch.ones(1000), op='max'),
                 all_reduce_dict=lambda: talk.all_reduce_dict(dict(t=torch.ones(1000))))
    res = {}
    for a, b in product(calls, calls):
        if a == b: continue
        e = error(calls[a] if rank == 0 else calls[b])
        res[a, b] = e, talk.all_gather_list((a, b)) == [(a, b)]*n
    return res


def test_out_of_step(world2):
    one, two = world2(out_of_step)
    assert one == two and len(one) == 5*4
    for pair, ((kind, text), after) in one.items():
        assert kind == 'OutOfStep' and after, pair
        assert text.startswith('rank 0 is at ') and ', rank 1 at ' in text and 'test_collectives.py:' in text


def subgroups():
    talk, rank, _ = start()
    import torch.distributed as dist
    g, other = dist.new_group([0, 2]), dist.new_group([1])
    f = io.StringIO()
    calls = [lambda g: talk.all_gather_list((rank, 'x'*2000), group=g),
             lambda g: talk.all_reduce(torch.full((2000,), float(rank)), g, op='mean')[0].item(),
             lambda g: talk.all_reduce_dict(dict(a=rank), group=g)['a'],
             lambda g: [len(o) for o in talk.all_gather_list(torch.ones(900*(rank+1)), g)],
             lambda g: talk.broadcast_object(rank, src=2, group=g),
             lambda g: talk.print_in_order('hi', group=g, file=f)]
    inside = [error(lambda: c(g)) for c in calls]
    alone = talk.all_gather_list(rank, group=other) if rank == 1 else error(lambda: talk.all_gather_list(rank, group=other))
    src = error(lambda: talk.broadcast_object(1, src=1, group=g))
    step = error(lambda: talk.all_reduce(1, group=g) if rank == 0 else talk.all_gather_list(1, group=g))
    return inside, alone, src, step, f.getvalue(), talk.all_gather_list(rank)


def test_subgroups(world3):
    for rank, (inside, alone, src, step, text, after) in enumerate(world3(subgroups)):
        assert after == [0, 1, 2]
        for kind, msg in [*inside, src, step] if rank == 1 else [alone]:
            assert kind == 'ValueError' and f'rank {rank} is not in this group' in msg
        if rank == 1:
            assert alone == [1]
            continue
        assert inside == [('no error', o) for o in ([(0, 'x'*2000), (2, 'x'*2000)], 1., 2, [900, 2700], 2, None)]
        assert text == ('' if rank else '[rank 0] hi\n[rank 2] hi\n')
        assert src[0] == 'ValueError' and 'src=1 is not in this group: its global ranks are [0, 2]' in src[1]
        assert step[0] == 'OutOfStep' and 'rank 0 is at all_reduce' in step[1] and 'rank 2 at all_gather_list' in step[1]
