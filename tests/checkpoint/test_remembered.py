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


class Averages(Callback):
    "A mean of the weights, from an epoch on"
    start, mean = 1, None
    def after_epoch(self):
        if self.epoch < self.start: return
        if self.mean is None: self.mean = AveragedModel(self.model)
        self.mean.update_parameters(self.model)


class MakesOnce(Averages):
    "Only in that epoch, so that it is never made after a restart behind it"
    def after_epoch(self):
        if self.epoch == self.start: self.mean = AveragedModel(self.model)


class MadeAtFit(Callback):
    mean = None
    def before_fit(self):
        if self.mean is None: self.mean = AveragedModel(self.model)
    def after_step(self): self.mean.update_parameters(self.model)


def means(learn): return [[p.tolist() for p in cb.mean.state_dict().values()] for cb in learn.cbs if getattr(cb, 'mean', None) is not None]


@pytest.mark.parametrize('ends,every', [([21], None), ([15, 17], 1)], ids=['of an epoch', 'twice before it is made again'])
def test_what_a_callback_makes_late(ends, every, tmp_path):
    assert not compare(tmp_path, lambda f: simple(f, Averages()), means, ends, every)


class SharesLists(Callback):
    "Two attributes are one list, which it grows by the first and reads by the second"
    def __init__(self): self.seen = self.last = []
    def after_batch(self):
        if self.training: self.seen.append(len(self.last))


def test_what_two_attributes_share(tmp_path):
    assert not compare(tmp_path, lambda f: simple(f, SharesLists()), lambda learn: (learn.shares_lists.seen, learn.shares_lists.last))


def test_what_a_callback_makes_no_more(tmp_path):
    fitted(tmp_path, lambda f: simple(f, MakesOnce()), means, 15)
    said, _, got = fitted(tmp_path, lambda f: simple(f, MakesOnce()), means)
    assert got == [] and any('MakesOnce.mean' in o and 'in __init__' in o for o in said), said


class OwnState(Averages):
    "With a state of its own, which reads what an epoch makes"
    def state_dict(self): return self.mean.state_dict()
    def load_state_dict(self, d): self.mean.load_state_dict(d)


class OwnAtFit(MadeAtFit):
    "With a state of its own, which reads what the beginning of a fit makes"
    def state_dict(self): return self.mean.state_dict()
    def load_state_dict(self, d): self.mean.load_state_dict(d)


@pytest.mark.parametrize('cb,ends,every', [(OwnState, [21], None), (OwnState, [15, 17], 1), (OwnAtFit, [9], 2), (OwnAtFit, [9, 15], 1)])
def test_a_state_of_its_own_that_is_made_late(cb, ends, every, tmp_path):
    "It is asked for when it is there, and put back when it is there again; what has none yet is told"
    said = compare(tmp_path, lambda f: simple(f, cb()), means, ends, every)
    assert not any('OwnAtFit' in o for o in said), said


def own_at_fit(folder, at, strategy): return fitted(folder, lambda f: simple(f, OwnAtFit()), means, at, 2, strategy)


def test_a_state_of_its_own_in_two_workers(world2, tmp_path):
    want = world2(own_at_fit, tmp_path/'whole', None, 'ddp')
    assert world2(own_at_fit, tmp_path/'part', 9, 'ddp') == [None]*2
    for (_, *a), (said, *b) in zip(want, world2(own_at_fit, tmp_path/'part', None, 'ddp')): assert repr(a) == repr(b) and not said, said


def by_own_trainer(folder, at=None):
    "A fit by a trainer that counts, which ends at batch `at`; what it has in the checkpoint, beside what is of its process alone, as the thread that trains"
    import fastdist.all
    from fastdist.checkpoint.files.folder import checkpoints
    from fastdist.trainer import DistributedTrainer
    class Mine(DistributedTrainer):
        def __init__(self):
            super().__init__()
            self.counted = []
        def after_batch(self):
            super().after_batch()
            if self.training: self.counted.append(self.learn.train_iter)
    res = fitted(folder, lambda f: simple(f, Mine()), lambda l: l.distributed_trainer.counted, at, 2)
    every = torch.load(checkpoints(folder/'ckpt')[0].path/'rank-0.pt', weights_only=True)['callbacks']
    return res, [[*o['attributes']] for k, o in every.items() if 'Mine' in k]


def test_a_trainer_of_a_class_of_its_own(world2, tmp_path):
    "What a subclass has beside the trainer's own is a user's to remember"
    want = world2(by_own_trainer, tmp_path/'whole')
    for res, _ in world2(by_own_trainer, tmp_path/'part', 9): assert res is None
    for (one, _), (many, names) in zip(want, world2(by_own_trainer, tmp_path/'part')):
        assert not many[0] and repr(one[1:]) == repr(many[1:]) and names == [['counted']], (one, many, names)


def several(folder, at=None):
    "Two fits, of which the second ends at batch `at`"
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    from_the_start()
    learn = simple(folder, OwnAtFit())
    learn.fit(2, cbs=Resume(folder/'ckpt'))
    learn.add_cb(Ends(at))
    try: learn.fit(2, cbs=Resume(folder/'ckpt', every=1))
    except ZeroDivisionError: return
    return {k: v.tolist() for k, v in weights(learn).items()}, means(learn)


@pytest.mark.parametrize('at', [0, 7])
def test_a_state_of_its_own_after_a_fit_that_has_ended(at, tmp_path):
    "Nothing of that fit is made again, and the next one makes it"
    want = several(tmp_path/'whole')
    assert several(tmp_path/'part', at) is None
    assert repr(several(tmp_path/'part')) == repr(want)


def test_a_state_that_cannot_be_read(tmp_path):
    "Is told, as nothing of it is saved"
    class Wrong(OwnAtFit):
        def state_dict(self): return self.means.state_dict()
    said = fitted(tmp_path, lambda f: simple(f, Wrong()), means)[0]
    assert any('Wrong' in o and 'AttributeError' in o and 'means' in o for o in said), said


def test_a_state_that_is_no_data(tmp_path):
    "Is an error before the fit, which names the callback"
    class Odd(OwnAtFit):
        def state_dict(self): return dict(folder=tmp_path)
    with pytest.raises(TypeError, match=r'Odd\.state_dict.*PosixPath.*numbers, texts, tensors'): fitted(tmp_path, lambda f: simple(f, Odd()), means)
    assert not list(tmp_path.glob('*/step-*'))


def test_a_fit_that_has_ended_makes_nothing(tmp_path):
    "It is said, and a later fit has it"
    def make(folder): return simple(folder, MadeAtFit())
    want = fitted(tmp_path, make, means)[2]
    learns = []
    said, _, got = fitted(tmp_path, make, lambda l: learns.append(l) or means(l))
    assert got == [] and any('MadeAtFit.mean' in o for o in said), said
    cb, = learns[0]._grab_cbs(MadeAtFit)
    cb('before_fit')
    assert repr([[p.tolist() for p in cb.mean.state_dict().values()]]) == repr(want)


class Own(torch.utils.data.Sampler):
    "Draws from a generator of its own"
    def __init__(self, n): self.n, self.g = n, np.random.default_rng(3)
    def __len__(self): return self.n
    def __iter__(self): return iter(self.g.permutation(self.n).tolist())


class Stream(torch.utils.data.IterableDataset):
    def __init__(self): self.g = torch.Generator().manual_seed(3)
    def __len__(self): return 22
    def __iter__(self):
        for _ in range(22):
            x = torch.randn(4, generator=self.g).double()
            yield x, TensorCategory((x.sum() > 0).long())


T = torch.utils.data
DRAW = dict(
    own=lambda ds: T.DataLoader(ds, 4, sampler=Own(22)),
    batches=lambda ds: T.DataLoader(ds, batch_sampler=T.BatchSampler(Own(22), 4, False)),
    weighted=lambda ds: T.DataLoader(ds, 4, sampler=T.WeightedRandomSampler(torch.arange(1., 23), 22, generator=torch.Generator().manual_seed(5))),
    stream=lambda ds: T.DataLoader(Stream(), 4),
    fastai_stream=lambda ds: DataLoader(Stream(), bs=4))


def drawing(kind, folder):
    learn = simple(folder)
    learn.dls.loaders[0] = DRAW[kind](learn.dls.train_ds)
    return learn


@pytest.mark.parametrize('kind', DRAW)
def test_generators_of_samplers_and_streams(kind, tmp_path): compare(tmp_path, partial(drawing, kind), lambda l: None)


def drawing_by_all(folder, at, strategy='ddp'): return fitted(folder, partial(drawing, 'own'), lambda l: None, at, strategy=strategy)


def test_generators_of_a_sampler_of_two_workers(world2, tmp_path):
    want = world2(drawing_by_all, tmp_path/'whole', None)
    assert world2(drawing_by_all, tmp_path/'part', 15) == [None]*2
    assert repr(world2(drawing_by_all, tmp_path/'part', None)) == repr(want)


class Collects(Callback):
    "The last losses, counts and lists by batch"
    def __init__(self): self.last, self.times, self.by_batch = collections.deque(maxlen=3), collections.Counter(), collections.defaultdict(list)
    def after_batch(self):
        if not self.training: return
        self.last.append(self.loss.item()), self.times.update([self.iter]), self.by_batch[self.iter].append(self.epoch)


def collected(learn):
    cb, = learn._grab_cbs(Collects)
    return cb.last, cb.times, cb.by_batch


def test_collections(tmp_path): assert not compare(tmp_path, lambda f: simple(f, Collects()), collected)


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


def unfrozen(folder, at, strategy, every): return fitted(folder, frozen, trained if strategy != 'fsdp' else lambda l: l.opt.frozen_idx, at, every, strategy)


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_what_a_callback_unfreezes_in_two_workers(world2, strategy, tmp_path):
    every = 1 if strategy in ('ddp', 'zero2') else None
    want = world2(unfrozen, tmp_path/'whole', None, strategy, None)
    assert world2(unfrozen, tmp_path/'part', 10 if every else 15, strategy, every) == [None]*2
    assert repr([o[1:] for o in world2(unfrozen, tmp_path/'part', None, strategy, every)]) == repr([o[1:] for o in want])


class Enough(Callback):
    "Doubles the gradients until it switches itself off; and another one on"
    def after_backward(self):
        for p in self.model.parameters():
            if p.grad is not None: p.grad *= 2
    def after_batch(self):
        if self.training and self.learn.train_iter == 7: self.run, self.learn.adds.run = False, True


class Adds(Callback):
    "Off at first"
    order = 3000
    def before_epoch(self):
        if self.epoch == 0: self.run = False
    def after_backward(self): self.learn.model[0].weight.grad += 1


@pytest.mark.parametrize('end,every', [(15, None), (9, 1)], ids=['of an epoch', 'in the middle'])
def test_a_callback_that_is_off(end, every, tmp_path): compare(tmp_path, lambda f: simple(f, [Enough(), Adds()]), lambda l: [o.run for o in l.cbs], [end], every)


def test_after_a_fit_that_has_ended_all_are_on(tmp_path):
    class Last(Enough): order = 3000  # behind Resume, whose checkpoint of the end has it off
    def run(folder): return fitted(folder, lambda f: simple(f, [Last(), Adds()]), lambda l: [o.run for o in l.cbs])
    assert run(tmp_path)[2] == run(tmp_path)[2]  # passed over


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


class StreamPerEpoch(Counts, T.IterableDataset):
    def __init__(self): self.epoch = 0
    def __len__(self): return 22
    def __iter__(self):
        self.epoch += 1
        g = torch.Generator().manual_seed(self.epoch)
        for _ in range(22):
            x = torch.randn(4, generator=g).double()
            yield x, TensorCategory((x.sum() > 0).long())


COUNT = dict(
    sampler=lambda ds: T.DataLoader(ds, 4, sampler=PerEpoch(22)),
    batches=lambda ds: T.DataLoader(ds, batch_sampler=T.BatchSampler(PerEpoch(22), 4, False)),
    stream=lambda ds: DataLoader(StreamPerEpoch(), bs=4))


def counting(kind, folder):
    learn = simple(folder)
    learn.dls.loaders = [COUNT[kind](learn.dls.train_ds), T.DataLoader(learn.dls.valid_ds, 4, sampler=PerEpoch(9))]
    return learn


@pytest.mark.parametrize('kind', COUNT)
@pytest.mark.parametrize('end,every', [(15, None), (3, 1), (9, 1)], ids=['of an epoch', 'in the first', 'in the middle'])
def test_samplers_that_count(kind, end, every, tmp_path):
    compare(tmp_path, partial(counting, kind), lambda l: vars(l.dls[1].sampler)['seen'], [end], every)


def counting_by_all(folder, at, every): return fitted(folder, partial(counting, 'sampler'), lambda l: None, at, every, strategy='ddp')


def test_samplers_that_count_in_two_workers(world2, tmp_path):
    want = world2(counting_by_all, tmp_path/'whole', None, None)
    assert world2(counting_by_all, tmp_path/'part', 10, 1) == [None]*2
    assert repr(world2(counting_by_all, tmp_path/'part', None, 1)) == repr(want)


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


@pytest.mark.parametrize('kind', ['coo', 'csr'])
def test_sparse_tensors(kind, tmp_path):
    compare(tmp_path, lambda f: simple(f, model=lambda: Graph(kind).double()), lambda l: l.model.kept[0].to_dense().tolist(), [9], 2)


def test_buffers_that_cannot_be_saved_are_an_error_at_once(tmp_path):
    with pytest.raises(ValueError, match=r'adj of the model are sparse tensors, .* nor Resume save: make them plain attributes'):
        fitted(tmp_path, lambda f: simple(f, model=lambda: Graph('buffer').double()), noop)


class Caches(nn.Module):
    "With a buffer that grows in the fit, is made in its first forward, or is given up in it"
    def __init__(self, kind):
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(4, 4), nn.Linear(4, 3), kind
        if kind != 'made': self.register_buffer('sums', torch.zeros(0 if kind == 'grows' else 4), persistent=kind == 'grows')
    def __iter__(self): return iter([self.a, self.b])
    def __getitem__(self, i): return [self.a, self.b][i]
    def forward(self, x):
        if self.kind == 'made' and not hasattr(self, 'sums'): self.register_buffer('sums', torch.zeros(4).to(x))
        if self.training and self.kind == 'grows' and len(self.sums) < 40: self.sums = torch.cat([self.sums, torch.ones(4).to(x)/9])
        if self.training and self.kind == 'made': self.sums += 1
        if self.training and self.kind == 'given up' and self.sums is not None:
            self.sums = None
            with torch.no_grad(): self.a.weight.div_(2)
        return self.b(self.a(x)*(1 if self.sums is None else 1+self.sums.sum()/9))


CACHES = 'grows', 'made', 'given up'
def caching(kind, folder): return simple(folder, model=lambda: Caches(kind).double())
def cached(learn): return {k: b.tolist() for k, b in learn.model.named_buffers()}, [*learn.model.state_dict()]


@pytest.mark.parametrize('kind', CACHES)
def test_buffers_that_change_in_a_fit(kind, tmp_path): compare(tmp_path, partial(caching, kind), cached, [9], 2)


def caching_by_all(folder, kind, strategy, at): return fitted(folder, partial(caching, kind), cached, at, 2, strategy=strategy)


@pytest.mark.parametrize('kind,strategy', [('grows', 'ddp'), ('made', 'fsdp')])
def test_buffers_that_change_in_two_workers(world2, kind, strategy, tmp_path):
    want = world2(caching_by_all, tmp_path/'whole', kind, strategy, None)
    assert world2(caching_by_all, tmp_path/'part', kind, strategy, 9) == [None]*2
    assert repr([o[1:] for o in world2(caching_by_all, tmp_path/'part', kind, strategy, None)]) == repr([o[1:] for o in want])


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


def in_the_middle_of_all(folder, kind, every, at=None): return fitted(folder, partial(in_the_middle, kind), lambda l: None, at, every, 'ddp')


@pytest.mark.parametrize('kind,every', [('first', 2), ('noisy', 2), ('noisy', None)])
def test_goes_on_in_the_middle_in_two_workers(world2, kind, every, tmp_path):
    want = world2(in_the_middle_of_all, tmp_path/'whole', kind, every)
    assert world2(in_the_middle_of_all, tmp_path/'part', kind, every, 15) == [None]*2
    assert repr(world2(in_the_middle_of_all, tmp_path/'part', kind, every)) == repr(want)


class Exports(Callback):
    "Keeps a copy of the learner as it is after an epoch"
    def after_epoch(self): Exports.copy = deepcopy(self.learn)


def test_a_learner_with_a_resume_is_copied_and_exported(tmp_path):
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    from_the_start()
    learn = simple(tmp_path, [Resume(tmp_path/'ckpt', every=2), Exports()])
    learn.fit(1)
    assert [o.active for o in Exports.copy.cbs if isinstance(o, Resume)] == [False]
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


def fails_while_writing(folder):
    "Of this worker, after a fit that has failed while a checkpoint was written: (does it hold the folder, after that has been written, what there is)"
    import fastdist.all
    from fastdist.checkpoint.files import saving, shared_folder
    from fastdist.checkpoint.files.folder import FolderLock, checkpoints
    from_the_start()
    write, saving.Saver._write = saving.Saver._write, lambda self, *args: (time.sleep(.5), write(self, *args))
    try: assert fitted(folder, simple, lambda l: None, 3, 2, 'ddp') is None
    finally: saving.Saver._write = write
    held = lambda: folder/'ckpt'/'.lock' in FolderLock.held
    first, ending = held(), shared_folder._fits[folder/'ckpt'].ending
    if ending is not None: ending.join()
    return first, held(), [o.verify().path.name for o in checkpoints(folder/'ckpt')]


def test_the_folder_stays_held_while_something_is_written(world2, tmp_path):
    "Who took it then deleted files of a checkpoint that was put in its place a moment later, which was damaged so"
    assert world2(fails_while_writing, tmp_path)[0] == (True, False, ['step-00000002'])
