"Forks are no ranks"


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
