"P1: N workers give the numbers of one process. References are computed in this process, with the same seed"
import pytest
from fastai.callback.training import GradientClip
from fastdist.metrics.metrics import interleave
from learners import *

SPLIT = dict(split_batches=True)


def same(world, tol=2e-7, losses=True, ctx=SPLIT, ref=None, **kwargs):
    "Weights, losses and epoch values of every worker against one process; `ref` are the arguments that differ there"
    one = trained(**{**kwargs, **(ref or {})})
    for m in world(trained, True, ctx=ctx, **kwargs):
        assert diff(one.weights, m.weights) < tol
        if losses:
            assert diff(one.losses, m.losses) < 1e-6
            assert diff(one.values, m.values) < 1e-6


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


@pytest.mark.parametrize('bn', [False, True], ids=['plain', 'bn'])
@pytest.mark.parametrize('opt,wd', [(SGD, None), (SGD, 0.1), (Adam, None), (Adam, 0.1)], ids=['sgd', 'sgd-wd', 'adam', 'adam-wd'])
def test_weights_split(world, opt, wd, bn):
    "The last batch of 22 in batches of 5 has 2 samples: fewer than 3 workers"
    same(world, n=22, bs=5, opt=opt, wd=wd, bn=bn, metrics=accuracy)


@pytest.mark.parametrize('n,bs', [(1, 1), (1, 8), (2, 5), (3, 1), (7, 3), (13, 13), (16, 5), (31, 6), (64, 16)])
def test_weights_awkward_sizes(world, n, bs): same(world, n=n, bs=bs, metrics=accuracy)


@pytest.mark.parametrize('n,bs', [(13, 4), (22, 7)])
def test_weights_drop_last(world, n, bs): same(world, n=n, bs=bs, drop_last=True)


@pytest.mark.parametrize('num_workers', [1, 2])
def test_weights_loader_processes(world2, num_workers): same(world2, n=22, bs=5, num_workers=num_workers)


@pytest.mark.parametrize('drop_last', [False, True])
def test_own_batches_are_one_process_with_the_global_batch(worlds, drop_last):
    "split_batches=False: each worker has `bs`, so the numbers are those of one process with `bs*world_size`"
    for i, n in enumerate((38, 24, 27)):
        size = 2 + (i+drop_last) % 2  # each set by two and by three workers, with what is left over and without
        one = trained(n=n, bs=4*size, val_bs=4, bn=True, drop_last=drop_last)
        for m in worlds(size)(trained, True, ctx={}, n=n, bs=4, val_bs=4, bn=True, drop_last=drop_last):
            assert diff(one.weights, m.weights) < 2e-7
            assert diff(one.losses, m.losses) < 1e-6
            assert diff(one.values, m.values) < 1e-6


def test_float32(world):
    "In the type that people train in, to rounding"
    same(world, n=22, bs=5, bn=True, dtype=torch.float32, loss=CrossEntropyLossFlat(), tol=2e-6)


class Conv(nn.Module):
    "Batch norm over 4 dimensions as well, and without affine parameters, and with a cumulative average"
    def __init__(self):
        super().__init__()
        self.conv, self.bn1 = nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3, affine=False)
        self.bn2, self.bn3, self.lin = nn.BatchNorm2d(3, momentum=None), nn.BatchNorm2d(3, track_running_stats=False), nn.Linear(9, 3)
    def forward(self, x):
        x = self.bn1(self.conv(x[:, None]))
        return self.lin(self.bn3(self.bn2(x[..., None])).view(x.shape[0], -1))


def conv():
    torch.manual_seed(0)
    return Conv().double()


def test_batch_norm_kinds(world):
    for n in (22, 21): same(world, n=n, bs=5, model=conv)


class Doubled(nn.BatchNorm1d):
    "A layer with a forward of its own, as fastai has one for lists of vectors"
    def forward(self, x): return super().forward(x)*2


def doubled():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), Doubled(5), nn.Linear(5, 3)).double()


def test_batch_norm_subclass(world): same(world, n=22, bs=5, model=doubled)


def odd_tensors():
    "Buffers of types that gloo does not send, strides, tied weights; seeded otherwise in each worker"
    import fastdist.all
    from fastdist.all import get_rank
    torch.manual_seed(get_rank())
    m = nn.Sequential(nn.Conv2d(1, 4, (1, 4)), nn.Flatten(), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 3))
    m = m.to(memory_format=torch.channels_last)
    m[3].weight = m[2].weight
    for i, t in enumerate([torch.bfloat16, torch.float16, torch.bool, torch.int16, torch.complex64, torch.float64]): m.register_buffer(f'b{i}', (torch.randn(3, 2)*9).to(t).T)
    m.register_buffer('empty', torch.zeros(0, 3))
    m.register_buffer('scalar', torch.tensor(get_rank()))
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.m = m
        def forward(self, x): return self.m(x[:, None, None])
    learn = quiet(learner(model=Net, dtype=torch.float32, loss=CrossEntropyLossFlat(), opt=Adam))
    with learn.distrib_ctx(): learn.fit(1)
    return weights(learn), m[3].weight is m[2].weight


def test_odd_tensors(world3):
    (a, tied), (b, _), (c, _) = world3(odd_tensors)
    assert tied and all(torch.equal(a[k], b[k]) and torch.equal(a[k], c[k]) for k in a) and a['m.scalar'] == 0


def buffers_without_sync_bn():
    import fastdist.all
    learn = quiet(learner(bn=True))
    with learn.distrib_ctx(sync_bn=False): learn.fit(1)
    return weights(learn)


def test_buffers_agree_without_sync_bn(world3):
    a, b, c = world3(buffers_without_sync_bn)
    assert diff(a, b) == 0 and diff(a, c) == 0


@pytest.mark.parametrize('loss', ['sum', 'weighted', 'function', 'ignored'])
def test_losses_that_divide_otherwise(world, loss):
    "A sum; a mean over class weights; a mean over what is not ignored, down to a share where all is ignored"
    f = dict(sum=Double(reduction='sum'), weighted=Double(weight=torch.tensor([1., 5., 0.5]).double()), ignored=Double(ignore_index=1),
             function=partial(F.cross_entropy, weight=torch.tensor([1., 5., 0.5])))[loss]
    same(world, n=22, bs=5, loss=f, lr=0.01, losses=loss != 'sum', **(dict(tol=1e-6, dtype=torch.float32) if loss == 'function' else {}))


def trained_mse(distrib=False):
    torch.manual_seed(5)
    learn = quiet(Learner(dls_of(22, classes=False, dtype=torch.float32), nn.Linear(4, 1), loss_func=MSELossFlat(), opt_func=SGD, lr=0.1, metrics=[mae, rmse]))
    if distrib:
        import fastdist.all
        with learn.distrib_ctx(split_batches=True): learn.fit(2)
    else: learn.fit(2)
    return weights(learn), [list(o) for o in learn.recorder.values]


def test_regression(world):
    w, values = trained_mse()
    for w1, values1 in world(trained_mse, True): assert diff(w, w1) < 1e-6 and diff(values, values1) < 1e-6


def test_accumulation(world):
    "n_acc counts the samples of all workers"
    for n_acc in (10, 11): same(world, n=22, bs=5, cbs=GradientAccumulation(n_acc))


def test_clip(world): same(world, n=22, bs=5, cbs=GradientClip(0.1))


class BatchRoot(Metric):
    "A metric that somebody wrote for one process: it keeps what it likes, and depends on how the set is cut in batches"
    def reset(self): self.seen = []
    def accumulate(self, learn): self.seen.append((learn.pred.softmax(-1).max().item(), len(learn.y), learn.loss.item()))
    @property
    def value(self): return sum(p**0.5*n+l for p, n, l in self.seen) + len(self.seen)*100
    @property
    def name(self): return 'batch_root'


def worst(pred, targ): return pred.max().abs().sqrt()


def val_values(distrib, sizes, ctx=None):
    "Validation of untrained learners"
    res = []
    for n in sizes:
        learn = quiet(learner(n=10, n_val=n, val_bs=4, metrics=[accuracy, worst, F1Score(average='macro'), BatchRoot(), Perplexity()], loss=Double()))
        if distrib:
            import fastdist.all
            with learn.distrib_ctx(**(ctx or {})): res.append(list(learn.validate()))
        else: res.append(list(learn.validate()))
    return res


@pytest.mark.parametrize('split', [False, True])
def test_validation_any_size(world, split):
    sizes = [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 17, 29]
    one = val_values(False, sizes)
    for m in world(val_values, True, sizes, ctx=dict(split_batches=split)):
        for n, a, b in zip(sizes, one, m): assert diff(a, b) < 1e-6*max(map(abs, a)), n


def preds(distrib, sizes):
    res = []
    for n in sizes:
        learn = quiet(learner(n=n, n_val=n, val_bs=4))
        def get():
            test = learn.dls.valid.new(Items(n, seed=5))
            return [learn.get_preds(), learn.get_preds(ds_idx=0), learn.get_preds(dl=learn.dls.valid.new(shuffle=True)),
                    learn.get_preds(dl=test, with_input=True, with_loss=True, with_decoded=True), learn.get_preds(reorder=False)]
        if distrib:
            import fastdist.all
            with learn.distrib_ctx(): res.append(get())
        else: res.append(get())
    return res


@pytest.mark.sizes
def test_predictions_in_order(world):
    "Order and length, from loaders that are shuffled as well"
    sizes = [1, 2, 3, 4, 5, 8, 9, 13, 23]
    one = preds(False, sizes)
    for m in world(preds, True, sizes):
        for n, a, b in zip(sizes, one, m):
            for i, (p, q) in enumerate(zip(a, b)):
                assert len(p) == len(q)
                for t, u in zip(p, q): assert diff(t, u) < 1e-6, (n, i)


def batches_seen(distrib, split, n=22, bs=5, epochs=2):
    "The samples of each step, by what is in them"
    seen = []
    class See(Callback):
        def before_batch(self):
            if self.training and (not distrib or self.dl.counts.mine): seen.append((self.epoch, self.iter, self.x.clone()))
    learn = quiet(learner(n=n, bs=bs, cbs=See()))
    if distrib:
        import fastdist.all
        with learn.distrib_ctx(split_batches=split): learn.fit(epochs)
    else: learn.fit(epochs)
    return seen


@pytest.mark.parametrize('split', [False, True])
def test_the_very_batches(worlds, split):
    "Step by step the workers together see the batches of one process; with batches of their own, `world_size` of them at a time"
    for size in (2, 3):
        one = batches_seen(False, split)
        many = worlds(size)(batches_seen, True, split)
        by_step = lambda e, k: [x for seen in many for (epoch, i, x) in seen if (epoch, i) == (e, k)]
        for epoch in range(2):
            mine = [x for e, _, x in one if e == epoch]
            k = 1 if split else size
            for step in range(-(-len(mine)//k)):
                assert torch.equal(interleave(by_step(epoch, step)), torch.cat(mine[step*k:(step+1)*k])), (size, epoch, step)


def unseeded():
    "Workers that nobody seeded, with models of their own"
    import fastdist.all
    set_seed(int.from_bytes(os.urandom(4), 'little'))
    learn = quiet(Learner(DataLoaders(TfmdDL(Items(22), bs=5, shuffle=True, num_workers=0), TfmdDL(Items(9, seed=1), bs=2, num_workers=0)), mlp(seed=random.randint(0, 999)),
                          loss_func=Double(), opt_func=Adam, metrics=accuracy))
    seen = []
    class See(Callback):
        def before_batch(self):
            if self.training and self.dl.counts.mine: seen.append(self.x)
    with learn.distrib_ctx(split_batches=True): learn.fit(1, cbs=See())
    return weights(learn), list(learn.recorder.values[-1]), torch.cat(seen)


def test_workers_that_were_not_seeded_agree(world3):
    res = world3(unseeded)
    for w, v, _ in res[1:]: assert diff(w, res[0][0]) == 0 and diff(v, res[0][1]) == 0
    seen = torch.cat([x for _, _, x in res])
    assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, Items(22).x.tolist()))  # each sample once


def train_metrics(distrib):
    learn = quiet(learner(n=22, bs=5, metrics=[accuracy, F1Score(average='macro')]))
    learn.recorder.train_metrics = True
    if distrib:
        import fastdist.all
        with learn.distrib_ctx(split_batches=True): learn.fit(2)
    else: learn.fit(2)
    return [list(o) for o in learn.recorder.values]


def test_training_metrics(world):
    one = train_metrics(False)
    for m in world(train_metrics, True): assert diff(one, m) < 1e-6


class Tags:
    "Six labels a sample"
    def __init__(self, n): self.x, self.y = torch.randn(n, 6, 4, dtype=torch.float64), torch.randint(0, 3, (n, 6))
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i], self.y[i]


class Texts:
    "Samples of different lengths"
    def __init__(self, n):
        self.x = [torch.randint(1, 9, (1+i*7 % 11,)) for i in range(n)]
        self.y = torch.randint(0, 3, (n,))
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i], self.y[i]


def padded(items):
    m = max(len(x) for x, _ in items)
    return [(F.pad(x, (0, m-len(x))), y) for x, y in items]


class Mean(nn.Module):
    "Depends on the padding, on purpose"
    def __init__(self):
        super().__init__()
        self.emb, self.lin = nn.Embedding(9, 4).double(), nn.Linear(4, 3).double()
    def forward(self, x): return self.lin(self.emb(x).mean(1))


def other_shapes(distrib, kind):
    from fastai.text.data import SortedDL
    import contextlib
    set_seed(3)
    if kind == 'tags': dls = DataLoaders(TfmdDL(Tags(7), bs=3, shuffle=True, num_workers=0), TfmdDL(Tags(7), bs=3, num_workers=0))
    else: dls = DataLoaders(SortedDL(Texts(23), bs=5, shuffle=True, before_batch=padded, num_workers=0), SortedDL(Texts(11), bs=3, before_batch=padded, num_workers=0))
    model = nn.Linear(4, 3).double() if kind == 'tags' else Mean()
    loss = Tagging() if kind == 'tags' else Double()
    learn = quiet(Learner(dls, model, loss_func=loss, opt_func=SGD, lr=0.1))
    if distrib: import fastdist.all
    with (learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext()):
        learn.fit(2)
        p, y = learn.get_preds()
    return weights(learn), [list(o) for o in learn.recorder.values], p, y


class Tagging(Double):
    def __call__(self, inp, targ, **kwargs): return super().__call__(inp.reshape(-1, 3), targ.reshape(-1), **kwargs)


@pytest.mark.parametrize('kind', ['tags', 'texts'])
def test_labels_and_texts(world, kind):
    "Several labels a sample, in shares of 2 and 1; texts sorted by length and padded as in one process"
    w, values, p, y = other_shapes(False, kind)
    for w1, values1, p1, y1 in world(other_shapes, True, kind):
        assert diff(w, w1) < 2e-7 and diff(values, values1) < 1e-6 and diff(p, p1) < 1e-6 and torch.equal(y, y1)


class AddsToLoss(Callback):
    "As fastai's RNNRegularizer does"
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad + 0.5*self.pred.float().pow(2).mean()


class ReplacesLoss(Callback):
    def after_loss(self): self.learn.loss_grad = self.learn.loss = self.pred.float().pow(2).mean()


class Teaches(Callback):
    "Averages of the model, with batch norm in training mode, whose predictions the model is to have"
    def before_fit(self): self.mean, self.more = deepcopy(self.learn.model), dict(slow=deepcopy(self.learn.model))
    def after_loss(self):
        if not self.training: return
        with torch.no_grad(): t = self.mean(self.x)*.7 + self.more['slow'](self.x)*.3
        self.learn.loss_grad = self.learn.loss_grad + (self.pred-t).pow(2).mean().float()
    def after_step(self):
        with torch.no_grad():
            for m, w in (self.mean, .1), (self.more['slow'], .01):
                for a, b in zip(m.parameters(), self.learn.model.parameters()): a.lerp_(b, w)


class StepsByLoss(Callback):
    "A decision that each worker takes by itself, by a loss that is of all of them"
    run_valid = False
    def before_step(self):
        from fastai.basics import CancelStepException # not the test module's, which travels by value
        if self.learn.loss.item() < 1.1: raise CancelStepException()


@pytest.mark.parametrize('cb', [AddsToLoss, ReplacesLoss, StepsByLoss])
def test_callbacks_that_change_the_loss(world, cb):
    for kw in dict(n=22, bs=5), dict(n=24, bs=4): same(world, **kw, cbs=cb)


class ReplacesTrainingLoss(ReplacesLoss): run_valid = False


@pytest.mark.parametrize('options', [dict(weight=torch.tensor([1., 5., .2])), dict(ignore_index=1)], ids=['weight', 'ignore_index'])
def test_a_loss_in_the_place_of_one_with_weights(world, options):
    from fastai.losses import CrossEntropyLossFlat
    same(world, n=22, bs=5, cbs=ReplacesTrainingLoss, loss=CrossEntropyLossFlat(**options))


def test_a_teacher_that_a_callback_keeps(world): same(world, n=23, bs=5, bn=True, cbs=Teaches)


def one_model_in_two_learners(distrib):
    import contextlib
    a, b = quiet(learner(n=23, bs=7, bn=True)), quiet(learner(n=23, bs=7, bn=True))
    b.model = a.model
    if distrib: import fastdist.all
    ctx = (lambda l: l.distrib_ctx(split_batches=True)) if distrib else (lambda l: contextlib.nullcontext())
    with ctx(a), ctx(b):
        a.fit(1)
        b.fit(1)
    if distrib:
        a.to_distributed(), b.to_distributed()
        a.detach_distributed(), b.detach_distributed()
    return weights(a), [type(m) is nn.BatchNorm1d for m in a.model.modules()].count(True)


def test_one_model_in_two_learners(world):
    w, _ = one_model_in_two_learners(False)
    for w1, n in world(one_model_in_two_learners, True): assert diff(w, w1) < 2e-7 and n == 1
