"P1 for loaders of every kind: each sample is read once in an epoch, and weights, numbers and predictions are those of one process"
import pytest
from loaders import KINDS, FastaiDL, Pairs, Stream, TorchDL, dl, learn_of
from table import *

case = Cases()
FLOAT32 = dict(vision=2e-6, tabular=2e-6, language_model=1e-6)  # models, or fastai's regularizer, in float32
NOT_REORDERED = {'fastai_stream', 'fastai_stream_processes'}  # fastai cannot, in one process either
# Objects that are loaders by their own idea of it, or whose order nobody knows, are left to other tests
NAMES = '''shuffled loader_processes drop_last shorter_than_the_set weighted partial_set own_get_idxs_class own_shuffle several_inputs_and_targets siamese vision tabular sorted_texts
    create_batch_pads language_model prebatched fastai_stream fastai_stream_processes torch_sequential torch_random torch_random_generator torch_drop_last torch_weighted
    torch_own_sampler torch_collate torch_processes torch_stream torch_stream_processes own_get_idxs_argument two_views curriculum torch_explicit_batch_sampler
    torch_own_batch_sampler torch_prebatched'''.split()


def fitted(name, within, k=1, **ctx):
    "A fit of the learner over loaders of this kind, whose batches are `k` times as large, and predictions"
    set_seed(7)
    learn = KINDS[name](k)
    with within(learn, **ctx):
        learn.fit(2)
        res = result(learn)
        plain = isinstance(learn.dls.valid, TorchDL) or name in NOT_REORDERED
        preds = [o for o in learn.get_preds(dl=learn.dls.valid if plain else None, reorder=not plain) if o is not None]
    assert len(res['losses']) > 1
    return dict(res, preds=preds)


for k in NAMES: case(partial(fitted, k), name=k, tol=FLOAT32.get(k, 2e-7))
# with batches of the workers' own, as one process with batches twice as large: those in which a batch is made in another way
for k in 'shuffled sorted_texts torch_drop_last fastai_stream language_model torch_own_batch_sampler'.split():
    case(lambda within, k=k: fitted(k, within, 1 if within.many else 2, split_batches=False), name=f'{k}, own batches', tol=FLOAT32.get(k, 2e-7))


@case
def sizes(within):
    "Sets and batches of awkward sizes, shuffled, in order, and from an iterable, fewer than workers too"
    res = {}
    for n, bs in ((1, 1), (2, 3), (5, 1), (7, 2), (13, 11)):
        for nm, make in dict(fastai=lambda: dl(n=n, bs=bs, shuffle=True), torch=lambda: TorchDL(Items(n), batch_size=bs), stream=lambda: FastaiDL(Stream(n), bs=bs)).items():
            set_seed(7)
            learn = learn_of(make(), dl(n=n, bs=bs, seed=1))
            with within(learn): learn.fit(2)
            res[nm, n, bs] = result(learn)
    return res


@case
def changed_in_a_fit(within):
    "A callback sets what a loader goes by, and looks at the first batch while another one is on"
    class Changes(Callback):
        def before_epoch(self): self.learn.dls.train.bs, self.learn.dls.train.shuffle = 3+self.epoch, self.epoch == 1
        def before_batch(self): self.dls.train.one_batch()
    set_seed(1)
    learn = learn_of(dl(), dl(n=5), cbs=Changes())
    with within(learn): learn.fit(3)
    return result(learn, bs=learn.dls.train.bs)


class Saying(TorchDL):
    "Says by itself how many batches there are"
    def __len__(self): return self.n_batches


@case
def says_another_length(within):
    "A stream of 5 batches that says it has as many, fewer, or more; one whose length nobody knows is an error, in one process too"
    res = []
    for said in (5, 1, 9):
        set_seed(7)
        learn = learn_of(Saying(Stream(22, sized=False), batch_size=5), Saying(Stream(13, sized=False, shuffle=False, seed=1), batch_size=3))
        learn.dls.train.n_batches, learn.dls.valid.n_batches = said, said
        with warnings.catch_warnings(), within(learn):
            warnings.simplefilter('ignore')  # torch says that there are more samples than there should be
            learn.fit(2)
        res.append(result(learn))
    learn = learn_of(TorchDL(Stream(22, sized=False), batch_size=5), dl(n=5))
    with pytest.raises(TypeError), within(learn): learn.fit(1)
    return res


@pytest.mark.parametrize('n', [2, 3])
def test_as_one_process(worlds, n):
    "Each kind by two workers or by three, and by both where it is for its sizes"
    own = [o for o in case if 'own batches' in o]
    case.check(worlds(n), [*NAMES[n % 2::2], *(own if n == 2 else []), *[o for o in case if o not in (*NAMES, *own)]])


def read(make):
    "What this worker reads of the training set in each of three epochs, and draws for each sample; nobody has seeded the workers"
    import fastdist.all
    seen = []
    class Sees(Callback):
        def before_epoch(self): seen.append([])
        def before_batch(self): seen[-1].extend(zip(self.x[:, 0].long().tolist(), self.x[:, 1:].tolist())) if self.training else None
    set_seed(int.from_bytes(os.urandom(4), 'little'))
    learn = quiet(Learner(DataLoaders(make(), TfmdDL(Draws(3), bs=3, num_workers=0)), nn.Linear(7, 1), loss_func=MSELossFlat(), opt_func=SGD, lr=0., cbs=Sees()))
    with learn.distrib_ctx(split_batches=True): learn.fit(3)
    return seen


class Draws:
    "The number of a sample, and two numbers of each of the three generators for it, as of an augmentation; one, in 24 bits, may come twice"
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): return torch.tensor([i, random.random(), random.random(), *np.random.rand(2).tolist(), *torch.rand(2).tolist()]), torch.tensor([0.])


class DrawsInTurn(Draws, torch.utils.data.IterableDataset):
    def __iter__(self): return map(self.__getitem__, random.sample(range(self.n), self.n))


LOADERS = dict(fastai=lambda: TfmdDL(Draws(30), bs=6, shuffle=True, num_workers=0), processes=lambda: TfmdDL(Draws(30), bs=6, shuffle=True, num_workers=2),
               torch=lambda: TorchDL(Draws(30), batch_size=6, shuffle=True), torch_processes=lambda: TorchDL(Draws(30), batch_size=6, shuffle=True, num_workers=2),
               stream=lambda: TorchDL(DrawsInTurn(30), batch_size=6))


def read_all(): return {k: read(v) for k, v in LOADERS.items()}


@pytest.mark.parametrize('n', [2, 3])
def test_each_sample_once(worlds, n):
    "In each epoch, in an order of its own; and augmentations draw other numbers for each sample and epoch, in each worker and loader process"
    every = worlds(n)(read_all)
    for nm in LOADERS:
        epochs = [[o for worker in every for o in worker[nm][e]] for e in range(3)]
        for e in epochs: assert sorted(i for i, _ in e) == list(range(30)), (nm, sorted(i for i, _ in e))
        assert len({tuple(i for i, _ in e) for e in epochs}) == 3, nm
        for drawn in zip(*[zip(d[::2], d[1::2]) for e in epochs for _, d in e]): assert len(set(drawn)) == len(drawn) or nm == 'stream', nm


def bare():
    "The documented example, before there is a group and in one; and a class of somebody's own"
    from fastdist.all import DistributedDL, get_rank, get_world_size, setup_distrib
    class Mine(DistributedDL):
        def after_batch(self, b): return super().after_batch(b)+1
    dl = TfmdDL(list(range(50)), bs=12, num_workers=2)
    def parts(): return [list(DistributedDL(dl, i, 4)) for i in range(4)]
    res = [parts(), [list(Mine(dl, i, 4)) for i in range(4)], isinstance(Mine(dl, 0, 4), DistributedDL) and isinstance(DistributedDL(dl, 0, 4), TfmdDL)]
    setup_distrib()
    res.append(parts())
    set_seed(get_rank())
    shuffled = DistributedDL(TfmdDL(list(range(50)), bs=7, shuffle=True, num_workers=0))  # those of its own rank
    return *res, len(shuffled), torch.cat(list(shuffled)).tolist()


def test_bare(world2):
    "In one process too"
    from fastdist.all import DistributedDL
    want = [[torch.arange(i*13, i*13+12) % 50, torch.tensor([i*13+12]) % 50] for i in range(4)]
    dl = TfmdDL(list(range(50)), bs=12, num_workers=2)
    def same(a, b=want): return all(x.equal(y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))
    assert same([list(DistributedDL(dl, i, 4)) for i in range(4)])
    every = world2(bare)
    for parts, mine, kinds, again, n, read in every: assert same(parts) and same(again) and same(mine, [[t+1 for t in o] for o in want]) and kinds and n == 4 and len(read) == 25
    assert sorted(every[0][-1]+every[1][-1]) == list(range(50))
