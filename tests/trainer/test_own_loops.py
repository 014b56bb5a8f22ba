"Loops over the learner's training loader that are no fit's, in a script and in callbacks: all workers train as one process does"
import pytest
from strategies import *


def loop(learn, epochs=1):
    learn.model.train()
    for _ in range(epochs):
        for xb, yb in learn.dls.train:
            learn.loss_func(learn.model(xb), yb).backward()
            learn.opt.step()
            learn.opt.zero_grad()


class After(Callback):
    "Fine-tunes after each epoch"
    def after_epoch(self): loop(self.learn)


class Beside(Callback):
    "A stream of batches beside those of the fit, read in the midst of them, such as of samples without labels"
    run_valid = False
    def before_epoch(self): self.batches = iter(self.dls.train)
    def before_batch(self):
        if self.train_iter%5 < 3: next(self.batches)


class Within(Callback):
    "Fine-tunes between two batches, when one has begun, and when one has ended"
    def after_batch(self):
        if self.training and self.iter == 1: loop(self.learn)
    def before_batch(self):
        if self.training and self.iter == 4: loop(self.learn)


class Before(Callback):
    "Fine-tunes before the fit reads, which in the second epoch does not happen"
    def before_train(self):
        if self.epoch == 1: raise CancelTrainException
        loop(self.learn)


def looped(kind, ctx=None):
    import fastdist.all
    learn = quiet(learner(n=22, n_val=9, bn=True, opt=partial(SGD, mom=.9), shuffle=False, cbs=dict(after=After, beside=Beside, before=Before, within=Within).get(kind)))
    with contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx):
        if kind in ('script', 'broken'):
            learn.create_opt()
            loop(learn, 2)
            if kind == 'broken': next(it := iter(learn.dls.train)) # and never goes on
        learn.fit(2)
        if kind == 'before': loop(learn)
        values = list(learn.validate())
    return weights(learn), values


ONE = {}


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('world', [2, 3])
def test_as_one_process(worlds, world, strategy):
    "22 samples in batches of 5: two workers of three have none, or one, of the last"
    for kind in ('script', 'broken', 'after', 'beside', 'before', 'within'):
        if kind not in ONE: ONE[kind] = looped(kind)
        for w, values in worlds(world)(looped, kind, ctx_of(strategy)): assert diff(ONE[kind][0], w) < 2e-6 and diff(ONE[kind][1], values) < 2e-6, kind # fastai keeps losses in float32


def test_nothing_is_left_of_a_loop_that_does_not_end(world2):
    "It is still there after the context, as in a notebook, where a variable has it"
    def left():
        import fastdist.all
        from torch.nn.modules import module
        hooks, backward = len(module._global_forward_pre_hooks), torch.autograd.backward
        with (learn := quiet(learner(n=22, bn=True))).distrib_ctx(split_batches=True):
            learn.create_opt()
            next(batches := iter(learn.dls.train))
        (other := nn.BatchNorm1d(4).double())(torch.randn(5, 4).double())
        return type(other) is nn.BatchNorm1d, len(module._global_forward_pre_hooks)-hooks, torch.autograd.backward is backward
    for o in world2(left): assert o == (True, 0, True)


def test_a_copy_is_whole_after_the_context(world2):
    "As the loader that it is a copy of"
    def copied():
        import fastdist.all
        learn = quiet(learner(n=22))
        with learn.distrib_ctx(split_batches=True):
            train, deep, dls = learn.dls.train, deepcopy(learn.dls.train), deepcopy(learn.dls)
            inside = [sum(len(b[0]) for b in o) for o in (train, deep, dls.train)]
        return inside, [sum(len(b[0]) for b in o) for o in (train, deep, dls.train)]
    found = world2(copied)
    for inside, after in found: assert len({*inside}) == 1 and after == [22]*3
    assert sum(inside[0] for inside, _ in found) == 22


def test_a_copy_is_nobodys(world2):
    "It has nothing of the learner"
    def copied():
        import fastdist.all
        with (learn := quiet(learner(n=22))).distrib_ctx(split_batches=True): return [(type(o).__name__, 'begin_own' in vars(o)) for o in (learn.dls.train, deepcopy(learn.dls.train))]
    for o in world2(copied): assert o == [('OwnLoopDL', True), ('OwnLoopDL', False)]


class Looks(Callback):
    "Looks at a batch, or all, in the middle of an epoch: before its last batch, of which a worker has nothing, and after its first"
    run_valid = False
    def __init__(self, whole): self.whole = whole
    def look(self):
        for _ in self.dls.train:
            if not self.whole: break
    def before_batch(self):
        if self.iter == 4: self.look()
    def after_batch(self):
        if self.iter == 0: self.look()


def looks(whole, ctx=None):
    import fastdist.all
    learn = quiet(learner(n=22, n_val=9, bn=True, opt=partial(SGD, mom=.9), shuffle=False, cbs=Looks(whole)))
    at = []
    if ctx: learn.add_cb(Callback(after_batch=lambda self: learn.training and at.append(tuple(learn.dl.state_dict()[o] for o in ('epoch', 'offset')))))
    with contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx): learn.fit(2)
    return weights(learn), [float(o) for o in learn.recorder.losses], at


@pytest.mark.parametrize('whole', [False, True])
def test_a_look_in_the_middle_of_an_epoch(world3, whole):
    w, losses, _ = looks(whole)
    for w1, losses1, at in world3(looks, whole, ctx_of('ddp')):
        assert diff(w, w1) < 2e-6 and diff(losses, losses1) < 2e-6
        assert at == [(0, 5), (0, 10), (0, 15), (0, 20), (1, 0), (1, 5), (1, 10), (1, 15), (1, 20), (2, 0)]  # behind the last the next epoch comes
