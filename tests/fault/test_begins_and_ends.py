"""A context that one worker, or all of them, fail as it begins, in a step, or by a Ctrl-C: the others hear of it at once, what was in
shards is whole again or is said to be lost, and all can train together after it"""
import os, signal, sys, time, warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from harness import TESTS, free_port, launched
from learners import *


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


def kinds_of(learn): return [type(o).__name__ for o in (*learn.cbs, *learn.model.modules())]


def ended(strategy, how='context', cbs=None):
    """What a fit ends with: (error, seconds, largest change of a weight, are the weights numbers?, is the user told to load a checkpoint?,
    has the learner its parts back?, weights of a fit after that)"""
    import fastdist.all
    from fastdist.trainer.trainer import DistributedTrainer
    learn = quiet(learner(n=24, bn=True, opt=Adam))
    learn.create_opt()
    before, kinds, start, error = weights(learn), kinds_of(learn), time.monotonic(), None
    def run():
        args = dict(watchdog=60, strategy=strategy)
        if how == 'callback': learn.fit(1, cbs=[*L(cbs), DistributedTrainer(**args)])
        elif how == 'to_distributed':
            learn.to_distributed(**args)
            try: learn.fit(1, cbs=cbs)
            finally: learn.detach_distributed()
        else:
            with learn.distrib_ctx(**args):
                try: learn.fit(1, cbs=cbs)
                except RuntimeError:
                    if how != 'caught': raise
                    learn.fit(1)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter('always')
        try: run()
        except BaseException as e: error = f'{type(e).__name__}: {e}'
    told, secs, now = any('load a checkpoint' in str(o.message) for o in shown), time.monotonic()-start, weights(learn)
    whole, same = all(o.isfinite().all() for o in now.values()), kinds_of(learn) == kinds
    again = quiet(learner(n=24, bn=True))
    with again.distrib_ctx(watchdog=60): again.fit(1)
    return error, secs, diff(now, before), whole, told, same, weights(again)


def fails(how, strategy, step, ctrl_c=False):
    """In rank 1, `step` of what a context calls as it begins meets an error, or a Ctrl-C: at its beginning, in the middle of its set-up,
    or late in it"""
    from fastdist.trainer import setup
    from fastdist.trainer.loaders import SharedLoaders
    from fastdist.world import get_rank
    at = SharedLoaders if step == 'on_learner' else setup
    plain = getattr(at, step)
    def failing(*args):
        setattr(at, step, plain)
        if not ctrl_c: raise RuntimeError('boom')
        os.kill(os.getpid(), signal.SIGINT)
        return plain(*args)
    if get_rank() == 1: setattr(at, step, failing)
    return ended(strategy, how)


@pytest.mark.parametrize('step,how,strategy',
                         [('check_values', 'callback', 'fsdp'), ('global_batch_norm', 'to_distributed', 'fsdp'),
                          ('global_batch_norm', 'context', 'zero2'),
                                               ('on_learner', 'context', 'ddp'), ('on_learner', 'to_distributed', 'zero1')])
def test_one_fails_as_it_begins(world, how, strategy, step):
    for r, (error, secs, change, _, told, same, w) in enumerate(found := world(fails, how, strategy, step)):
        assert error.startswith('RuntimeError' if r == 1 else 'RemoteError') and 'boom' in error and (r == 1 or 'rank 1' in error), error
        assert secs < 6 and same
        # where rank 1 had not begun to shard, nobody has its part of what the others have, who are told
        lost = strategy != 'ddp' and step == 'global_batch_norm' and r != 1
        assert told == lost and (change == 0) == (not lost or strategy not in ('zero2', 'fsdp')), (told, change)
        assert not diff(w, found[0][-1])


@pytest.mark.parametrize('step,strategy', [('check_values', 'fsdp'), ('on_learner', 'zero2')])
def test_ctrl_c_as_it_begins(world, strategy, step):
    "It counts when all have begun"
    for error, secs, change, _, told, same, w in (found := world(fails, 'context', strategy, step, True)):
        assert error.startswith('KeyboardInterrupt') and secs < 6 and same
        assert not (change or told) and not diff(w, found[0][-1])


class FailAtOnce(Callback):
    "All workers fail before the second step, at the same moment, so that none hears of another before; rank 0 has begun a message more"
    order = 100
    def __init__(self, at): self.at = at
    def before_step(self):
        from fastdist.world import get_rank
        if self.iter < 1: return
        if get_rank() == 0: dist.all_reduce(torch.ones(3), async_op=True)
        time.sleep(max(self.at-time.time(), 0))
        raise RuntimeError(f'boom of {get_rank()}')


@pytest.mark.parametrize('strategy,how', [('ddp', 'caught'), ('zero1', 'context'), ('fsdp', 'context')])
def test_all_fail_at_different_places(world, strategy, how):
    at = time.time()+2
    for error, secs, _, whole, told, same, w in (found := world(lambda: ended(strategy, how, FailAtOnce(at)))):
        assert 'boom' in error and secs < 14 and same and (whole or told)
        assert not diff(w, found[0][-1])


class FailInStep(Callback):
    "The last worker fails in the first step, when the optimizer remembers something of some parameters alone"
    def before_step(self):
        from fastdist.world import get_rank, get_world_size
        if get_rank() < get_world_size()-1: return
        seen = []
        def third(p, **kwargs):
            seen.append(p)
            if len(seen) == 3: raise RuntimeError('boom')
            return {}
        self.learn.opt.cbs = L(third, *self.learn.opt.cbs)


@pytest.mark.parametrize('strategy', ['zero1', 'zero2'])
def test_one_fails_within_a_step(world, strategy):
    for error, secs, _, whole, told, same, w in (found := world(lambda: ended(strategy, cbs=FailInStep()))):
        assert 'boom' in error and secs < 8 and same and whole, told
        assert not diff(w, found[0][-1])


KILLED = f'''
import os, signal, sys, time
sys.path.insert(0, {str(TESTS/'support')!r})
from learners import *
import fastdist.all
class Dies(Callback):
    def before_step(self):
        print('at', time.time(), flush=True)
        if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)
learn = quiet(learner(n=24, bn=True))
with learn.distrib_ctx(strategy='fsdp'): learn.fit(1, cbs=Dies())
'''


def test_nobody_waits_for_one_that_was_killed(tmp_path):
    "Without a launcher, which would end them: neither to gather what was in shards, nor at the end of the process that holds the store"
    (tmp_path/'script.py').write_text(KILLED)
    port = free_port()
    def run(rank):
        res = launched([sys.executable, tmp_path/'script.py'], 60,
                       dict(RANK=f'{rank}', WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=f'{port}'))
        return res, time.time()
    with ThreadPoolExecutor() as pool: (first, end), (second, _) = pool.map(run, range(2))
    assert second.returncode == -signal.SIGKILL and first.returncode == 1
    assert 'rank 0 stopped because rank 1' in first.stderr and 'other workers had shards' in first.stderr
    assert end-float(first.stdout.split()[1]) < 8, first.stderr # seconds; the limits of these waits are 10 and 5
