"Several fits of one script with one folder: each goes on where it was, and what the script does between them is as it was"
import pytest
from test_resume import *
from fastdist.checkpoint.files import checkpoints


class StopsAt(Callback):
    "Ends the process, as far as a test can, by an exception at the batch of this number in it"
    order, left = 3000, None  # of the class: what a callback itself has is saved
    def after_batch(self):
        if not self.training or StopsAt.left is None: return
        StopsAt.left -= 1
        if StopsAt.left: return
        if (writes := self.learn.resume.fit.saver.thread) is not None: writes.join()  # so that the checkpoint before it is there
        raise KeyError('stop')


def started(script, folder, at=None, **kwargs):
    "What `script(learn, folder)` returns, started anew, or `None` where it ends at batch `at`; how many steps this process has made; and warnings"
    import fastdist.all
    from_the_start()
    StopsAt.left, Trained.steps = at, []
    learn = made(folder, **{**dict(n=10, more=False), **kwargs})
    learn.add_cbs([Trained(), StopsAt()])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        try: res = script(learn, folder/'ckpt')
        except KeyError: res = None
    return res, len(Trained.steps), [str(o.message) for o in said if 'fit' in str(o.message)]


def contexts(learn, folder):
    """Fits of 3, 2 and 1 epochs of 3 steps, each in a context with a `Resume` of its own; what is there in the end, and the newest
    checkpoint"""
    from fastdist.checkpoint.resume import Resume
    seen = []
    for n in (3, 2, 1):
        with learn.distrib_ctx(split_batches=True, resume=Resume(folder)): learn.fit(n)
        seen.append({k: v.tolist() for k, v in weights(learn).items()})
    c = checkpoints(folder)[0].summary
    return found(learn) | dict(seen=seen), [c[k] for k in ('step', 'fit', 'ended')]


def test_a_resume_of_its_own(tmp_path):
    "Ended in the second fit, and again in the third: nothing is trained again that a checkpoint has, and the newest checkpoint is the newest"
    (want, place), n, _ = started(contexts, tmp_path/'whole')
    assert (place, n) == ([18, 2, True], 18)
    assert started(contexts, tmp_path/'a', 13)[:2] == (None, 13)
    c = checkpoints(tmp_path/'a'/'ckpt')[0].summary
    assert (c['step'], c['fit']) == (12, 1)
    assert started(contexts, tmp_path/'a', 4)[:2] == (None, 4)
    (res, place), n, _ = started(contexts, tmp_path/'a')
    assert (place, n) == ([18, 2, True], 3) and not differ(want, res)


def looks(learn, exact=True):
    "What a script may do between two fits"
    res = [float(o) for o in learn.validate()]+[float(o) for o in learn.recorder.losses]
    return [*res, learn.opt.hypers[-1]['lr'], random.random(), np.random.rand(), torch.rand(1).item()] if exact else res


def stages(learn, folder, strategy=None, exact=True, keep=1):
    "As `fine_tune`, with a fit more, and looks at the learner between them: what is there in the end, and what was seen"
    from fastdist.checkpoint.resume import Resume
    seen, kw = [], dict(cbs=Resume(folder, keep=keep))
    with contextlib.nullcontext() if strategy is None else learn.distrib_ctx(**ctx_of(strategy)):
        learn.freeze()
        learn.fit(2, .1, **kw)
        seen.append(looks(learn, exact))
        if strategy is None: learn.save('stage1', with_opt=False)
        learn.unfreeze()
        learn.fit_one_cycle(1, **kw)
        seen.append(looks(learn, exact))
        learn.fit(2, **kw)
    if strategy is None: seen.append({k: v.tolist() for k, v in torch.load(learn.path/'models'/'stage1.pth').items()})
    return found(learn) if exact else weights(learn), seen


def finds(learn, folder):
    "The learning rate of the second fit is found after the first"
    from fastai.callback.schedule import minimum
    from fastdist.checkpoint.resume import Resume
    kw = dict(cbs=Resume(folder))
    learn.fit(2, **kw)
    lr = learn.lr_find(num_it=30, show_plot=False, suggest_funcs=(minimum,)).minimum
    learn.fit_one_cycle(3, lr, **kw)
    return found(learn), lr


@pytest.mark.parametrize('script,steps,at', [(stages, 15, 8), (finds, 15, 44)], ids=['in the second', 'lr_find'])
def test_between_the_fits(script, steps, at, tmp_path):
    "Those that have ended leave the learner as they did: what is seen, saved and found after them is the same"
    want, n, _ = started(script, tmp_path/'whole')
    assert started(script, tmp_path/'a', at)[0] is None
    res, again, said = started(script, tmp_path/'a')
    assert want[1] == res[1] and not differ(want[0], res[0]) and again < n and not said, said
    res, again, said = started(script, tmp_path/'a')  # all have ended
    assert want[1] == res[1] and not differ(want[0], res[0]) and again == (0 if script is stages else 30) and not said, said


SMALL = dict(n=26, dropout=0., Data=Items, bs=6)


def some(folder, strategy, at=None):
    "One of a run's processes; with no random numbers, so that the number of workers does not matter"
    return started(partial(stages, strategy=strategy, exact=False), folder, at, **SMALL)


def test_between_the_fits_of_another_number_of_workers(worlds, tmp_path):
    (want, seen), n, _ = started(partial(stages, exact=False), tmp_path/'one', **SMALL)
    assert n == 25 and [o[0] for o in worlds(2)(some, tmp_path/'many', 'zero1', 22)] == [None]*2
    for (w, again), n, said in worlds(3)(some, tmp_path/'many', 'fsdp'):
        assert n == 5 and diff(want, w) < 1e-9 and not said and all(np.allclose(a, b, rtol=1e-5) for a, b in zip(seen, again)), (n, said)
