"Workers that have drawn another split each do not train: rows that one validates on, another would train on"
import pandas as pd
import pytest
from learners import *
from learners import learner as small_learner


def frame(n=40):
    g = np.random.RandomState(3)
    return pd.DataFrame(dict(a=g.rand(n), b=g.choice(list('xyz'), n), y=g.randint(0, 2, n)))


def tabular():
    from fastai.tabular.all import Categorify, CategoryBlock, Normalize, TabularDataLoaders, tabular_learner
    dls = TabularDataLoaders.from_df(frame(), procs=[Categorify, Normalize], cat_names=['b'], cont_names=['a'], y_names='y', y_block=CategoryBlock(), bs=8)
    return tabular_learner(dls, layers=[4])


def learner(dls): return Learner(dls, nn.Sequential(nn.Linear(1, 2)), loss_func=CrossEntropyLossFlat())


def block():
    from fastai.data.all import ColReader, DataBlock, RandomSplitter, TransformBlock
    as_x, as_y = lambda o: tensor([float(o)]), lambda o: tensor(int(o))
    blocks = TransformBlock(type_tfms=[as_x]), TransformBlock(type_tfms=[as_y])
    return learner(DataBlock(blocks, get_x=ColReader('a'), get_y=ColReader('y'), splitter=RandomSplitter()).dataloaders(frame(), bs=8))


def torchs(n=40): return torch.rand(n, 1, generator=torch.Generator().manual_seed(1)), torch.arange(n)%2


def permuted():
    x, y = torchs()
    p = np.random.permutation(40)
    return learner(DataLoaders.from_dsets(*[list(zip(x[o], y[o])) for o in (p[:32], p[32:])], bs=8))


class Wraps:
    "A data set around another, as one that adds transforms to a `Subset`"
    def __init__(self, ds, **kwargs): vars(self).update(kwargs, ds=ds)
    def __len__(self): return len(self.ds)
    def __getitem__(self, i): return self.ds[i]


def wrapped():
    from torch.utils.data import TensorDataset, random_split
    return learner(DataLoaders.from_dsets(*map(Wraps, random_split(TensorDataset(*torchs()), [32, 8])), bs=8))


def ranged():
    from torch.utils.data import Subset, TensorDataset
    first, ds = np.random.randint(1000), TensorDataset(*torchs(1040))
    return learner(DataLoaders.from_dsets(Subset(ds, range(first, first+32)), Subset(ds, range(8)), bs=8))


class Table:
    "As a `Dataset` of Hugging Face: rows are dicts, and a transform may draw random numbers whenever one is read"
    def __init__(self, rows, plain=False): self._rows, self._plain = rows, plain
    column_names = ['a', 'y']
    def with_format(self, type=None): return Table(self._rows, True)
    def __len__(self): return len(self._rows)
    def __getitem__(self, i):
        a, y = self._rows[i]
        return dict(a=a, y=y) if self._plain else (tensor([a+np.random.rand()/100]), tensor(y))


def table():
    rows = tuple((float(a), int(a > .5)) for a in np.random.rand(40))
    return learner(DataLoaders.from_dsets(Table(rows), Table(rows[:8]), bs=8))


KINDS = dict(tabular=tabular, block=block, wrapped=wrapped, ranged=ranged, permuted=permuted, table=table)


def seen(kind, seed):
    import fastdist.all
    from fastdist.world import get_rank
    warnings.simplefilter('ignore')
    set_seed(42 if seed else 1000+get_rank())
    learn = quiet(KINDS[kind]())
    try:
        with learn.distrib_ctx(split_batches=True): learn.validate()
    except ValueError as e: return str(e)


@pytest.mark.parametrize('kind', KINDS)
def test_a_split_of_its_own_in_each_worker(world3, kind):
    assert world3(seen, kind, True) == [None]*3
    for e in world3(seen, kind, False): assert 'has other data than that of rank 0' in e and 'set_seed(42) before it' in e, e


def as_before(n):
    "What scripts for fastai.distributed call of a loader: `to_detach` gathers"
    from fastdist.all import DistributedDL, setup_distrib
    setup_distrib()
    res, gathered, dl = {}, {}, TfmdDL(list(range(n)), bs=3, num_workers=0)
    for split in (None, False, True):
        ddl = DistributedDL(dl, split_batches=split)
        gathered[split] = [ddl.to_detach((b, dict(s=b.float().requires_grad_()))) for b in ddl]
    res['gathered'] = {k: (torch.cat([a for a, _ in v]).tolist(), torch.cat([d['s'] for _, d in v]).tolist(), any(d['s'].requires_grad for _, d in v)) for k, v in gathered.items()}
    learn = quiet(small_learner(n=13, n_val=7, bs=5))
    preds, texts = [], []
    class Look(Callback):
        def after_pred(self):
            if self.training: preds.append((self.dl.to_detach(self.pred), self.dl.to_detach(self.yb)[0], len(self.learn.to_detach(self.pred)) == len(self.pred)))
            else:
                try: self.dl.to_detach(self.pred)
                except RuntimeError as e: texts.append(str(e))
                preds.append((self.dl.to_detach(self.pred, gather=False),))
    with learn.distrib_ctx(split_batches=True): learn.fit(1, lr=0., cbs=Look())
    res['sizes'], res['local'], res['texts'] = [[len(t) for t in o[:2]] for o in preds if len(o) == 3], all(o[2] for o in preds if len(o) == 3), texts
    res['pairs'] = [o[:2] for o in preds if len(o) == 3]
    return res


@pytest.mark.parametrize('size', [2, 3])
def test_as_their_first_users_know_them(worlds, size):
    one = small_learner(n=13, n_val=7, bs=5)
    rows = {tuple(o.tolist()): i for i, o in enumerate(one.model(one.dls.train_ds.x).detach().float())}
    every = worlds(size)(as_before, 31)
    for rank, r in enumerate(every):
        for split, (ids, same, grad) in r['gathered'].items():
            assert ids == same and not grad
            if split is None: assert set(ids) == set(range(31)) and len(ids) <= 31+size
            else: assert ids == list(range(31)), split
        assert r['sizes'] == [[5, 5], [5, 5], [3, 3]] and r['local']
        for preds, ys in r['pairs']: assert [one.dls.train_ds.y[rows[tuple(p.float().tolist())]] for p in preds] == ys.tolist()
        assert (r['texts'] or rank == 2) and all('in an evaluation each worker has whole batches of its own' in o for o in r['texts'])
