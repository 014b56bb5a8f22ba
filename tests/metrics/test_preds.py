"P1 for predictions: in the order of the data set, of exact length, whatever is asked for"
import contextlib, warnings

import pytest, torch

from learners import *


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


def ctx_of(learn, distrib): 
    if not distrib: return contextlib.nullcontext()
    import fastdist.all
    return learn.distrib_ctx()


def plain(o):
    "Nests of tensors as nests of lists"
    if isinstance(o, torch.Tensor): return ['tensor', str(o.dtype), list(o.shape), o.float().flatten().tolist()]
    if isinstance(o, dict): return {k: plain(v) for k, v in o.items()}
    return list(map(plain, o)) if isinstance(o, (list, tuple, L)) else o


def close(a, b):
    if type(a) is not type(b): return False
    if isinstance(a, dict): return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
    if isinstance(a, list): return len(a) == len(b) and all(map(close, a, b))
    return abs(a-b) < 1e-6 if isinstance(a, float) else a == b


class TwoOut(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 2)
    def forward(self, x): return self.a(x), (self.b(x), self.a(x).bfloat16()), self.b(x) > 0


class Longer(nn.Module):
    "Longer outputs for some batches, which cannot be concatenated"
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)
    def forward(self, x): return self.a(x)[:, None].expand(-1, 1+int(x[0, 0] > 0), -1)


OPTIONS = dict(
    plain={}, train=dict(ds_idx=0), all=dict(with_input=True, with_decoded=True, with_loss=True), act=dict(act=torch.sigmoid), unordered=dict(reorder=False),
    concat=dict(concat_dim=1, reorder=False, with_targs=False), no_preds=dict(with_preds=False, with_loss=True), no_targs=dict(with_targs=False), inner=dict(inner=True))


def options(distrib, n, bs, folder=None):
    warnings.simplefilter('ignore')
    learn, res = quiet(learner(n=11, n_val=n, bs=bs)), {}
    batch = learn.dls.valid.one_batch()
    with ctx_of(learn, distrib):
        for nm, kw in OPTIONS.items():
            if nm == 'concat' and n % bs: continue
            res[nm] = plain(learn.get_preds(**kw))
        res['positional'] = plain(learn.get_preds(1, None, True, False, True))
        items = [learn.dls.valid_ds[i] for i in range(n)]
        res['another order'] = plain(learn.get_preds(dl=learn.dls.valid.new(get_idxs=lambda: list(range(n))[::-1])))
        res['no targets'] = plain(learn.get_preds(dl=TfmdDL([(x,) for x, _ in items], bs=bs, n_inp=1)))
        res['batches'] = plain(learn.get_preds(dl=[batch]*2, reorder=False))
        if folder:
            from fastdist.world import get_rank
            for o in ('p', 't'): Path(f'{folder}/{o}').mkdir(exist_ok=True, parents=True)
            learn.get_preds(save_preds=Path(folder)/'p', save_targs=Path(folder)/'t', with_preds=False, with_targs=False)
            res['files'] = [sorted((int(f.name), plain(torch.load(f))) for f in Path(f'{folder}/{o}').iterdir()) for o in ('p', 't')] if get_rank() == 0 else None
    return res


@pytest.mark.parametrize('n,bs', [(1, 4), (2, 4), (13, 3), (24, 6)])
def test_options(world, n, bs, tmp_path):
    want = options(False, n, bs, tmp_path/'one')
    for r, got in enumerate(world(options, True, n, bs, tmp_path/f'many{world.n}')):
        assert {k for k in want if not close(want[k], got[k])} <= ({'files'} if r else set())


def written(n_val, folder):
    import fastdist.all
    learn, paths, real = quiet(learner(n=11, n_val=n_val, bs=3)), [], torch.save
    def save(o, f, **kwargs):
        paths.append(str(f))
        real(o, f, **kwargs)
    torch.save = save
    try:
        with learn.distrib_ctx(split_batches=True): learn.get_preds(save_preds=folder)
    finally: torch.save = real
    return paths, sorted(f.name for f in folder.iterdir())


def stream_after(distrib, n_val, what):
    "The next draws of a script that was seeded once, by kind"
    import random
    sharded = what=='sharded'
    learn = quiet(learner(n=5 if sharded else 11, n_val=n_val, bs=4, drop_last=sharded))
    if distrib: import fastdist.all
    with learn.distrib_ctx(strategy='fsdp', split_batches=True) if distrib and sharded else ctx_of(learn, distrib):
        set_seed(5)
        dict(preds=learn.get_preds, sharded=lambda: (learn.fit(1), learn.get_preds(ds_idx=0)), train=lambda: learn.get_preds(ds_idx=0), unordered=lambda: learn.get_preds(reorder=False),
             dl=lambda: learn.get_preds(dl=learn.dls.train), shuffled=lambda: learn.get_preds(dl=learn.dls.train.new(shuffle=True)),
             validate=learn.validate, fit=lambda: (learn.fit(1), learn.get_preds()))[what]()
    return random.random(), np.random.rand(), torch.rand(1).item()


@pytest.mark.parametrize('what', ['preds', 'train', 'unordered', 'dl', 'shuffled', 'validate', 'fit', 'sharded'])
@pytest.mark.parametrize('n_val', [1, 9])
def test_what_is_drawn_after(world, n_val, what):
    "The next fold of a loop that is seeded once starts from the weights of one process"
    assert world(stream_after, True, n_val, what) == [stream_after(False, n_val, what)]*world.n


@pytest.mark.parametrize('n_val', [3, 13])
def test_no_file_is_written_by_two(world, n_val, tmp_path):
    "A single batch is evaluated by all: nobody reads what another one is writing again"
    (tmp_path/'p').mkdir()
    res = world(written, n_val, tmp_path/'p')
    paths, n = [o for ps, _ in res for o in ps], -(-n_val//3)
    assert len(paths) == len(set(paths)) == (n if n > 1 else world.n)
    assert [names for _, names in res] == [sorted(map(str, range(n)))]*world.n and [o.name for o in tmp_path.iterdir()] == ['p']


def outputs(distrib, kind):
    warnings.simplefilter('ignore')
    loss = lambda p, t, **kw: F.cross_entropy(p[0] if isinstance(p, tuple) else p.reshape(len(t), -1), t*0, **kw)
    learn, res = quiet(learner(n=11, n_val=23, bs=4, model=dict(two=TwoOut, longer=Longer)[kind], dtype=torch.float32, loss=loss)), []
    with ctx_of(learn, distrib):
        res.append(plain(learn.get_preds(with_input=True, act=noop, reorder=kind == 'two')))
        res.append(plain(learn.get_preds(act=noop, reorder=False)))
    return res


@pytest.mark.parametrize('kind', ['two', 'longer'])
def test_outputs_of_all_kinds(world, kind):
    want = outputs(False, kind)
    for got in world(outputs, True, kind): assert close(want, got)


class Ranks(CrossEntropyLossFlat):
    "Its activation compares samples with each other"
    def activation(self, x): return x.argsort(0).float()


def of_kind(i):
    "(loss function, predictions of a sample) for a model whose predictions are sums of its inputs"
    return [(CrossEntropyLossFlat(), (3,)), (CrossEntropyLossFlat(axis=1), (3, 2, 2)), (BCEWithLogitsLossFlat(), (3,)),
            (BCEWithLogitsLossFlat(), ()), (LabelSmoothingCrossEntropyFlat(), (3,)), (FocalLossFlat(), (3,)), (Ranks(), (3,)), (MSELossFlat(), (3,))][i]


class Sums(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape, self.w = shape, nn.Parameter(torch.linspace(-1, 1, 4*max(1, math.prod(shape))).view(4, -1))
    def forward(self, x): return (x.float() @ self.w).view(-1, *self.shape)


def activated(distrib, i, n):
    loss, shape = of_kind(i)
    ys = torch.arange(n)[(...,)+(None,)*(len(shape)-1)].expand(-1, *shape[1:]) % 3
    if not isinstance(loss, CrossEntropyLossFlat | FocalLossFlat | LabelSmoothingCrossEntropyFlat): ys = torch.ones(n, *shape)
    items, res = list(zip(torch.randn(n, 4, generator=torch.Generator().manual_seed(1)), ys)), []
    dls = DataLoaders(*[TfmdDL(items, bs=4, num_workers=0) for _ in range(2)])
    learn = quiet(Learner(dls, Sums(shape), loss_func=loss))
    calls, softmax = [], F.softmax
    def counted(x, *args, **kwargs):
        calls.append(len(x))
        return softmax(x, *args, **kwargs)
    F.softmax = counted
    try:
        with ctx_of(learn, distrib):
            res = [learn.get_preds()[0], learn.get_preds(with_decoded=True, with_input=True)[1], learn.get_preds(rank0_only=True)[0] if distrib else learn.get_preds()[0]]
            res.append(learn.get_preds(act=torch.sigmoid)[0])
    finally: F.softmax = softmax
    return res, calls


@pytest.mark.parametrize('i', range(8))
def test_activations(world, i):
    "fastai's for each sample are made by each worker of its own predictions, once; any other of all of them"
    n = 23
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        want, _ = activated(False, i, n)
    for r, (got, calls) in enumerate(world(activated, True, i, n)):
        assert all(a.equal(b) for a, b in zip(want[:2]+want[3:], got[:2]+got[3:])) and (want[2].equal(got[2]) if r == 0 else got[2] is None)
        mine = sum(min(4, n-4*b) for b in range(r, 6, world.n))
        if i in (0, 1, 4, 5): assert sum(calls[:len(range(r, 6, world.n))]) == mine and sum(calls) == 2*mine + n*(r == 0)


def only_rank0(n, keep):
    "Predictions in rank 0 alone, sent while the evaluation goes on"
    from fastdist.metrics.metrics import GatheredPreds
    learn = quiet(learner(n=11, n_val=n, bs=4))
    most, real = [0], GatheredPreds.send
    def send(self, i):
        real(self, i)
        most[0] = max(most[0], len(self.cb.preds))
    with ctx_of(learn, True):
        all_ = learn.get_preds(with_input=True, with_decoded=True, with_loss=True)
        GatheredPreds.send, defaults = send, GatheredPreds.__init__.__defaults__
        GatheredPreds.__init__.__defaults__ = tuple(keep if o == 16 else o for o in defaults)
        try: mine = learn.get_preds(with_input=True, with_decoded=True, with_loss=True, rank0_only=True)
        finally: GatheredPreds.send, GatheredPreds.__init__.__defaults__ = real, defaults
        short = learn.get_preds(1, None, True, rank0_only=True)
        again = learn.get_preds()
    return plain(all_), plain(mine), plain(short), len(again[0]), most[0]


@pytest.mark.parametrize('n', [1, 3, 50, 101])
def test_in_rank_0_alone(world, n):
    res = world(only_rank0, n, 2)
    for r, (all_, mine, short, again, most) in enumerate(res):
        assert close(mine, all_ if r == 0 else [None]*5) and close(short, all_[:3] if r == 0 else [None]*3) and again == n
        assert most <= 2, most # never more than a few batches are kept


def by_count(distrib):
    "Transforms that do something else in each batch"
    from fastai.vision.all import DeterministicDihedral, DeterministicFlip, TensorImage
    class Flat(Transform):
        order = 200
        def encodes(self, o: TensorImage): return o.flatten(1).as_subclass(Tensor)
    set_seed(0)
    pics = [(TensorImage(o), i % 3) for i, o in enumerate(torch.rand(17, 3, 4, 4))]
    dsets = Datasets(pics, [[ItemGetter(0)], [ItemGetter(1)]], splits=[list(range(9)), list(range(9, 17))])
    dls = dsets.dataloaders(bs=4, after_batch=[DeterministicFlip(), DeterministicDihedral(), Flat()], num_workers=0, drop_last=False)
    learn = quiet(Learner(dls, nn.Linear(48, 3), loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=.1))
    with ctx_of(learn, distrib): return plain([learn.tta(n=3)[0], learn.get_preds(0)[0], learn.tta(n=2)[0]])


def test_transforms_that_count_batches(world):
    for o in world(by_count, True): assert close(o, by_count(False))


def alone():
    "One sample in rank 0 alone, while the others do something else"
    from fastdist.world import get_rank
    learn = quiet(learner(n=22, n_val=13, bs=4))
    import fastdist.all
    with learn.distrib_ctx():
        if get_rank() == 0: learn.get_preds(dl=learn.dls.valid.new(dataset=[learn.dls.valid_ds[0]], n=1)); learn.validate(dl=[learn.dls.valid.one_batch()])
        return len(learn.get_preds()[0])


def alone_in_a_fit():
    "The same by a callback, while others may cancel"
    from fastdist.world import get_rank
    import fastdist.all
    class Shows(Callback):
        def after_epoch(self):
            if get_rank() == 0: self.learn.get_preds(dl=self.learn.dls.valid.new(dataset=[self.learn.dls.valid_ds[0]], n=1), inner=True)
            self.n = len(self.learn.get_preds(inner=True)[0])
    class MayStop(Callback):
        def _stop(self):
            from fastai.callback.core import CancelFitException
            if self.epoch > 5: raise CancelFitException()
        def before_epoch(self): self._stop()
        def before_validate(self): self._stop()
        def after_epoch(self): self._stop()
        def after_fit(self): self._stop()
    learn, cb = quiet(learner(n=22, n_val=13, bs=4)), Shows()
    with learn.distrib_ctx(split_batches=True): learn.fit(2, cbs=[cb, MayStop()])
    return cb.n, weights(learn)


def test_rank_0_predicts_one_sample_in_a_fit(world):
    first, *others = world(alone_in_a_fit)
    learn = quiet(learner(n=22, n_val=13, bs=4))
    learn.fit(2)
    assert first[0] == 13 and diff(first[1], weights(learn)) < 2e-7
    for o in others: assert o[0] == 13 and diff(first[1], o[1]) == 0


def test_rank_0_predicts_one_sample(world): assert world(alone) == [13]*world.n


def sharded():
    "Parameters are spread over the workers, so each forward is a collective, and there are not as many batches as steps"
    from torch.distributed.fsdp import fully_shard
    import fastdist.all
    res = []
    for n_val, bs in [(13, 3), (5, 2), (33, 4), (4, 2)]:
        learn = quiet(learner(n=11, n_val=n_val, bs=bs, metrics=[accuracy, F1Score(average='macro')], dtype=torch.float32, loss=CrossEntropyLossFlat()))
        want = [plain(learn.get_preds()), list(learn.validate())]
        with learn.distrib_ctx():
            for m in learn.model: fully_shard(m)
            fully_shard(learn.model)
            res += [close(want[0], plain(learn.get_preds())), close(want[1], list(learn.validate()))]
    # of PyTorch's loader, which has no `one_batch`, a third worker has no batch
    learn = quiet(learner(dtype=torch.float32, loss=CrossEntropyLossFlat()))
    learn.dls = DataLoaders(*[torch.utils.data.DataLoader(Items(4, dtype=torch.float32), batch_size=2, num_workers=1) for _ in range(2)])
    with learn.distrib_ctx(strategy='fsdp'):
        learn.fit(1)
        got = list(learn.validate())
    return [*res, close(list(learn.validate()), got)]


def test_sharded_models(world): assert world(sharded) == [[True]*9]*world.n
