"""Loaders that a script or a callback puts in the place of a learner's, in a context: it trains as in one process, and the learner keeps
them"""
from loaders import *


def usual(): return dl(n=23, bs=6, shuffle=True), dl(n=9, bs=4, seed=1)


def one_replaced(distrib):
    "What has been learned, and what of the loaders is left after the context"
    import fastdist.all
    set_seed(3)
    learn = learn_of(*usual())
    with learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext():
        learn.fit(1)
        learn.dls.loaders[0] = dl(n=11, bs=4, shuffle=True, seed=2)
        learn.dls.loaders.append(dl(n=5, seed=4))
        learn.dls.note, learn.dls.path = 'mine', Path('there')
        learn.fit(1)
    left = [(type(o).__name__, o.n) for o in learn.dls.loaders], getattr(learn.dls, 'note',
        None), str(learn.dls.path), len(learn.recorder.losses)
    return weights(learn), [list(v) for v in learn.recorder.values], left


def test_a_loader_replaced_in_its_place(world3):
    w, values, left = one_replaced(False)
    for w1, v1, l1 in world3(one_replaced, True): assert diff(w, w1) < 2e-7 and diff(values, v1) < 2e-7 and left == l1, (left, l1)


class OtherInValidation(Callback):
    def before_validate(self): self.learn.dl = dl(n=5, seed=3)

def validates_other():
    import fastdist.all
    learn = learn_of(*usual())
    try:
        with learn.distrib_ctx(): learn.fit(1, cbs=OtherInValidation())
    except RuntimeError as e: return str(e)

def test_a_callback_validates_on_another_loader(world2):
    for o in world2(validates_other): assert 'learn.dl in before_validate' in o and 'learn.dls.loaders[1]' in o, o
