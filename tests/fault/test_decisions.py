"A Cancel exception of some workers is one of all, and leaves what it leaves in one process; so does a Ctrl-C"
import contextlib, os, signal

import pytest
from harness import WorkerError
from learners import *

CANCELS = ['CancelFit', 'CancelEpoch', 'CancelTrain', 'CancelValid', 'CancelBatch', 'CancelStep', 'CancelBackward']
OUTSIDE = ['before_fit', 'before_epoch', 'before_train', 'after_train', 'before_validate', 'after_validate', 'after_epoch', 'after_fit']
INSIDE = ['before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step', 'after_step', 'after_batch']


def raises(event, exc, ranks, training=True, at=1, asked=True):
    """A callback that raises `exc` in `event` of the first epoch, from batch `at` on, in some workers; the others are `asked` whether to
    do so too"""
    def f(self):
        from fastai.callback import core  # here: fastai makes these classes in a way by which they would travel to the workers as copies
        from fastdist.world import get_rank
        if event not in ('before_fit', 'after_fit') and self.epoch != 0 or get_rank() not in ranks: return
        if event in INSIDE and (self.learn.training != training or self.iter < at): return
        raise getattr(core, f'{exc}Exception')()
    return type('Raises', (Callback,), {event: f, 'sync_cancel': asked})()


class Seen(Callback):
    "Counts the events, after all other callbacks"
    order = 200
    def __init__(self): self.n = {}
    def __getattr__(self, nm):
        if nm.startswith(('before_', 'after_')) and nm not in INSIDE: return lambda: self.n.update({nm: self.n.get(nm, 0)+1})
        return super().__getattr__(nm)


def state_after(distrib, case, **ctx):
    "What a fit with a callback that `raises(*case)` leaves, and the weights of one without it after that"
    import fastdist.all
    learn, cb, err = quiet(learner(n=14, n_val=23, bs=4, bn=True, opt=Adam, metrics=accuracy, cbs=Seen())), raises(*case), None
    def context(): return learn.distrib_ctx(split_batches=True, **ctx) if distrib else contextlib.nullcontext()
    try:
        with context(): learn.fit(2, cbs=cb)
    except Exception as e: err = type(e).__name__
    rec = vars(learn.recorder)
    res = dict(err=err, weights=weights(learn), losses=[float(o) for o in rec.get('losses', [])], seen=dict(learn.seen.n),
               values=[[v for v in o if not isinstance(v, str)] for o in rec.get('values', [])],
               at=(getattr(learn, 'epoch', None), getattr(learn, 'iter', None), learn.opt.hypers[-1]['lr']))
    learn.remove_cbs(learn._grab_cbs(type(cb)))
    with context(): learn.fit(1)
    return {**res, 'again': weights(learn)}


def states_after(distrib, cases, **ctx): return [state_after(distrib, case, **ctx) for case in cases]


def alike(a, b):
    "Are two lists of lists of numbers and `None` the same, up to rounding?"
    if isinstance(a, list): return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, float): return a == b or abs(a-b) <= 1e-6*max(1, abs(a)) or a != a and b != b
    return a == b


def differs(a, b):
    "The keys by which two states differ"
    return [k for k in a if (diff(a[k], b[k]) > 2e-7 if k in ('weights', 'again') else not alike(a[k], b[k]))]


def compare(world, cases, want, **ctx):
    "Each worker's states are those of one process"
    got, want = world(states_after, True, cases, timeout=280, **ctx), states_after(False, want)
    bad = [(c, rank, d) for rank, states in enumerate(got) for c, w, s in zip(cases, want, states) if (d := differs(w, s))]
    assert not bad, f'{len(bad)} of {len(cases)*len(got)}: {bad[:20]}'


# Who raises it enters the agreement alone, where and what only what follows: so each event, and each exception, is met by both
@pytest.mark.parametrize('subset', [[0], [1]])
@pytest.mark.parametrize('where', ['outside', 'inside'])
def test_cancelled_by_some_of_two(world2, where, subset):
    pairs = [(ev, exc) for ev in (OUTSIDE if where == 'outside' else INSIDE) for exc in CANCELS][sum(subset)::4]
    compare(world2, [(*o, subset) for o in pairs], [(*o, [0]) for o in pairs])


def test_cancelled_in_validation(world3):
    "What counts is the first batch of the data set in which one of the workers raises it: they have every third"
    cases = [('before_batch', 'CancelFit'), ('after_pred', 'CancelEpoch'), ('after_batch', 'CancelValid')]
    for ranks, first in ([1], 1), ([0], 3), ([0, 2], 2):
        compare(world3, [(*o, ranks, False, 1) for o in cases], [(*o, [0], False, first) for o in cases])


@pytest.mark.parametrize('strategy', ['zero1', 'fsdp'])
def test_cancelled_with_a_strategy(world3, strategy):
    cases = [('after_loss', 'CancelBatch'), ('before_step', 'CancelStep'), ('after_backward', 'CancelFit'),
             ('before_validate', 'CancelValid')]
    compare(world3, [(*o, [1]) for o in cases], [(*o, [0]) for o in cases], strategy=strategy)


LOOPS = [('before_batch', 'CancelFit'), ('after_step', 'CancelTrain'), ('after_epoch', 'CancelFit'), ('after_loss', 'CancelEpoch')]


def test_all_raise_what_they_are_not_asked_for(world3):
    compare(world3, [(*o, range(3), True, 1, False) for o in LOOPS], [(*o, [0]) for o in LOOPS])


@pytest.mark.parametrize('rank', [0, 2])
def test_one_ends_a_loop_unasked(world3, rank):
    "All end it together, after that batch or the next"
    one = states_after(False, [(*o, [0]) for o in LOOPS])
    first, *others = world3(states_after, True, [(*o, [rank], True, 1, False) for o in LOOPS])
    for i, (a, b) in enumerate(zip(one, first)):
        assert len(a['losses']) <= len(b['losses']) <= len(a['losses'])+1 and a['at'][0] <= b['at'][0] <= a['at'][0]+1, LOOPS[i]
        for o in others:
            assert not {'weights', 'losses', 'again'} & {*differs(b, o[i])} and o[i]['at'][0] == b['at'][0], (LOOPS[i], differs(b, o[i]))


def skips(how):
    "One worker leaves out a step, by a callback that nobody asks, or a batch, by its loss"
    import fastdist.all
    from fastai.callback.core import CancelBatchException
    from fastdist.world import get_rank
    learn = quiet(learner(n=14, bs=4))
    def cancels(*_):
        if get_rank() == 1 and learn.training: raise CancelBatchException()
    if how == 'loss': learn.loss_func.register_forward_hook(cancels)
    with learn.distrib_ctx(): learn.fit(1, cbs=raises('before_step', 'CancelStep', [1], asked=False) if how == 'callback' else None)


@pytest.mark.parametrize('how,says',
                         [('callback', ['Raises.before_step raised CancelStepException, other ranks did not', 'sync_cancel = True']),
                                      ('loss', ['CancelBatchException was raised, and not by a callback'])], ids=['callback', 'loss'])
def test_one_skips_what_others_do(world3, how, says):
    with pytest.raises(WorkerError) as e: world3(skips, how, grace=20)
    assert all(o in e.value.problems[1] for o in says), e.value.problems[1]


def interrupted(when):
    "Ctrl-C in one worker, of which the script makes the best, or which has a handler of its own"
    import fastdist.all
    from fastdist.world import get_rank
    how, seen = None, []
    class Presses(Callback):
        def before_batch(self):
            if get_rank() == 1 and self.training and self.epoch == 1 and self.iter == 1 and when != 'raised':
                os.kill(os.getpid(), signal.SIGINT)
        def after_epoch(self):
            if when == 'raised' and get_rank() == 1 and self.epoch == 1: raise KeyboardInterrupt
    handler = (lambda *_: seen.append(1)) if when == 'own handler' else signal.default_int_handler
    old, learn = signal.signal(signal.SIGINT, handler), quiet(learner(n=22, n_val=33, bn=True))
    try:
        with learn.distrib_ctx():
            try: learn.fit(3, cbs=Presses())
            except KeyboardInterrupt: how = 'interrupted'
            loss = learn.validate()[0]  # all workers go on together
            learn.fit(1)
        return how, loss, weights(learn), signal.getsignal(signal.SIGINT) is handler, bool(seen)
    finally: signal.signal(signal.SIGINT, old)


@pytest.mark.parametrize('when', ['pressed', 'raised', 'own handler'])
def test_interrupted(world3, when):
    first, *others = world3(interrupted, when)
    assert first[0] == (None if when == 'own handler' else 'interrupted')
    for r, o in enumerate([first, *others]):
        assert o[:2] == first[:2] and diff(o[2], first[2]) == 0 and o[3:] == (True, r == 1 and when == 'own handler')
