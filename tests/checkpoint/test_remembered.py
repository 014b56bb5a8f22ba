"What callbacks, layers and loaders of one's own remember goes on after a restart as in the run that nobody has ended"
import collections, warnings
import pytest
from loaders import Hops
from test_resume import *
from torch.optim.swa_utils import AveragedModel


def fitted(folder, make, what, at=None, every=None):
    "A fit that ends at batch `at`, or goes on from where the one before has ended: (the texts of the warnings, weights, `what(learn)` of it)"
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    from_the_start()
    global fitted_learner
    learn = fitted_learner = make(folder)
    learn.add_cb(Ends(at))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        try: learn.fit(4, cbs=Resume(folder/'ckpt', every=every))
        except ZeroDivisionError: return
    return [str(o.message) for o in said if 'Resume' in str(o.message)], {k: v.tolist() for k, v in weights(learn).items()}, what(learn)


class Ends(Callback):
    "At the `at`-th batch of the fit, before all others"
    order = -90
    def __init__(self, at): self._ends = lambda: at
    def before_batch(self):
        if self.training and self.learn.train_iter == self._ends(): 1/0


def simple(folder, cbs=None, **kwargs): return made(folder, cbs=cbs, more=False, Data=Items, dropout=0, **kwargs)


def compare(tmp_path, make, what, ends=(15,), every=None):
    "The whole run, and the one that has ended at each of `ends`; the texts of the latter's warnings"
    want = fitted(tmp_path/'whole', make, what)
    for at in ends: assert fitted(tmp_path/'part', make, what, at, every) is None
    said, *got = fitted(tmp_path/'part', make, what, None, every)
    assert repr(got) == repr(list(want[1:])), (got, want)
    return said


class MadeAtFit(Callback):
    mean = None
    def before_fit(self):
        if self.mean is None: self.mean = AveragedModel(self.model)
    def after_step(self): self.mean.update_parameters(self.model)


def means(learn): return [[p.tolist() for p in cb.mean.state_dict().values()] for cb in learn.cbs if getattr(cb, 'mean', None) is not None]


def test_what_a_callback_makes_at_the_beginning(tmp_path): assert not compare(tmp_path, lambda f: simple(f, MadeAtFit()), means, [9, 15], 1)


def test_microbatch_is_the_scripts(tmp_path):
    "A restart may have less memory: the size of its parts is that which it says"
    from fastdist.monitor.sizes import Microbatches
    def size_of(learn): return learn.microbatches.size
    assert fitted(tmp_path, lambda f: simple(f, Microbatches(8)), size_of, 15) is None
    assert fitted(tmp_path, lambda f: simple(f, Microbatches(2)), size_of)[2] == 2


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


@pytest.mark.parametrize('sampler', [Hops, lambda n: PerEpoch(n)], ids=['own generator', 'counts'])
def test_samplers_of_ones_own(sampler, tmp_path):
    def make(folder):
        learn = simple(folder)
        learn.dls.loaders[0] = TorchDL(learn.dls.train_ds, 4, sampler=sampler(22))
        return learn
    compare(tmp_path, make, lambda l: None, [9], 1)


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


class PerEpoch(torch.utils.data.Sampler):
    "Another order in each epoch, by its own number; and from the second one on, another one by what it has seen"
    def __init__(self, n): self.n, self.epoch, self.seen = n, 0, []
    def __len__(self): return self.n
    def state_dict(self): return dict(epoch=self.epoch, seen=self.seen)
    def load_state_dict(self, state): self.epoch, self.seen = state['epoch'], state['seen']
    def __iter__(self):
        self.epoch += 1
        self.seen.append(self.epoch)
        return iter(torch.randperm(self.n, generator=torch.Generator().manual_seed(sum(self.seen))).tolist())
