"What callbacks, layers and loaders of one's own remember goes on after a restart as in the run that nobody has ended"
import collections, warnings
import pytest
from test_resume import *
from torch.optim.swa_utils import AveragedModel


def fitted(folder, make, what, at=None, every=None, strategy=None, n=4):
    "A fit that ends at batch `at`, or goes on from where the one before has ended: (the texts of the warnings, weights, `what(learn)` of it)"
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    from_the_start()
    global fitted_learner
    learn = fitted_learner = make(folder)
    learn.add_cb(Ends(at))
    with warnings.catch_warnings(record=True) as said, learn.distrib_ctx(**ctx_of(strategy)) if strategy else contextlib.nullcontext():
        warnings.simplefilter('always')
        try: learn.fit(n, cbs=Resume(folder/'ckpt', every=every))
        except ZeroDivisionError: return
    return [str(o.message) for o in said if 'Resume' in str(o.message)], {k: v.tolist() for k, v in weights(learn).items()}, what(learn)


class Ends(Callback):
    "At the `at`-th batch of the fit, before all others"
    order = -90
    def __init__(self, at): self._ends = lambda: at
    def before_batch(self):
        if self.training and self.learn.train_iter == self._ends(): 1/0


def simple(folder, cbs=None, **kwargs): return made(folder, cbs=cbs, more=False, Data=Items, dropout=0, **kwargs)


def compare(tmp_path, make, what, ends=(15,), every=None, **kwargs):
    "The whole run, and the one that has ended at each of `ends`; the texts of the latter's warnings"
    want = fitted(tmp_path/'whole', make, what, **kwargs)
    for at in ends: assert fitted(tmp_path/'part', make, what, at, every, **kwargs) is None
    said, *got = fitted(tmp_path/'part', make, what, None, every, **kwargs)
    assert repr(got) == repr(list(want[1:])), (got, want)
    return said


class MadeAtFit(Callback):
    mean = None
    def before_fit(self):
        if self.mean is None: self.mean = AveragedModel(self.model)
    def after_step(self): self.mean.update_parameters(self.model)


def means(learn): return [[p.tolist() for p in cb.mean.state_dict().values()] for cb in learn.cbs if getattr(cb, 'mean', None) is not None]


def test_what_a_callback_makes_at_the_beginning(tmp_path): assert not compare(tmp_path, lambda f: simple(f, MadeAtFit()), means, [9, 15], 1)


class Off(Callback):
    "Has done what it does after the first epoch"
    def __init__(self): self.seen = []
    def before_epoch(self): self.seen.append(self.epoch)
    def after_epoch(self): self.run = False


class OffWithState(Off):
    "Its own state goes on beside its attributes, and is put back last"
    def __init__(self): self.seen, self.host = [], 'here'
    def state_dict(self): return dict(n=len(self.seen))
    def load_state_dict(self, d): self.host = f'moved after {d["n"]}'


def test_what_has_switched_itself_off(tmp_path):
    def seen(learn): return [cb.seen for cb in learn.cbs if isinstance(cb, Off)]
    assert not compare(tmp_path, lambda f: simple(f, [Off(), OffWithState()]), seen, [15], 1)
    assert next(cb.host for cb in fitted_learner.cbs if isinstance(cb, OffWithState)).startswith('moved after')


def test_a_state_that_is_no_data(tmp_path):
    "Is an error, which names the callback"
    class Odd(MadeAtFit):
        def state_dict(self): return dict(folder=tmp_path)
        def load_state_dict(self, d): pass
    with pytest.raises(TypeError, match=r'Odd\.state_dict.*PosixPath.*numbers, texts, tensors'): fitted(tmp_path, lambda f: simple(f, Odd()), means)
    assert not list(tmp_path.glob('*/step-*'))


class Own(torch.utils.data.Sampler):
    "Draws from a generator of its own"
    def __init__(self, n): self.n, self.g = n, np.random.default_rng(3)
    def __len__(self): return self.n
    def __iter__(self): return iter(self.g.permutation(self.n).tolist())


T = torch.utils.data
DRAW = dict(own=lambda ds: T.DataLoader(ds, 4, sampler=Own(22)), counts=lambda ds: T.DataLoader(ds, 4, sampler=PerEpoch(22)))


def drawing(kind, folder):
    learn = simple(folder)
    learn.dls.loaders[0] = DRAW[kind](learn.dls.train_ds)
    return learn


@pytest.mark.parametrize('kind', DRAW)
def test_samplers_of_ones_own(kind, tmp_path): compare(tmp_path, partial(drawing, kind), lambda l: None, [9], 1)


class Collects(Callback):
    "The last losses, and counts by batch"
    def __init__(self): self.last, self.times, self.array = collections.deque(maxlen=3), collections.Counter(), np.zeros(2)
    def after_batch(self):
        if not self.training: return
        self.last.append(self.loss.item()), self.times.update([self.iter])
        self.array = self.array+self.iter


def test_collections(tmp_path):
    "What a checkpoint cannot have is told, at the beginning"
    said = compare(tmp_path, lambda f: simple(f, Collects()), lambda l: (l.collects.times, l.collects.array))
    assert len(said) == 1 and 'Resume does not save Collects.last: no data' in said[0], said


class Counts:
    def state_dict(self): return {k: v for k, v in vars(self).items() if k in ('epoch', 'seen')}
    def load_state_dict(self, state): vars(self).update(state)


class PerEpoch(Counts, torch.utils.data.Sampler):
    "Another order in each epoch, by its own number; and from the second one on, another one by what it has seen"
    def __init__(self, n): self.n, self.epoch, self.seen = n, 0, []
    def __len__(self): return self.n
    def __iter__(self):
        self.epoch += 1
        self.seen.append(self.epoch)
        return iter(torch.randperm(self.n, generator=torch.Generator().manual_seed(sum(self.seen))).tolist())


class Scaled(nn.Linear):
    "By how often it has been trained, which is no tensor"
    n = 0
    def forward(self, x):
        self.n += self.training
        return super().forward(x)*(1+self.n/10)
    def get_extra_state(self): return dict(n=self.n)
    def set_extra_state(self, state): self.n = state['n']


def extra_saved(folder, strategy):
    "(What the model has counted: as it was saved, as it was loaded again, and as what `fastdist export` writes has it)"
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    from fastdist.launch.checkpoint.export import main
    from fastdist.world import get_rank, rank0_first
    from_the_start()
    learn = simple(folder, model=lambda: nn.Sequential(Scaled(4, 8), nn.Linear(8, 3)).double())
    with learn.distrib_ctx(**ctx_of(strategy)):
        learn.fit(1, cbs=Resume(folder/'ckpt'))
        n = learn.model[0].n
        learn.save('saved')
        learn.fit(1)
        learn.load('saved')
    loaded = learn.model[0].n
    rank0_first(lambda: get_rank() == 0 and main([str(folder/'ckpt'), str(folder/'models'/'exported.pth')]))
    learn.load('exported', with_opt=False)
    return n, loaded, learn.model[0].n


def test_the_extra_state_of_a_model_is_saved_and_exported(world2, tmp_path):
    for o in world2(extra_saved, tmp_path, 'fsdp'): assert len({*o}) == 1 and o[0], o
