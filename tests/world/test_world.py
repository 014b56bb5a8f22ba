"Groups and calls of many workers, and what forks are"
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
    for f in (lambda: rank0_first(rank0_first, fail), lambda: rank0_read(rank0_first, lambda: 5), lambda: rank0_first(rank0_first, get_rank),
              lambda: rank0_read(get_rank)):
        try: res.append(f())
        except Exception as e: res.append(type(e).__name__)
    return res


def test_rank0_first_within_itself(world3):
    "The others waited for a call of rank 0's of another number, without a limit"
    for r, res in enumerate(world3(within_each_other)): assert res == ['RemoteError' if r else 'ValueError', 5, r, 0], res


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


def test_no_address_in_the_environment(monkeypatch):
    "Was a KeyError, or one of urlparse about a port None"
    from fastdist.world import distributed_init
    for k in [o for o in os.environ if o.startswith(('SLURM_', 'MASTER_', 'TORCHELASTIC_', 'RANK', 'WORLD_SIZE', 'LOCAL_'))]:
        monkeypatch.delenv(k)
    with pytest.raises(ValueError, match="init_method='env://' .* MASTER_ADDR and MASTER_PORT is not set"):
        distributed_init('env://', rank=0, world_size=2)


def forked():
    "A child forked in a group has its world, and ends nothing of it; one that is forked before has a world of its own"
    from fastdist.world import current_world, setup_distrib, teardown_distrib
    teardown_distrib()
    def child(f):
        pid = os.fork()
        if pid == 0:
            ok = False
            try: ok = f()
            finally: os._exit(0 if ok else 1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    w, ends = current_world(), []
    apart = child(lambda: current_world() is not w)
    setup_distrib()
    w = current_world()
    w.on_end(lambda: ends.append(1))
    kept = child(lambda: current_world() is w and (w.end(), ends == [])[1])
    teardown_distrib()
    return apart, kept, ends


def test_forks_are_no_ranks(world2): assert world2(forked) == [(True, True, [1])]*2
