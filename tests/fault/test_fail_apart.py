"""Several workers fail at once, each by an error of its own, where they have begun different messages, or remember different things: what was in
shards is whole again or is said to be lost, and all can train together after it"""
import time, warnings

import pytest
import torch.distributed as dist
from learners import *


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


STRATEGIES = ['ddp', 'zero1', 'zero2', 'fsdp']


def kinds_of(learn): return [type(o).__name__ for o in (*learn.cbs, *learn.model.modules())]


def ended(strategy, cb, how='fit'):
    "Errors that a fit with `cb` ends with, seconds, has the learner its parts back?, are its weights numbers?, is it told to load a checkpoint?, weights of a fit after that"
    import fastdist.all
    learn = quiet(learner(n=24, bn=True, opt=Adam))
    kinds, start, error = kinds_of(learn), time.monotonic(), None
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter('always')
        try:
            with learn.distrib_ctx(watchdog=60, strategy=strategy):
                if how == 'fit': learn.fit(1, cbs=cb)
                else:
                    try: learn.fit(1, cbs=cb)
                    except RuntimeError as e: error = e
                    learn.fit(1)
        except Exception as e: error = e
    told = any('load a checkpoint' in str(o.message) for o in shown)
    secs, same, whole = time.monotonic()-start, kinds_of(learn) == kinds, all(o.isfinite().all() for o in weights(learn).values())
    again = quiet(learner(n=24, bn=True))
    with again.distrib_ctx(watchdog=60): again.fit(1)
    return f'{type(error).__name__}: {error}', secs, same, whole, told, weights(again)


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


def at_once(strategy, at, how='fit'): return ended(strategy, FailAtOnce(at), how)


@pytest.mark.parametrize('how', ['fit', 'caught'])
@pytest.mark.parametrize('strategy', STRATEGIES)
def test_all_fail_at_different_places(world, strategy, how):
    for error, secs, same, whole, told, w in (found := world(at_once, strategy, time.time()+2, how)):
        assert 'boom' in error and secs < 14 and same
        assert whole or told
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


def in_step(strategy): return ended(strategy, FailInStep())


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_one_fails_within_a_step(world, strategy):
    for error, secs, same, whole, told, w in (found := world(in_step, strategy)):
        assert 'boom' in error and secs < 8 and same
        assert whole, told
        assert not diff(w, found[0][-1])
