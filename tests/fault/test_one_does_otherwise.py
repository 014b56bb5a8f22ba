"""One worker does otherwise than the others: it has other arguments, callbacks or numbers, leaves the context early, or makes another call. All of them
hear of it at once, by an error that says who does what, have their learners back as they were, and can train together after it"""
import collections, re, tempfile, time
from functools import partial

import pytest
from fastdist.world import RemoteError
from learners import *
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.progress import CSVLogger, ProgressCallback
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback
from fastai.callback.training import BnFreeze, GradientClip, ShortEpochCallback


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


CALLBACKS = dict(accumulates=partial(GradientAccumulation, 10), clips=GradientClip, stops=EarlyStoppingCallback, plateau=ReduceLROnPlateau,
                 short=ShortEpochCallback, freezes=BnFreeze, half=MixedPrecision)
ARGS = dict(strategy='zero1', sync_bn=False, gradient_accumulation_steps=3, split_batches=True)
CALLS = dict(leaves=([], 'at the end of distrib_ctx ('), stays=(['fit', 'fit'], 'at a fit of 2 epochs ('), tunes=(['fit', 'tune'], 'at a fit of 1 epoch ('), longer=(['longer'], 'at a fit of 3 epochs ('),
             evaluates=(['validate'], 'at learn.validate of ds_idx=1 ('), predicts=(['preds'], 'at learn.get_preds of ds_idx=1 ('))


def caught(f):
    start = time.monotonic()
    try: f()
    except Exception as e: return type(e).__name__, str(e), time.monotonic()-start
    return None, '', time.monotonic()-start


def parts(learn): return [type(o).__name__ for os in (learn.cbs, learn.model.modules(), learn.dls.loaders) for o in os]


def otherwise(strategy=None, cb=None, args=None, calls=None, schedule=None, frozen=(), all_have=None, **kwargs):
    "In rank 1 alone what is given happens. The error of each rank, and whether it is rid of it"
    import fastdist.all
    from fastdist.world import get_rank
    mine = get_rank() == 1
    learn = quiet(learner(n=24, bn=True, opt=Adam, splitter=lambda m: [params(m[:2]), params(m[2:])], **(kwargs if mine else {})))
    if cb and mine: learn.add_cb(CALLBACKS[cb]())
    if all_have: learn.add_cb(all_have())
    for o in frozen if mine else (): learn.model.get_parameter(o).requires_grad_(False)
    before = parts(learn)
    does = dict(fit=lambda: learn.fit(2), tune=lambda: learn.fine_tune(1), longer=lambda: learn.fit(3), validate=learn.validate, preds=learn.get_preds)
    def run():
        with learn.distrib_ctx(watchdog=60, **({'strategy': strategy} if strategy else {}), **(args if args and mine else {})):
            if calls is None: learn.fit_one_cycle(2, **(schedule if schedule and mine else {}))
            else:
                for o in (calls if mine else ['fit']): does[o]()
    error = caught(run)
    again = quiet(learner(n=24, bn=True))
    with again.distrib_ctx(watchdog=60): again.fit(1)
    return error, parts(learn) == before, weights(again)


def told(found, kind, *said):
    for (cls, text, secs), same, w in found:
        assert cls == kind and all(o in text for o in said), (cls, text)
        assert secs < 30 and same # by no watchdog
        assert not diff(w, found[0][-1])


@pytest.mark.parametrize('case,strategy', [(o, None) for o in CALLS] + [('leaves', 'zero1'), ('stays', 'fsdp')])
def test_makes_other_calls(world, case, strategy):
    calls, what = CALLS[case]
    told(world(otherwise, strategy, calls=calls), 'OutOfStep', what, 'test_one_does_otherwise.py:')


@pytest.mark.parametrize('name', list(ARGS))
def test_has_other_arguments(world, name):
    told(world(otherwise, args={name: ARGS[name]}), 'ValueError', f'{name} is not the same in all workers: rank', f'rank 1 has {ARGS[name]!r}')


@pytest.mark.parametrize('cb', list(CALLBACKS))
def test_has_a_callback_that_changes_training(world, cb):
    made = CALLBACKS[cb]()
    told(world(otherwise, cb=cb), 'RuntimeError', f'not all workers have the callback {type(made).__name__} (order ', 'it is missing in rank')


@pytest.mark.parametrize('strategy', [None, 'fsdp'])
def test_has_frozen_layers(world, strategy):
    told(world(otherwise, strategy, frozen=['0.weight', '3.bias']), 'RuntimeError', 'not all workers train the same parameters: ', 'is frozen in rank 1. ')


@pytest.mark.parametrize('case,strategy', [('lr_max', None), ('moms', None), ('wd', None), ('lr', None), ('lr_max', 'fsdp')])
def test_steps_by_other_numbers(world, case, strategy):
    if case == 'lr': case, kwargs = 'lr_max', dict(schedule=None, lr=.3) # the learner's own
    elif case == 'wd': kwargs = dict(wd=.1)
    else: kwargs = dict(schedule={'lr_max': dict(lr_max=.3), 'moms': dict(moms=(.5, .4, .5))}[case])
    found = world(otherwise, strategy, **kwargs)
    told(found, 'RuntimeError', f"{dict(lr_max='lr', moms='mom').get(case, case)} of parameter group 0: rank", 'rank 1 has ')


def goes_on():
    import fastdist.all
    from fastdist.world import get_rank
    learn = quiet(learner(n=24, metrics=accuracy))
    with learn.distrib_ctx(watchdog=60):
        error = caught(lambda: learn.fit(1, lr=.1 if get_rank() == 0 else .2))
        return error[0], list(learn.validate())


def test_goes_on_in_the_context(world):
    "What has ended one fit in all workers, before it began, is nothing to what comes after it"
    one = list(quiet(learner(n=24, metrics=accuracy)).validate())
    for error, values in world(goes_on): assert error == 'RuntimeError' and diff(values, one) < 1e-6


@pytest.mark.parametrize('kwargs', [dict(shuffle=False), dict(drop_last=True)], ids=lambda o: next(iter(o)))
def test_batches_otherwise(world, kwargs):
    (name, value), = kwargs.items()
    told(world(otherwise, **kwargs), 'ValueError', 'loader 0 of rank 1 has other data than that of rank 0, or batches it otherwise', f'{name}={value}')


class Table(Callback):
    "`if rank == 0:` in a callback that all have"
    def __init__(self, call): self.call, self.inside = call, False
    def after_epoch(self): # as the evaluation has, too
        from fastdist.world import get_rank
        if get_rank() != 1 or self.inside: return
        self.inside = True
        getattr(self.learn, self.call)()


@pytest.mark.parametrize('call', ['validate', 'get_preds'])
def test_evaluates_in_a_callback_of_all(world, call):
    for rank, ((cls, text, secs), same, _) in enumerate(world(otherwise, all_have=partial(Table, call))):
        assert cls == ('OutOfStep' if rank == 1 else 'RemoteError') and secs < 30 and same, (rank, cls, text)
        assert f'rank 1 is at learn.{call} of ds_idx=1 (' in text and 'has gone on without it: call it in all workers' in text, text


def between_fits(what, strategy=None):
    "The second fit's weights, where rank 0 alone, or each worker by itself, has done something between two fits of a context; the error, if there is one"
    import fastdist.all
    from fastdist.world import get_rank
    learn = quiet(learner(n=24, bn=True, opt=Adam))
    def load():
        if get_rank() == 0: learn.load(path)
    def split(): learn.dls = DataLoaders(*(TfmdDL(Items(24, True, seed=get_rank()), bs=5) for _ in range(2)))
    def batches(): learn.dls.train.bs = 5 + (get_rank() == 1)
    with tempfile.TemporaryDirectory() as tmp, learn.distrib_ctx(watchdog=60, split_batches=True, strategy=strategy):
        path = Path(tmp)/'first'
        learn.fit(1)
        learn.save(path)
        learn.fit(1)
        locals()[what]()
        error = caught(lambda: learn.fit(1))
        return error, error[0] or {**weights(learn), **{f'{i}.{k}': o for i, (p, *_) in enumerate(learn.opt.all_params()) for k, o in learn.opt.state[p].items() if k in ('grad_avg', 'sqr_avg', 'step')}}


def test_loads_between_fits(world):
    "What rank 0 alone has loaded, all have: weights, what the optimizer remembers, and its numbers"
    (_, one), = [between_fits('load')]
    for error, found in world(between_fits, 'load'): assert error[0] is None and diff(one, found) < 1e-6


@pytest.mark.parametrize('strategy', ['fsdp'])
def test_loads_shards_between_fits(world, strategy):
    for error, _ in world(between_fits, 'load', strategy): assert error[0] == 'RuntimeError' and f'only some workers have changed the weights' in error[1]


@pytest.mark.parametrize('what', ['split', 'batches'])
def test_other_data_between_fits(world, what):
    for error, _ in world(between_fits, what): assert error[0] == 'ValueError' and 'has other data than that of rank 0, or batches it otherwise' in error[1] and error[2] < 30


def logged(tmp, saves):
    "Collectives of a fit in which rank 0 alone has callbacks that log, and may save"
    import fastdist.all
    from fastdist.world import get_rank
    learn = learner(n=24, path=tmp)
    learn.logger = noop
    if get_rank() == 0: learn.add_cbs([CSVLogger(), *([SaveModelCallback()] if saves else [])])
    else: learn.remove_cb(ProgressCallback)
    with learn.distrib_ctx(watchdog=60), learn.no_bar() if saves else contextlib.nullcontext():
        with counted_collectives(collections.Counter()) as counts: learn.fit(2)
    return counts, weights(learn)


def test_what_rank0_logs_is_shared_with_nobody(world, tmp_path):
    "No list of callbacks of each rank is sent to all, where they only log; and one that saves may be rank 0's alone"
    found = world(logged, tmp_path, False)
    for counts, w in found:
        assert counts['allreduce'] > 0 and not any('gather' in o and n for o, n in counts.items()), counts
        assert not diff(w, found[0][1])
    saved = world(logged, tmp_path, True)
    for _, w in saved: assert not diff(w, found[0][1])


def busy_before_the_end(secs, watchdog):
    "Seconds until this rank has left the context; those that gloo's messages may take before the last, and in it"
    import fastdist.all
    from fastdist.fault import supervisor
    from fastdist.world import get_rank
    from fastdist.world.group import backends
    limits, real = [], supervisor.same_call
    def limit(): limits.append(backends()[-1][2].options._timeout.total_seconds())
    def noted(what): return limit(), real(what)
    learn, start = quiet(learner(n=24)), time.monotonic()
    supervisor.same_call = noted
    try:
        with learn.distrib_ctx(watchdog=watchdog):
            learn.fit(1)
            limit()
            if get_rank() == 0: time.sleep(secs)  # it evaluates, or sends away what was trained
    finally: supervisor.same_call = real
    return time.monotonic()-start, limits


def test_the_others_wait_at_the_end(worlds):
    "As long as it takes: longer than the watchdog has patience, and than gloo has"
    for secs, (before, last) in worlds(3)(busy_before_the_end, 6, 2): assert secs >= 6 and before == 64 and last > 1e6


def detaches_alone(watchdog):
    import fastdist.all
    from fastdist.world import get_rank
    learn = quiet(learner(n=24))
    before = parts(learn)
    learn.to_distributed(watchdog=watchdog, strategy='zero1')
    learn.fit(1)
    if get_rank() == 1: return None
    return *caught(learn.detach_distributed), parts(learn) == before


def test_the_others_do_not_detach(worlds):
    cls, text, _, same = worlds(2)(detaches_alone, 2)[0]
    assert cls == 'RemoteError' and 'rank 1 has kept the others waiting' in text and same


def busy_elsewhere(file, watchdog):
    "Rank 0 is done, and busy with something of its own; the others wait for it in a fit: one of them has to watch"
    import fastdist.all
    from fastdist.world import get_rank
    learn = quiet(learner(n=24))
    learn.to_distributed(watchdog=watchdog)
    learn.fit(1)
    error = [None, '', 0]
    if get_rank() == 0:
        for _ in range(300):
            if Path(file).exists(): break
            time.sleep(.1)
    else:
        try: learn.fit(1)
        except RemoteError as e: error = [e.rank, str(e), 1]
        Path(file).touch()
    return error


def test_is_done_before_the_others(worlds, tmp_path):
    first, *others = worlds(3)(busy_elsewhere, str(tmp_path/'done'), 2)
    for rank, text, n in others: assert n and rank == 0 and 'rank 0 has kept the others waiting' in text, text


def at_different_saves(watchdog):
    "Each rank waits for the others to make its own call, by which all have to save their shards: none is in a collective"
    import fastdist.all
    from fastdist.world import get_rank
    learn = quiet(learner(n=24))
    def run():
        with learn.distrib_ctx(watchdog=watchdog, strategy='fsdp'):
            learn.fit(1)
            if get_rank() == 1: learn.export('other.pkl')
            else: learn.save('one')
    error = caught(run)
    return error, hasattr(learn, 'distributed_trainer')


def test_waits_for_another_call(worlds, tmp_path):
    for (cls, text, secs), there in worlds(2)(at_different_saves, 3):
        assert cls == 'RemoteError' and 'have waited for 3 s' in text, (cls, text)
        assert len(set(re.findall(r'otherwise.py:(\d+) in run', text))) == 2 and secs < 60 and not there


def saves_alone():
    "Rank 0 alone saves, goes on after the error that says so, and then all save"
    import fastdist.all
    from fastdist.world import get_rank
    learn, errors = quiet(learner(n=24)), []
    with learn.distrib_ctx(watchdog=60, strategy='zero1'):
        learn.fit(1)
        if get_rank() == 0: errors.append(caught(lambda: learn.save('alone'))[:2])
        learn.fit(1)
        errors.append(caught(lambda: learn.save('all'))[:2])
        learn.load('all')
        learn.fit(1)
    return errors, weights(learn)


def test_saves_alone_and_then_with_all(worlds, tmp_path, monkeypatch):
    (first, *others), w = zip(*worlds(2)(saves_alone))
    assert first[0][0] == 'RuntimeError' and 'rank 1 does not make the call' in first[0][1] and first[1:] == [(None, '')], first
    assert others == [[(None, '')]] and not diff(*w)


def within_rank0_first():
    "What comes of what all workers do together, in the function of `rank0_first`, and then of a fit outside of it"
    import fastdist.all
    from fastdist.world import rank0_first, teardown_distrib
    learn, res = quiet(learner(n=23, n_val=43)), []
    def call(f):
        try: res.append(f())
        except Exception as e: res.append((type(e).__name__, getattr(e, 'rank', None), str(e)))
    def context():
        with learn.distrib_ctx(): learn.fit(1)
    teardown_distrib()
    call(lambda: rank0_first(context))
    with learn.distrib_ctx():
        for f in learn.fit, learn.validate: call(lambda: rank0_first(*[f, 1][:1+(f == learn.fit)]))
        learn.fit(1)
    return res


def test_all_are_called_by_rank0_first(world):
    "Rank 0 would wait in it for the others, which wait for rank 0: until the watchdog, or half an hour"
    for r, res in enumerate(world(within_rank0_first)):
        assert [o[:2] for o in res] == [('RemoteError', 0) if r else ('RuntimeError', None)]*3, res
        assert all('is for all workers together' in o[2] for o in res)
