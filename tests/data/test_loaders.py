"P1 for every kind of loader: weights, losses, metrics and predictions of N workers are those of one process"
import contextlib

import pytest
from loaders import *

NOT_REORDERED = {'fastai_stream', 'fastai_stream_processes'}  # fastai cannot, in one process either


def fitted(name, distrib, split=True, k=1, epochs=2):
    "A fit of the learner over loaders of this kind, whose batches are `k` times as large"
    set_seed(7)
    learn = KINDS[name](k)
    if distrib: import fastdist.all
    with (learn.distrib_ctx(split_batches=split) if distrib else contextlib.nullcontext()):
        learn.fit(epochs)
        rec = learn.recorder
        res = SimpleNamespace(weights=weights(learn), losses=[float(o) for o in rec.losses], values=[list(v) for v in rec.values])
        plain = isinstance(learn.dls.valid, TorchDL) or name in NOT_REORDERED
        res.preds = [o for o in learn.get_preds(dl=learn.dls.valid if plain else None, reorder=not plain) if o is not None]
        if name == 'language_model': res.rows = [shape[1] for shape in learn.hidden.shapes]
    return res


@pytest.fixture(scope='module')
def one():
    done = {}
    def f(name, k=1): return done[name, k] if (name, k) in done else done.setdefault((name, k), fitted(name, False, k=k))
    return f


def flat(o): return [t for v in o for t in (flat(v) if isinstance(v, (list, tuple, L)) else [v])]


def check(a, m, tol):
    assert len(a.losses) > 1 and diff(a.losses, m.losses) < 1e-6*max(a.losses)
    assert diff(a.weights, m.weights) < tol
    for v, w in zip(a.values, m.values, strict=True): assert diff(v, w) < 1e-6*max(1, *v)
    for p, q in zip(flat(a.preds), flat(m.preds), strict=True): assert diff(p, q) < 1e-6


FLOAT32 = dict(vision=2e-6, tabular=2e-6, language_model=1e-6)  # models, or fastai's regulariser, in float32


def check_all(many, one, name):
    for m in many: check(one, m, FLOAT32.get(name, 2e-7))
    if name == 'language_model':  # hidden states are of the workers' own rows: 5 in evaluation, which comes last
        rows = [m.rows for m in many]
        assert [sum(o) for o in zip(*rows)] == [5]*len(rows[0]) and max(rows[0])-min(rows[-1]) == 1


# The contract has the other kinds. Each kind meets both sizes, in turn
SPLIT = [(name, 2 + i % 2) for i, name in enumerate(
    'own_get_idxs_argument two_views curriculum torch_explicit_batch_sampler torch_eager_batch_sampler torch_own_batch_sampler torch_prebatched'.split())]
OWN = [(name, 3 - i % 2) for i, name in enumerate(
    'two_views curriculum torch_explicit_batch_sampler torch_own_batch_sampler torch_prebatched prebatched language_model create_batch_pads drop_last'.split())]


@pytest.mark.parametrize('name,size', SPLIT)
def test_split_batches(worlds, one, name, size):
    check_all(worlds(size)(fitted, name, True), one(name), name)


@pytest.mark.parametrize('name,size', OWN)
def test_batches_of_their_own(worlds, one, name, size):
    "As one process with batches `world_size` times as large"
    check_all(worlds(size)(fitted, name, True, split=False), one(name, size), name)


def texts_in_turn(distrib, k=1):
    "A language model's fits, and an evaluation of its training set, each of which shuffles the texts from the order that they had"
    set_seed(7)
    learn, rows = KINDS['language_model'](k), []
    def predicted(): return flat(learn.get_preds(ds_idx=0, act=noop))
    if distrib: import fastdist.all
    for _ in range(2):
        with learn.distrib_ctx() if distrib else contextlib.nullcontext():
            learn.fit(1)
            learn.validate(ds_idx=0)
            learn.fit(1)
            rows.append(predicted())
    rows.append(predicted())
    return weights(learn), list(learn.dls.train.items.idxs), rows[1:]


def test_texts_of_a_language_model_stay_in_order(world2):
    "Between epochs and contexts, with batches of the workers' own as in one process with the large batch; and all rows are predicted"
    want, order, _ = texts_in_turn(False, 2)
    for got, mine, rows in world2(texts_in_turn, True):
        assert mine == order and diff(want, got) < 1e-6
        for a, b in zip(*rows, strict=True): assert diff(a, b) < 1e-6


def validated(distrib):
    "Validation of a language model by losses that are no mean over words, or count some only"
    set_seed(7)
    learn = KINDS['language_model'](1)
    class Masks(Callback):
        "As of a masked language model: few words count, and in some batches none of a worker's rows"
        def after_pred(self):
            x, y = self.xb[0], self.yb[0].clone()
            y[x > self.iter % 5] = -100
            self.learn.yb = (y,)
    if distrib: import fastdist.all
    def whole(f): return fastdist.all.GlobalBatchLoss(f) if distrib else f
    losses = dict(ignored=CE(ignore_index=3), weighted=CE(weight=torch.arange(1., 12).double()), summed=CE(reduction='sum'), masked=CE(), whole=whole(CE(ignore_index=3)))
    with learn.distrib_ctx() if distrib else contextlib.nullcontext():
        res = {}
        for name, learn.loss_func in losses.items(): res[name] = [float(o) for o in learn.validate(cbs=Masks() if name == 'masked' else None)]
    return res


def test_losses_of_a_language_model(worlds):
    want = validated(False)
    for size in (2, 3):
        for got in worlds(size)(validated, True):
            for name, values in want.items(): assert diff(values, got[name]) < 1e-5*max(values), name  # perplexity enlarges the rounding of float32


def noise(o=None): return torch.tensor([torch.rand(1).item(), np.random.rand(), random.random()])


def augmented(kind, num_workers, seeds=(1, 1, 2)):
    "The random numbers of each item, epoch by epoch, for a loader made after each of `seeds`"
    from fastdist.data.dl import DistributedDL
    res = []
    for s in seeds:
        set_seed(s)
        dl = dict(item=lambda: TfmdDL(list(range(12)), bs=4, after_item=noise, num_workers=num_workers),
                  batch=lambda: TfmdDL(list(range(12)), bs=4, after_batch=lambda b: torch.stack([noise() for _ in b]), num_workers=num_workers),
                  torch=lambda: TorchDL(Noisy(12), batch_size=4, num_workers=num_workers))[kind]()
        dl = DistributedDL(dl, split_batches=True)
        res.append([torch.cat(list(dl)) for _ in range(2)])
    return res

class Noisy:
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): return noise()


# fastai applies `after_batch` in the worker itself, whether loader processes read the items or not
@pytest.mark.parametrize('kind,num_workers', [('item', 0), ('item', 2), ('batch', 0), ('torch', 0), ('torch', 2)])
def test_augmentations_differ_and_come_again(world3, kind, num_workers):
    "Between workers, loader processes, items, epochs; after the same seed they are the same"
    res = world3(augmented, kind, num_workers)
    for again in res: assert torch.equal(torch.cat(again[0]), torch.cat(again[1]))
    drawn = torch.cat([e for worker in res for run in (worker[0], worker[2]) for e in run])
    assert drawn.shape == (2*2*12, 3)
    for col in drawn.T: assert len(col.unique()) == len(col)


class Draws(Callback):
    "What dropout draws in each training batch"
    def before_fit(self): self.drawn = []
    def after_pred(self):
        if self.training: self.drawn.append(torch.rand(1).item())


def fit_twice():
    import fastdist.all
    learn = quiet(learner(n=22, bs=5, cbs=Draws()))
    res = []
    with learn.distrib_ctx(split_batches=True):
        for seed in (3, 3, None):
            if seed: set_seed(seed)
            learn.fit(1)
            res.append(learn.draws.drawn)
    return res


def test_a_fit_draws_the_same_after_the_same_seed(world3):
    res = world3(fit_twice)
    for first, again, other in res: assert first == again and not set(first) & set(other)
    assert len({v for worker in res for v in worker[0]}) == sum(len(worker[0]) for worker in res)


def mixed_samples(cb, n):
    import fastdist.all
    from fastai.callback.mixup import CutMix, MixUp
    set_seed(1)
    x, y = torch.rand(n, 3, 4, 4), torch.arange(n) % 2
    dls = DataLoaders(*[TfmdDL(list(zip(x, y)), bs=4, num_workers=0) for _ in range(2)])
    learn = quiet(Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), loss_func=CrossEntropyLossFlat(), cbs=dict(mixup=MixUp, cutmix=CutMix)[cb]()))
    with learn.distrib_ctx(split_batches=True): learn.fit(2)
    return weights(learn), [float(o) for o in learn.recorder.losses], list(learn.recorder.values[-1])


@pytest.mark.parametrize('cb', ['mixup', 'cutmix'])
def test_mixed_samples(world3, cb):
    "Shares of two samples, of one, and of none"
    for n in (12, 13, 5):
        res = world3(mixed_samples, cb, n)
        for w, losses, values in res:
            assert diff(w, res[0][0]) == 0 and losses == res[0][1] and values == res[0][2] and np.isfinite(losses).all()


def messages(kind, n):
    "Sizes of the messages at the start of an epoch"
    import torch.distributed as dist
    from fastdist.data.dl import DistributedDL
    from fastdist.world import init_group
    init_group()
    sent, real = [], {}
    def note(nm):
        real[nm] = getattr(dist, nm)
        def f(o, *args, **kwargs):
            sent.append(o.nbytes if nm == 'broadcast' and o.nbytes > 1024 else nm)  # 1024: the size of what follows, and its beginning
            return real[nm](o, *args, **kwargs)
        setattr(dist, nm, f)
    make = dict(shuffled=lambda: TfmdDL(list(range(n)), bs=n//4, shuffle=True, num_workers=0), sequential=lambda: TfmdDL(list(range(n)), bs=n//4, num_workers=0),
                weighted=lambda: WeightedDL(list(range(n)), bs=n//4, wgts=np.ones(n), shuffle=True, num_workers=0),
                torch=lambda: TorchDL(list(range(n)), batch_size=n//4, shuffle=True))[kind]
    set_seed(1)
    dl = DistributedDL(make(), split_batches=True)
    try:
        for o in 'broadcast', 'all_reduce', 'all_gather', 'gather', 'scatter', 'barrier': note(o)
        for _ in range(2):
            for b in dl: pass
    finally:
        for nm, f in real.items(): setattr(dist, nm, f)
    return [o for o in sent if isinstance(o, int)], len([o for o in sent if not isinstance(o, int)])


@pytest.mark.parametrize('kind,each', [('shuffled', 1), ('sequential', 0), ('weighted', 1), ('torch', 1)])
def test_agreeing_is_one_message_of_fixed_size(world2, kind, each):
    small, large = world2(messages, kind, 100)[1], world2(messages, kind, 100000)[1]
    assert len(small[0]) == 2*each and max(small[0]+large[0], default=0) < 20000 and max(large[0], default=0) < 1.1*max(small[0], default=1)
    assert small[1] == large[1]  # the lengths


def own_orders(kind):
    "Each worker draws an order of its own, which it cannot be made to share"
    import fastdist.all
    urandom = lambda n: random.Random(os.urandom(8)).sample(range(n), n)
    class Unshared(Sampler):
        def __init__(self): pass
        def __len__(self): return 22
        def __iter__(self): return iter(urandom(22))
    trn = dl(get_idxs=lambda: urandom(22)) if kind == 'fastai' else TorchDL(Items(22), batch_size=5, sampler=Unshared())
    learn = learn_of(trn, dl(n=5))
    try:
        with learn.distrib_ctx(split_batches=True): learn.fit(1)
    except RuntimeError as e: return str(e)


@pytest.mark.parametrize('kind', ['fastai', 'torch'])
def test_orders_that_differ_are_an_error(world3, kind):
    for msg in world3(own_orders, kind): assert 'has drawn another order (22 samples) than rank 0 (22 samples)' in msg and 'keep the generator as an attribute' in msg


def not_seeded(kind):
    "The samples that come, in workers that nobody seeded"
    from fastdist.data.dl import DistributedDL
    from fastdist.world import init_group
    init_group()
    set_seed(int.from_bytes(os.urandom(4), 'little'))
    data = list(range(53))
    dl = dict(fastai=lambda: TfmdDL(data, bs=8, shuffle=True, num_workers=0), torch=lambda: TorchDL(data, batch_size=8, shuffle=True),
              sampler=lambda: TorchDL(data, batch_size=8, sampler=Hops(53)), stream=lambda: TorchDL(Sampled(53), batch_size=8))[kind]()
    dl = DistributedDL(dl, split_batches=False)
    return [[b[:dl.counts.mine].tolist() for b in dl] for _ in range(2)]

class Sampled(IterableDataset):
    def __init__(self, n): self.n = n
    def __iter__(self): return iter(random.sample(range(self.n), self.n))


@pytest.mark.parametrize('kind', ['fastai', 'torch', 'sampler', 'stream'])
def test_workers_that_were_not_seeded_share_an_order(world3, kind):
    res = world3(not_seeded, kind)
    epochs = [[o for worker in res for b in worker[e] for o in b] for e in range(2)]
    assert all(sorted(o) == list(range(53)) for o in epochs) and epochs[0] != epochs[1]


def tabular_test_set(distrib):
    set_seed(1)
    learn = tabular(1)
    df = pd.DataFrame(dict(a=list('xyzzyxx'), b=np.linspace(0, 1, 7), c=np.linspace(1, 0, 7)))
    if distrib: import fastdist.all
    with (learn.distrib_ctx() if distrib else contextlib.nullcontext()):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            to = learn.dls.train_ds.new(df)
            to.process()
            preds, targs = learn.get_preds(dl=learn.dls.valid.new(to, bs=3))
    return preds, targs


def test_a_test_set_without_targets(world3):
    one, _ = tabular_test_set(False)
    for preds, targs in world3(tabular_test_set, True): assert targs is None and diff(one, preds) < 1e-6


def looked_at():
    "What people do with a loader: in rank 0 alone, without a message"
    import fastdist.all, matplotlib
    matplotlib.use('agg')
    from fastdist.all import get_rank
    set_seed(1)
    learn = vision(1)
    with learn.distrib_ctx(split_batches=True):
        if get_rank() == 0:
            learn.dls.show_batch()
            dl = learn.dls.train
            assert len(dl.one_batch()[0]) == 3 and dl.n == 22 and dl.bs == 5 and len(dl.dataset) == 22 and len(dl.new(bs=2)) == 11
            learn.summary()
        learn.fit(1)
    return weights(learn)


def test_looking_at_a_loader_in_one_rank(world2):
    a, b = world2(looked_at)
    assert diff(a, b) == 0


def unsized():
    "A validation set whose length nobody knows: what a fit says, and whether `lr_find` goes"
    import fastdist.all
    learn, said = learn_of(TorchDL(Stream(22), batch_size=5), TorchDL(Stream(13, sized=False), batch_size=3)), []
    for f in (lambda: learn.fit(2), lambda: learn.lr_find(num_it=12, stop_div=False, show_plot=False)):
        try:
            with learn.distrib_ctx(split_batches=True): said.append(f())
        except TypeError as e: said.append(str(e))
    return said


def test_a_validation_stream_of_unknown_length(world2):
    "fastai has to know it, in one process too: here all workers say so before they train anything, but `lr_find` goes"
    for r, (fit, found) in enumerate(world2(unsized)):
        assert f'rank {r}: torch.utils.data.dataloader.DataLoader reads an iterable data set whose length is not known' in fit and 'give the data set a __len__' in fit
        assert found.valley > 0, found


def part_of_an_epoch():
    "A fit that goes on in the middle of an epoch, by the state of its loader"
    learn = quiet(learner(n=22, bs=4))
    seen = []
    class Stop(Callback):
        def after_batch(self):
            if self.training: seen.append(self.learn.dl.state_dict() if self.iter == 1 else None)
    import fastdist.all
    with learn.distrib_ctx(split_batches=True):
        learn.fit(1, cbs=Stop())
        n = len(seen)
        learn.dls.train.load_state_dict(seen[1])
        learn.fit(2, cbs=Stop())
    return n, len(seen)-n, seen[1]['offset']


def test_a_fit_in_the_middle_of_an_epoch(world2):
    "6 steps, of which 2 were done: 4 more, and then a whole epoch"
    assert world2(part_of_an_epoch) == [(6, 4+6, 8)]*2


def found(name, distrib):
    set_seed(7)
    learn = KINDS[name](1)
    if distrib: import fastdist.all
    with (learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext()):
        lr = learn.lr_find(num_it=12, stop_div=False, show_plot=False).valley
    return lr, [float(o) for o in learn.recorder.losses], weights(learn)


@pytest.mark.parametrize('name', ['torch_random', 'fastai_stream', 'language_model'])
def test_lr_find(world2, name):
    one = found(name, False)
    for m in world2(found, name, True): assert abs(one[0]-m[0]) < 1e-6 and diff(one[1], m[1]) < 1e-5*max(one[1]) and diff(one[2], m[2]) < 1e-12


def peeked():
    "`one_batch` in rank 0 alone shuffles the documents there once more"
    import fastdist.all
    from fastdist.all import get_rank
    set_seed(1)
    learn = language_model(1)
    with learn.distrib_ctx(split_batches=True):
        if get_rank() == 0: learn.dls.train.one_batch()
        learn.fit(1)
        return list(learn.dls.train.items.idxs)


def test_documents_agree_after_a_look_in_one_rank(world2):
    a, b = world2(peeked)
    assert a == b


class Beside(Callback):
    "Reads a batch of the training loader in the middle of an epoch, or of a loader `like` it"
    run_valid = False
    def __init__(self, like): self.like = like
    def before_epoch(self): self.read = self.dls.train.new() if self.like else self.dls.train
    def after_batch(self): next(iter(self.read))


def read_beside(like, distrib=True):
    import fastdist.all
    learn = quiet(learner(n=22, cbs=Beside(like), shuffle=False))
    with (learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext()): learn.fit(1)
    return weights(learn)


def raised():
    with pytest.raises(RuntimeError) as e: read_beside(False)
    return str(e.value)


def test_two_loops_over_the_training_loader(world2):
    "By the second nobody would know where the first one is; a loader of its own is read beside it"
    for r, o in enumerate(world2(raised)):
        assert o.startswith(f'rank {r}: ') and 'another loop over this loader has begun' in o and 'learn.dls.train.new()' in o, o
    one = read_beside(True, distrib=False)
    for w in world2(read_beside, True): assert diff(one, w) < 2e-7


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


class Two:
    "An object of two loaders"
    def __init__(self, dl): self.dls = [dl, dl.new()]
    def __len__(self): return len(self.dls[0])
    def __iter__(self): return (x for x, _ in zip(*self.dls))


def held():
    "The error for an object of two loaders that trains, and the numbers of one that validates"
    import fastdist.all
    learn = quiet(learner(n=22))
    with learn.distrib_ctx(): one = learn.validate()
    learn.dls.loaders[1] = Two(learn.dls.loaders[1])
    with learn.distrib_ctx(): two = learn.validate()
    learn.dls.loaders[0] = Two(learn.dls.loaders[0])
    with pytest.raises(TypeError) as e, learn.distrib_ctx(): pass
    return str(e.value), diff(one, two)


def test_an_object_of_two_loaders(world2):
    for r, (o, off) in enumerate(world2(held)): assert f'rank {r}: ' in o and "Two is no DataLoader of fastai's or PyTorch's" in o and 'give a single one' in o and off < 1e-6, (o, off)


def read_alone(make):
    "What rank 0 alone reads of a loader that `make` makes of the learner's"
    from fastdist.all import get_rank
    learn, seen = quiet(learner(n=22, bs=6, n_val=5)), []
    class Look(Callback):
        def after_epoch(self): seen.append([(len(x), x.unique().tolist()) for x, _ in self.dls.train])
    with learn.distrib_ctx(split_batches=True):
        learn.dls.loaders[0] = make(learn.dls.train.dl)
        learn.fit(1, cbs=[Look()] if get_rank() == 0 else [])
    return seen


def sevens(dl):
    "A class of its own says what becomes of a batch"
    from fastdist.all import DistributedDL
    class Sevens(DistributedDL):
        def after_batch(self, b):
            x, y = super().after_batch(b)
            return x*0+7, y
    return Sevens(dl, split_batches=True)


def test_what_a_worker_reads_alone(world2):
    assert world2(read_alone, sevens) == [[[(6, [7.]), (6, [7.]), (6, [7.]), (4, [7.])]], []]
