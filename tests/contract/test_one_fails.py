"P2: what goes wrong in one worker, or is decided by one, ends or is agreed on in all of them within seconds"
import time

from table import *


def fails(where, strategy='ddp', rank=1):
    "What this worker raises where that of this rank fails, how long after, and what it is told"
    import fastdist.all
    from fastdist.all import get_rank
    learn, at = quiet(learner(n=24, bs=6, n_val=30, bn=True, metrics=accuracy)), []
    def fail(*args, **kwargs): raise (KeyboardInterrupt if where == 'Ctrl-C' else ValueError)('no disk')
    class In(Callback):
        "Notes the time of the last batch that began"
        order = -100
        def before_batch(self): at[:] = [time.monotonic()]
    class Fail(Callback): order = 5
    if get_rank() == rank:
        if hasattr(nn.Module, where): learn.model[2].register_forward_hook(fail)
        elif where == 'data set': learn.dls.train.dataset.__class__ = type('Fails', (Items,), dict(__getitem__=fail))
        elif where == 'loss': learn.loss_func.register_forward_hook(fail)
        elif where == 'Ctrl-C': Fail.before_backward = fail
        else: setattr(Fail, where, fail)
    try:
        with learn.distrib_ctx(**ctx_of(strategy)): learn.fit(1000, cbs=[In(), *([Fail()] if get_rank() == rank else [])])
    except BaseException as e: return type(e).__name__, getattr(e, 'rank', None), str(e), time.monotonic()-(at or [time.monotonic()])[0]


FAULTS = [('before_batch', 'ddp'), ('after_validate', 'ddp'), ('data set', 'ddp'), ('loss', 'ddp'), ('forward', 'ddp'), ('after_backward', 'zero1'), ('after_pred', 'fsdp'), ('Ctrl-C', 'ddp')]
def fail_all(): return [fails(*o) for o in FAULTS]


def test_one_raises(world3):
    "The others raise a `RemoteError` that has its rank and its text, at once: a batch takes milliseconds, and there are 1000 epochs"
    for rank, res in enumerate(world3(fail_all)):
        for (where, strategy), (kind, other, text, seconds) in zip(FAULTS, res, strict=True):
            at = where, strategy, rank, kind, text
            if rank == 1: assert kind == ('KeyboardInterrupt' if where == 'Ctrl-C' else 'ValueError'), at
            elif where == 'Ctrl-C': assert kind in ('KeyboardInterrupt', 'RemoteError'), at
            else: assert (kind, other) == ('RemoteError', 1) and 'rank 1' in text and 'no disk' in text, at
            assert seconds < 30, (at, seconds)


def cancels(what, event, rank):
    "The weights, steps, losses and epochs of a fit of 5 epochs that one worker ends by itself, and of the next, which nobody does"
    import fastdist.all
    from fastdist.all import get_rank
    import fastai.callback.core as core
    class Counts(Callback):
        n = 0
        def after_step(self): self.n += 1
    class Ends(Callback): order, run_valid = 30, False
    def end(self):
        if self.epoch == 1 and (self.learn.iter >= 1 or 'epoch' in event): raise getattr(core, f'Cancel{what}Exception')()
    setattr(Ends, event, end)
    learn, counts = quiet(learner(n=24, bs=6, n_val=30, bn=True)), Counts()
    with learn.distrib_ctx(split_batches=True):
        learn.fit(5, cbs=[counts, *([Ends()] if get_rank() == rank else [])])
        n, epochs = counts.n, len(learn.recorder.values)
        learn.fit(1)
    return n, epochs, weights(learn)


CANCELS = [('Fit', 'after_batch', 1), ('Fit', 'after_batch', 0), ('Epoch', 'after_step', 1), ('Train', 'after_batch', 0), ('Fit', 'after_epoch', 1)]
def cancel_all(): return [cancels(*o) for o in CANCELS]


def test_one_cancels(world3):
    "All end the loop together, after the same number of steps: after that batch, or the next"
    first, *others = world3(cancel_all)
    for i, (what, event, _) in enumerate(CANCELS):
        n, epochs, w = first[i]
        assert (4 < n <= 9 and epochs <= 2 if what == 'Fit' else 16 < n <= 20), (CANCELS[i], n, epochs)
        for o in others: assert o[i][:2] == (n, epochs) and diff(o[i][2], w) == 0, (CANCELS[i], o[i][:2], n, epochs)
