"Models with a state of their own, over plain loaders: hidden states, statistics"
import fastai.callback.core as core, pytest
from fastai.callback.rnn import ModelResetter
from learners import *
import torch.nn.functional as F


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


class Reader(nn.Module):
    "A recurrent model as in fastai's book: its hidden state goes on from batch to batch"
    def __init__(self, lstm=False):
        super().__init__()
        torch.manual_seed(3)
        self.emb, self.rnn, self.out, self.h = nn.Embedding(7, 5), (nn.LSTM if lstm else nn.RNN)(5, 6, batch_first=True), nn.Linear(6, 7), None
    def forward(self, x):
        res, h = self.rnn(self.emb(x), self.h)
        self.h = tuple(o.detach() for o in h) if isinstance(h, tuple) else h.detach()
        return self.out(res)
    def reset(self): self.h = None


class Kept(Callback):
    "A resetter of one's own"
    def before_epoch(self): self.model.reset()
    def before_validate(self): self.model.reset()


def flat(p, y): return F.cross_entropy(p.reshape(-1, 7), y.reshape(-1)).float()


def reader(bs=6, lstm=False, cbs=ModelResetter):
    "Chunks of a text, in the order that makes row `i` of a batch the continuation of row `i` of the one before"
    g = torch.Generator().manual_seed(1)
    def chunks(n):
        text = torch.randint(0, 7, (n*bs*4+1,), generator=g)
        seqs = [(text[i*4:i*4+4], text[i*4+1:i*4+5]) for i in range(n*bs)]
        return [seqs[i+n*j] for i in range(n) for j in range(bs)]
    set_seed(5)
    dls = DataLoaders.from_dsets(chunks(7), chunks(5), bs=bs, shuffle=False, drop_last=True, num_workers=0)
    return Learner(dls, Reader(lstm).double(), loss_func=flat, metrics=[perplexity, AvgMetric(lambda p, y: (p.argmax(2)==y).double().square().mean())], cbs=cbs(), lr=.1, opt_func=SGD)


def read(distrib=True, **kwargs):
    import fastdist.all
    learn = quiet(reader(**kwargs))
    with learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext():
        learn.fit(1)
        values, preds = learn.validate(), learn.get_preds()[0]
    return weights(learn), [list(v) for v in learn.recorder.values], list(values), preds


READERS = dict(rnn=dict(), own=dict(cbs=Kept, lstm=True, bs=5))
def read_all(distrib=True): return {k: read(distrib, **kw) for k, kw in READERS.items()}


def test_hidden_states(world):
    one = read_all(False)
    for every in world(read_all):
        off = {k: [diff(a, b) for a, b in zip(one[k], every[k])] for k in one}
        assert all(max(o) < 1e-6 for o in off.values()), off


class Stats(nn.Module):
    "Instance norm with running statistics, spectral norm, or an average that is nobody's business but its own"
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(3)
        self.kind, self.lin, self.out = kind, nn.Linear(4, 12), nn.Linear(12, 3)
        self.norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True) if kind in ('instance', 'twice') else None
        if kind == 'spectral': self.lin = nn.utils.parametrizations.spectral_norm(self.lin)
        if kind == 'ema': self.register_buffer('ema', torch.zeros(12))
    def forward(self, x):
        x = self.lin(x)
        if self.norm is not None: x = self.norm(x.view(-1, 3, 4)).flatten(1)
        if self.kind == 'twice': x = self.norm(x.view(-1, 3, 4)*2+1).flatten(1)
        if self.training and self.kind == 'ema': self.ema.lerp_(x.detach().mean(0).to(self.ema.dtype), .1)
        return self.out(x.relu())


class Ends(Callback):
    "Ends the pass, the epoch or the fit after the third batch of an epoch, when the recorder has had it"
    order = Recorder.order+1
    def __init__(self, error): self.error = error
    def after_batch(self):
        if self.training and self.iter == 2: raise getattr(core, self.error)


def stats(kind, distrib=True, n=22, bs=6, ends=None, **ctx):
    import fastdist.all
    learn = quiet(learner(n=n, bs=bs, model=lambda: Stats(kind).double(), metrics=accuracy, cbs=ends and Ends(ends)))
    learn.recorder.train_metrics = True
    with warnings.catch_warnings(record=True) as seen, learn.distrib_ctx(split_batches=True, **ctx) if distrib else contextlib.nullcontext():
        warnings.simplefilter('always')
        for _ in range(2): learn.fit(1)
    return weights(learn), [list(v) for v in learn.recorder.values], [str(o.message) for o in seen if 'the buffers' in str(o.message)]


def stats_of(kinds, **kwargs): return [stats(k, **kw, **kwargs) for k, kw in kinds]


def test_running_statistics(world):
    """The last batch has 4 of 22 samples: 2 and 2, or 2, 1 and 1; one of 24 has as many as the others. A callback ends it after one of 5,
    or after the last one, of 1"""
    ended = [('instance', dict(n=n, bs=5, ends=o)) for n, o in ((20, 'CancelTrainException'), (11, 'CancelFitException'))]
    kinds = [('instance', {}), ('instance', dict(n=20)), ('twice', dict(n=20)), ('spectral', {}), ('ema', dict(n=24)), *ended]
    for r, every in enumerate(world(stats_of, kinds)):
        for (k, _), a, b in zip(kinds, stats_of(kinds, distrib=False), every):
            assert diff(a[0], b[0]) < 2e-7 and diff(a[1], b[1]) < 1e-6, k
            assert len(b[2]) == (k == 'ema' and r == 0) and all('buffers ema of' in o for o in b[2])
