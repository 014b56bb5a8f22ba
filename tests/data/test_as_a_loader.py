"`DistributedDL` as an object, with no process group: a subclass of it, what `isinstance` says, attributes, copies, and everything that its loader can do"

import pytest
from loaders import *
import copy, pickle
from fastai.tabular.core import TabDataLoader
from fastdist.data.dl import DistributedDL


class Numbers(IterableDataset):
    def __init__(self, n): self.n = n
    def __iter__(self): return iter(range(self.n))

class Sized(Numbers):
    def __len__(self): return self.n


def table():
    df = pd.DataFrame(dict(a=list('xyzzyxx'), b=np.linspace(0, 1, 7), y=np.arange(7.)))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return TabularPandas(df, [Categorify], ['a'], ['b'], 'y')


MAKE = dict(tfmd=lambda: TfmdDL(list(range(10)), bs=4, num_workers=0), fastai=lambda: FastaiDL(list(range(10)), bs=4), stream=lambda: FastaiDL(Numbers(10), bs=4, n=10),
            processes=lambda: TfmdDL(list(range(10)), bs=4, num_workers=2),
            sorted=lambda: SortedDL(Texts(10), bs=4, before_batch=padded, num_workers=0), weighted=lambda: WeightedDL(list(range(10)), bs=4, shuffle=True, num_workers=0),
            language_model=lambda: LMDataLoader(Corpus(9), bs=4, seq_len=4), table=lambda: TabDataLoader(table(), bs=4),
            torch=lambda: TorchDL(list(range(10)), batch_size=4), torch_sampler=lambda: TorchDL(list(range(10)), batch_size=4, sampler=Hops(10)),
            torch_batch_sampler=lambda: TorchDL(list(range(22)), batch_sampler=Bunches(1)), torch_stream=lambda: TorchDL(Sized(10), batch_size=4),
            torch_persistent=lambda: TorchDL(list(range(10)), batch_size=4, num_workers=2, persistent_workers=True))
HOW = dict(slices={}, own=dict(split_batches=False), split=dict(split_batches=True), evaluate=dict(evaluate=True))
def ways(kind): return [v for k, v in HOW.items() if not (kind.endswith('stream') and k == 'evaluate')]


def made(kind):
    set_seed(2)
    return MAKE[kind]()

def flat(o):
    if isinstance(o, (list, tuple)): return [v for e in o for v in flat(e)]
    return o.flatten().tolist() if isinstance(o, Tensor) else [o]
def listed(dl):
    set_seed(4)
    return [flat(b) for b in dl]


class Counted(DistributedDL):
    "An attribute set before and after, a class attribute, a property, and methods that call those of `DistributedDL`"
    unit = 'batches'
    def __init__(self, dl, *args, note=None, **kwargs):
        self.n_seen = 0
        super().__init__(dl, *args, **kwargs)
        self.note = note
    @property
    def said(self): return f'{self.n_seen} {self.unit}'
    def __iter__(self):
        for b in super().__iter__():
            self.n_seen += 1
            yield b
    def __len__(self): return super().__len__()+100
    def state_dict(self): return dict(n_seen=self.n_seen, inner=super().state_dict())
    def load_state_dict(self, state):
        self.n_seen = state['n_seen']
        super().load_state_dict(state['inner'])
    def after_batch(self, b): return super().after_batch(b)*2


@pytest.mark.parametrize('kind', ['tfmd', 'stream', 'processes', 'torch', 'torch_stream'])
def test_a_subclass(kind):
    twice = 1 if kind.startswith('torch') else 2  # PyTorch's loaders call no `after_batch`
    for how in ways(kind):
        expected, dl = listed(DistributedDL(made(kind), 1, 2, **how)), made(kind)
        mine, n = Counted(dl, 1, 2, **how, note='x'), len(expected)
        assert mine.dl is dl and all(isinstance(mine, o) for o in (Counted, DistributedDL, type(dl)))
        assert listed(mine) == [[v*twice for v in b] for b in expected]
        mine.unit = 'of them'
        assert (mine.note, mine.said, len(mine)) == ('x', f'{n} of them', n+100)
        later = Counted(made(kind), 1, 2, **how)
        later.load_state_dict(mine.state_dict())
        assert later.n_seen == n


def test_a_subclass_stays_one():
    "In `new`, copies and pickles"
    mine = Counted(made('tfmd'), 1, 2, split_batches=True, note='x')
    for o in mine.new(), copy.copy(mine), copy.deepcopy(mine), pickle.loads(pickle.dumps(mine)), mine.new(bs=3).new(bs=4):
        assert isinstance(o, Counted) and isinstance(o, TfmdDL) and len(o) > 100 and listed(o) == listed(mine)


@pytest.mark.parametrize('kind', MAKE)
def test_stands_in_for_its_loader(kind):
    for how in ways(kind):
        dl = made(kind)
        ddl = DistributedDL(dl, 0, 2, **how)
        assert isinstance(ddl, DistributedDL)
        for o in type(dl).__mro__: assert isinstance(ddl, o)
        if isinstance(dl, FastaiDL): assert not isinstance(ddl, TorchDL) and isinstance(ddl, TfmdDL) == isinstance(dl, TfmdDL)
        if isinstance(dl, TorchDL): assert not hasattr(ddl, 'get_idxs') and not hasattr(ddl, 'new') and not hasattr(ddl, 'after_batch')
        assert not hasattr(ddl, 'no_such_attribute') and set(dir(dl)) <= set(dir(ddl))
        first = listed(ddl)
        again = DistributedDL(ddl, 0, 2, **how)
        assert again.dl is dl and len(ddl) == len(first) == len(again)
        for o in copy.copy(ddl), *([] if kind == 'torch_persistent' else [copy.deepcopy(ddl), pickle.loads(pickle.dumps(ddl))]):
            assert isinstance(o, DistributedDL) and isinstance(o, type(dl)) and len(o) == len(first)


def test_what_is_set_reaches_the_loader():
    dl = made('tfmd')
    ddl = DistributedDL(dl, 0, 2, split_batches=True)
    ddl.bs, ddl.shuffle, ddl.rng, ddl.after_item, ddl.drop_last = 6, True, random.Random(3), lambda o: o+100, True
    assert (dl.bs, dl.shuffle, dl.drop_last) == (6, True, True) and dl.rng is ddl.rng
    assert len(ddl) == 1 and [len(b) for b in ddl] == [3] and all(v >= 100 for b in ddl for v in b)
    ddl.get_idxs = lambda: [5, 6, 7, 8, 9, 0]
    assert listed(ddl) == [[105, 107, 109]] and ddl.get_idxs() == [5, 6, 7, 8, 9, 0]
    ddl.n = 4
    assert dl.n == 4
    t = TorchDL(list(range(10)), batch_size=4)
    ddl = DistributedDL(t, 0, 2, split_batches=True)
    ddl.collate_fn = lambda b: -tensor(b)
    assert listed(ddl) == [[0, -2], [-4, -6], [-8]] and t.collate_fn is ddl.collate_fn
    with pytest.raises((AttributeError, ValueError)): ddl.bs = 3
    with pytest.raises(ValueError): ddl.batch_size = 3
