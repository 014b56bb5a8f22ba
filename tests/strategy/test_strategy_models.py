"Every strategy, with the models, callbacks and arguments that users have: the weights, losses, metrics and optimizer state of one process"
import contextlib

import pytest
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from strategies import *

CASES, TOL = {}, {}


def case(f=None, tol=1e-7):
    "`tol`: of the weights; what fastai keeps in float32 may differ by ten times that"
    if f is None: return partial(case, tol=tol)
    CASES[f.__name__], TOL[f.__name__] = f, tol
    return f


def within(learn, ctx):
    import fastdist.all
    return contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx)


def data(*xs, n=20, n_val=7, bs=5, ys=None, n_inp=None, **kwargs):
    "Loaders of samples that the functions `xs` make from a generator, and of targets"
    def items(n, seed):
        g = torch.Generator().manual_seed(seed)
        return [tuple(x(g) for x in (*xs, ys or (lambda g: torch.randint(0, 3, (), generator=g)))) for _ in range(n)]
    set_seed(7)
    return DataLoaders(*[TfmdDL(items(m, i), bs=bs, shuffle=not i, n_inp=n_inp or len(xs), **kwargs) for i, m in enumerate((n, n_val))])


def row(n=4): return lambda g: torch.randn(n, generator=g, dtype=torch.float64)


def made(model, dls=None, path='.', opt=Adam, lr=0.02, loss=None, dtype=torch.float64, **kwargs):
    "A learner of the model that a function makes"
    torch.manual_seed(3)
    model = model().to(dtype)
    return quiet(Learner(dls or data(row()), model, loss_func=loss or Double(), opt_func=opt, lr=lr, path=path, **{'splitter': trainable_params, **kwargs}))


def result(learn, **more):
    "What is compared; `alike` is the same in all workers only"
    def plain(o): return not isinstance(o, torch.Tensor) or type(o) in (torch.Tensor, nn.Parameter)
    modules = {n: (type(m).__name__, sorted(vars(m)), {k: len(v) for k, v in vars(m).items() if 'hook' in k and isinstance(v, dict)},
                   [k for k, v in vars(m).items() if not all(map(plain, v if isinstance(v, (list, tuple)) else v.values() if isinstance(v, dict) else [v]))])
               for n, m in learn.model.named_modules()}
    return dict(weights=weights(learn), losses=[float(o) for o in learn.recorder.losses], values=[[o for o in v if not isinstance(o, str)] for v in learn.recorder.values],
                opt=state_of(learn.opt), modules=modules, strides={n: p.stride() for n, p in learn.model.named_parameters()}, **more)


def far(a, b):
    "The largest difference in what is nested; texts and the like have to be equal"
    if isinstance(a, dict):
        assert a.keys()==b.keys(), (a.keys() ^ b.keys())
        return max((far(a[k], b[k]) for k in a if k!='alike'), default=0.)
    if isinstance(a, (list, tuple)):
        assert len(a)==len(b), (a, b)
        return max((far(x, y) for x, y in zip(a, b)), default=0.)
    if isinstance(a, (float, torch.Tensor)): return diff(a, b)
    assert a==b, (a, b)
    return 0.


def run(names, ctx, path):
    "The cases' results, by name"
    res = {}
    for n in names:
        (folder := Path(path)/n).mkdir(exist_ok=True, parents=True)
        res[n] = CASES[n](ctx, folder)
    return res


REFERENCE = {}


def check(world, strategy, names, tmp_path, **ctx):
    "No worker's result differs from that of one process, nor from another worker's"
    for n in names:
        if n not in REFERENCE: REFERENCE.update(run([n], None, tmp_path/'one'))
    every = world(run, names, ctx_of(strategy, **ctx), tmp_path/'many', timeout=300)
    for n in names:
        want = REFERENCE[n]
        for r, m in enumerate(every):
            found = {k: far(want[k], m[n][k]) for k in want if k!='alike'}
            assert want.keys()==m[n].keys() and all(d < TOL[n]*(1 if k=='weights' else 20) for k, d in found.items()), (n, r, found)
            assert far({'a': every[0][n].get('alike')}, {'a': m[n].get('alike')})==0., (n, r)


# What a model takes, gives and has


def picture(c=3, s=8):
    from fastai.torch_core import TensorImage
    return lambda g: torch.rand(c, s, s, generator=g, dtype=torch.float64).as_subclass(TensorImage)


@case
def language_model(ctx, path):
    "Tied weights, a hidden state that `reset` clears, and the regularizer of the activations"
    from fastai.callback.rnn import rnn_cbs
    from fastai.text.data import LMDataLoader, LMTensorText
    from fastai.text.models import AWD_LSTM, get_language_model
    from fastai.text.models.awdlstm import awd_lstm_lm_split
    class Corpus:
        def __init__(self, n, seed):
            g = torch.Generator().manual_seed(seed)
            self.x = [LMTensorText(torch.randint(0, 11, (5+i*13 % 17,), generator=g)) for i in range(n)]
        def __len__(self): return len(self.x)
        def __getitem__(self, i): return (self.x[i],)
    set_seed(7)
    dls = DataLoaders(LMDataLoader(Corpus(20, 0), bs=5, seq_len=8, shuffle=True, num_workers=0),
                      LMDataLoader(Corpus(9, 1), bs=5, seq_len=8, num_workers=0))
    config = dict(emb_sz=6, n_hid=7, n_layers=2, pad_token=1, bidir=False, output_p=0., hidden_p=0., input_p=0., embed_p=0., weight_p=1e-12, tie_weights=True, out_bias=True)
    def model(): return get_language_model(AWD_LSTM, 11, config=config)
    def loss(o, y): return F.cross_entropy(o.flatten(0, 1), y.flatten()).float()
    loss.loss_divisor = None
    learn = made(model, dls, loss=loss, cbs=rnn_cbs(.1, .1), metrics=[accuracy, Perplexity()], splitter=awd_lstm_lm_split)
    with within(learn, ctx):
        learn.freeze_to(-1)
        learn.fit_one_cycle(1)
        learn.unfreeze()
        learn.fit_one_cycle(1, slice(1e-3, 1e-2))
    assert learn.model[1].decoder.weight is learn.model[0].encoder.weight
    learn.fit(1)
    return result(learn)


@case
def transformer(ctx, path):
    "In evaluation its layers go torch's fast path"
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(11, 8)
            self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True), 2, enable_nested_tensor=False)
            self.head = nn.Linear(8, 3)
        def forward(self, x): return self.head(self.enc(self.emb(x)).mean(1))
    learn = made(Model, data(lambda g: torch.randint(0, 11, (6,), generator=g)), metrics=accuracy)
    with within(learn, ctx):
        learn.fit(2)
        preds = learn.get_preds()
    return result(learn, preds=[*preds])


@case
def unet(ctx, path):
    from fastai.vision.all import DynamicUnet
    def model():
        body = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ReLU())
        return DynamicUnet(body, 2, (16, 16))
    learn = made(model, data(picture(s=16), ys=lambda g: torch.randint(0, 2, (16, 16), generator=g), n=10, n_val=5), loss=Double(axis=1), metrics=foreground_acc,
                 splitter=lambda m: [params(m[0]), params(m[1:])])
    with within(learn, ctx):
        learn.freeze()
        learn.fit(1)
        learn.unfreeze()
        learn.fit(1)
    return result(learn)


@case
def channels_last(ctx, path):
    def model(): return nn.Sequential(nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU()), nn.Conv2d(5, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    learn = made(lambda: model().to(memory_format=torch.channels_last), data(picture()), opt=Lamb)
    with within(learn, ctx): learn.fit(1)
    learn.fit(1)
    return result(learn)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.ModuleList([nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)]), nn.Linear(10, 3)
    def forward(self, x): return self.head(self.rnn[0](x)[0][:, -1])


def as_cudnn(rnn):
    "On a GPU all weights move into one buffer"
    ws = [w for w in rnn._flat_weights if not hasattr(w, 'full_tensor')]
    for w, o in zip(ws, torch.cat([w.detach().reshape(-1) for w in ws]).split([w.numel() for w in ws]) if ws else ()): w.data = o.view_as(w)


@case
def lstm_in_one_buffer(ctx, path):
    was, nn.RNNBase.flatten_parameters = nn.RNNBase.flatten_parameters, as_cudnn
    try:
        learn = made(Recurrent, data(lambda g: torch.randn(6, 4, generator=g, dtype=torch.float64)))
        with within(learn, ctx): learn.fit(2)
        assert learn.model.rnn[0].flatten_parameters.__func__ is as_cudnn
        learn.fit(1)
        return result(learn)
    finally: nn.RNNBase.flatten_parameters = was


MODELS = [*CASES]


@pytest.mark.parametrize('world', [2, 3])
@pytest.mark.parametrize('strategy', STRATEGIES)
def test_models(worlds, tmp_path, strategy, world): check(worlds(world), strategy, MODELS[(world+STRATEGIES.index(strategy)) % 2::2], tmp_path)


# Callbacks, and what is asked of a learner in the context

def net(): return nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 3))


@case
def hooks(ctx, path):
    "On a unit, on the model and on a layer, forward and backward; of all of them plain tensors are kept"
    from fastai.callback.hook import hook_output, hook_outputs
    learn = made(net, data(row(), n=18, n_val=7, bs=4), dtype=torch.float64)
    with within(learn, ctx):
        with hook_outputs([learn.model[0], learn.model[1][0], learn.model]) as h, hook_output(learn.model[1], grad=True) as g:
            learn.fit(1)
            stored = [type(o).__name__ for o in h.stored], [type(o).__name__ for o in g.stored], g.stored[0].shape[1:]
        summary = str(learn.summary()).split('Callbacks:')[0]
        preds = learn.get_preds()
    return result(learn, stored=stored, summary=summary.split('Total params')[1].split('Optimizer')[0], preds=[*preds])


class EMA(Callback):
    "A moving average of the parameters, which takes their places at the end of the fit. It sees what the worker has: its rows, under 'fsdp'"
    def before_fit(self): self.avg = [p.detach().clone() for p in self.model.parameters()]
    def after_step(self):
        for a, p in zip(self.avg, self.model.parameters()): a.lerp_(p.detach(), 0.1)
    def after_fit(self):
        with torch.no_grad():
            for a, p in zip(self.avg, self.model.parameters()): p.copy_(a)


@case
def moving_average(ctx, path):
    learn = made(net, metrics=accuracy)
    with within(learn, ctx):
        learn.fit(2, cbs=(ema := EMA()))
        valid = learn.validate()
        learn.fit(1)
    shards = [type(a).__name__ for a in ema.avg]
    assert set(shards)=={'DTensor' if ctx and ctx['strategy'] in ('zero2', 'fsdp') else 'Tensor'}, shards
    return result(learn, valid=[*valid])


@case
def nothing_to_train(ctx, path):
    "A model whose parameters are all frozen, as those of adapters that are switched off, evaluates between two fits"
    learn = made(net, metrics=accuracy)
    with within(learn, ctx):
        learn.fit(1)
        learn.model.requires_grad_(False)
        valid, preds = learn.validate(), learn.get_preds()
        learn.model.requires_grad_(True)
        learn.fit(1)
    res = result(learn, valid=[*valid], preds=[*preds])
    learn.model.requires_grad_(False)
    with pytest.raises(Exception, match='so there is nothing to train' if ctx else 'does not require grad'), within(learn, ctx): learn.fit(1)
    return res


CALLBACKS = [o for o in CASES if o not in MODELS]


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_callbacks(world2, tmp_path, strategy):
    names = CALLBACKS[STRATEGIES.index(strategy)::2] if strategy in ('ddp', 'zero1') else CALLBACKS  # as of the models
    check(world2, strategy, names, tmp_path)


# Recomputed, offloaded and compiled

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 6)
    def forward(self, x): return x+self.b(self.norm(self.a(x)).relu())


def blocks(): return nn.Sequential(nn.Linear(4, 6), Block(), Block(), nn.Linear(6, 3))


def composed(ctx):
    from torch._dynamo import reset # not as torch._dynamo: cloudpickle would send the module's parts
    from torch._dynamo.utils import counters
    reset()
    compiles = 'dynamo_backend' in (ctx or {})
    learn, runs = made(blocks, data(row(), n=24, n_val=7), metrics=accuracy), []
    with within(learn, ctx):
        h = learn.model[1].a.register_forward_hook(lambda *_: None if compiles else runs.append(torch.is_grad_enabled()))
        n = counters['stats']['unique_graphs']
        try: learn.fit(2)
        finally: h.remove()
        n = counters['stats']['unique_graphs']-n
    learn.fit(1)
    return result(learn), sum(runs), n


COMPOSED = dict(recompute=dict(activation_checkpointing=True), classes=dict(activation_checkpointing=Block), offload=dict(activation_checkpointing=True, offload_to_cpu=True),
                compile=dict(dynamo_backend='aot_eager'), all=dict(activation_checkpointing=Block, offload_to_cpu=True, dynamo_backend='aot_eager', gradient_accumulation_steps=2))


# Compiling takes longest: once with all the rest, and alone under those whose hooks are not DDP's. Not all of them under 'fsdp': there torch finds other
# code when it computes again, and says so (CheckpointError). What is computed again is the model's: each of the three ways by two or three of the strategies
EACH = dict(ddp=['recompute', 'all'], zero1=['classes', 'offload'], zero2=['recompute', 'offload', 'compile'], fsdp=['recompute', 'classes', 'offload', 'compile'])
def each_composed(strategy): return {k: composed(ctx_of(strategy, **COMPOSED[k])) for k in EACH[strategy]}


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_composed(world2, strategy):
    one = composed(None)[0], composed(dict(gradient_accumulation_steps=2))[0] if 'all' in EACH[strategy] else None
    for m in world2(each_composed, strategy, timeout=300):
        for k, (res, runs, graphs) in m.items():
            assert far(one[k=='all'], res) < 2e-6 and diff(one[k=='all']['weights'], res['weights']) < 1e-7, k
            if k not in ('compile', 'all'): assert runs==20, (k, runs) # 10 batches, twice
            assert (graphs > 0)==(k in ('compile', 'all')), (k, graphs)


# Accelerate's arguments

def arguments(ctx, folder=None):
    learn, states = made(net, metrics=accuracy), []
    class Look(Callback):
        def after_pred(self):
            if self.training and self.iter==0: states.append(torch.get_rng_state())
    path = learn.path
    with within(learn, ctx):
        learn.fit(2, cbs=Look())
        if folder: learn.save('a')
    return SimpleNamespace(res=result(learn), states=states, restored=learn.path==path)


def many_arguments(strategy, folder):
    bf16 = [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)]
    given = dict(plain={}, rng=dict(rng_types=['torch']), project=dict(project_dir=folder))
    res = {k: arguments({**ctx_of(strategy), **kw}, folder=k=='project') for k, kw in given.items()}
    if strategy=='ddp': res['hook'] = arguments(ctx_of(strategy, kwargs_handlers=bf16))
    return res


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_arguments(world2, tmp_path, strategy):
    plain = arguments(None)
    every = world2(many_arguments, strategy, tmp_path)
    for m in every:
        for k in ('plain', 'rng', 'project'): assert far(plain.res, m[k].res) < 2e-6 and diff(plain.res['weights'], m[k].res['weights']) < 1e-7, k
        assert all(o.restored for o in m.values())
    for i in range(2):
        for k, same in dict(plain=False, rng=True).items(): assert torch.equal(every[0][k].states[i], every[1][k].states[i])==same
    assert diff(torch.load(tmp_path/'models/a.pth', weights_only=False)['model'], plain.res['weights']) < 1e-7
    if 'hook' in every[0]: assert 1e-6 < diff(plain.res['weights'], every[0]['hook'].res['weights']) < 0.1


