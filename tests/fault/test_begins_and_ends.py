"""One worker fails, is killed, or gets a Ctrl-C while a context begins, or as it ends: the others hear of it at once, all have whole models, and can
train together after it"""
import os, signal, sys, time, warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import TESTS, free_port, launched
from learners import *


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


STEPS = ['check_values', 'global_batch_norm', 'on_learner']  # what a context calls at its beginning, in the middle of its set-up, and late in it


def kinds_of(learn): return [type(o).__name__ for o in (*learn.cbs, *learn.model.modules())]


def fails(how, strategy, step, ctrl_c=False):
    "In rank 1, `step` of what the trainer does as it begins meets an error, or a Ctrl-C: (error, seconds), largest change of a weight, is it told to load a checkpoint?, has it its parts back?, weights of a fit after that"
    import fastdist.all
    from fastdist.trainer import setup
    from fastdist.trainer.loaders import SharedLoaders
    from fastdist.trainer.trainer import DistributedTrainer
    from fastdist.world import get_rank
    at = SharedLoaders if step == 'on_learner' else setup
    learn = quiet(learner(n=24, bn=True, opt=Adam))
    learn.create_opt()
    before, kinds, plain, start, error = weights(learn), kinds_of(learn), getattr(at, step), time.monotonic(), None
    def failing(*args):
        if ctrl_c: os.kill(os.getpid(), signal.SIGINT)
        else: raise RuntimeError('boom')
        return plain(*args)
    def run():
        if how == 'context':
            with learn.distrib_ctx(watchdog=60, strategy=strategy): learn.fit(1)
        elif how == 'callback': learn.fit(1, cbs=DistributedTrainer(watchdog=60, strategy=strategy))
        else:
            learn.to_distributed(watchdog=60, strategy=strategy)
            try: learn.fit(1)
            finally: learn.detach_distributed()
    if get_rank() == 1: setattr(at, step, failing)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter('always')
        try: run()
        except BaseException as e: error = type(e).__name__, str(e)
        finally: setattr(at, step, plain)
    told = any('load a checkpoint' in str(o.message) for o in shown)
    secs, now, same = time.monotonic()-start, weights(learn), kinds_of(learn) == kinds
    again = quiet(learner(n=24, bn=True))
    with again.distrib_ctx(watchdog=60): again.fit(1)
    return error, secs, diff(now, before), told, same, weights(again)


@pytest.mark.parametrize('step,how,strategy', [('check_values', 'context', 'ddp'), ('check_values', 'callback', 'fsdp'), ('global_batch_norm', 'context', 'zero2'), ('global_batch_norm', 'to_distributed', 'fsdp'),
                                              ('on_learner', 'context', 'ddp'), ('on_learner', 'to_distributed', 'zero1')])
def test_one_fails_as_it_begins(world, how, strategy, step):
    for r, (error, secs, change, told, same, w) in enumerate(found := world(fails, how, strategy, step)):
        assert error[0] == ('RuntimeError' if r == 1 else 'RemoteError') and 'boom' in error[1], error
        assert r == 1 or 'rank 1' in error[1]
        assert secs < 6 and same
        # where rank 1 had not begun to shard, nobody has its part of what the others have, who are told
        lost = strategy != 'ddp' and step == 'global_batch_norm' and r != 1
        assert told == lost and (change == 0) == (not lost or strategy not in ('zero2', 'fsdp')), (told, change)
        assert not diff(w, found[0][-1])


@pytest.mark.parametrize('strategy', ['zero2', 'fsdp'])
@pytest.mark.parametrize('step', STEPS)
def test_ctrl_c_as_it_begins(world, strategy, step):
    "It counts when all have begun"
    for error, secs, change, told, same, w in (found := world(fails, 'context', strategy, step, True)):
        assert error[0] == 'KeyboardInterrupt' and secs < 6 and same
        assert not (change or told) and not diff(w, found[0][-1])


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
with learn.distrib_ctx(strategy=sys.argv[1]): learn.fit(1, cbs=Dies())
'''


@pytest.mark.parametrize('strategy', ['fsdp'])
def test_nobody_waits_for_one_that_was_killed(tmp_path, strategy):
    "Without a launcher, which would end them: neither to gather what was in shards, nor at the end of the process that holds the store"
    (tmp_path/'script.py').write_text(KILLED)
    port = free_port()
    def run(rank):
        res = launched([sys.executable, tmp_path/'script.py', strategy], 60, dict(RANK=f'{rank}', WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=f'{port}'))
        return res, time.time()
    with ThreadPoolExecutor() as pool: (first, end), (second, _) = pool.map(run, range(2))
    assert second.returncode == -signal.SIGKILL and first.returncode == 1
    assert 'rank 0 stopped because rank 1' in first.stderr and 'other workers had shards' in first.stderr
    assert end-float(first.stdout.split()[1]) < 8, first.stderr # seconds; the limits of these waits are 10 and 5
