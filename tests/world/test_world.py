"Starting, waiting and failing, on many workers"
import os
import pytest
from learners import *


def groups_again():
    "Groups made and left, again and again"
    import torch.distributed as dist
    from fastdist.all import get_rank, setup_distrib, teardown_distrib
    res = []
    for i in range(6):
        setup_distrib(); setup_distrib()
        t = torch.tensor([get_rank()+1.])
        dist.all_reduce(t)
        res.append((t.item(), dist.get_backend()))
        teardown_distrib(); teardown_distrib()
    return res


def test_groups_one_after_another(worlds):
    for size, total in (2, 3.), (3, 6.):
        for res in worlds(size)(groups_again): assert res == [(total, 'gloo')]*6


def within_each_other():
    "Calls in the function of a call, which rank 0 alone makes where that fails, or is `rank0_read`'s; and calls after them"
    from fastdist.all import get_rank, rank0_first, rank0_read
    def fail(): raise ValueError('no disk')
    res = []
    for f in (lambda: rank0_first(rank0_first, fail), lambda: rank0_read(rank0_read, lambda: 5), lambda: rank0_first(rank0_first, get_rank), lambda: rank0_read(get_rank)):
        try: res.append(f())
        except Exception as e: res.append(type(e).__name__)
    return res


def test_rank0_first_within_itself(world3):
    "The others waited for a call of rank 0's of another number, without a limit"
    for r, res in enumerate(world3(within_each_other)): assert res == ['RemoteError' if r else 'ValueError', 5, r, 0], res


def alone(monkeypatch, **env):
    for k in [o for o in os.environ if o.startswith(('SLURM_', 'MASTER_', 'TORCHELASTIC_')) or o in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')]:
        monkeypatch.delenv(k)
    for k, v in env.items(): monkeypatch.setenv(k, v)


def test_no_address_in_the_environment(monkeypatch):
    "Was a KeyError, or one of urlparse about a port None"
    from fastdist.world import distributed_init
    for env, what in ({}, 'MASTER_ADDR and MASTER_PORT'), (dict(MASTER_ADDR='h'), 'MASTER_PORT'):
        alone(monkeypatch, **env)
        with pytest.raises(ValueError, match=f"init_method='env://' .* {what} is not set"): distributed_init('env://', rank=0, world_size=2)


def test_arguments_that_are_none(monkeypatch):
    "Alone without a word, or an AttributeError"
    from fastdist.world import distributed_init
    alone(monkeypatch)
    for args in {'distributed_world_size': 2}, Path('/shared/meet'), 3:
        with pytest.raises(TypeError, match='args=.* is not accepted: it is an init_method'): distributed_init(args)


def too_large():
    "A value that is larger than the store takes, and the next one"
    from fastdist.world import get_rank, setup_distrib, world_store
    setup_distrib()
    kv = world_store()
    try: kv.set('large', 'x'*2**23)
    except ValueError as e: kv.set(f'said by {get_rank()}', str(e))
    return kv.wait([f'said by {r}' for r in range(2)], 60)


def test_a_value_that_is_too_large(world2):
    "Ended the connection to the store, for what came after it too"
    for res in world2(too_large): assert all("the value of 'large' has 83" in o and 'broadcast_object' in o for o in res), res


def test_rank0_first_before_workers_are_started(monkeypatch):
    "On a node of several, in the one task that Slurm has started for all of its GPUs: it waited ten minutes for workers that nobody starts"
    from fastdist.world import rank0_first, world_store
    alone(monkeypatch, SLURM_PROCID='0', SLURM_NTASKS='2', SLURM_LOCALID='0', SLURM_NODEID='0', SLURM_NNODES='2', SLURM_STEP_ID='0', SLURM_STEP_NODELIST='h[1-2]')
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    monkeypatch.setattr('torch.cuda.device_count', lambda: 2)
    for f in (lambda: rank0_first(len, 'a')), world_store:
        with pytest.raises(ValueError, match='by `call_main`, and call this in what it calls'): f()
