"Which samples go where, with no process group: partition, order, length, balance, state"
import pytest
from hypothesis import given, settings, strategies as st
from loaders import *
from fastdist.data.dl import DistributedDL
from fastdist.data.partition import Plan

# Other examples in each run, so that many runs see many; hypothesis shrinks a failure to its smallest. As many as show each planted fault in one run
sizes = dict(n=st.integers(1, 60), bs=st.integers(1, 17), size=st.integers(1, 9), drop_last=st.booleans())


@settings(max_examples=80)
@given(n=st.integers(0, 600), bs=st.integers(1, 100), size=st.one_of(st.integers(1, 40), st.just(257)), split=st.booleans(), mode=st.sampled_from(['steps', 'batches', 'slices']))
def test_plan(n, bs, size, split, mode):
    """Over an epoch each sample comes exactly once, but for those that fill up and count for nothing; all workers make as many steps, of
    shares that are alike"""
    seen, steps = [], set()
    for r in range(size):
        d = Plan(range(n), bs, r, size, mode, global_bs=bs if split else None)
        steps.add(len(d))
        for k in range(len(d)):
            counts = d.counts(k)
            assert len(d.local_batch(k)) > 0 and (mode != 'steps' or counts.total//size <= counts.mine <= -(-counts.total//size))
            seen.extend(d.local_batch(k)[:d.counts(k).mine])
    assert sorted(seen) == list(range(n)) and (mode == 'batches' or len(steps) == 1)


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


@pytest.mark.parametrize('kind,split', [('fastai', True), ('fastai', False), ('torch', False), ('stream', True), ('torch_stream', False), ('batch_sampler', True), ('weighted', True),
                                        ('language_model', True), ('language_model', False), ('processes', True)])
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
                    processes=lambda: TfmdDL(list(range(50)), bs=bs, shuffle=True, num_workers=2),
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


def test_a_worker_reads_its_own_samples_only():
    read = []
    class Noted(list):
        def __getitem__(self, i):
            read.append(i)
            return super().__getitem__(i)
    for make in lambda: TfmdDL(Noted(range(21)), bs=5, num_workers=0), lambda: TorchDL(Noted(range(21)), batch_size=5):
        read.clear()
        list(DistributedDL(make(), 1, 3, split_batches=False))
        assert sorted(read) == list(range(1, 21, 3))


class ByRank(torch.utils.data.IterableDataset):
    "Each worker has samples of its own, or all of them"
    def __init__(self, splits): self.splits = splits
    def __len__(self): return 12
    def __iter__(self):
        import torch.distributed as dist
        first, every = (dist.get_rank(), dist.get_world_size()) if self.splits else (0, 1)
        return iter([dict(name=f'{i}.jpg', x=torch.full((2,), float(i))) for i in range(first, 12, every)])


def by_rank(processes):
    from fastdist.all import DistributedDL, setup_distrib
    setup_distrib()
    res = []
    for splits in False, True:
        for split in False, True:
            for loader in (partial(torch.utils.data.DataLoader, batch_size=4, collate_fn=lambda o: torch.stack([d['x'] for d in o])),
                           partial(DataLoader, bs=4, create_batch=lambda o: torch.stack([d['x'] for d in o]))):
                try: res.append(len(list(DistributedDL(loader(ByRank(splits), num_workers=processes), split_batches=split))))
                except RuntimeError as e: res.append(str(e))
    return res


@pytest.mark.parametrize('processes', [0, 1])
def test_streams_that_split_themselves_by_rank(world2, processes):
    "Of what each worker is given a part, all have to read the same"
    for res in world2(by_rank, processes):
        assert res[:4] == [2, 2, 3, 3], res
        for e in res[4:]: assert 'has another first sample' in e and 'nodesplitter' in e, res
