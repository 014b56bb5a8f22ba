"A script's own threads beside a fit"
import threading

from loaders import *


def beside(who, call, epochs=2):
    "What `call(learn)` in a thread of the ranks `who` has raised, where it begins in the middle of a fit and ends before that goes on; the weights after the fit"
    import fastdist.all
    from fastdist.world.ranks import get_rank
    raised = []
    def run(learn):
        try: call(learn)
        except Exception as e: raised.append(f'{type(e).__name__}: {e}')
    class Beside(Callback):
        def after_pred(self):
            if self.epoch or self.iter != 1 or not self.training or get_rank() not in who: return
            thread = threading.Thread(target=run, args=(self.learn,))
            thread.start()
            thread.join()
    set_seed(1)
    learn = learn_of(dl(n=23, bs=6, shuffle=True), dl(n=9, bs=4, seed=1))
    with learn.distrib_ctx(split_batches=True):
        learn.fit(epochs, cbs=Beside())
        got = len(learn.get_preds()[0])
    return raised, weights(learn), got


def get_preds(learn): learn.get_preds()
def validate(learn): learn.validate()
def fit(learn): learn.fit(1)


def test_a_learner_does_one_thing_at_a_time(world2):
    w = [w for _, w, _ in world2(beside, (), get_preds)][0]
    for call in get_preds, validate, fit:
        for r, (raised, w1, n) in enumerate(world2(beside, (1,), call)):
            assert diff(w, w1) == 0 and n == 9
            assert len(raised) == r and all('another thread' in o and 'copy.deepcopy(learn)' in o for o in raised), raised
