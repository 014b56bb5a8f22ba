"`find_batch_size` finds what fits and leaves no trace; with `microbatch` a fit is that of whole batches, in parts"
import contextlib, io, os

import pytest, torch
from fastai.callback.training import GradientClip
from learners import *


class Parts(nn.Module):
    "What `n` workers with parts of `size` samples compute, in one process: batch norm over the part of all"
    def __init__(self, model, n, size):
        super().__init__()
        self.model, self.n, self.size = model, n, size

    def forward(self, x):
        rows = [torch.arange(r, len(x), self.n) for r in range(self.n)]
        k = max(1, min(-(-len(rows[0])//self.size), len(rows[-1])))
        at = torch.cat(ids := [torch.cat([r[i*len(r)//k:(i+1)*len(r)//k] for r in rows]) for i in range(k)])
        return torch.cat([self.model(x[i]) for i in ids])[at.argsort()]


class PairLoss(nn.Module):
    "No mean over samples: fastdist computes it of the global batch"
    def forward(self, pred, y): return (torch.pdist(pred).mean()-1).square().float() if len(pred) > 1 else pred.sum().float()*0


CASES = dict(plain=dict(), weighted=dict(loss=lambda: Double(weight=torch.tensor([1., 2., 5.], dtype=torch.float64))), of_all=dict(loss=PairLoss),
             clipped=dict(cbs=lambda: GradientClip(0.05)), steps=dict(gradient_accumulation_steps=2), bn=dict(bn=True), adam=dict(opt=Adam),
             again=dict(activation_checkpointing=True), twice=dict(cbs=lambda: Twice()))


class Twice(Callback):
    "A second backward pass through the same parts"
    def before_backward(self): self.learn.loss_grad.backward(retain_graph=True)


def fitted(case='plain', n=23, bs=9, reference=None, **ctx):
    "Weights and losses; `reference` is the number of workers and the size of a part of what one process is to compute by itself"
    import fastdist.all
    kw = dict(CASES[case])
    ctx.update({k: kw.pop(k) for k in ('gradient_accumulation_steps', 'activation_checkpointing') if k in kw})
    cbs, loss, steps = kw.pop('cbs', noop), kw.pop('loss', Double), []
    learn = quiet(learner(n=n, bs=bs, lr=0.05, cbs=cbs(), loss=loss(), n_val=7, **kw))
    if reference: learn.model = Parts(learn.model, *reference)
    class Counts(Callback):
        def after_step(self): steps.append(len(self.pred))
    with warnings.catch_warnings(), learn.distrib_ctx(split_batches=True, **ctx):
        warnings.simplefilter('ignore')
        learn.fit(2, cbs=Counts())
    assert 'forward' not in vars(learn.model)
    return {k.removeprefix('model.'): v for k, v in weights(learn).items()}, [float(o) for o in learn.recorder.losses], steps


@pytest.mark.parametrize('n,strategy,case', [*((2, 'ddp', o) for o in CASES), (3, 'ddp', 'plain'), (3, 'ddp', 'bn'), (3, 'ddp', 'weighted'), (3, 'zero1', 'adam'),
                                             (2, 'zero1', 'steps'), (3, 'zero2', 'plain'), (3, 'fsdp', 'steps'), (2, 'fsdp', 'bn'), (3, 'fsdp', 'adam')])
def test_parts_are_a_whole(worlds, n, strategy, case):
    "Batches of 9 and 5 samples in parts of 2 of a worker's; callbacks see none of it"
    want = fitted(case, reference=(n, 2) if case == 'bn' else None)
    for w, losses, steps in worlds(n)(fitted, case, strategy=strategy, microbatch=2):
        assert diff(want[0], w) < 1e-6 and diff(want[1], losses) < 1e-6 and len(steps) == len(want[2]), (diff(want[0], w), diff(want[1], losses))


@pytest.mark.parametrize('size', [2, 100])
@pytest.mark.parametrize('case', ['plain', 'weighted', 'bn'])
def test_in_one_process(case, size):
    size += case == 'bn' and size < 3 # of one sample alone there are no statistics
    want = fitted(case, reference=(1, size) if case == 'bn' else None)
    w, losses, steps = fitted(case, microbatch=size)
    assert diff(want[0], w) < 1e-6 and diff(want[1], losses) < 1e-6 and steps == want[2]


@pytest.mark.parametrize('n,bs', [(3, 2), (4, 3), (19, 6), (8, 7)])
def test_fewer_samples_than_parts(worlds, n, bs):
    "A last batch of one sample, and workers without any"
    want = fitted(n=n, bs=bs)
    for o in worlds(3)(fitted, n=n, bs=bs, microbatch=1): assert diff(want[0], o[0]) < 1e-6 and diff(want[1], o[1]) < 1e-6


class Runs(nn.Module):
    "A model whose memory runs out above some number of samples, in one rank at fewer"
    def __init__(self, model, most, rank=None):
        super().__init__()
        self.model, self.most, self.rank, self.sizes = model, most, rank, []

    def forward(self, x):
        self.sizes.append(len(x))
        if len(x) > self.most and self.rank in (None, os.environ.get('RANK')): raise torch.OutOfMemoryError('injected')
        return self.model(x)


class Remembers(Callback):
    n = 0
    def before_batch(self): self.n += 1


def state_of(learn):
    opt = learn.opt.state_dict() if learn.opt else None
    return (weights(learn), [m.training for m in learn.model.modules()], None if opt is None else [(k, v.tolist() if isinstance(v, Tensor) else v) for s in opt['state'] for k, v in s.items()],
            [p.grad is None for p in learn.model.parameters()], torch.rand(1).item(), np.random.rand(), random.random(), learn.remembers.n, sorted(vars(learn)))


def searched(most, rank=None, bs=6, n=500, fits=0, bn=True, microbatch=None, ctx=True, **kwargs):
    "The size that was found, what was printed, and whether the learner is as it was and trains as if there had been no search"
    import fastdist.all
    res, states = [], []
    for search in False, True:
        learn = quiet(learner(n=n, bs=bs, n_val=6, bn=bn, opt=Adam, cbs=Remembers()))
        learn.model = Runs(learn.model, most, rank)
        with learn.distrib_ctx(microbatch=microbatch, **kwargs) if ctx else contextlib.nullcontext(), contextlib.redirect_stdout(io.StringIO()) as said:
            if fits: learn.fit(fits)
            found = learn.find_batch_size() if search else None
            states.append(state_of(learn))
            learn.fit(1)
        res.append(weights(learn))
    return found, said.getvalue(), diff(*res), [a == b for a, b in zip(*[s[1:] for s in states])], diff(states[0][0], states[1][0])


def check(res, size):
    found, said, apart, same, moved = res
    assert found == size and not apart and not moved and all(same), (found, apart, same, moved)


@pytest.mark.parametrize('most,ctx,fits', [(40, False, 0), (10, True, 1), (10**9, True, 0)])
def test_found_in_one_process(most, ctx, fits):
    check(res := searched(most, ctx=ctx, fits=fits), min(most, 500))
    assert 'samples/s' in res[1] and ('does not fit' in res[1]) == (most < 500)


@pytest.mark.parametrize('strategy,split', [('ddp', True), ('ddp', False), ('zero1', True)])
def test_found_by_all(worlds, strategy, split):
    "The memory of rank 1 runs out first; `bs` is that of all, or of each"
    for r, res in enumerate(worlds(2)(searched, 10, '1', strategy=strategy, split_batches=split, fits=int(split))):
        check(res, 20 if split else 10)
        assert (('of all 2 workers' if split else 'of each of 2 workers') in res[1]) == (r == 0)


def refused(strategy):
    with pytest.raises(ValueError, match="strategy='fsdp'.*zero1"): searched(10, strategy=strategy)
    with pytest.raises(ValueError, match="strategy='fsdp'.*microbatch="): fitted(strategy=strategy, microbatch='auto')


def test_where_workers_wait_for_shards(world2): world2(refused, 'fsdp')


class Odd(nn.Module):
    "Binds its buffer to another tensor in each forward"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3, dtype=torch.float64)
        self.register_buffer('h', torch.zeros(3, dtype=torch.float64))
    def forward(self, x):
        self.h = self.h+1
        return self.lin(x)+self.h


class Hooks(Callback):
    "Hooks that stay, and what a fit has from its beginning on"
    def before_fit(self): self.model.lin.register_forward_hook(lambda *_: None)
    def before_train(self): assert len(self.dl) and self.epoch == 0


def tried(find):
    "Whether a learner is as it was, by what its model has"
    import fastdist.all
    from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
    learn = quiet(learner(model=Odd, metrics=accuracy, cbs=[SaveModelCallback(monitor='accuracy'), EarlyStoppingCallback(monitor='accuracy'), Hooks()]))
    h, device = learn.model.h, learn.model.h.device
    if torch.cuda.is_available(): learn.dls.to(torch.device('cuda', torch.cuda.current_device()))
    with contextlib.redirect_stdout(io.StringIO()): find(learn)
    assert learn.model.h is h and not h.any() and not learn.model.lin._forward_hooks
    assert {t.device for t in learn.model.state_dict().values()} == {device} and device.type == 'cpu'


@pytest.mark.parametrize('find', [Learner.find_batch_size, partial(Learner.distrib_plan, world_size=8, link=1e9)])
def test_leaves_no_trace(find): tried(find)


def on_gpu(): tried(Learner.find_batch_size), tried(partial(Learner.distrib_plan, world_size=8, link=1e9))


def test_model_is_where_it_was(fake_gpu_worlds): fake_gpu_worlds(2)(on_gpu)


@pytest.mark.parametrize('kwargs', [dict(batch_size=None), dict(batch_sampler=torch.utils.data.BatchSampler(range(6), 2, False))])
def test_loaders_without_a_batch_size(kwargs):
    import fastdist.all
    learn = learner()
    learn.dls = DataLoaders(torch.utils.data.DataLoader(learn.dls.train_ds, **kwargs))
    with pytest.raises(ValueError, match='a training loader with a batch size'): learn.find_batch_size()


def by_itself(most, rank=None, bs=12, **ctx):
    "Weights, and sizes of parts, of a fit that finds what fits"
    import fastdist.all
    learn = quiet(learner(n=26, bs=bs, n_val=2, opt=Adam))
    learn.model = Runs(learn.model, most, rank)
    with learn.distrib_ctx(split_batches=True, **ctx), contextlib.redirect_stdout(io.StringIO()) as said:
        learn.fit(1)
        learn.model.sizes.clear()
        learn.fit(1)
    return weights(learn), max(learn.model.sizes[-4:]), said.getvalue()


@pytest.mark.parametrize('n', [1, 2])
def test_auto(worlds, n):
    "What fits into the memory of the worker that has least"
    want = by_itself(100)[0]
    for w, size, said in worlds(2)(by_itself, 4, '1', microbatch='auto') if n == 2 else [by_itself(4, microbatch='auto')]:
        assert diff(want, w) < 1e-6 and size <= 4


class Keeps(nn.Linear):
    def reset(self): pass


class NoRows(nn.Linear):
    def forward(self, x): return super().forward(x).mean()


@pytest.mark.parametrize('model,msg', [(Keeps, 'keeps a state'), (NoRows, r'returns some of shapes \[\(\)\]')])
def test_models_that_have_no_parts(model, msg):
    import fastdist.all
    learn = quiet(learner(model=lambda: model(4, 3, dtype=torch.float64)))
    with pytest.raises(ValueError, match=msg), learn.distrib_ctx(microbatch=2): learn.fit(1)
    assert 'forward' not in vars(learn.model)
    for o in 0, 'all', 1.5:
        with pytest.raises(ValueError, match='microbatch=.*an integer from 1'), learn.distrib_ctx(microbatch=o): pass
    with pytest.raises(ValueError, match='max_bs=0'): learn.find_batch_size(max_bs=0)


def wide():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4096), nn.ReLU(), nn.Linear(4096, 3))


def in_memory_of(room, split, microbatch=None, search=False, precision=noop):
    "Weights after a fit, and the most bytes beyond those from before it; where there is `room` for so many more, and for twice in other ranks"
    import fakegpu.cuda, fastdist.all, gc
    learn = precision(quiet(learner(n=1024, n_val=4, bs=512, val_bs=4, model=wide, dtype=torch.float32, loss=CrossEntropyLossFlat(), opt=SGD)))
    gpu, limits = torch.device('cuda', torch.cuda.current_device()), fakegpu.cuda.limit_memory
    with learn.distrib_ctx(split_batches=split, microbatch=microbatch), contextlib.redirect_stdout(io.StringIO()):
        gc.collect()
        before = torch.cuda.memory_allocated(gpu)
        torch.cuda.reset_peak_memory_stats(gpu)
        try:
            limits(before+room*(1 if os.environ.get('RANK', '0') == '0' else 2))
            if search: return learn.find_batch_size(), torch.cuda.memory_allocated(gpu)-before
            learn.fit(1)
        finally: limits(2**62)
    return weights(learn), torch.cuda.max_memory_allocated(gpu)-before


def test_on_gpus(fake_gpu_worlds):
    "Parts take a part of the memory, and `find_batch_size` and 'auto' find what there is room for; the memory of rank 0 runs out first"
    run, much = fake_gpu_worlds(2), 2**40
    whole, parts = [run(in_memory_of, much, True, microbatch=o)[0] for o in (None, 32)]
    assert parts[1] < whole[1]/2 and diff(whole[0], parts[0]) < 1e-5
    room = (whole[1]+parts[1])//2
    (size, left), again = run(in_memory_of, room, True, search=True)
    assert again == (size, left) and 32*2 <= size < 512 and not left
    half = [run(in_memory_of, much, True, microbatch=o, precision=Learner.to_fp16)[0] for o in (None, 32)]
    assert diff(half[0][0], half[1][0]) < 1e-3 and half[1][1] < half[0][1]
    for w, peak in run(in_memory_of, room, True, microbatch='auto'): assert diff(whole[0], w) < 1e-5 and peak < 2*room
