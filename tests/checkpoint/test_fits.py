"Several fits of one script with one folder: each goes on where it was, and what the script does between them is as it was"
import pytest
from test_resume import *
from fastdist.checkpoint.folder import _summary_sum, checkpoints, write_json


class StopsAt(Callback):
    "Ends the process, as far as a test can, at the batch of this number in it: by an exception, or by what a signal asks for"
    order, left, how = 3000, None, None  # of the class: what a callback itself has is saved
    def after_batch(self):
        if not self.training or StopsAt.left is None: return
        StopsAt.left -= 1
        if StopsAt.left == 0 and StopsAt.how == 'exception': raise KeyError('stop')
    def before_batch(self):
        if self.training and StopsAt.left == 1 and StopsAt.how == 'signal': self.learn.resume.request(stop=True)


def started(script, folder, at=None, how='exception', **kwargs):
    "What `script(learn, folder)` returns, started anew, or `None` where it ends at batch `at`; how many steps this process has made; and warnings"
    import fastdist.all
    from_the_start()
    StopsAt.left, StopsAt.how, Trained.steps = at, how, []
    learn = made(folder, **{**dict(n=10, more=False), **kwargs})
    learn.add_cbs([Trained(), StopsAt()])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        try: res = script(learn, folder/'ckpt')
        except (KeyError, SystemExit): res = None
    return res, len(Trained.steps), [str(o.message) for o in said if 'fit' in str(o.message)]


def one_each(learn, folder, keep=3):
    "Fits of 3, 2 and 1 epochs of 3 steps, each with a `Resume` of its own; what is there in the end, and the newest checkpoint"
    from fastdist.checkpoint.resume import Resume
    for n in (3, 2, 1): learn.fit(n, cbs=Resume(folder, keep=keep, on_error=False))
    c = checkpoints(folder)[0].summary
    return found(learn), [c[k] for k in ('step', 'fit', 'ended')]


def contexts(learn, folder, strategy='ddp', **kwargs):
    "The same in as many contexts"
    from fastdist.checkpoint.resume import Resume
    for n in (3, 2, 1):
        with learn.distrib_ctx(**ctx_of(strategy), resume=Resume(folder, on_error=False)): learn.fit(n)
    c = checkpoints(folder)[0].summary
    return found(learn), [c[k] for k in ('step', 'fit', 'ended')]


@pytest.mark.parametrize('how', ['exception', 'signal'])
@pytest.mark.parametrize('script', [one_each, contexts])
def test_a_resume_of_its_own(script, how, tmp_path):
    "Ended in the second fit, and again in the third: nothing is trained again that a checkpoint has, and the newest checkpoint is the newest"
    (want, place), n, _ = started(script, tmp_path/'whole')
    assert (place, n) == ([18, 2, True], 18)
    assert started(script, tmp_path/'a', 13, how)[:2] == (None, 13)
    c = checkpoints(tmp_path/'a'/'ckpt')[0].summary
    assert (c['step'], c['fit']) == ((12, 1), (13, 1))[how == 'signal']
    assert started(script, tmp_path/'a', 4, how)[:2] == (None, 4)
    (res, place), n, _ = started(script, tmp_path/'a')
    assert (place, n) == ([18, 2, True], (3, 1)[how == 'signal']) and not differ(want, res)


def many_of_their_own(tmp_path, strategy):
    (want, place), _, _ = started(partial(contexts, strategy=strategy), tmp_path/'whole')
    assert started(partial(contexts, strategy=strategy), tmp_path/'a', 13)[:2] == (None, 13)
    (res, again), n, _ = started(partial(contexts, strategy=strategy), tmp_path/'a')
    return list(differ(want, res)), place, again, n


@pytest.mark.parametrize('strategy', ['ddp', 'zero2'])
def test_contexts_of_their_own(world2, strategy, tmp_path):
    for bad, place, again, n in world2(many_of_their_own, tmp_path, strategy): assert not bad and place == again == [18, 2, True] and n == 6, (bad, place, again, n)


def test_steps_that_began_anew(tmp_path):
    "A folder in which the second fit's steps were counted from 0 again, and so taken for older: it is made once more, and is the newest then"
    (want, _), _, _ = started(one_each, tmp_path/'whole')
    assert started(partial(one_each, keep=99), tmp_path/'a', 13)[0] is None
    for c in checkpoints(tmp_path/'a'/'ckpt'):
        if c.summary['fit'] == 0: continue
        says = {k: v for k, v in c.summary.items() if k != 'checksum'} | dict(step=c.summary['step']-9)
        write_json(c.path/'summary.json', dict(says, checksum=_summary_sum(says)))
        c.path.rename(c.path.with_name(f'step-{says["step"]:08d}.1'))
    assert [(o.summary['step'], o.summary['fit']) for o in checkpoints(tmp_path/'a'/'ckpt')] == [(9, 0), (6, 0), (3, 1), (3, 0)]
    (res, place), n, _ = started(one_each, tmp_path/'a')
    assert (place, n) == ([18, 2, True], 9) and not differ(want, res)
