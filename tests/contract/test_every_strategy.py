"P1 for every strategy: what people train ends as in one process, and so does what is saved; each worker has a part of what is shared out"
import pandas as pd
import pytest
from test_training import Marks, case as training
from fastai.learner import load_learner
from loaders import KINDS
from table import *

# All that concerns the optimizer, gradients, and who has what; whole parameters and the very model are not in all of them
NAMES = [*OPTS, 'radam', 'qhadam', 'ranger', 'lookahead', 'adamw', 'torch_sgd', 'larc', *'''clip accumulate clip_accumulate norms loss_norm
         marks summed combined adds_weights cancels fp16_infinite any_size own_batches accumulation_argument schedules trackers
         frozen_in_turn gan text_classifier sam aux own_backward used_sometimes'''.split()]
# A loss with parts of the model, which is a sharded copy in some strategies; an argument of DistributedDataParallel's
REPLICATED = 'gan',
SHARDED = STRATEGIES[1:]


@pytest.mark.parametrize('n', [2, 3])
@pytest.mark.parametrize('strategy', SHARDED)
def test_as_one_process(worlds, strategy, n):
    "Each case by two workers or by three"
    names = [o for o in NAMES[(n+SHARDED.index(strategy)) % 2::2] if o not in REPLICATED or strategy == 'zero1']
    training.check(worlds(n), names, **ctx_of(strategy))


def test_on_one_worker():
    "A worker alone, without a launcher, shares nothing out"
    for i, strategy in enumerate(STRATEGIES): training.check(None, [o for o in NAMES[i::12] if o not in REPLICATED], **ctx_of(strategy))


case = Cases()


def before_in_after(opt, within):
    "An optimizer that was made before, goes on in the context, and after it in one process"
    learn = quiet(learner(n=20, opt={**OPTS, **MORE_OPTS}[opt], model=lambda: Scaled(True).double(), splitter=splitter, lr=.05))
    learn.fit(1)
    opt, model, ps = learn.opt, learn.model, list(learn.model.parameters())
    with within(learn): learn.fit(1)
    assert learn.opt is opt and learn.model is model and all(a is b and type(a) is nn.Parameter for a, b in zip(ps, model.parameters(), strict=True))
    learn.fit(1)
    return result(learn)


for k in ('adam', 'lamb', 'ranger', 'adamw'): case(partial(before_in_after, k), name=f'{k} before, in and after')


@case
def saves(within):
    "Save, load, export, predict, validate, find a learning rate: in the context"
    with shared_folder(within) as path:
        learn = quiet(learner(n=20, n_val=11, opt=Adam, model=lambda: Scaled(True).double(), splitter=splitter, lr=.05, metrics=accuracy, path=path))
        res = {}
        def note(key): res[key] = list(learn.validate())
        with within(learn):
            learn.fit(1)
            learn.save('a')
            learn.fit(1)
            note('later')
            learn.load('a')
            note('loaded')
            learn.fit(1)
            note('again')
            res['lr'] = learn.lr_find(num_it=5, show_plot=False).valley
            learn.fit(1)
            note('after lr_find')
            learn.export('e.pkl')
            learn.fit(1)
            res['preds'] = list(learn.get_preds(with_loss=True))
            learn.save('b')
        learn.save('c')
        within.wait()
        files = [torch.load(path/f'models/{o}.pth', weights_only=False) for o in 'abc']
        for o in files: assert all(type(v) is Tensor for v in o['model'].values())
        other = learner(n=20, opt=Adam, model=lambda: Scaled(True).double(), splitter=splitter, path=path).load('b')  # fastai by itself loads it
        assert diff(weights(learn), weights(other)) == 0
        exported = load_learner(path/'e.pkl')
        assert type(exported.model).__name__ == 'Scaled' and all(type(p) is nn.Parameter for p in exported.model.parameters())
        assert sorted(o.name for o in exported.cbs) == ['cast_to_tensor', 'recorder', 'train_eval']
        return result(learn, **res, weights_of_files=[o['model'] for o in files], exported=weights(exported), opts=[state_of_file(o['opt']) for o in files])


def state_of_file(opt): return [{k: float(torch.as_tensor(v).double().sum()) for k, v in s.items()} for s in opt['state']]


class ManyIn(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)
    def forward(self, x, z, nothing=None):
        h = (self.a(x)+self.b(z)).relu()
        return self.c(h), nothing, dict(h=h, n=3)


class MoreIn(Callback):
    def before_batch(self): self.learn.xb = (*self.xb, self.x*2, None)


@case
def many_in_and_out(within):
    "Several inputs, a `None` among them; a nest of outputs"
    def loss(o, y): return (F.cross_entropy(o[0], y)+.1*o[2]['h'].pow(2).mean()*o[2]['n']).float()
    loss.loss_divisor = None
    learn = quiet(learner(n=22, bs=5, loss=loss, cbs=MoreIn(), model=lambda: (torch.manual_seed(3), ManyIn().double())[1]))
    with within(learn): learn.fit(2)
    return result(learn)


class Odd(nn.Module):
    """A parameter in three places, one with fewer rows than workers, one without elements, numbers, a frozen layer, an LSTM, which keeps a
    list of its weights"""
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.ReLU()) for _ in range(3)])
        for b in self.blocks: b[0].weight = self.blocks[0][0].weight
        self.narrow, self.wide, self.rnn, self.head = nn.Linear(7, 1), nn.Linear(1, 7), nn.LSTM(7, 7, num_layers=2, batch_first=True), nn.Linear(7, 3)
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(.1))
        self.frozen, self.fixed = nn.Linear(7, 7).requires_grad_(False), nn.Parameter(torch.tensor(.9), requires_grad=False)
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer('n', torch.tensor(0))
    def forward(self, x):
        if self.training: self.n += 1
        x = self.first(x).relu()
        for b in self.blocks: x = b(x)
        x = x+self.rnn(x[:, None])[0][:, -1]
        return self.head(x+self.wide(self.narrow(x)).tanh()+self.frozen(x)*self.fixed)*self.scale+self.shift+self.none.sum(0)


@case
def odd_parameters(within):
    "One of which learns from the second fit on"
    learn = quiet(learner(n=32, opt=Lamb, metrics=accuracy, cbs=[GradientClip(.05), GradientAccumulation(12)], model=lambda: (torch.manual_seed(3), Odd().double())[1]))
    learn.model.shift.requires_grad_(False)
    with within(learn):
        learn.fit(1)
        learn.model.shift.requires_grad_(True)
        learn.fit(1)
    learn.fit(1)
    return result(learn)


class Tempered(nn.CrossEntropyLoss):
    "With a temperature to learn"
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5).double())
    def forward(self, o, y): return super().forward(o/self.temperature, y).float()


class SecondHead(Callback):
    "A module of the callback's, after the model"
    def __init__(self): self.head = new_head()
    def before_train(self): self.head.train()
    def before_validate(self): self.head.eval()
    def after_pred(self): self.learn.pred = self.head(self.pred)


def new_head(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()


def beside(within, module, **kwargs):
    "The optimizer has parameters that are not the model's"
    learn = quiet(learner(n=22, n_val=4, opt=partial(SGD, mom=.9), lr=.05, splitter=lambda m: [params(m), params(module)], **kwargs))
    with within(learn): learn.fit(2)
    return result(learn, weights_beside=module.state_dict())


@case
def loss_that_learns(within):
    "Some shares of a batch have no labels, and so no gradient of the temperature"
    loss = Tempered()
    return beside(within, loss, loss=loss, cbs=[Marks(), GradientAccumulation(12)])


@case(tol=2e-6)  # batches of two rows
def module_of_a_callback(within):
    cb = SecondHead()
    return beside(within, cb.head, cbs=cb)


class MovingAverage(Callback):
    "Of the weights, of which it sees the worker's own part; it takes their place at the end of the fit"
    def before_fit(self): self.avg = [p.detach().clone() for p in self.model.parameters()]
    def after_step(self):
        for a, p in zip(self.avg, self.model.parameters()): a.lerp_(p.detach(), .1)
    def after_fit(self):
        with torch.no_grad():
            for a, p in zip(self.avg, self.model.parameters()): p.copy_(a)


@case
def moving_average(within):
    learn = quiet(learner(n=22, bn=True, opt=Adam, metrics=accuracy))
    with within(learn):
        learn.fit(2, cbs=MovingAverage())
        valid = list(learn.validate())
    return result(learn, valid=valid)


@case(tol=1e-6)
def language_model(within):
    "Tied weights, and texts that go on from batch to batch"
    set_seed(7)
    learn = KINDS['language_model'](1)
    with within(learn): learn.fit_one_cycle(2)
    assert learn.model[1].decoder.weight is learn.model[0].encoder.weight
    return result(learn)


class Encoder(nn.Module):
    "In evaluation torch's layers go a fast path, which reads their weights"
    def __init__(self):
        super().__init__()
        self.emb = nn.Linear(4, 8)
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True), 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)
    def forward(self, x): return self.head(self.enc(self.emb(x)[:, None]).mean(1))


@case
def transformer(within):
    learn = quiet(learner(n=20, opt=Adam, lr=.02, metrics=accuracy, model=lambda: (torch.manual_seed(3), Encoder().double())[1]))
    with within(learn):
        learn.fit(2)
        preds = list(learn.get_preds())
    return result(learn, preds=preds)


@case
def unet(within):
    "Whose layers take what hooks have kept of others"
    from fastai.vision.all import DynamicUnet, foreground_acc
    set_seed(7)
    dls = DataLoaders(*[TfmdDL([(torch.rand(3, 16, 16).double(), torch.randint(0, 2, (16, 16))) for _ in range(n)], bs=5,
                               num_workers=0) for n in (10, 5)])
    body = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ReLU())
    learn = quiet(Learner(dls, DynamicUnet(body, 2, (16, 16)).double(), loss_func=Double(axis=1), opt_func=SGD, lr=.05,
                          metrics=foreground_acc))
    with within(learn): learn.fit(1)
    return result(learn)


@case(tol=2e-6)
def tabular(within):
    "Without columns of numbers: the model has parameters without elements, which nothing uses"
    from fastai.tabular.all import Categorify, CategoryBlock, TabularDataLoaders, tabular_learner
    g = np.random.RandomState(3)
    df = pd.DataFrame(dict(b=g.choice(list('xyz'), 22), y=g.randint(0, 2, 22)))
    set_seed(3)
    dls = TabularDataLoaders.from_df(df, procs=[Categorify], cat_names=['b'], cont_names=[], y_names='y', y_block=CategoryBlock(), bs=5,
                                     valid_idx=range(17, 22), num_workers=0)
    learn = quiet(tabular_learner(dls, layers=[4]))
    with within(learn): learn.fit(2, .01)
    return result(learn)


@case
def other_models(within):
    "Between two fits, and as one begins: another head, or model, each worker's with weights of its own, and an optimizer for it"
    from fastdist.all import get_rank
    class NewHead(Callback):
        def before_fit(self):
            self.learn.model[-1] = nn.Linear(5, 3).double()
            self.learn.create_opt()
    learn = quiet(learner(n=22, opt=partial(SGD, mom=.9), lr=.05))
    with within(learn):
        learn.fit(1, cbs=GradientAccumulation(12))  # gradients of a batch wait when the model changes
        learn.model.extend(new_head(get_rank()))
        learn.opt = None
        values = list(learn.validate())
        learn.fit(1)
        torch.manual_seed(get_rank())
        learn.fit(1, cbs=NewHead())
        learn.model = mlp(bn=True, seed=4+get_rank())
        learn.create_opt()
        learn.fit(1)
    return result(learn, valid=values)


class InDouble(Callback):
    def before_batch(self): self.learn.xb = (self.x.double(),)


@case(tol=2e-6)
def vision(within):
    "A body and a head with batch norm, frozen and fine-tuned, of fastai's pictures"
    from fastai.vision.all import ResBlock, TensorImage, XResNet, create_head
    class BodyHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(*list(XResNet(ResBlock, 1, [1, 1], c_in=3, stem_szs=(4, 4, 64), widen=1/16).children())[:-4])
            self.head = create_head(8, 3, lin_ftrs=[6], ps=0.)
        def forward(self, x): return self.head(self.body(x))
    set_seed(7)
    dls = DataLoaders(*[TfmdDL([(TensorImage(torch.rand(3, 16, 16).double()), torch.randint(0, 3, ())) for _ in range(n)], bs=5, shuffle=n > 9, num_workers=0) for n in (18, 7)])
    learn = quiet(Learner(dls, BodyHead().double(), loss_func=Double(), lr=.02, cbs=InDouble(), metrics=accuracy, splitter=lambda m: [params(m.body), params(m.head)]))
    with within(learn): learn.fine_tune(1, freeze_epochs=1)
    learn.fit(1)
    return result(learn)


@pytest.mark.parametrize('n', [2, 3])
@pytest.mark.parametrize('strategy', STRATEGIES)
def test_models_and_files(worlds, strategy, n):
    names = [o for o in case if o != 'other_models' or strategy in ('ddp', 'zero1')]  # a sharded copy keeps its layers
    case.check(worlds(n), names[(n+STRATEGIES.index(strategy)) % 2::2], **ctx_of(strategy))


def shares(strategy):
    "Numbers in all, and what this worker has of parameters, gradients and optimizer state after a step"
    import fastdist.all
    learn, res = quiet(learner(n=20, opt=Adam, model=lambda: Scaled(False).double(), splitter=splitter)), []
    def count(ts): return sum(t.to_local().numel() if hasattr(t, 'to_local') else t.numel() for t in ts)
    class Look(Callback):
        order = 2000
        def before_step(self): self.grads = count(p.grad for p in learn.model.parameters() if p.grad is not None)
        def after_step(self): res.append((count(learn.model.parameters()), self.grads, count(o for s in learn.opt.state.values() for o in s.values() if isinstance(o, Tensor))))
    with learn.distrib_ctx(**ctx_of(strategy)): learn.fit(1, cbs=Look())
    return sum(p.numel() for p in learn.model.parameters()), res


HAVE = dict(zero1=[2], zero2=[1, 2], fsdp=[0, 1, 2])


def all_shares(): return {o: shares(o) for o in HAVE}


@pytest.mark.parametrize('n', [2, 3])
def test_what_is_shared_out(worlds, n):
    "Each worker has about 1/n of what its strategy shares out, and together they have all of it"
    every = worlds(n)(all_shares)
    for strategy, kinds in HAVE.items():
        for step in range(4):
            for i in kinds:
                total, each = every[0][strategy][0]*(1, 1, 2)[i], [m[strategy][1][step][i] for m in every]
                assert max(each) < total*(.62, .5)[n-2] and total <= sum(each) <= total+2*n, (strategy, step, i, each, total)  # a number alone may be in all
