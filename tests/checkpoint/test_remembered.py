"What callbacks, layers and loaders of one's own remember goes on after a restart as in the run that nobody has ended"
import collections, time, warnings
import pytest
from test_resume import *
from torch.optim.swa_utils import AveragedModel


def fitted(folder, make, what, at=None, every=None, strategy=None, n=4):
    "A fit that ends at batch `at`, or goes on from where the one before has ended: (the texts of the warnings, weights, `what(learn)` of it)"
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    from_the_start()
    learn = make(folder)
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


class LateAverage(Callback):
    "Makes its average after an epoch, when the checkpoint of that epoch's end has been put back already"
    mean = None
    def after_epoch(self):
        if self.mean is None: self.mean = AveragedModel(self.model)


def means(learn): return [[p.tolist() for p in cb.mean.state_dict().values()] for cb in learn.cbs if getattr(cb, 'mean', None) is not None]


@pytest.mark.parametrize('ends,every', [([15], None), ([9, 15], 1)])
def test_what_a_callback_makes_at_the_beginning(ends, every, tmp_path): assert not compare(tmp_path, lambda f: simple(f, MadeAtFit()), means, ends, every)


def test_what_a_callback_makes_late_is_told(tmp_path):
    fitted(tmp_path, lambda f: simple(f, LateAverage()), means, 15)
    with pytest.raises(ValueError, match=r'LateAverage\.mean of a callback cannot take the state .* in __init__, or in before_fit'): fitted(tmp_path, lambda f: simple(f, LateAverage()), means)


class SharesLists(Callback):
    "Two attributes are one list, which it grows by the first and reads by the second"
    def __init__(self): self.seen = self.last = []
    def after_batch(self):
        if self.training: self.seen.append(len(self.last))


def test_what_two_attributes_share(tmp_path):
    assert not compare(tmp_path, lambda f: simple(f, SharesLists()), lambda learn: (learn.shares_lists.seen, learn.shares_lists.last))


class OwnAtFit(MadeAtFit):
    "With a state of its own, which reads what the beginning of a fit makes"
    def state_dict(self): return self.mean.state_dict()
    def load_state_dict(self, d): self.mean.load_state_dict(d)


def test_a_state_that_is_no_data(tmp_path):
    "Is an error, which names the callback"
    class Odd(OwnAtFit):
        def state_dict(self): return dict(folder=tmp_path)
    with pytest.raises(TypeError, match=r'Odd\.state_dict.*PosixPath.*numbers, texts, tensors'): fitted(tmp_path, lambda f: simple(f, Odd()), means)
    assert not list(tmp_path.glob('*/step-*'))


def own_at_fit(folder, at, strategy): return fitted(folder, lambda f: simple(f, OwnAtFit()), means, at, 2, strategy)


def test_a_state_of_its_own_in_two_workers(world2, tmp_path):
    want = world2(own_at_fit, tmp_path/'whole', None, 'ddp')
    assert world2(own_at_fit, tmp_path/'part', 9, 'ddp') == [None]*2
    for (_, *a), (said, *b) in zip(want, world2(own_at_fit, tmp_path/'part', None, 'ddp')): assert repr(a) == repr(b) and not said, said


class Own(torch.utils.data.Sampler):
    "Draws from a generator of its own"
    def __init__(self, n): self.n, self.g = n, np.random.default_rng(3)
    def __len__(self): return self.n
    def __iter__(self): return iter(self.g.permutation(self.n).tolist())


T = torch.utils.data
DRAW = dict(own=lambda ds: T.DataLoader(ds, 4, sampler=Own(22)), counts=lambda ds: T.DataLoader(ds, 4, sampler=PerEpoch(22)),
            weighted=lambda ds: T.DataLoader(ds, 4, sampler=T.WeightedRandomSampler(torch.arange(1., 23), 22, generator=torch.Generator().manual_seed(5))))


def drawing(kind, folder):
    learn = simple(folder)
    learn.dls.loaders[0] = DRAW[kind](learn.dls.train_ds)
    return learn


@pytest.mark.parametrize('kind', DRAW)
@pytest.mark.parametrize('end,every', [(15, None), (9, 1)], ids=['of an epoch', 'in the middle'])
def test_samplers_of_ones_own(kind, end, every, tmp_path): compare(tmp_path, partial(drawing, kind), lambda l: None, [end], every)


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


class Skips(Callback):
    "Passes over the first batch after the restart, for which fastai records the loss of the one before"
    def before_batch(self):
        if self.training and self.learn.train_iter == 9: raise CancelBatchException


def skipping(folder):
    learn = simple(folder, Skips())
    learn.recorder.train_metrics = False
    return learn


def test_what_is_recorded_of_a_batch_that_is_passed_over(tmp_path):
    compare(tmp_path, skipping, lambda l: ([float(o) for o in l.recorder.losses], [o[:2] for o in l.recorder.values]), [9], 1)


class Gradual(Callback):
    "Unfreezes as the second epoch begins, and freezes all but one layer at its fourth batch"
    def before_epoch(self):
        if self.epoch == 1: self.learn.unfreeze()
    def before_batch(self):
        if self.training and self.epoch == 1 and self.iter == 3: self.learn.model[1].bias.requires_grad_(False)


def frozen(folder):
    learn = simple(folder, Gradual())
    learn.freeze()
    return learn


def trained(learn): return learn.opt.frozen_idx, [p.requires_grad for p in learn.model.parameters()]


@pytest.mark.parametrize('end,every', [(15, None), (9, 1), (12, 1)], ids=['of an epoch', 'in the middle', 'behind the last batch'])
def test_what_a_callback_unfreezes(end, every, tmp_path): compare(tmp_path, frozen, trained, [end], every)


class Enough(Callback):
    "Doubles the gradients until it switches itself off"
    def after_backward(self):
        for p in self.model.parameters():
            if p.grad is not None: p.grad *= 2
    def after_batch(self):
        if self.training and self.learn.train_iter == 7: self.run = False


@pytest.mark.parametrize('end,every', [(15, None), (9, 1)], ids=['of an epoch', 'in the middle'])
def test_a_callback_that_is_off(end, every, tmp_path): compare(tmp_path, lambda f: simple(f, Enough()), lambda l: [o.run for o in l.cbs], [end], every)


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


class Forgets(PerEpoch): state_dict = None


def test_a_sampler_that_counts_and_has_no_state(tmp_path):
    "Its order is another one after a restart, so that it cannot go on in the middle of it"
    def make(folder):
        learn = simple(folder)
        learn.dls.loaders[0] = T.DataLoader(learn.dls.train_ds, 4, sampler=Forgets(22))
        return learn
    fitted(tmp_path, make, None, 9, 1)
    with pytest.raises(ValueError, match='in another order than the 22 of this one. Make it of the same data, and give a sampler'): fitted(tmp_path, make, None, None, 1)


class Links(Callback):
    "Has the model's parameters in a list of its own, and changes them after each step"
    def before_fit(self): self.ps, self.data = list(self.model.parameters()), {'w': self.model[0].weight.data}
    def after_step(self):
        with torch.no_grad():
            for p in self.ps: p.mul_(.9)
            self.data['w'].add_(.01)


class Layers(nn.Module):
    "Its parameters in a list of its own, too; it begins by the first batch that it sees, and counts"
    def __init__(self):
        super().__init__()
        self.a, self.b, self.n, self.ready = nn.Linear(4, 8), nn.Linear(8, 3), 0, False
        self.ws = [self.a.weight, self.b.weight]
    def __iter__(self): return iter([self.a, self.b])
    def __getitem__(self, i): return [self.a, self.b][i]
    def forward(self, x):
        self.n += self.training
        if not self.ready:
            self.ready = True
            with torch.no_grad(): self.a.weight.div_(2)
        return F.linear(F.linear(x, self.ws[0], self.a.bias), self.ws[1], self.b.bias)/(1+self.n/10)


class Extra(Layers):
    "What it counts is part of its `state_dict`, and nowhere else that others would look"
    n = property(lambda self: self._extra[0], lambda self, v: setattr(self, '_extra', [v]))
    def get_extra_state(self): return torch.tensor(self.n)
    def set_extra_state(self, state): self.n = state.item()


class Decays:
    "A loss function with the model's parameters"
    def __init__(self, model): self.ps = list(model.parameters())
    def __call__(self, p, y): return (F.cross_entropy(p, y) + sum(o.pow(2).sum() for o in self.ps)/9).float()


def linked(what, folder):
    learn = simple(folder, Links() if what == 'callback' else None, model=(lambda: dict(layers=Layers, extra=Extra)[what]().double()) if what in ('layers', 'extra') else None)
    if what == 'loss': learn.loss_func = Decays(learn.model)
    return learn


class Graph(nn.Module):
    "With a sparse matrix that changes, as a plain attribute, as `distrib_ctx` wants it, or as a buffer"
    def __init__(self, kind):
        super().__init__()
        self.a, self.b, adj = nn.Linear(4, 4), nn.Linear(4, 3), torch.eye(4).double()
        self.kept = [adj.to_sparse_csr() if kind == 'csr' else adj.to_sparse()]
        if kind == 'buffer': self.register_buffer('adj', adj.to_sparse())
    def __iter__(self): return iter([self.a, self.b])
    def __getitem__(self, i): return [self.a, self.b][i]
    def forward(self, x):
        if self.training: self.kept = [self.kept[0]*1.1]
        return self.b(self.a((self.kept[0] @ x.t()).t()))


def test_buffers_that_cannot_be_saved_are_an_error_at_once(tmp_path):
    with pytest.raises(ValueError, match=r'adj of the model are sparse tensors, .* nor Resume save: make them plain attributes'):
        fitted(tmp_path, lambda f: simple(f, model=lambda: Graph('buffer').double()), noop)


class Grows(nn.Module):
    "With a buffer that grows in the fit"
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer('sums', torch.zeros(0))
    def __iter__(self): return iter([self.a, self.b])
    def __getitem__(self, i): return [self.a, self.b][i]
    def forward(self, x):
        if self.training: self.sums = torch.cat([self.sums, torch.ones(4).to(x)])
        return self.b(self.a(x))


def test_a_buffer_that_grows_is_told(tmp_path):
    fitted(tmp_path, lambda f: simple(f, model=lambda: Grows().double()), noop, 9, 2)
    with pytest.raises(ValueError, match=r'model\.sums has shape \(0,\), and .* has it with \(32,\): register buffers'): fitted(tmp_path, lambda f: simple(f, model=lambda: Grows().double()), noop)


@pytest.mark.parametrize('what', ['callback', 'layers', 'extra', 'loss'])
def test_links_to_parameters_stay(what, tmp_path): compare(tmp_path, partial(linked, what), lambda l: None, [15], 2)


def counted(what, folder, at): return fitted(folder, partial(linked, what), lambda l: l.model.n, at, 2, 'ddp')


@pytest.mark.parametrize('what', ['layers', 'extra'])
def test_what_layers_count_on_another_number_of_workers(worlds, what, tmp_path):
    want = worlds(2)(counted, what, tmp_path/'whole', None)[0]
    worlds(2)(counted, what, tmp_path/'part', 15)
    for _, w, n in worlds(3)(counted, what, tmp_path/'part', None):
        assert n == want[2] and max(diff(torch.tensor(v), torch.tensor(want[1][k])) for k, v in w.items()) < 1e-6


class First(Callback):
    "Looks at a first batch in the middle of an epoch"
    def after_batch(self):
        if self.training and self.iter in (1, 3): self.dls.train.one_batch()


class Varies(T.Sampler):
    "As many batches in each epoch as there come to be; how many it says is a guess"
    def __len__(self): return 5
    def __iter__(self):
        left = torch.randperm(22).tolist()
        while left:
            k = int(torch.randint(3, 6, (1,)))
            if len(left)-k < 3: k = len(left)
            yield left[:k]
            left = left[k:]


def in_the_middle(kind, folder):
    learn = simple(folder, First() if kind == 'first' else None)
    if kind == 'noisy': learn.dls.loaders[0] = DataLoader(Noisy(22), bs=4, shuffle=True)
    if kind == 'varies': learn.dls.loaders[0] = T.DataLoader(learn.dls.train_ds, batch_sampler=Varies())
    return learn


@pytest.mark.parametrize('kind', ['first', 'noisy', 'varies'])
def test_goes_on_in_the_middle(kind, tmp_path): compare(tmp_path, partial(in_the_middle, kind), lambda l: None, [15], 2)


class Exports(Callback):
    "Keeps a copy of the learner as it is after an epoch"
    def after_epoch(self): Exports.copy = deepcopy(self.learn)


def test_a_learner_with_a_resume_is_copied_and_exported(tmp_path):
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    from_the_start()
    learn = simple(tmp_path, [Resume(tmp_path/'ckpt', every=2), Exports()])
    learn.fit(1)
    assert [o.fit is not None for o in Exports.copy.cbs if isinstance(o, Resume)] == [False]
    learn.export()
    assert [o.folder for o in load_learner(tmp_path/'export.pkl').cbs if isinstance(o, Resume)] == [tmp_path/'ckpt']


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


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp'])
def test_the_extra_state_of_a_model_is_saved_and_exported(world2, strategy, tmp_path):
    for o in world2(extra_saved, tmp_path, strategy): assert len({*o}) == 1 and o[0], o


class Validates(Callback):
    "In the middle of an epoch, and trains on; fastai counts `train_iter` anew then"
    run_valid, seen = False, 0
    def __init__(self, at): self._ends = lambda: at
    def before_batch(self):
        if self.seen == self._ends(): 1/0
    def after_batch(self):
        self.seen += 1
        if self.learn.iter != 2: return
        self.learn.validate()
        self.learn.training = True
        self.model.train()


def validating(folder, at=None):
    return fitted(folder, lambda f: simple(f, [Validates(at), ParamScheduler({'lr': SchedCos(.1, .01)})]), lambda l: None, None, 2, 'ddp')


def test_goes_on_after_a_validation_in_the_middle(world2, tmp_path):
    "The number of the batch, and of all, are those of the training, and the loader is"
    for k, world in enumerate((lambda f, *args: [f(*args)], world2)):
        want = world(validating, tmp_path/f'whole{k}')
        world(validating, tmp_path/f'part{k}', 17)
        assert (tmp_path/f'part{k}'/'ckpt'/'step-00000014').exists(), k
        assert repr(world(validating, tmp_path/f'part{k}')) == repr(want), k


