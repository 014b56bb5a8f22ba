"Loaders that a script or a callback puts in the place of a learner's, or changes by itself, in a context: it trains as in one process, and the learner keeps them"
from loaders import *


def fitted(fit, make, distrib, after=None, **kwargs):
    "What a learner over `make()` has after `fit(learn, loaders)` in a context, and after `after(learn)` behind it"
    if distrib: import fastdist.all
    set_seed(3)
    trn, val = make()
    learn = learn_of(trn, val, **kwargs)
    with (learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext()): fit(learn, trn, val)
    return weights(learn), [list(v) for v in learn.recorder.values], after and after(learn)


def as_one(world, fit, make, after=None, **kwargs):
    w, values, left = fitted(fit, make, False, after=after, **kwargs)
    for w1, v1, l1 in world(fitted, fit, make, True, after=after, **kwargs): assert diff(w, w1) < 2e-7 and diff(values, v1) < 2e-7 and left == l1, (left, l1)


def usual(): return dl(n=23, bs=6, shuffle=True), dl(n=9, bs=4, seed=1)


def change_held(learn, trn, val):
    learn.fit(1)
    trn.bs = 4
    learn.fit(1)
    trn.shuffle, trn.bs, val.bs = False, 9, 2
    learn.fit(1)

def test_a_batch_size_set_in_the_loader_itself(world3): as_one(world3, change_held, usual)


def one_replaced(learn, *_):
    learn.fit(1)
    learn.dls.loaders[0] = dl(n=11, bs=4, shuffle=True, seed=2)
    learn.dls.loaders.append(dl(n=5, seed=4))
    learn.dls.note, learn.dls.path = 'mine', Path('there')
    learn.fit(1)

def what_is_left(learn):
    n = len(learn.recorder.losses)
    return [type(o).__name__ for o in learn.dls.loaders], [o.n for o in learn.dls.loaders], getattr(learn.dls, 'note', None), str(learn.dls.path), n

def test_a_loader_replaced_in_its_place(world3): as_one(world3, one_replaced, usual, after=what_is_left)


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


class Named(Items):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x, dict(label=y, row=torch.tensor(i))

class OfNamed(OwnDouble):
    "A subclass of fastai's loss function that looks for its labels in a dict"
    def __call__(self, p, t, **kwargs): return super().__call__(p, t['label'], **kwargs)

def thrice(learn, *_): learn.fit(3)
def named(): return dl(ds=Named(23), bs=6, shuffle=True), dl(ds=Named(9, seed=1), bs=4)

def test_targets_that_are_dicts(world3): as_one(world3, thrice, named, loss=OfNamed(), metrics=[])
