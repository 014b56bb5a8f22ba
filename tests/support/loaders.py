"Learners over every kind of loader, built alike in one process and in many. `KINDS[name](k)` has batches `k` times as large"
import random

import pandas as pd
from fastai.callback.data import PartialDL, WeightedDL
from fastai.data.load import DataLoader as FastaiDL, _FakeLoader
from fastai.tabular.core import Categorify, FillMissing, Normalize, TabularPandas
from fastai.tabular.model import TabularModel
from fastai.text.data import LMDataLoader, LMTensorText, SortedDL, TensorText
from fastai.text.learner import LMLearner
from fastai.text.models import AWD_LSTM, get_language_model
from fastai.callback.rnn import rnn_cbs
from torch.utils.data import BatchSampler, DataLoader as TorchDL, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler, get_worker_info
from learners import *

KINDS = {}
def kind(f):
    KINDS[f.__name__] = f
    return f


class CE(OwnDouble):
    "For outputs of any number of dimensions, computed in float64"
    def __call__(self, inp, targ, **kwargs): return super().__call__(inp.reshape(-1, inp.shape[-1]), targ.reshape(-1).long(), **kwargs)


def learn_of(trn, val, model=None, loss=None, metrics=accuracy, **kwargs):
    return quiet(Learner(DataLoaders(trn, val), model or mlp(), loss_func=loss or Double(), opt_func=SGD, lr=0.1, metrics=metrics, **kwargs))


def dl(cls=TfmdDL, n=22, bs=5, seed=0, **kwargs): return cls(kwargs.pop('ds', None) or Items(n, seed=seed), bs=bs, num_workers=kwargs.pop('num_workers', 0), **kwargs)


@kind
def shuffled(k): return learn_of(dl(bs=5*k, shuffle=True), dl(n=13, seed=1))

@kind
def loader_processes(k): return learn_of(dl(bs=5*k, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True), dl(n=13, seed=1, num_workers=2))

@kind
def drop_last(k): return learn_of(dl(n=38, bs=5*k, shuffle=True, drop_last=True), dl(n=13, seed=1))

@kind
def shorter_than_the_set(k): return learn_of(TfmdDL(Items(31), bs=5*k, n=17, num_workers=0), TfmdDL(Items(13, seed=1), n=9, bs=4, num_workers=0))

@kind
def weighted(k): return learn_of(dl(WeightedDL, bs=5*k, wgts=np.arange(22.), shuffle=True), dl(n=13, seed=1))

@kind
def partial_set(k): return learn_of(dl(PartialDL, bs=5*k, partial_n=13), dl(n=13, seed=1))

class Backwards(TfmdDL):
    def get_idxs(self): return list(range(self.n))[::-1]

@kind
def own_get_idxs_class(k): return learn_of(dl(Backwards, bs=5*k), dl(Backwards, n=13, seed=1))

@kind
def own_get_idxs_argument(k): return learn_of(dl(bs=5*k, get_idxs=lambda: random.sample(range(22), 22)), dl(n=13, seed=1))

@kind
def own_shuffle(k): return learn_of(dl(bs=5*k, shuffle=True, shuffle_fn=lambda idxs: np.random.permutation(idxs)), dl(n=13, seed=1))


class Pairs(Items):
    "Two inputs, two targets, of which one is a number"
    def __getitem__(self, i): return self.x[i], self.x[i]*2, self.y[i], self.x[i].sum()

class TwoIn(nn.Module):
    def __init__(self, n_out=4):
        super().__init__()
        torch.manual_seed(2)
        self.lin = nn.Linear(8, n_out).double()
    def forward(self, a, b): return self.lin(torch.cat([a, b], 1))

def two_losses(out, y, z): return (F.cross_entropy(out[:, :3], y) + (out[:, 3]-z).pow(2).mean()).float()

@kind
def several_inputs_and_targets(k):
    trn, val = dl(ds=Pairs(22), bs=5*k, shuffle=True), dl(ds=Pairs(13, seed=1))
    trn._n_inp = val._n_inp = 2
    return learn_of(trn, val, TwoIn(), two_losses, metrics=[])


class TwoViews(TfmdDL):
    "A batch has two rows for each sample"
    def create_batch(self, b): return tuple(torch.cat([o, o]) for o in super().create_batch(b))

@kind
def two_views(k): return learn_of(dl(TwoViews, bs=5*k, shuffle=True), dl(n=13, seed=1), cbs=GradientAccumulation(20))

class Curriculum(TfmdDL):
    "`before_iter` sets what `get_idxs` reads, and `get_idxs` what `create_item` reads"
    epoch = -1
    def before_iter(self):
        super().before_iter()
        self.epoch, self.noise = self.epoch+1, np.random.rand()
    def get_idxs(self):
        self.factor = 1+self.epoch+self.noise
        return list(range(self.epoch, self.n))
    def create_item(self, i):
        x, y = super().create_item(i)
        return x*self.factor, y

@kind
def curriculum(k): return learn_of(dl(Curriculum, bs=5*k), dl(n=13, seed=1))


class Siamese(Items):
    "A tuple of two samples, and whether they are of one class"
    def __getitem__(self, i):
        j = (i*7+3) % len(self)
        return (self.x[i], self.x[j]), (self.y[i] == self.y[j]).long()

class Twin(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.body, self.head = nn.Linear(4, 6).double(), nn.Linear(12, 2).double()
    def forward(self, xs): return self.head(torch.cat([self.body(x).relu() for x in xs], 1))

@kind
def siamese(k): return learn_of(dl(ds=Siamese(22), bs=5*k, shuffle=True), dl(ds=Siamese(13, seed=1)), Twin())


class Pixels:
    "Little images, through fastai's pipelines: types, a transform of the item, and two of the batch"
    def __init__(self, n): self.n = n
    def __call__(self, i): return np.random.RandomState(i).randint(0, 255, (6, 6, 3), dtype=np.uint8)

@kind
def vision(k):
    from fastai.vision.all import CategoryBlock, DataBlock, ImageBlock, IntToFloatTensor, Normalize, PILImage, Resize
    block = DataBlock((ImageBlock, CategoryBlock), get_items=lambda n: list(range(n)), get_x=lambda i: PILImage.create(Pixels(0)(i)), get_y=lambda i: 'abc'[i % 3],
                      splitter=lambda o: (list(range(22)), list(range(22, 35))), item_tfms=Resize(4), batch_tfms=Normalize.from_stats([.5]*3, [.2]*3))
    dls = block.dataloaders(35, bs=5*k, val_bs=5, num_workers=0, drop_last=False)
    dls.train.drop_last = False
    torch.manual_seed(1)
    return quiet(Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(48, 3)), opt_func=SGD, lr=0.01, loss_func=CrossEntropyLossFlat(), metrics=accuracy))


@kind
def tabular(k):
    g = np.random.RandomState(1)
    df = pd.DataFrame(dict(a=g.choice(list('xyz'), 35), b=g.rand(35), c=np.where(g.rand(35) < .2, np.nan, g.rand(35)), y=g.choice(['no', 'yes'], 35)))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        to = TabularPandas(df, [Categorify, FillMissing, Normalize], ['a'], ['b', 'c'], 'y', splits=(list(range(22)), list(range(22, 35))))
    dls = to.dataloaders(bs=5*k, val_bs=5)
    dls.train.drop_last = False
    set_seed(1)  # not torch.manual_seed: cloudpickle would take `torch` and `classes` for the module torch.classes
    return quiet(Learner(dls, TabularModel([(len(v)+1, 3) for v in to.classes.values()], 2, 2, [5], use_bn=False), opt_func=SGD, lr=0.1, loss_func=CrossEntropyLossFlat(), metrics=accuracy))


class Texts:
    def __init__(self, n, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.x = [TensorText(torch.randint(1, 9, (1+i*7 % 11,), generator=g)) for i in range(n)]
        self.y = torch.randint(0, 3, (n,), generator=g)
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i], self.y[i]

def padded(items):
    m = max(len(x) for x, _ in items)
    return [(F.pad(x, (0, m-len(x))), y) for x, y in items]

class MeanText(nn.Module):
    "Does not count the padding"
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.emb, self.lin = nn.Embedding(9, 4, padding_idx=0).double(), nn.Linear(4, 3).double()
    def forward(self, x): return self.lin(self.emb(x).sum(1)/(x != 0).sum(1, keepdim=True))

@kind
def sorted_texts(k):
    trn = SortedDL(Texts(53), bs=4*k, shuffle=True, before_batch=padded, num_workers=0)
    return learn_of(trn, SortedDL(Texts(13, 1), bs=3, before_batch=padded, num_workers=0), MeanText())


class Corpus:
    def __init__(self, n, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.x = [LMTensorText(torch.randint(0, 11, (5+i*13 % 17,), generator=g)) for i in range(n)]
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return (self.x[i],)

class Hidden(Callback):
    "The shapes of the hidden states that the model keeps from batch to batch"
    def after_batch(self): self.shapes = [tuple(h.shape) for hs in self.model[0].hidden for h in hs]

class PadsItself(SortedDL):
    def create_batch(self, b): return super().create_batch(padded(b))

@kind
def create_batch_pads(k):
    return learn_of(PadsItself(Texts(53), bs=4*k, shuffle=True, num_workers=0), PadsItself(Texts(13, 1), bs=3, num_workers=0), MeanText())

@kind
def language_model(k):
    torch.manual_seed(1)
    config = dict(emb_sz=6, n_hid=7, n_layers=2, pad_token=1, bidir=False, output_p=0., hidden_p=0., input_p=0., embed_p=0., weight_p=1e-12, tie_weights=True, out_bias=True)
    model = get_language_model(AWD_LSTM, 11, config=config).double()
    learn = learn_of(LMDataLoader(Corpus(40), bs=5*k, seq_len=4, shuffle=True), LMDataLoader(Corpus(17, 1), bs=5, seq_len=4), model, CE(),
                     metrics=[accuracy, Perplexity()], cbs=[*rnn_cbs(.1, .1), Hidden()])
    return learn


class Batches:
    "Items that are batches already, of different sizes"
    sizes = 4, 2, 5, 1, 3, 6, 2
    def __init__(self, k=1, seed=0):
        items, cuts = Items(sum(self.sizes), seed=seed), np.cumsum([0, *self.sizes])[::k]
        cuts = list(cuts) + ([len(items)] if cuts[-1] != len(items) else [])
        self.b = [items[a:b] for a, b in zip(cuts, cuts[1:])]
    def __len__(self): return len(self.b)
    def __getitem__(self, i): return self.b[i]

@kind
def prebatched(k): return learn_of(FastaiDL(Batches(k), bs=None), FastaiDL(Batches(seed=1), bs=None))


class Stream(IterableDataset):
    "A shuffled stream of samples, with or without a length; each loader process reads its own part"
    def __init__(self, n, sized=True, shuffle=True, seed=0):
        self.items, self.shuffle = Items(n, seed=seed), shuffle
        if sized: self.__class__ = SizedStream
    def __iter__(self):
        info, n = get_worker_info(), len(self.items)
        idxs = range(n)[info.id::info.num_workers] if info else range(n)
        return map(self.items.__getitem__, random.sample(idxs, len(idxs)) if self.shuffle else idxs)

class SizedStream(Stream):
    def __len__(self): return len(self.items)

@kind
def fastai_stream(k): return learn_of(FastaiDL(Stream(22), bs=5*k), FastaiDL(Stream(13, shuffle=False, seed=1), bs=5))

@kind
def fastai_stream_processes(k):
    return learn_of(FastaiDL(Stream(24), bs=4*k, num_workers=2), FastaiDL(Stream(12, shuffle=False, seed=1), bs=3, num_workers=2))

@kind
def torch_stream_processes(k):
    return learn_of(TorchDL(Stream(24), batch_size=4*k, num_workers=2), TorchDL(Stream(12, shuffle=False, seed=1), batch_size=3, num_workers=2))

@kind
def torch_stream(k): return learn_of(TorchDL(Stream(22), batch_size=5*k), TorchDL(Stream(13, shuffle=False, seed=1), batch_size=5))


# PyTorch's

def torch_learn(k=1, n=22, bs=5, val=None, **kwargs): return learn_of(TorchDL(Items(n), **{**({} if 'batch_sampler' in kwargs else dict(batch_size=bs*k)), **kwargs}), val or TorchDL(Items(13, seed=1), batch_size=5))

@kind
def torch_sequential(k): return torch_learn(k)

@kind
def torch_random(k): return torch_learn(k, shuffle=True)

@kind
def torch_random_generator(k): return torch_learn(k, shuffle=True, generator=torch.Generator().manual_seed(4))

@kind
def torch_drop_last(k): return torch_learn(k, n=38, shuffle=True, drop_last=True)

@kind
def torch_weighted(k): return torch_learn(k, sampler=WeightedRandomSampler(torch.arange(22.), 17))

class Hops(Sampler):
    "Draws its order from a generator of its own"
    def __init__(self, n): self.n, self.rng = n, np.random.default_rng(3)
    def __len__(self): return self.n
    def __iter__(self): return iter(self.rng.permutation(self.n).tolist())

@kind
def torch_own_sampler(k): return torch_learn(k, sampler=Hops(22))

@kind
def torch_explicit_batch_sampler(k): return torch_learn(batch_sampler=BatchSampler(RandomSampler(range(22)), 5*k, False))

class Bunches:
    "Batches of different sizes, in another order in each epoch; `k` of them make one of a larger batch"
    def __init__(self, k): self.k = k
    def bunches(self):
        o = [list(range(i*(i+1)//2, (i+1)*(i+2)//2)) for i in range(6)] + [[21]]
        random.shuffle(o)
        return o
    def __len__(self): return -(-7//self.k)
    def __iter__(self):
        o = self.bunches()
        return iter([sum(o[i:i+self.k], []) for i in range(0, 7, self.k)])

@kind
def torch_own_batch_sampler(k): return torch_learn(batch_sampler=Bunches(k))

def to_longest(items):
    x, y = zip(*padded(items))
    return torch.stack([o.as_subclass(torch.Tensor) for o in x]), torch.stack(y)

@kind
def torch_collate(k): return learn_of(TorchDL(Texts(22), batch_size=5*k, shuffle=True, collate_fn=to_longest), TorchDL(Texts(13, 1), batch_size=5, collate_fn=to_longest), MeanText())

def note_process(worker_id): assert get_worker_info().id == worker_id

@kind
def torch_processes(k):
    return torch_learn(k, shuffle=True, num_workers=2, persistent_workers=True, pin_memory=True, worker_init_fn=note_process, prefetch_factor=3,
                       val=TorchDL(Items(13, seed=1), batch_size=5, num_workers=2))

@kind
def torch_prebatched(k): return learn_of(TorchDL(Batches(k), batch_size=None), TorchDL(Batches(seed=1), batch_size=None))
