"What is drawn outside of loader, forward and backward is drawn from one stream: the same in all workers, and in one process"
import pytest
from learners import *
from fastai.callback.mixup import MixUp

SPLIT = dict(split_batches=True)


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


def noise(t): return t.new_tensor(random.gauss(0, 1)) + t.new_tensor(np.random.randn()) + torch.randn_like(t)


class GradientNoise(Callback):
    def before_step(self):
        for p in self.model.parameters():
            if p.grad is not None: p.grad += 0.1*noise(p.grad)


class WeightNoise(Callback):
    run_valid = False
    def __init__(self, event): setattr(self, event, self._add)
    def _add(self):
        for p in self.model.parameters(): p.data += 0.1*noise(p.data)


class Mask(Callback):
    "A part of the weights that is held at 0, drawn once; a layer that begins anew with each epoch"
    def before_fit(self): self.held = (torch.rand_like(self.model[0].weight) > 0.3).to(self.model[0].weight.dtype)
    def before_epoch(self): nn.init.normal_(self.model[-1].weight)
    def after_step(self): self.model[0].weight.data.mul_(self.held)


class Rarely(Callback):
    "By chance no step is made"
    def before_step(self):
        from fastai.callback.core import CancelStepException  # else a copy of it is sent to the workers
        if np.random.rand() > 0.5: raise CancelStepException


CASES = dict(gradients=GradientNoise, mask=Mask, rarely=Rarely,
             **{o: partial(WeightNoise, o) for o in ('before_batch', 'after_step', 'after_validate')})


def drawn(): return random.gauss(0, 1), random.random(), np.random.randn(), torch.rand(1).item()


def run(kinds, distrib, strategy='ddp'):
    "By kind: weights, and what the script draws next"
    res = {}
    for k in kinds:
        learn = quiet(learner(n=22, bs=5, cbs=CASES[k]()))
        set_seed(42)
        np.random.randn(), random.gauss(0, 1)  # each draws two, and keeps one
        if distrib: import fastdist.all
        with learn.distrib_ctx(**SPLIT, strategy=strategy) if distrib else contextlib.nullcontext():
            learn.fit(1)
            learn.fit(1)
        res[k] = weights(learn), drawn()
    return res


def test_one_stream(world):
    "By all with whole optimizers, and by some of three with shards: among how many a stream is shared is not the event's business"
    names = list(CASES)[::1 if world.n == 2 else 3]
    one = run(names, False)
    for res in world(run, names, True, 'ddp' if world.n == 2 else 'zero1'):
        assert {k: diff(w, one[k][0]) for k, (w, _) in res.items() if diff(w, one[k][0]) > 1e-6} == {}
        assert {k for k, (_, d) in res.items() if d != one[k][1]} == set()


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []
    def forward(self, x):
        self.seen = [*self.seen, drawn()]  # a trial before the first step leaves no attribute changed
        return x


def own_and_shared():
    import fastdist.all
    from fastdist.world import get_rank
    draws, shared, lams = Draws(), [], []
    class See(Callback):
        def before_batch(self): shared.append(drawn())
    class Lam(Callback):
        order, run_valid = 1, False
        def before_batch(self): lams.append(self.learn.mix_up.lam.tolist())
    class Alone(Callback):
        def before_step(self): drawn()
        def after_pred(self): drawn()
    learn = quiet(learner(n=22, bs=6, model=lambda: nn.Sequential(draws, mlp(dtype=torch.float32)), dtype=torch.float32, loss=CrossEntropyLossFlat()))
    set_seed(42)
    with learn.distrib_ctx(**SPLIT):
        if get_rank() == 1: learn.add_cb(Alone())
        learn.fit(1, cbs=[See()])
        learn.fit(1, cbs=[See(), MixUp(), Lam()])
    return draws.seen, shared, lams, drawn()


def test_own_and_shared(world2):
    "Forwards and MixUp draw other numbers in each worker, callbacks the same; one that a rank has alone moves none of them"
    (seen, shared, lams, after), (seen1, shared1, lams1, after1) = world2(own_and_shared)
    n = len(seen)
    assert len({*seen, *seen1}) == 2*n and len(set(shared)) == len(shared)
    assert shared == shared1 and after == after1
    assert lams != lams1


class OwnGenerator(Callback):
    "Noise from a generator that has another seed in each worker"
    def __init__(self, seed=None): self.rng = np.random.default_rng(seed)
    def before_step(self): self.model[0].bias.grad += float(self.rng.normal())


def own_generators():
    import fastdist.all
    def error(seed):
        try:
            with learner().distrib_ctx(**SPLIT) as learn: quiet(learn).fit(2, cbs=OwnGenerator(seed))
        except RuntimeError as e: return str(e)
    return error(3), error(None)


def test_own_generators(world2):
    "Workers whose weights part learn of it within some batches, which the error says"
    for same, text in world2(own_generators):
        assert same is None and 'no longer have the same weights: 0.bias: rank 0 has ' in text and 'in epoch 0, by batch' in text
