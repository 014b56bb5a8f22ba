"DistributedDL, with no process group: partition, order, length"
import math

from hypothesis import given, settings, strategies as st
from learners import *
from fastdist.data import DistributedDL, share

sizes = dict(n=st.integers(1, 60), bs=st.integers(1, 17), size=st.integers(1, 9), drop_last=st.booleans())


def loader(n, bs, drop_last, shuffle=False, seed=3):
    set_seed(seed)
    return TfmdDL(list(range(n)), bs=bs, shuffle=shuffle, drop_last=drop_last, num_workers=0)


def batches(dl): return [b.tolist() for b in dl]


@given(n=st.integers(0, 10**6), size=st.integers(1, 4096))
def test_shares(n, size):
    s = [share(n, r, size) for r in range(size)]
    assert s[0].start == 0 and s[-1].stop == n and all(a.stop == b.start for a, b in zip(s, s[1:]))
    lens = [o.stop-o.start for o in s]
    assert max(lens)-min(lens) <= 1 and lens == sorted(lens, reverse=True)


@settings(deadline=None, max_examples=150)
@given(**sizes, shuffle=st.booleans(), split=st.booleans())
def test_training_steps_are_global_batches(n, bs, size, drop_last, shuffle, split):
    "Step by step the shares put together are the batches of one process with the global batch size"
    one = batches(loader(n, bs if split else bs*size, drop_last, shuffle))
    dls = [DistributedDL(loader(n, bs, drop_last, shuffle), r, size, split_batches=split) for r in range(size)]
    parts = [batches(dl) for dl in dls]
    assert [len(dl) for dl in dls] == [len(p) for p in parts] == [len(one)]*size
    for i, b in enumerate(one):
        counts = [dl.counts(i) for dl in dls]
        assert all(total == len(b) for _, total in counts) and max(c for c, _ in counts)-min(c for c, _ in counts) <= 1
        assert sum([p[i][:c] for p, (c, _) in zip(parts, counts)], []) == b
        assert all(len(p[i]) == max(1, c) for p, (c, _) in zip(parts, counts))


@settings(deadline=None, max_examples=150)
@given(**sizes, shuffle=st.booleans())
def test_evaluation_deals_whole_batches(n, bs, size, drop_last, shuffle):
    one = batches(loader(n, bs, drop_last, shuffle))
    dls = [DistributedDL(loader(n, bs, drop_last, shuffle), r, size, evaluate=True) for r in range(size)]
    assert [batches(dl) for dl in dls] == [one[r::size] for r in range(size)]
    assert [len(dl) for dl in dls] == [len(one[r::size]) for r in range(size)]


@settings(deadline=None, max_examples=150)
@given(**sizes)
def test_slices(n, bs, size, drop_last):
    "fastai's documented form: slices of one length, the last filled up from the start"
    m = math.ceil(n/size)
    for r in range(size):
        dl = DistributedDL(loader(n, bs, drop_last), r, size)
        expected = [i % n for i in range(r*m, (r+1)*m)]
        expected = [expected[i:i+bs] for i in range(0, m, bs)]
        if drop_last: expected = [b for b in expected if len(b) == bs]
        assert batches(dl) == expected and len(dl) == len(expected)


def test_loaders_with_an_order_of_their_own():
    "Weighted, partial, and a `get_idxs` given as an argument"
    from fastai.callback.data import PartialDL, WeightedDL
    def make(cls, **kwargs):
        set_seed(5)
        return cls(dataset=list(range(20)), bs=4, num_workers=0, **kwargs)
    for cls, kw in (WeightedDL, dict(wgts=np.arange(20.), shuffle=True)), (PartialDL, dict(partial_n=9)), (TfmdDL, dict(get_idxs=lambda: [3, 1, 4, 1, 5, 9])):
        one = batches(make(cls, **kw))
        parts = []
        for r in range(3):
            dl = DistributedDL(make(cls, **kw), r, 3, split_batches=True)
            set_seed(5); make(cls, **kw)
            parts.append((dl, batches(dl)))
            assert isinstance(dl, cls)
        assert len(parts[0][1]) == len(one) == len(parts[0][0])
        for i, b in enumerate(one): assert sum([p[i][:dl.counts(i)[0]] for dl, p in parts], []) == b


def test_skipped_items_move_no_others():
    from fastai.data.load import SkipItemException
    class Skips(list):
        def __getitem__(self, i):
            if i == 5: raise SkipItemException
            return super().__getitem__(i)
    parts = [batches(DistributedDL(TfmdDL(Skips(range(12)), bs=6, num_workers=0), r, 2, split_batches=True)) for r in range(2)]
    assert parts == [[[0, 1, 2], [6, 7, 8]], [[3, 4], [9, 10, 11]]]


def test_pickles(tmp_path):
    "For loader processes that are not forked"
    import pickle
    from fastai.data.load import DataLoader
    dl = DistributedDL(DataLoader(list(range(10)), bs=3), 1, 2, split_batches=True)
    dl.get_idxs()
    twin = pickle.loads(pickle.dumps(dl))
    assert isinstance(twin, DistributedDL) and isinstance(twin, DataLoader) and batches(twin) == batches(dl)
