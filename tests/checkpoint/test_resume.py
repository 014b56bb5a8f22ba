"Going on from each checkpoint of a run ends as the run itself: weights, optimizer, recorder, files, order of samples, random numbers"
import random, shutil, time, warnings
import pytest, torch.distributed as dist
from fastai.callback.progress import CSVLogger
from fastai.callback.rnn import ModelResetter
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback
from fastai.losses import BaseLoss
from fastai.text.data import LMDataLoader
from torch.utils.data import DataLoader as TorchDL
from loaders import Corpus
from strategies import *


class Noisy(Items):
    "Samples with noise from all three generators"
    def __getitem__(self, i): return self.x[i] + random.random()/9 + np.random.randn()/9 + torch.rand(4, dtype=self.x.dtype)/9, self.y[i]
    def new_empty(self): return Noisy(0)


class Seen(Callback):
    "The first feature of each sample that was trained, by place; and a moving average of the weights, of a user's own"
    def before_fit(self):
        if not hasattr(self, 'mean'): self.mean, self.drawn = [p.detach().clone() for p in self.model.parameters()], []
    def after_batch(self):
        if not self.training: return
        self.drawn.append((self.epoch, self.iter, self.xb[0][:, 0].tolist(), random.random()))  # draws from the shared stream
        if self.learn.model.__class__.__name__ != 'FSDPSequential': self.mean = [a.lerp(p.detach(), .5) for a, p in zip(self.mean, self.model.parameters())]


def made(path, n=22, opt=Adam, workers=0, cbs=None, dropout=.3, more=True, Data=Noisy, model=None, bs=4):
    Path(path).mkdir(parents=True, exist_ok=True)
    set_seed(7)
    dls = DataLoaders(TfmdDL(Data(n), bs=bs, shuffle=True, num_workers=workers), TfmdDL(Items(9, seed=1), bs=bs, num_workers=0))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 3)).double() if model is None else model()
    learn = Learner(dls, model, loss_func=Double(), opt_func=opt, lr=.05, wd=.01, path=path, metrics=accuracy, cbs=cbs,
                    splitter=lambda m: [list(m[0].parameters()), [p for o in m[1:] for p in o.parameters()]])
    if more: learn.add_cbs([Seen(), CSVLogger('log.csv'), EarlyStoppingCallback(patience=99), ReduceLROnPlateau(patience=1)])
    learn.recorder.train_metrics = True
    return quiet(learn)


class Trained(Callback):
    "Counts, in what no checkpoint has, the steps that this process makes"
    steps = []
    def after_step(self): self.steps.append(1)


FITS = dict(fit=lambda l, **kw: l.fit(2, **kw), one_cycle=lambda l, **kw: l.fit_one_cycle(2, 1e-2, **kw), flat_cos=lambda l, **kw: l.fit_flat_cos(2, 1e-2, **kw),
            fine_tune=lambda l, **kw: l.fine_tune(1, 1e-2, freeze_epochs=1, **kw))


def found(learn):
    "All that a fit leaves, to be compared bit for bit"
    rec, csv = learn.recorder, learn.path/'log.csv'
    res = dict(weights={k: v.tolist() for k, v in weights(learn).items()}, opt={k: v.tolist() for k, v in sorted(state_of(learn.opt).items())},
               hypers=[dict(o) for o in learn.opt.hypers], values=[list(o) for o in rec.values], losses=[float(o) for o in rec.losses], lrs=rec.lrs, iters=rec.iters,
               hps=getattr(rec, 'hps', None), rng=(random.random(), np.random.rand(), torch.rand(1).item()), csv=[o.rpartition(',')[0] for o in csv.read_text().splitlines()] if csv.exists() else None)
    for cb in learn.cbs:
        if isinstance(cb, Seen): res.update(drawn=cb.drawn, mean=[o.tolist() for o in cb.mean])
        if hasattr(cb, 'best'): res[cb.name] = cb.best, getattr(cb, 'wait', None)
    return res


def differ(a, b): return {k: (a[k], b.get(k)) for k in a if repr(a[k]) != repr(b.get(k))}


def each_checkpoint(run, tmp_path, at=None, plain=True):
    "Results of `run(folder, cbs)`: without `Resume`, with it, and gone on with from each of its checkpoints"
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    from fastdist.checkpoint.files import checkpoints
    from fastdist.world import get_rank, get_world_size
    def put(c, folder):
        if get_rank() == 0: shutil.copytree(c, folder/'ckpt'/c.name), (shutil.copy(tmp_path/'all'/'log.csv', folder) if (tmp_path/'all'/'log.csv').exists() else None)
    every = []
    for nm in ('plain', 'all')[not plain:]: every.append(run(tmp_path/nm, None if nm == 'plain' else [Resume(tmp_path/'all'/'ckpt', every=1, keep=99)]))
    names = sorted((o.path for o in checkpoints(tmp_path/'all'/'ckpt')), key=lambda p: (p.name.partition('.')[0], len(p.name), p.name))
    for i, c in enumerate(names):
        if at is not None and i not in at: continue
        folder = tmp_path/c.name
        put(c, folder)
        if dist.is_initialized(): dist.barrier()
        Trained.steps.clear()
        every.append(run(folder, [Resume(folder/'ckpt', every=100), Trained()]))
        total, done = checkpoints(folder/'ckpt')[0].summary['step'], int(c.name[5:13])
        assert len(Trained.steps) == total-done and total == int(names[-1].name[5:13]), (c.name, len(Trained.steps), total)  # nothing again, and nothing left out
    return every, [o.name for i, o in enumerate(names) if at is None or i in at]


@pytest.mark.parametrize('kind', FITS)
def test_one_process(kind, tmp_path):
    def run(folder, cbs):
        learn = made(folder)
        FITS[kind](learn, cbs=cbs)
        return found(learn)
    (plain, *others), names = each_checkpoint(run, tmp_path)
    assert len(names) >= 10
    for nm, o in zip(['with Resume', *names], others): assert not differ(plain, o), (nm, differ(plain, o).keys())


class Recurrent(nn.Module):
    "Its hidden state goes on from batch to batch"
    def __init__(self):
        super().__init__()
        self.rnn, self.out, self.h = nn.RNN(4, 6), nn.Linear(6, 3), None
    def __iter__(self): return iter([self.rnn, self.out])
    def __getitem__(self, i): return [self.rnn, self.out][i]
    def forward(self, x):
        y, h = self.rnn(x[:, None], self.h)
        self.h = h.detach()
        return self.out(y[:, 0])
    def reset(self): self.h = None


class Wraps(Callback):
    "Keeps the model in another module, from the fit on"
    def before_fit(self): self.wrapper = nn.ModuleList([self.model])


MORE = dict(processes=dict(workers=1), accumulate=dict(cbs=lambda: [GradientAccumulation(8)]), hidden=dict(model=lambda: Recurrent().double(), Data=Items, cbs=lambda: [Wraps()]),
            adamw=dict(opt=MORE_OPTS['adamw']), ranger=dict(opt=MORE_OPTS['ranger']))


@pytest.mark.parametrize('kind', MORE)
def test_more_in_one_process(kind, tmp_path):
    "Loader processes, a step of several batches, a hidden state, and each kind of optimizer's state"
    def run(folder, cbs):
        learn = made(folder, **{k: v() if k == 'cbs' else v for k, v in MORE[kind].items()}, more=False)
        learn.fit(2, cbs=cbs)
        return found(learn)
    (first, *others), names = each_checkpoint(run, tmp_path, [1, 4], plain=kind != 'processes')  # there they draw for each batch anew
    for nm, o in zip(['with Resume', *names][kind == 'processes':], others): assert not differ(first, o), (nm, differ(first, o).keys())


class Anneals:
    "A loss function that counts, as one with a weight that grows"
    def __init__(self): self.steps, self.mean = 0, torch.ones(())
    def __call__(self, p, y):
        loss = nn.functional.cross_entropy(p, y)
        if torch.is_grad_enabled(): self.steps, self.mean = self.steps+1, self.mean*.9+loss.detach()*.1
        return (loss/self.mean/self.steps**.5).float()


class AnnealsModule(nn.Module):
    "A module of it counts"
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()
        self.inner.steps = 1
    def forward(self, p, y):
        self.inner.steps += torch.is_grad_enabled()
        return (nn.functional.cross_entropy(p, y)/self.inner.steps**.5).float()


class InFront(Callback):
    "Stands in front of the loss function while it is trained, as fastai's `MixUp` does"
    def before_train(self): self.old_lf, self.learn.loss_func = self.learn.loss_func, self.lf
    def after_train(self): self.learn.loss_func = self.old_lf
    def lf(self, p, y): return self.old_lf(p, y)


def of_all(f):
    from fastdist.metrics.losses import GlobalBatchLoss
    return GlobalBatchLoss(f)


REMEMBER = dict(object=Anneals, module=AnnealsModule, all=lambda: of_all(Anneals()), partial=lambda: partial(Anneals()), fastai=lambda: BaseLoss(AnnealsModule))


@pytest.mark.parametrize('loss', REMEMBER)
@pytest.mark.parametrize('in_front', [False, True])
def test_a_loss_function_that_remembers(loss, in_front, tmp_path):
    "Numbers and tensors of it, whatever is around it, also while a callback stands in front of it"
    def run(folder, cbs):
        learn = made(folder, more=False)
        learn.loss_func = REMEMBER[loss]()
        if in_front: learn.add_cb(InFront())
        learn.fit(2, cbs=cbs)
        return found(learn)
    (first, *others), names = each_checkpoint(run, tmp_path, [1, 4, 6])
    for nm, o in zip(['with Resume', *names], others): assert not differ(first, o), (nm, differ(first, o).keys())


class Late(Callback):
    "After all others, as far as its author knows"
    order = 5000
    def __init__(self): self.n = 0
    def after_batch(self): self.n += self.training
    def after_epoch(self): self.n += 100


def test_a_callback_of_a_late_order(tmp_path):
    "What it counts at the last event before a checkpoint is in it"
    def run(folder, cbs):
        late = Late()
        made(folder, more=False, cbs=late).fit(2, cbs=cbs)
        return late.n
    res, names = each_checkpoint(run, tmp_path, [1, 4, 6])
    assert res == [212]*5, (res, names)


class Words(nn.Module):
    "Its hidden state goes on from batch to batch; of AWD_LSTM's kind, which a `ModelResetter` resets"
    def __init__(self):
        super().__init__()
        self.table, self.rnn, self.out, self.h = nn.Embedding(11, 5), nn.RNN(5, 6, batch_first=True), nn.Linear(6, 11), None
    def forward(self, x):
        y, h = self.rnn(self.table(x.as_subclass(Tensor)), self.h)
        self.h = h.detach()
        return self.out(y)
    def reset(self): self.h = None


class OfWords(nn.Module):
    "Cross-entropy, one class in the last dimension"
    def forward(self, p, y): return nn.functional.cross_entropy(p.flatten(0, 1), y.as_subclass(Tensor).flatten())


def reads(folder, cbs=None, ctx=None, bs=6):
    "Three epochs of a language model, whose loader shuffles the texts from the order that they had"
    folder.mkdir(parents=True, exist_ok=True)
    set_seed(7)
    dls = DataLoaders(LMDataLoader(Corpus(7), bs=bs, seq_len=4, shuffle=True), LMDataLoader(Corpus(5, 1), bs=6, seq_len=4))
    learn = quiet(Learner(dls, Words(), loss_func=OfWords(), opt_func=Adam, lr=.05, path=folder, metrics=accuracy, cbs=ModelResetter()))
    with contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx):
        learn.fit(1, cbs=cbs)
        learn.fit(2, cbs=cbs)
    return found(learn)


def test_a_language_model(tmp_path):
    "In the middle of an epoch, at the end of one, and of a fit"
    (plain, *others), names = each_checkpoint(reads, tmp_path)
    assert len(names) == 14  # two at the end of an epoch
    for nm, o in zip(['with Resume', *names], others): assert not differ(plain, o), (nm, differ(plain, o).keys())


def read_by_all(tmp_path, split):
    import fastdist.all
    run = partial(reads, ctx=dict(ctx_of('ddp'), split_batches=split), bs=6 if split else 3)
    (first, *others), names = each_checkpoint(run, tmp_path, [1, 3, 4, 7, 9])
    return [(nm, list(d)) for nm, o in zip(['with Resume', *names], others) if (d := differ(first, o))], names


@pytest.mark.parametrize('split', [True, False])
def test_a_language_model_of_two_workers(world2, tmp_path, split):
    for bad, names in world2(read_by_all, tmp_path, split): assert not bad and len(names) == 5, (bad, names)


def with_other_loaders(tmp_path):
    "Errors of a run that goes on in the middle of the second epoch, with a loader of other samples, of another kind, or of fewer texts"
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    class Stops(Callback):
        def after_batch(self):
            if self.training and self.epoch == 1 and self.iter == 2: raise OSError('the end')
    def run(folder, train, *cbs):
        set_seed(7)
        words = isinstance(train, LMDataLoader)
        model, loss = (Words(), OfWords()) if words else (nn.Linear(4, 3).double(), Double())
        learn = quiet(Learner(DataLoaders(train, texts(5) if words else dl(9)), model, loss_func=loss, opt_func=SGD, path=tmp_path, cbs=list(cbs)))
        with learn.distrib_ctx(split_batches=True, resume=Resume(tmp_path/folder, every=None if words else 2)): learn.fit(2)
    def dl(n=22): return TfmdDL(Items(n), bs=4, shuffle=True, num_workers=0)
    def texts(n): return LMDataLoader(Corpus(n), bs=6, seq_len=4, shuffle=True)
    told = []
    for folder, before, *others in (('a', dl(), dl(31), TorchDL(Items(22), batch_size=4, shuffle=True)), ('b', texts(7), texts(5), texts(9))):
        with pytest.raises(OSError, match='the end'): run(folder, before, Stops())
        for o in others:
            with pytest.raises(ValueError) as e: run(folder, o)
            told.append(str(e.value))
        run(folder, before)
    return told


def test_other_loaders_are_told(world2, tmp_path):
    "With what they differ in, and the way out; the run goes on with those that it had"
    for told in world2(with_other_loaders, tmp_path):
        assert all('give this script a folder of its own' in o and '/step-0000000' in o for o in told), told
        for o, why in zip(told, ['it had 22 samples', 'states of random number generators do not fit', 'it had 7 texts, this one has 5', 'it had 7 texts, this one has 9'], strict=True): assert why in o, o


class Fault(Callback):
    "At step `at`, an exception of a callback before the batch; of one rank, or of all"
    at, rank = None, None
    def before_batch(self):
        from fastdist.world import get_rank
        if self.training and self.learn.train_iter == Fault.at and Fault.rank in (None, get_rank()):
            random.random(), torch.rand(1)  # it has drawn by then
            1/0


class Presses(Callback):
    "Ctrl-C, in one rank"
    at = None
    def before_batch(self):
        from fastdist.world import get_rank
        import os, signal
        if self.training and self.learn.train_iter == Presses.at and get_rank() == 1: os.kill(os.getpid(), signal.SIGINT)


def stopped_by(folder, at=None, rank=None, press=None):
    "(The class of the exception, the steps that were made, what is left)"
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    Trained.steps.clear()
    Fault.at, Fault.rank, Presses.at, res = at, rank, press, None
    learn = made(folder, more=False, cbs=[Trained(), Fault(), Presses()])
    try:
        with learn.distrib_ctx(split_batches=True): learn.fit(2, cbs=Resume(folder/'ckpt', every='1 epoch'))
    except BaseException as e: res = type(e).__name__
    return res, len(Trained.steps), found(learn) if res is None else None


def test_all_workers_fail_or_one(world2, tmp_path):
    "All at the same batch, one alone, or by Ctrl-C: the last regular checkpoint counts, and nobody waits"
    want = [o[2] for o in world2(stopped_by, tmp_path/'whole')]
    for i, (kw, who) in enumerate([(dict(at=8), ['ZeroDivisionError']*2), (dict(press=9), ['KeyboardInterrupt']*2), (dict(at=8, rank=0), ['ZeroDivisionError', 'RemoteError'])]):
        first = world2(stopped_by, tmp_path/f'{i}', **kw)
        assert [o[0] for o in first] == who, (kw, first)
        for w, (res, made, now) in zip(want, world2(stopped_by, tmp_path/f'{i}')): assert (res, made) == (None, 6) and not differ(w, now), (kw, made)


def many(tmp_path, strategy, kind, at, dropout=.3, workers=0, plain=False, gpus=False, **kwargs):
    "The same in `distrib_ctx`, in each worker; the first differences by checkpoint, and what the first run has left"
    import fastdist.all
    def run(folder, cbs):
        learn = made(folder, workers=workers, dropout=dropout, more=strategy != 'fsdp')
        if gpus: learn.dls.to(torch.device('cuda', torch.cuda.current_device()))
        with learn.distrib_ctx(**ctx_of(strategy, **kwargs)): FITS[kind](learn, cbs=cbs)
        return found(learn)
    (first, *others), names = each_checkpoint(run, tmp_path, at, plain)
    return [(nm, list(d)) for nm, o in zip((['with Resume'] if plain else [])+names, others) if (d := differ(first, o))], names


class Fails(Callback):
    "Before the batch of this number in this process"
    order = -30
    def __init__(self, at): self.at = at
    def before_batch(self):
        self.at -= self.training
        if self.training and not self.at: raise ZeroDivisionError('no batch')


def accumulated(folder, strategy, at, resume=True):
    "A fit in which batches of the end of an epoch wait for those of the next one, 8 samples to a step: it is saved after that step"
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    from_the_start()
    learn = made(folder, dropout=0, cbs=[GradientAccumulation(8), *([Fails(at)] if at else [])], more=False, Data=Items)
    with learn.distrib_ctx(**ctx_of(strategy)) if strategy else contextlib.nullcontext():
        try:
            learn.fit(3, cbs=Resume(folder/'ckpt') if resume else None)
        except ZeroDivisionError: return
    return weights(learn)


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_what_waits_for_a_step(worlds, strategy, tmp_path):
    want = accumulated(tmp_path/'one', None, None, resume=False)
    assert worlds(2)(accumulated, tmp_path/'many', strategy, 8) == [None]*2
    i = STRATEGIES.index(strategy)
    for w in worlds(3)(accumulated, tmp_path/'many', STRATEGIES[i-1], None): assert diff(want, w) < 2e-7


def again_at_once(folder, slow):
    "A fit that fails in all workers while they write, and the same one again in the same processes, as in a notebook whose workers stay"
    import fastdist.all
    import fastdist.checkpoint.files as files
    from fastdist.checkpoint.resume import Resume
    from fastdist.world import get_rank
    from_the_start()
    real = files.file_sum
    def file_sum(file):
        if get_rank() and '00000002-' in str(file):
            if slow is None: raise OSError('the disk has gone')
            time.sleep(slow)
        return real(file)
    files.file_sum, files.Saver.patience = file_sum, 10 if slow else .5
    learn, texts, Trained.steps = made(folder, dropout=0, cbs=[Fails(3), Trained()], more=False, Data=Items), [], []
    try:
        with learn.distrib_ctx(split_batches=True), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            for _ in range(2):
                try: learn.fit(2, cbs=Resume(folder/'ckpt', every=1))
                except ZeroDivisionError:
                    texts.append(f'failed, {len(Trained.steps)} steps')
                    learn.remove_cbs(Fails)
                    Trained.steps = []
            texts.append(len(Trained.steps))
    finally: files.file_sum, files.Saver.patience = real, 5
    return weights(learn), texts, [str(o.message) for o in said if 'damaged' in str(o.message)]


@pytest.mark.parametrize('slow,left', [(0.5, 10), (None, 11)], ids=['which goes on', 'and is given up'])
def test_a_failure_while_it_is_written(world2, slow, left, tmp_path):
    learn = made(tmp_path/'one', dropout=0, more=False, Data=Items)
    learn.fit(2)
    want = weights(learn)
    for w, texts, damaged in world2(again_at_once, tmp_path/'many', slow): assert diff(want, w) < 2e-7 and texts == ['failed, 2 steps', left] and not damaged, (texts, damaged)
    assert not [o.name for o in (tmp_path/'many'/'ckpt').iterdir() if o.name.startswith(('damaged', '.draft'))]


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_two_workers(world2, strategy, tmp_path):
    for bad, names in world2(many, tmp_path, strategy, dict(zero2='fine_tune').get(strategy, 'one_cycle'), [1, 5, 6, 8], plain=strategy == 'ddp'):
        assert not bad and len(names) == 4, (bad, names)


def test_on_gpus(gpu_worlds, tmp_path):
    "The numbers of dropout are drawn there"
    for strategy in 'ddp', 'fsdp':
        for bad, names in gpu_worlds(2)(many, tmp_path/strategy, strategy, 'one_cycle', [1, 6], gpus=True): assert not bad and len(names) == 2, (strategy, bad, names)


def part(folder, strategy=None, opt=Adam):
    "All of a run, or what is left of it, with a checkpoint at each step: what it leaves, and the order of samples of the batches that it trains"
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    Trained.steps.clear()
    learn = made(folder, n=26, dropout=0., more=False, Data=Items, opt=opt, bs=6)
    learn.remove_cbs(learn._grab_cbs(ReduceLROnPlateau))
    with contextlib.nullcontext() if strategy is None else learn.distrib_ctx(**ctx_of(strategy)): learn.fit_one_cycle(2, 1e-2, cbs=[Resume(folder/'ckpt', every=1, keep=99), Trained()])
    return SimpleNamespace(weights=weights(learn), opt=state_of(learn.opt), losses=[float(o) for o in learn.recorder.losses], values=[list(o) for o in learn.recorder.values], n=len(Trained.steps))


PLACES = dict(adam=[(2, 'ddp', 0), (1, None, 2), (3, 'fsdp', 4), (2, 'ddp', 8)], adamw=[(2, 'fsdp', 0), (3, 'zero1', 3)], lookahead=[(3, 'zero2', 0), (2, 'zero1', 4), (2, 'fsdp', 7)])


@pytest.mark.parametrize('opt', PLACES)
def test_on_other_numbers_of_workers_and_strategies(worlds, opt, tmp_path):
    "(workers, strategy, the step from which they go on): as one process does all of it, up to rounding"
    how = {**OPTS, **MORE_OPTS}[opt]
    want = part(tmp_path/'one', opt=how)
    for i, (n, strategy, at) in enumerate(PLACES[opt]):
        folder = tmp_path/f'{i}'
        if at: shutil.copytree(tmp_path/f'{i-1}'/'ckpt'/f'step-{at:08d}', folder/'ckpt'/f'step-{at:08d}')
        for res in worlds(n)(part, folder, strategy, how) if n > 1 else [part(folder, strategy, how)]:
            assert res.n == 10-at
            off = {k: diff(vars(want)[k], vars(res)[k]) for k in ('weights', 'opt', 'losses', 'values')}
            assert max(off.values()) < 1e-5 and off['weights'] < 1e-9, (n, strategy, off)


__all__ = [o for o in dir() if not o.startswith(('_', 'test'))]  # other files of this folder train the same


def own_folder(path, path0):
    "The error of a fit with a folder that only this worker sees, as on another machine's disk, and then with one that all see"
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    from fastdist.world import get_rank
    said = []
    for folder in (path0 if get_rank() == 0 else path/f'{get_rank()}', path0):
        learn = made(path0.parent/'learner', n=8, more=False)
        try:
            with learn.distrib_ctx(split_batches=True): learn.fit(1, cbs=Resume(folder/'ckpt'))
        except OSError as e: said.append(str(e))
    return said, len(learn.recorder.losses), list(path.iterdir()) if path.exists() else []


def test_a_folder_that_not_all_see(world3, tmp_path):
    for said, n, left in world3(own_folder, tmp_path/'disk', tmp_path/'shared'):
        assert len(said) == 1 and 'rank 1 does not see what rank 0 has written there' in said[0] and n == 2 and not left, (said, n, left)


def test_each_learner_a_folder_of_its_own(tmp_path):
    "The second fold of a cross-validation is no repetition of the first, and a fit within a fit does not write to the same folder"
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    made(tmp_path, n=8, more=False).fit(1, cbs=Resume(tmp_path/'ckpt'))
    with pytest.raises(ValueError, match='give each one a folder of its own'): made(tmp_path, n=8, more=False).fit(1, cbs=Resume(tmp_path/'ckpt'))
    class Within(Callback):
        def after_batch(self): made(tmp_path, n=8, more=False).fit(1, cbs=Resume(tmp_path/'b'))
    with pytest.raises(OSError, match='another fit of this process'): made(tmp_path, n=8, more=False, cbs=Within()).fit(1, cbs=Resume(tmp_path/'b'))


def test_a_folder_by_two_names(tmp_path):
    "It is one folder, whatever links lead there: the second fit is the second"
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    (tmp_path/'real').mkdir()
    (tmp_path/'link').symlink_to('real')
    Trained.steps.clear()
    learn = made(tmp_path, n=8, more=False, cbs=Trained())
    for nm in ('real', 'link', 'link/../real'): learn.fit(1, cbs=Resume(tmp_path/nm))
    assert len(Trained.steps) == 6


def test_with_a_bar(tmp_path, capsys):
    "fastai's bar goes on too; a fit that has ended is told"
    from fastdist.all import Resume
    def fitted(stop):
        Stops.at = stop  # of the class: what a callback itself has is saved
        learn = made(tmp_path, cbs=Stops(), more=False)
        learn.add_cb(ProgressCallback())
        learn.logger = print
        try: learn.fit(3, cbs=Resume(tmp_path/'ckpt', every=5))
        except ZeroDivisionError: pass
        return capsys.readouterr().out
    assert 'Going on' not in fitted(7)
    assert 'Going on from step-00000005: epoch 0, batch 5' in fitted(12)
    out = fitted(None)
    assert 'Going on from step-00000010: epoch 1, batch 4' in out and 'Epoch 2/3' in out and 'Epoch 1/3' not in out
    with pytest.raises(ValueError, match='another learner of this process'): fitted(None)
    from_the_start()
    assert 'fit 0 of the script has ended before' in fitted(None)


class Stops(Callback):
    at = None
    def before_batch(self):
        if self.training and self.learn.train_iter == self.at: 1/0


def alone(folder, ranks, at=None):
    "Fits of some workers, each by itself, outside of a context, or parts of them; the model has a layer that several workers would write together"
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    from fastdist.world import get_rank
    from_the_start()
    if get_rank() not in ranks: return
    def large(): return nn.Sequential(nn.Linear(4, 3000), nn.ReLU(), nn.Linear(3000, 3)).double()
    own = folder/f'{get_rank()}'
    learn = made(own, more=False, Data=Items, model=large, cbs=[] if at is None else [Fails(at)])
    try: learn.fit(1+get_rank(), cbs=Resume(own/'ckpt', every=2))
    except ZeroDivisionError: return
    return {k: v.tolist() for k, v in weights(learn).items()}


@pytest.mark.parametrize('ranks', [(0,), (0, 1)], ids=['rank 0', 'each'])
def test_workers_alone(world2, ranks, tmp_path):
    "Workers that train models of their own, as those of a cross-validation: each has a folder, and all of its model is there"
    want = world2(alone, tmp_path/'whole', ranks)
    assert world2(alone, tmp_path/'part', ranks, 5) == [None]*2
    assert world2(alone, tmp_path/'part', ranks) == want


def without_recorder(folder, at=None):
    "Steps of this process"
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    from fastdist.world.store import wait_until
    from_the_start()
    Trained.steps.clear()
    learn = made(folder, dropout=0, more=False, Data=Items, cbs=[Trained()] if at is None else [Trained(), Fails(at)])
    learn.remove_cb(learn.recorder)
    with learn.distrib_ctx(split_batches=True):
        try: learn.fit(1, cbs=Resume(folder/'ckpt', every=2))
        except ZeroDivisionError: return wait_until((folder/'ckpt'/'step-00000004').exists, 60)
    return weights(learn), len(Trained.steps)


def test_without_a_recorder(world2, tmp_path):
    "In the middle of an epoch, on another number of workers"
    want, _ = without_recorder(tmp_path/'whole')
    assert all(world2(without_recorder, tmp_path/'part', 5))
    got, n = without_recorder(tmp_path/'part')
    assert diff(want, got) < 2e-7 and n == 2
