"""One worker does otherwise than the others: it has other arguments, callbacks or numbers, leaves the context early, or makes another call.
All of them hear of it at once, by an error that says who does what, have their learners back as they were, and can train together
after it"""
import tempfile, time
from functools import partial

import pytest
from learners import *
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.progress import CSVLogger, ProgressCallback
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientClip


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


class MoreNumbers(Recorder):
    "What a logger adds: it feeds the metrics once more"
    name = 'more_numbers'


CALLBACKS = dict(accumulates=partial(GradientAccumulation, 10), clips=GradientClip, half=MixedPrecision, records=MoreNumbers)
ARGS = dict(strategy='zero1', gradient_accumulation_steps=3)
CALLS = dict(leaves=([], 'at the end of distrib_ctx ('), stays=(['fit', 'fit'], 'at a fit of 2 epochs ('),
             longer=(['longer'], 'at a fit of 3 epochs ('),
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
    does = dict(fit=lambda: learn.fit(2), longer=lambda: learn.fit(3), validate=learn.validate, preds=learn.get_preds)
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


@pytest.mark.parametrize('case,strategy', [(o, None) for o in CALLS] + [('stays', 'fsdp')])
def test_makes_other_calls(world, case, strategy):
    calls, what = CALLS[case]
    told(world(otherwise, strategy, calls=calls), 'OutOfStep', what, 'test_one_does_otherwise.py:')


@pytest.mark.parametrize('name', list(ARGS))
def test_has_other_arguments(world, name):
    told(world(otherwise, args={name: ARGS[name]}), 'ValueError', f'{name} is not the same in all workers: rank',
         f'rank 1 has {ARGS[name]!r}')


@pytest.mark.parametrize('cb', list(CALLBACKS))
def test_has_a_callback_that_changes_training(world, cb):
    made = CALLBACKS[cb]()
    told(world(otherwise, cb=cb), 'RuntimeError', f'not all workers have the callback {type(made).__name__} (order ',
         'it is missing in rank')


def test_has_frozen_layers(world):
    told(world(otherwise, frozen=['0.weight', '3.bias']), 'RuntimeError', 'not all workers train the same parameters: ',
         'is frozen in rank 1. ')


@pytest.mark.parametrize('case,strategy', [('lr', None), ('wd', None), ('lr', 'fsdp')])
def test_steps_by_other_numbers(world, case, strategy):
    found = world(otherwise, strategy, **dict(lr=dict(schedule=dict(lr_max=.3)), wd=dict(wd=.1))[case])
    told(found, 'RuntimeError', f'{case} of parameter group 0: rank', 'rank 1 has ')


def test_batches_otherwise(world):
    told(world(otherwise, drop_last=True), 'ValueError', 'loader 0 of rank 1 has other data than that of rank 0, or batches it otherwise',
         'drop_last=True')


class Table(Callback):
    "`if rank == 0:` in a callback that all have"
    inside = False
    def after_epoch(self): # as the evaluation has, too
        from fastdist.world import get_rank
        if get_rank() != 1 or self.inside: return
        self.inside = True
        self.learn.validate()


def test_evaluates_in_a_callback_of_all(world):
    for rank, ((cls, text, secs), same, _) in enumerate(world(otherwise, all_have=Table)):
        assert cls == ('OutOfStep' if rank == 1 else 'RemoteError') and secs < 30 and same, (rank, cls, text)
        assert 'rank 1 is at learn.validate of ds_idx=1 (' in text and 'has gone on without it: call it in all workers' in text, text


def between_fits(what, strategy=None):
    """The second fit's weights, where rank 0 alone, or each worker by itself, has done something between two fits of a context; the error,
    if there is one"""
    import fastdist.all
    from fastdist.world import get_rank
    learn = quiet(learner(n=24, bn=True, opt=Adam))
    def load():
        if get_rank() == 0: learn.load(path)
    def split(): learn.dls = DataLoaders(*(TfmdDL(Items(24, True, seed=get_rank()), bs=5) for _ in range(2)))
    with tempfile.TemporaryDirectory() as tmp, learn.distrib_ctx(watchdog=60, split_batches=True, strategy=strategy):
        path = Path(tmp)/'first'
        learn.fit(1)
        learn.save(path)
        learn.fit(1)
        locals()[what]()
        error = caught(lambda: learn.fit(1))
        state = {f'{i}.{k}': o for i, (p, *_) in enumerate(learn.opt.all_params())
                 for k, o in learn.opt.state[p].items() if k in ('grad_avg', 'sqr_avg', 'step')}
        return error, error[0] or {**weights(learn), **state}


def test_loads_between_fits(world):
    "What rank 0 alone has loaded, all have: weights, what the optimizer remembers, and its numbers"
    (_, one), = [between_fits('load')]
    for error, found in world(between_fits, 'load'): assert error[0] is None and diff(one, found) < 1e-6


@pytest.mark.parametrize('what,strategy,kind,says', [
    ('load', 'fsdp', 'RuntimeError', 'only some workers have changed weights'),
    ('split', None, 'ValueError', 'has other data than that of rank 0, or batches it otherwise')], ids=['shards', 'data'])
def test_what_cannot_be_shared_between_fits(world, what, strategy, kind, says):
    for error, _ in world(between_fits, what, strategy): assert error[0] == kind and says in error[1] and error[2] < 30, error


class ByFirstBatch(Callback):
    "Sets what a model begins with by the first batch, as LSUV does, or by every so many-th sample of it"
    def __init__(self, every=1): self.every = every
    def before_fit(self):
        x = self.dls.train.one_batch()[0][::self.every]
        self.model.train()
        with torch.no_grad():
            self.model[0].weight.div_(self.model[0](x).std())
            self.model(x) # which changes running statistics


def by_first_batch(every=1, strategy=None, distrib=True):
    import fastdist.all
    learn = quiet(learner(n=24, bs=6, bn=True, shuffle=False))
    with warnings.catch_warnings(record=True) as seen, (
            learn.distrib_ctx(split_batches=True, strategy=strategy) if distrib else contextlib.nullcontext()):
        warnings.simplefilter('always')
        learn.fit(2, cbs=ByFirstBatch(every))
    return weights(learn), [str(o.message) for o in seen]


@pytest.mark.parametrize('size,strategy', [(2, None), (3, 'zero1')])
def test_sets_weights_by_its_first_batch(worlds, size, strategy):
    "Each worker by its share: all train with what rank 0 has set, and rank 0 says so"
    want, _ = by_first_batch(size, distrib=False)
    for rank, (found, said) in enumerate(worlds(size)(by_first_batch, strategy=strategy)):
        assert diff(want, found) < 2e-7
        assert sum("all go on with rank 0's" in o for o in said) == len(said) == (rank == 0), said


def logged(tmp):
    "The weights of a fit in which rank 0 alone has callbacks that log and save"
    import fastdist.all
    from fastdist.world import get_rank
    learn = learner(n=24, path=tmp)
    learn.logger = noop
    if get_rank() == 0: learn.add_cbs([CSVLogger(), SaveModelCallback()])
    else: learn.remove_cb(ProgressCallback)
    with learn.distrib_ctx(watchdog=60), learn.no_bar(): learn.fit(2)
    return weights(learn)


def test_what_rank0_logs_and_saves_is_its_own(world, tmp_path):
    first, *others = world(logged, tmp_path)
    for w in others: assert not diff(w, first)
    assert (tmp_path/'models'/'model.pth').exists()


def busy_before_the_end(secs, watchdog):
    "Seconds until this rank has left the context"
    import fastdist.all
    from fastdist.world import get_rank
    learn, start = quiet(learner(n=24)), time.monotonic()
    with learn.distrib_ctx(watchdog=watchdog):
        learn.fit(1)
        if get_rank() == 0: time.sleep(secs)  # it evaluates, or sends away what was trained
    return time.monotonic()-start


def test_the_others_wait_at_the_end(world3):
    "As long as it takes: longer than the watchdog has patience"
    for secs in world3(busy_before_the_end, 6, 2): assert secs >= 6


def busy_elsewhere(file, watchdog):
    "Rank 0 is done, and busy with something of its own; the others wait for it in a fit: one of them has to watch"
    import fastdist.all
    from fastdist.world import RemoteError, get_rank
    learn = quiet(learner(n=24))
    learn.to_distributed(watchdog=watchdog)
    learn.fit(1)
    if get_rank() == 0:
        for _ in range(300):
            if Path(file).exists(): return
            time.sleep(.1)
    try: learn.fit(1)
    except RemoteError as e: return e.rank, str(e)
    finally: Path(file).touch()


def test_is_done_before_the_others(world3, tmp_path):
    _, *others = world3(busy_elsewhere, str(tmp_path/'done'), 2)
    for rank, text in others: assert rank == 0 and 'rank 0 has kept the others waiting' in text, text


def within_rank0_first():
    "What comes of what all workers do together, in the function of `rank0_first`, and then of a fit outside of it"
    import fastdist.all
    from fastdist.world import rank0_first
    learn = quiet(learner(n=23, n_val=43))
    with learn.distrib_ctx():
        error = caught(lambda: rank0_first(learn.fit, 1))
        learn.fit(1)
    return error


def test_all_are_called_by_rank0_first(world):
    "Rank 0 would wait in it for the others, which wait for rank 0: until the watchdog, or half an hour"
    for r, (cls, text, _) in enumerate(world(within_rank0_first)):
        assert cls == ('RemoteError' if r else 'RuntimeError') and 'is for all workers together' in text, text
