"Going on from each checkpoint of a run ends as the run itself: weights, optimizer, recorder, files, order of samples, random numbers"
import random, shutil
import pytest
from fastai.callback.progress import CSVLogger
from fastai.callback.rnn import ModelResetter
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau
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
        self.mean = [a.lerp(p.detach(), .5) for a, p in zip(self.mean, self.model.parameters())]


def made(path, n=22, opt=Adam, workers=0, cbs=None, dropout=.3, more=True, Data=Noisy, model=None, bs=4, loss=None):
    Path(path).mkdir(parents=True, exist_ok=True)
    set_seed(7)
    dls = DataLoaders(TfmdDL(Data(n), bs=bs, shuffle=True, num_workers=workers), TfmdDL(Items(9, seed=1), bs=bs, num_workers=0))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 3)).double() if model is None else model()
    learn = Learner(dls, model, loss_func=loss or Double(), opt_func=opt, lr=.05, wd=.01, path=path, metrics=accuracy, cbs=cbs,
                    splitter=lambda m: [list(m[0].parameters()), [p for o in m[1:] for p in o.parameters()]])
    if more: learn.add_cbs([Seen(), CSVLogger('log.csv'), EarlyStoppingCallback(patience=99), ReduceLROnPlateau(patience=1)])
    learn.recorder.train_metrics = True
    return quiet(learn)


class Trained(Callback):
    "Counts, in what no checkpoint has, the steps that this process makes"
    steps = []
    def after_step(self): self.steps.append(1)


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
    def put(c, folder):
        shutil.copytree(c, folder/'ckpt'/c.name)
        if (tmp_path/'all'/'log.csv').exists(): shutil.copy(tmp_path/'all'/'log.csv', folder)
    every = []
    for nm in ('plain', 'all')[not plain:]: every.append(run(tmp_path/nm, None if nm == 'plain' else [Resume(tmp_path/'all'/'ckpt', every=1, keep=99)]))
    names = sorted((o.path for o in checkpoints(tmp_path/'all'/'ckpt')), key=lambda p: (p.name.partition('.')[0], len(p.name), p.name))
    for i, c in enumerate(names):
        if at is not None and i not in at: continue
        folder = tmp_path/c.name
        put(c, folder)
        Trained.steps.clear()
        every.append(run(folder, [Resume(folder/'ckpt', every=100), Trained()]))
        total, done = checkpoints(folder/'ckpt')[0].summary['step'], int(c.name[5:13])
        assert len(Trained.steps) == total-done and total == int(names[-1].name[5:13]), (c.name, len(Trained.steps), total)  # nothing again, and nothing left out
    return every, [o.name for i, o in enumerate(names) if at is None or i in at]


def test_one_process(tmp_path):
    "Of two fits, with a layer frozen in the first: each checkpoint of either"
    def run(folder, cbs):
        learn = made(folder)
        learn.fine_tune(1, 1e-2, freeze_epochs=1, cbs=cbs)
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


class Anneals:
    "A loss function that counts, as one with a weight that grows"
    def __init__(self): self.steps, self.mean = 0, torch.ones(())
    def __call__(self, p, y):
        loss = nn.functional.cross_entropy(p, y)
        if torch.is_grad_enabled(): self.steps, self.mean = self.steps+1, self.mean*.9+loss.detach()*.1
        return (loss/self.mean/self.steps**.5).float()


MORE = dict(processes=dict(workers=1), hidden=dict(model=lambda: Recurrent().double(), Data=Items, cbs=lambda: [GradientAccumulation(8)]),
            ranger=dict(opt=MORE_OPTS['ranger']), loss=dict(loss=Anneals))


@pytest.mark.parametrize('kind', MORE)
def test_more_in_one_process(kind, tmp_path):
    """Loader processes, a step of several batches, a hidden state, an optimizer of optimizers, and a loss function that remembers numbers
    and tensors"""
    def run(folder, cbs):
        learn = made(folder, **{k: v() if k in ('cbs', 'loss') else v for k, v in MORE[kind].items()}, more=False)
        learn.fit(2, cbs=cbs)
        return found(learn)
    (first, *others), names = each_checkpoint(run, tmp_path, [1, 4], plain=kind != 'processes')  # there they draw for each batch anew
    for nm, o in zip(['with Resume', *names][kind == 'processes':], others): assert not differ(first, o), (nm, differ(first, o).keys())


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


def reads(folder, cbs=None):
    "Three epochs of a language model, whose loader shuffles the texts from the order that they had"
    folder.mkdir(parents=True, exist_ok=True)
    set_seed(7)
    dls = DataLoaders(LMDataLoader(Corpus(7), bs=6, seq_len=4, shuffle=True), LMDataLoader(Corpus(5, 1), bs=6, seq_len=4))
    learn = quiet(Learner(dls, Words(), loss_func=OfWords(), opt_func=Adam, lr=.05, path=folder, metrics=accuracy, cbs=ModelResetter()))
    learn.fit(1, cbs=cbs)
    learn.fit(2, cbs=cbs)
    return found(learn)


def test_a_language_model(tmp_path):
    "In the middle of an epoch, at the end of one, and of a fit"
    (plain, *others), names = each_checkpoint(reads, tmp_path)
    assert len(names) == 14  # two at the end of an epoch
    for nm, o in zip(['with Resume', *names], others): assert not differ(plain, o), (nm, differ(plain, o).keys())


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


@pytest.mark.parametrize('strategy', ['ddp', 'zero2'])
def test_what_waits_for_a_step(worlds, strategy, tmp_path):
    want = accumulated(tmp_path/'one', None, None, resume=False)
    assert worlds(2)(accumulated, tmp_path/'many', strategy, 8) == [None]*2
    i = STRATEGIES.index(strategy)
    for w in worlds(3)(accumulated, tmp_path/'many', STRATEGIES[i-1], None): assert diff(want, w) < 2e-7


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
    "The second fold of a cross-validation is no repetition of the first"
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    made(tmp_path, n=8, more=False).fit(1, cbs=Resume(tmp_path/'ckpt'))
    with pytest.raises(ValueError, match='give each one a folder of its own'): made(tmp_path, n=8, more=False).fit(1, cbs=Resume(tmp_path/'ckpt'))


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
