"Which samples go where, with no process group: partition, order, length, balance, state"
import math

import pytest
from hypothesis import given, settings, strategies as st
from loaders import *
from fastdist.data.dl import DistributedDL
from fastdist.data.partition import Plan

# Other examples in each run, so that many runs see many; hypothesis shrinks a failure to its smallest. As many as show each planted fault in one run
N, BS, WORLD = st.integers(0, 10**6), st.integers(1, 5000), st.integers(1, 4096)
sizes = dict(n=st.integers(1, 60), bs=st.integers(1, 17), size=st.integers(1, 9), drop_last=st.booleans())


def some_ranks(size, data): return sorted({0, size-1, data.draw(st.integers(0, size-1))})


@settings(max_examples=120)
@given(n=N, bs=BS, size=WORLD, drop_last=st.booleans(), split=st.booleans(), start=N, data=st.data())
def test_steps_of_large_worlds(n, bs, size, drop_last, split, start, data):
    "Without making the batches: all workers make the same steps, whose shares partition the global batch and differ by one sample at most"
    gbs, start = bs if split else bs*size, min(start, n)
    plans = [Plan(range(n), bs, r, size, global_bs=gbs, drop_last=drop_last, start=start) for r in some_ranks(size, data)]
    steps = (n-start)//gbs if drop_last else math.ceil((n-start)/gbs)
    assert {len(d) for d in plans} == {steps}
    for k in {0, steps//2, steps-1} if steps else ():
        lo, hi = start+k*gbs, min(start+(k+1)*gbs, n)
        assert plans[0].global_batch(k) == range(lo, hi) and plans[0].done(k+1) == hi
        for d in plans:
            c = d.counts(k)
            mine = range(lo+d.rank, hi, size)
            assert (c.mine, c.total, c.empty) == (len(mine), hi-lo, hi-lo < size)
            assert (hi-lo)//size <= c.mine <= -(-(hi-lo)//size)
            assert d.local_batch(k) == (mine or range(lo, lo+1))


@settings(max_examples=80)
@given(n=st.integers(0, 600), bs=st.integers(1, 100), size=st.one_of(st.integers(1, 40), st.just(257)), split=st.booleans(), mode=st.sampled_from(['steps', 'batches', 'slices']))
def test_plan(n, bs, size, split, mode):
    "Over an epoch each sample comes exactly once, but for those that fill up and count for nothing"
    seen = []
    for r in range(size):
        d = Plan(range(n), bs, r, size, mode, global_bs=bs if split else None)
        for k in range(len(d)):
            assert len(d.local_batch(k)) > 0
            seen.extend(d.local_batch(k)[:d.counts(k).mine])
    assert sorted(seen) == list(range(n))


def loader(n, bs, drop_last=False, shuffle=False, seed=3, **kwargs):
    set_seed(seed)
    return TfmdDL(list(range(n)), bs=bs, shuffle=shuffle, drop_last=drop_last, num_workers=0, **kwargs)


def listed(b): return [*zip(*[o.tolist() for o in b])] if isinstance(b, tuple) else b.tolist()
def batches(dl): return [listed(b) for b in dl]
def counted(dl): return [(listed(b), dl.counts) for b in dl]
def joined(parts): return [[v for vs in zip_longest(*[b[:c.mine] for b, c in step]) for v in vs if v is not None] for step in zip(*parts, strict=True)]


@settings(max_examples=60)
@given(**sizes, shuffle=st.booleans(), split=st.booleans())
def test_training_steps_are_global_batches(n, bs, size, drop_last, shuffle, split):
    "Step by step the shares put together are the batches of one process with the global batch size, in its order"
    one = batches(loader(n, bs if split else bs*size, drop_last, shuffle))
    dls = [DistributedDL(loader(n, bs, drop_last, shuffle), r, size, split_batches=split) for r in range(size)]
    lens = [len(dl) for dl in dls]
    parts = [counted(dl) for dl in dls]
    assert lens == [len(dl) for dl in dls] == [len(p) for p in parts] == [len(one)]*size
    assert joined(parts) == one


@settings(max_examples=60)
@given(**sizes, shuffle=st.booleans())
def test_evaluation_deals_whole_batches(n, bs, size, drop_last, shuffle):
    one = batches(loader(n, bs, drop_last, shuffle))
    dls = [DistributedDL(loader(n, bs, drop_last, shuffle), r, size, evaluate=True) for r in range(size)]
    assert [batches(dl) for dl in dls] == [one[r::size] for r in range(size)]
    assert [len(dl) for dl in dls] == [len(one[r::size]) for r in range(size)]


class Numbers(IterableDataset):
    def __init__(self, n): self.n = n
    def __iter__(self): return iter(range(self.n))


@settings(max_examples=50)
@given(**sizes, split=st.booleans(), torchs=st.booleans())
def test_streams_of_unknown_length(n, bs, size, drop_last, split, torchs):
    "All workers stop together, and together they have had all of the stream"
    def make(bs): return TorchDL(Numbers(n), batch_size=bs, drop_last=drop_last) if torchs else FastaiDL(Numbers(n), bs=bs, drop_last=drop_last)
    one = batches(make(bs if split else bs*size))
    assert joined([counted(DistributedDL(make(bs), r, size, split_batches=split)) for r in range(size)]) == one


@settings(max_examples=50)
@given(**sizes, shuffle=st.booleans(), split=st.booleans())
def test_torch_loaders(n, bs, size, drop_last, shuffle, split):
    def make(bs):
        set_seed(5)
        return TorchDL(list(range(n)), batch_size=bs, shuffle=shuffle, drop_last=drop_last)
    one = batches(make(bs if split else bs*size))
    dls = [DistributedDL(make(bs), r, size, split_batches=split) for r in range(size)]
    parts = []
    for dl in dls:
        set_seed(5)
        parts.append(counted(dl))
    assert [len(dl) for dl in dls] == [len(p) for p in parts] == [len(one)]*size
    if not shuffle: assert joined(parts) == one
    else:  # which samples are left out differs; in a fit even the order is that of one process: contract/test_every_loader.py
        seen = sum(joined(parts), [])
        assert len(seen) == len(set(seen)) == len(sum(one, [])) and [len(b) for b in joined(parts)] == [len(b) for b in one]


@pytest.mark.parametrize('kind,split', [('fastai', True), ('fastai', False), ('torch', False), ('stream', True), ('torch_stream', False), ('batch_sampler', True), ('weighted', True),
                                        ('language_model', True), ('language_model', False), ('processes', True), ('torch_processes', True)])
def test_goes_on_in_the_middle(kind, split):
    "In another world the same global batches come, from the very next sample on, and then the same next epoch; the state is one that torch reads without pickle"
    import io
    class Shuffled(Numbers):
        def __iter__(self): return iter(random.sample(range(self.n), self.n))
    corpus = Corpus(40)
    def make(size):
        bs = 6 if split else 12//size
        return dict(fastai=lambda: loader(50, bs, shuffle=True), torch=lambda: TorchDL(list(range(50)), batch_size=bs, shuffle=True),
                    stream=lambda: FastaiDL(Shuffled(50), bs=bs, n=50), torch_stream=lambda: TorchDL(Shuffled(50), batch_size=bs),
                    batch_sampler=lambda: TorchDL(list(range(22)), batch_sampler=Bunches(1)),
                    language_model=lambda: LMDataLoader(corpus, bs=bs, seq_len=4, shuffle=True),
                    processes=lambda: TfmdDL(list(range(50)), bs=bs, shuffle=True, num_workers=2), torch_processes=lambda: TorchDL(list(range(50)), batch_size=bs, shuffle=True, num_workers=2),
                    weighted=lambda: WeightedDL(list(range(50)), bs=bs, wgts=np.arange(50.), shuffle=True, num_workers=0))[kind]()
    def world(size, state=None):
        dls, at = [], rng_state()
        for r in range(size):
            set_rng_state(at)
            dls.append(DistributedDL(make(size), r, size, split_batches=split))
            if state: dls[-1].load_state_dict(state)
        return dls
    def epoch(dls):
        "The workers one after the other, from one state of the random numbers"
        at, parts = rng_state(), []
        for dl in dls:
            set_rng_state(at)
            parts.append(counted(dl))
        return joined(parts)
    from fastdist.data.rng import rng_state, set_rng_state
    set_seed(8)
    first = world(2)
    epoch(first)
    at, whole = rng_state(), []
    for dl in first:
        set_rng_state(at)
        it = iter(dl)
        whole.append([(listed(next(it)), dl.counts) for _ in range(2)])
        state = dl.state_dict()
        whole[-1] += [(listed(b), dl.counts) for b in it]
    then = epoch(first)
    whole = joined(whole)
    f = io.BytesIO()
    torch.save(state, f)
    state = torch.load(io.BytesIO(f.getvalue()), weights_only=True)
    for size in (2, 3, 1) if split or kind != 'batch_sampler' else (2,):
        set_seed(99)  # what was drawn in between has no part in it
        later = world(size, state)
        if not kind.endswith('stream'): assert [len(o) for o in later] == [len(whole)-2]*size
        assert state['epoch'] == 1 and epoch(later) == whole[2:]
        assert epoch(later) == then
        assert {o.state_dict()['epoch'] for o in later} == {3}


def test_state_that_does_not_fit():
    dl = DistributedDL(loader(50, 6), 0, 2, split_batches=True)
    for b in dl: break
    state = dl.state_dict()
    with pytest.raises(ValueError, match='it had 50 samples or batches, this one has 40'): DistributedDL(loader(40, 6), 0, 2, split_batches=True).load_state_dict(state)
    with pytest.raises(ValueError, match='it was cut in steps, this one is in slices'): DistributedDL(loader(50, 6), 0, 2).load_state_dict(state)
    dl = DistributedDL(loader(50, 6), 0, 2)
    next(iter(dl))
    with pytest.raises(ValueError, match='slices for 2 workers, not 3'): DistributedDL(loader(50, 6), 0, 3).load_state_dict(dl.state_dict())
    dl = DistributedDL(FastaiDL(Numbers(50), bs=6, num_workers=2), 0, 2, split_batches=True)
    for b in dl: break
    with pytest.raises(ValueError, match='use num_workers=0'): dl.load_state_dict(dl.state_dict())


def test_loading_an_item_twice_is_not_needed():
    "A worker reads its own samples and no others"
    read = []
    class Noted(list):
        def __getitem__(self, i):
            read.append(i)
            return super().__getitem__(i)
    for make in lambda: TfmdDL(Noted(range(21)), bs=5, num_workers=0), lambda: TorchDL(Noted(range(21)), batch_size=5):
        read.clear()
        list(DistributedDL(make(), 1, 3, split_batches=False))
        assert sorted(read) == list(range(1, 21, 3))


class Refused(TfmdDL):
    def __iter__(self): return iter([])

class RefusedTorch(TorchDL):
    def __iter__(self): return iter([])


@pytest.mark.parametrize('make,why', [
    (lambda: Refused([1]), 'has its own `__iter__`'),
    (lambda: RefusedTorch([1]), 'has its own `__iter__`'),
    (lambda: TorchDL([1], sampler=torch.utils.data.DistributedSampler([1], 2, 0)), 'split already, by its DistributedSampler'),
    (lambda: TorchDL([1], in_order=False, num_workers=2), 'in_order=False'),
    (lambda: [1, 2], 'so it cannot be split')])
def test_says_what_it_cannot_split(make, why):
    with pytest.raises(TypeError, match=why) as e: DistributedDL(make(), 0, 2)
    assert str(e.value).startswith('rank 0: ')


def test_a_list_with_a_dict_for_each_sample():
    "As models of torchvision that detect objects take their images and targets"
    def item(i, k): return torch.zeros(3, 8+i, 8), dict(boxes=torch.zeros(k, 4), labels=torch.full((k,), i))
    def lists(b): return tuple(zip(*b))
    for ks in (1, 2, 3, 1, 2, 2), (3, 3, 3, 2, 3, 4): # in batches of 4 and 2, and of 3 pictures of 3 colours, among which there are as many boxes as pictures
        items, n = [item(i, k) for i, k in enumerate(ks)], 4 if ks[0]==1 else 3
        for dl in TfmdDL(items, bs=n, num_workers=0, create_batch=lists), TorchDL(items, batch_size=n, collate_fn=lists):
            for r in range(2):
                every = list(DistributedDL(dl, r, 2, split_batches=True))
                want = [[*range(n)][r::2], [*range(n, 6)][r::2]]
                assert [[o.shape[1]-8 for o in x] for x, _ in every]==want and [[o['labels'][0].item() for o in y] for _, y in every]==want


@pytest.mark.parametrize('size', [2, 3, 7])
@pytest.mark.parametrize('how', [dict(split_batches=True), dict(split_batches=False), dict(split_batches=True, evaluate=True)], ids=['split', 'own', 'evaluate'])
def test_streams_of_text_go_on_from_batch_to_batch(how, size):
    "In each row of a worker's batches, from the first to the last; and together they are those of one process"
    corpus = Corpus(60)
    def make(k=1):
        set_seed(3)
        return LMDataLoader(corpus, bs=5*k, seq_len=4, shuffle=True)
    k = size if how.get('split_batches') is False and 'evaluate' not in how else 1
    one = [(x.tolist(), y.tolist()) for x, y in make(k)]
    parts = []
    for r in range(size):
        dl = DistributedDL(make(), r, size, **how)
        set_seed(3); make()
        it = [(x, y, dl.counts) for x, y in dl]
        assert len(it) == len(dl) and all(len(x) == len(it[0][0]) for x, _, _ in it)
        for i, ((_, y, _), (x, _, _)) in enumerate(zip(it, it[1:])):
            assert torch.equal(y[:, -1], x[:, 0])
        parts.append(it)
    for i, (x, y) in enumerate(one):
        for j, (row, targ) in enumerate(zip(x, y)):
            px, py, c = parts[j % size][i]
            assert px[j//size].tolist() == row and py[j//size].tolist() == targ and c.total == len(x)
