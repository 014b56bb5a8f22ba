"A Cancel exception of some workers is one of all, and leaves what it leaves in one process"
import pytest, torch

from learners import *


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


CANCELS = ['CancelFit', 'CancelEpoch', 'CancelTrain', 'CancelValid', 'CancelBatch', 'CancelStep', 'CancelBackward']
OUTSIDE = ['before_fit', 'before_epoch', 'before_train', 'after_train', 'before_validate', 'after_validate', 'after_epoch', 'after_fit']
INSIDE = ['before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step', 'after_step', 'after_batch']


def raises(event, exc, ranks, training=True, at=1, order=0, asks=True):
    "A callback that raises `exc` in `event` of the first epoch, from batch `at` on, in some workers"
    def f(self):
        from fastdist.world import get_rank
        if event not in ('before_fit', 'after_fit') and self.epoch != 0 or get_rank() not in ranks: return
        if event in INSIDE and (self.learn.training != training or self.iter < at): return
        # here: fastai makes these classes in a way by which they would travel to the workers as copies
        from fastai.callback.core import CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException, CancelStepException, CancelTrainException, CancelValidException
        raise dict(CancelFit=CancelFitException, CancelEpoch=CancelEpochException, CancelTrain=CancelTrainException, CancelValid=CancelValidException,
                   CancelBatch=CancelBatchException, CancelStep=CancelStepException, CancelBackward=CancelBackwardException)[exc]()
    return type('Raises', (Callback,), {event: f, 'order': order, 'sync_cancel': asks})()


class Seen(Callback):
    "Counts the events, after all other callbacks"
    order = 200
    def __init__(self): self.n = {}
    def __getattr__(self, nm):
        if nm.startswith(('before_', 'after_')) and nm[-5:] != 'batch' and nm not in INSIDE: return lambda: self.n.update({nm: self.n.get(nm, 0)+1})
        return super().__getattr__(nm)


def state_after(distrib, cb, again=True, **kwargs):
    "What a fit with `cb` leaves, and one without it after that"
    import contextlib
    kwargs = {**dict(n=14, n_val=23, bs=4, bn=True, opt=Adam, metrics=accuracy, cbs=Seen()), **kwargs}
    learn = quiet(learner(**kwargs))
    err = None
    if distrib: import fastdist.all
    try:
        with learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext(): learn.fit(2, cbs=cb)
    except Exception as e: err = type(e).__name__
    rec = vars(learn.recorder)
    res = dict(err=err, weights=weights(learn), losses=[float(o) for o in rec.get('losses', [])], values=[[v for v in o if not isinstance(v, str)] for o in rec.get('values', [])],
               at=(getattr(learn, 'epoch', None), getattr(learn, 'iter', None), learn.opt.hypers[-1]['lr']), seen=dict(learn.seen.n))
    learn.remove_cbs(learn._grab_cbs(type(cb)))
    if again: # a learner that has been cancelled goes on
        with learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext(): learn.fit(1)
        res['again'] = weights(learn)
    return res


def alike(a, b):
    "Are two lists of lists of numbers, strings and `None` the same, up to rounding?"
    if isinstance(a, list): return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, float): return a == b or abs(a-b) <= 1e-6*max(1, abs(a)) or a != a and b != b
    return a == b


def differs(a, b):
    "The keys by which two states differ"
    bad = [k for k in ('err', 'at', 'seen') if a[k] != b[k]]
    for k in ('weights', 'again'):
        if k in a and diff(a[k], b[k]) > 2e-7: bad.append(k)
    return bad + [k for k in ('losses', 'values') if not alike(a[k], b[k])]


def all_of(distrib, cases): return [state_after(distrib, raises(*case), again=i%3==0) for i, case in enumerate(cases)]


def compare(world, subset, cases, refs=None):
    got = world(all_of, True, [(ev, exc, subset, *rest) for ev, exc, *rest in cases], timeout=280)
    want = all_of(False, refs or [(ev, exc, [0], *rest) for ev, exc, *rest in cases])
    bad = [(c, rank, d) for rank, states in enumerate(got) for c, w, s in zip(cases, want, states) if (d := differs(w, s))]
    assert not bad, f'{len(bad)} of {len(cases)*len(got)}: {bad[:20]}'


# Who raises it enters the agreement alone, where and what only what follows: so each pair of event and exception is tried once, and each
# event, and each exception, with each of those who may raise it (there are 7 exceptions, and 3 is no divisor of that). All of 336 cells cost 5 minutes.
@pytest.mark.parametrize('subset', [[0], [1], [0, 1]])
@pytest.mark.parametrize('where', ['outside', 'inside'])
def test_cancelled_by_some_of_two(world2, where, subset):
    pairs = [(ev, exc) for ev in (OUTSIDE if where == 'outside' else INSIDE) for exc in CANCELS]
    compare(world2, subset, pairs[sum(subset) + (len(subset) > 1)::3])


@pytest.mark.parametrize('subset', [[0], [1], [1, 2]])
def test_cancelled_in_validation(world3, subset):
    "What counts is the first batch of the data set in which one of the workers raises it"
    # each exception at each event, by one of the three subsets
    events, excs = ('before_batch', 'after_pred', 'after_loss', 'after_batch'), ('CancelFit', 'CancelEpoch', 'CancelValid')
    cases = [(ev, excs[(i + [[0], [1], [1, 2]].index(subset)) % 3], False, 1) for i, ev in enumerate(events)]
    first = min(b for b in range(1, 6) if b % 3 in subset)
    compare(world3, subset, cases, [(ev, exc, [0], False, first) for ev, exc, *_ in cases])


def nans(distrib, when, ranks):
    "A NaN that one worker alone meets, in training or in validation"
    import fastdist.all
    from fastai.callback.tracker import TerminateOnNaNCallback
    class Spoils(Callback):
        def before_batch(self):
            if (when == 'train') == self.training and self.epoch == 1 and self.iter >= 2: self.learn.xb = tuple(torch.where(torch.arange(len(x))[:, None] == 0, x*float('nan'), x) if self.spoils() else x for x in self.xb)
        def spoils(self):
            from fastdist.world import get_rank
            return get_rank() in ranks
    return state_after(distrib, Spoils(), again=False, bn=False, cbs=[Seen(), TerminateOnNaNCallback()])


@pytest.mark.parametrize('when,ranks', [('train', [1]), ('valid', [0])])
def test_terminate_on_nan(world2, when, ranks):
    want = nans(False, when, [0]) if when == 'train' or ranks == [0] else None
    a, b = world2(nans, True, when, ranks)
    assert not differs(a, b) and a['seen']['after_epoch'] == 1, (differs(a, b), a) # the second of two epochs was not finished
    if want is not None: assert [k for k in differs(want, a) if k != 'losses'] == [] and alike(want['losses'][:-1], a['losses'][:-1])


def monitored(distrib, folder):
    "Stock callbacks that decide by what is recorded"
    import fastdist.all, os
    from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback
    from fastdist.world import get_rank
    path = f'{folder}/{"many" if distrib else "one"}'
    # a metric that is another number in each worker: they all record rank 0's, and decide by it
    odd = ValueMetric(lambda: [3., 1., 2., 2., 0., 1., 1., 1., 1.][learn.epoch] + 10*get_rank()*(learn.epoch % 2), 'odd')
    learn = quiet(learner(n=22, bs=5, metrics=[accuracy, odd], path=path))
    cbs = [SaveModelCallback('odd', comp=np.less, fname='best'), EarlyStoppingCallback('odd', comp=np.less, patience=3), ReduceLROnPlateau('odd', comp=np.less, patience=1)]
    saved = []
    class Looks(Callback):
        order = 62 # right after the save
        def after_epoch(self):
            self.learn.load('best', with_opt=False) if self.save_model.new_best else None
            saved.append((self.save_model.new_best, os.path.exists(f'{path}/models/best.pth')))
    def fit(): learn.fit(9, cbs=[*cbs, Looks()])
    if distrib:
        with learn.distrib_ctx(split_batches=True): fit()
    else: fit()
    return dict(err=None, weights=weights(learn), losses=[float(o) for o in learn.recorder.losses], values=[list(v) for v in learn.recorder.values],
                at=(learn.epoch, learn.opt.hypers[-1]['lr'], cbs[0].best, cbs[1].wait, cbs[2].wait), seen=saved)


def test_stock_callbacks_that_decide(world, tmp_path):
    want = monitored(False, tmp_path)
    assert want['at'][0] < 8 and want['seen'].count((True, True)) == 3
    for o in world(monitored, True, tmp_path): assert not differs(want, o), (differs(want, o), want['at'], o['at'], want['values'], o['values'])


def short(distrib, short_valid):
    import fastdist.all
    from fastai.callback.training import ShortEpochCallback
    return state_after(distrib, ShortEpochCallback(0.4, short_valid=short_valid), again=False)


@pytest.mark.parametrize('short_valid', [True])
def test_short_epochs(world, short_valid):
    want = short(False, short_valid)
    for o in world(short, True, short_valid): assert not differs(want, o), differs(want, o)


def preds_until(distrib, at):
    "Predictions of an evaluation that a callback ends"
    import contextlib
    learn = quiet(learner(n_val=33, bs=5))
    if distrib: import fastdist.all
    with learn.distrib_ctx() if distrib else contextlib.nullcontext():
        return [tuple(o.double() for o in learn.get_preds(reorder=False, cbs=raises(ev, 'CancelValid', [0, 1, 2], training=False, at=at, order=order), with_loss=True))
                for ev, order in (('before_batch', 0), ('after_batch', 0), ('after_batch', 70))]


@pytest.mark.parametrize('at', [2])
def test_predictions_of_a_cancelled_evaluation(world, at):
    want = preds_until(False, at)
    for got in world(preds_until, True, at):
        for w, o in zip(want, got): assert [len(x) for x in w] == [len(x) for x in o] and max(diff(x, y) for x, y in zip(w, o)) < 1e-6


class Hides(Callback):
    "Raises what its code does not show: `exc` in the ranks of `ranks`, the `at`th time of `event`"
    def __init__(self, event, exc, ranks, at=3, asked=True):
        self.exc, self.ranks, self.at, self.n, self.sync_cancel = exc, ranks, at, 0, asked
        setattr(self, event, lambda: self._decide())
    def _decide(self):
        from fastdist.world import get_rank
        self.n += 1
        if self.n == self.at and get_rank() in self.ranks: raise vars(sys.modules['fastai.callback.core'])[self.exc](f'rank {get_rank()}')


HIDDEN = [('before_batch', 'CancelBatchException'), ('after_loss', 'CancelBatchException'), ('after_backward', 'CancelFitException'), ('before_step', 'CancelStepException'),
          ('after_batch', 'CancelEpochException'), ('before_validate', 'CancelValidException')]


def hidden(distrib, ranks, cases, asked=True, **kwargs):
    "After a fit with one that raises: weights, batches that have been trained, and epochs"
    res = []
    for event, exc in cases:
        learn = quiet(learner(n=22, bs=5, opt=SGD))
        with distrib_or_not(learn, distrib, **kwargs): learn.fit(3, cbs=Hides(event, exc, ranks, asked=asked))
        res.append((weights(learn), len(learn.recorder.losses), learn.epoch, learn.opt.hypers[-1]['lr']))
    return res


def distrib_or_not(learn, distrib, **kwargs):
    import contextlib
    if not distrib: return contextlib.nullcontext()
    import fastdist.all
    return learn.distrib_ctx(split_batches=True, **kwargs)


def as_one(got, one):
    for res in got:
        for (w, *more), (w1, *more1) in zip(res, one, strict=True): assert diff(w, w1) < 1e-6 and more == more1


@pytest.mark.parametrize('strategy', ['zero1', 'zero2', 'fsdp'])
def test_one_raises_it_with_a_strategy(world3, strategy):
    cases = HIDDEN[['zero1', 'zero2', 'fsdp'].index(strategy)::2]
    as_one(world3(hidden, True, [1], cases, strategy=strategy), hidden(False, [0], cases))


UNASKED = [('before_batch', 'CancelFitException'), ('after_step', 'CancelTrainException'), ('after_epoch', 'CancelFitException')]


def test_all_raise_what_they_are_not_asked_for(world3):
    as_one(world3(hidden, True, range(3), UNASKED, asked=False), hidden(False, [0], UNASKED))


@pytest.mark.parametrize('rank', [0, 2])
def test_one_ends_a_loop_unasked(world3, rank):
    "All end it together, after that batch or the next"
    cases = [*UNASKED, ('after_loss', 'CancelEpochException'), ('after_backward', 'CancelFitException')]
    one, (first, *others) = hidden(False, [0], cases), world3(hidden, True, [rank], cases, asked=False)
    as_one(others, first)
    for (_, n, epoch, _), (_, n1, epoch1, _) in zip(one, first): assert n <= n1 <= n+1 and epoch <= epoch1 <= epoch+1


def test_one_skips_what_others_do(world3):
    from harness import WorkerError
    with pytest.raises(WorkerError) as e: world3(hidden, True, [1], [('before_step', 'CancelStepException')], asked=False, grace=20)
    assert 'Hides.before_step raised CancelStepException, other ranks did not' in e.value.problems[1] and 'sync_cancel = True' in e.value.problems[1]


def in_a_loss():
    import fastdist.all
    from fastdist.world import get_rank
    learn = quiet(learner(n=14, bs=4))
    loss = learn.loss_func
    def cancels(*args, **kwargs):
        from fastai.callback.core import CancelBatchException
        if get_rank() == 1 and learn.training and learn.iter == 1: raise CancelBatchException()
        return loss(*args, **kwargs)
    learn.loss_func = cancels
    with learn.distrib_ctx(): learn.fit(1)


def test_no_callback_raises_it(world3):
    from harness import WorkerError
    with pytest.raises(WorkerError) as e: world3(in_a_loss, grace=20)
    assert 'CancelBatchException was raised, and not by a callback' in e.value.problems[1]


def interrupted(when):
    "Ctrl-C in one worker, of which the script makes the best"
    import fastdist.all, os, signal
    from fastdist.world import get_rank
    class Presses(Callback):
        def before_batch(self):
            if get_rank() == 1 and self.training == (when == 'train') and self.epoch == 1 and self.iter >= 1: os.kill(os.getpid(), signal.SIGINT)
        def after_epoch(self):
            if when == 'raised' and get_rank() == 1 and self.epoch == 1: raise KeyboardInterrupt
            if when == 'epoch' and get_rank() == 1 and self.epoch == 1: os.kill(os.getpid(), signal.SIGINT)
    learn = quiet(learner(n=22, n_val=33, bn=True))
    how = None
    with learn.distrib_ctx():
        try: learn.fit(2 if when == 'epoch' else 3, cbs=Presses())
        except KeyboardInterrupt: how = 'interrupted'
        loss = learn.validate()[0] # all workers go on together
        learn.fit(1)
    return how, loss, weights(learn), signal.getsignal(signal.SIGINT) is signal.default_int_handler, len(learn.recorder.losses)


@pytest.mark.parametrize('when', ['train', 'valid', 'raised'])
def test_interrupted(world, when):
    first, *others = world(interrupted, when)
    assert first[0] == 'interrupted' and first[3]
    for o in others: assert o[:2] == first[:2] and diff(o[2], first[2]) == 0 and o[3:] == first[3:]
