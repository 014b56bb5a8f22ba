"`World`: it is made with a process group, holds what is of that group, and ends with it"
import pytest


def groups():
    "What a world knows in each of three groups, the second of which somebody else makes"
    import os, torch.distributed as dist
    from fastdist.world import current_world, get_rank, get_world_size, node_group, setup_distrib, teardown_distrib
    from fastdist.world.ranks import World
    teardown_distrib()  # of an earlier test
    begun, res, rank, n = [], [], get_rank(), get_world_size()
    hook = World.on_begin(lambda: begun.append(current_world().number))
    before = current_world()
    address = os.environ['MASTER_PORT'] if 'MASTER_PORT' in os.environ else None
    try:
        for other in (False, True, False):
            if other: dist.init_process_group('gloo', store=dist.PrefixStore('other', before.rendezvous.store), rank=rank, world_size=n)
            else: setup_distrib()
            w, ends = current_world(), []
            assert w is current_world() and w is not before and w.is_live
            w.on_end(lambda: ends.append(dist.is_initialized()))
            assert w.cached('x', lambda: rank) == w.cached('x', lambda: -1) == rank
            w.store('test').set(f'{rank}', str(w.number))
            dist.barrier()
            seen = [w.store('test').get(f'{r}') == str(w.number).encode() for r in range(n)]
            group = node_group() is node_group()
            (dist.destroy_process_group if other else teardown_distrib)()
            before = current_world()
            res.append((other, seen, group, ends, w.cache, w.is_live))
            assert before.rendezvous is w.rendezvous
    finally: World.begin_hooks.remove(hook)
    return res, begun[1]-begun[0], len(begun)


@pytest.mark.parametrize('n', [2, 3])
def test_worlds_of_groups(worlds, n):
    for res, more, begun in worlds(n)(groups):
        assert (more, begun) == (1, 2)  # not of the group that somebody else has made
        for other, seen, group, ends, cache, live in res:
            assert seen == [True]*n and group and not live and cache == {}
            assert ends == [not other]  # before the group goes; or when it is found to have gone


def forked():
    "A child forked in a group has its world, and ends nothing of it; one that is forked before has a world of its own"
    import os, torch.distributed as dist
    from fastdist.world import current_world, setup_distrib, teardown_distrib
    from fastdist.world.group import shared_store
    teardown_distrib()
    def child(f):
        pid = os.fork()
        if pid == 0:
            ok = False
            try: ok = f()
            finally: os._exit(0 if ok else 1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    w, ends = current_world(), []
    apart = child(lambda: current_world() is not w and current_world().rendezvous is None)
    setup_distrib()
    w = current_world()
    w.on_end(lambda: ends.append(1))
    kept = child(lambda: current_world() is w and (w.end(), ends == [])[1])
    teardown_distrib()
    return apart, kept, ends


def test_forks(world2): assert world2(forked) == [(True, True, [1])]*2


def destroyed(folder):
    "A context after the end of a group that the script has made, or `distributed_init`, where no variable of a launcher's says how to make another"
    import os, torch.distributed as dist
    from fastdist.world import current_world, distributed_init, get_world_size, setup_distrib, teardown_distrib
    names = [k for k in os.environ if k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'MASTER_ADDR', 'MASTER_PORT') or k.startswith('TORCHELASTIC_')]
    launched, res = {k: os.environ.pop(k) for k in names}, []
    rank = int(launched['RANK'])
    try:
        dist.init_process_group('gloo', init_method=f'file://{folder}/torchs', rank=rank, world_size=2)
        current_world()  # as a context in it does
        dist.barrier()  # who goes before the other one has its connections breaks them
        dist.destroy_process_group()
        try: setup_distrib()
        except RuntimeError as e: res.append(str(e))
        os.environ['WORLD_SIZE'] = '1'
        setup_distrib()
        del os.environ['WORLD_SIZE']
        res.append(dist.is_initialized())
        distributed_init(f'file://{folder}/ours', rank=rank, world_size=2)
        dist.barrier()
        teardown_distrib()
        setup_distrib()  # as a context after one that has failed
        dist.barrier()
        res.append(get_world_size())
        teardown_distrib()
    finally: os.environ.update(launched)
    return res


def test_after_the_end_of_a_group(worlds, tmp_path):
    for r, (why, alone, n) in enumerate(worlds(2)(destroyed, tmp_path)):
        assert f'rank {r}: the process group of 2 workers has gone' in why and not alone and n == 2
