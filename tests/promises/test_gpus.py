"""P6: what runs on the CPU runs on GPUs, with the same numbers; a worker stays on its own. Where there
is none the GPUs are pretended (support/fakegpu), under nccl's rules."""
import os, signal, time

import fakegpu, pytest, real_gpus
from accelerate import ParallelismConfig
from fastai.callback.fp16 import MixedPrecision  # and `to_fp16`
from fastai.callback.training import GradientClip
from forked import started
from harness import free_port
from learners import *
from strategies import FullyShardedDataParallelPlugin, Scaled, ctx_of, fit, fits

STRATEGIES = 'ddp', 'zero1', 'zero2', 'fsdp'
DEVICE = 'cuda' if real_gpus.hide() else 'fakegpu'
WIDTH, BESIDE = (4096, .12) if real_gpus.hide() else (258, 0)  # of layers; what cuBLAS has of its own, some 90 MB, in sizes of such a model


def report(learn, preds=None):
    "What a learner has learned, and where it is"
    res = SimpleNamespace(weights=weights(learn), losses=[float(o) for o in learn.recorder.losses], values=[list(v) for v in learn.recorder.values], preds=preds)
    state = [v for s in learn.opt.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    res.devices = {str(o.device) for o in (*learn.model.parameters(), *learn.model.buffers(), *state)}
    return res


def own_gpu():
    "What the device of this worker's GPU is called"
    return str(torch.empty(0, device=torch.device('cuda', torch.cuda.current_device())).device)


class Aux(Callback):
    "A mean over samples beside the loss, whose own mean goes by the weights of classes"
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad + .3*self.pred.pow(2).mean().float()


CASES = dict(clip=lambda: dict(cbs=GradientClip(0.05)), accumulate=lambda: dict(cbs=GradientAccumulation(11)), plain=dict,
             weighted=lambda: dict(loss=Double(weight=torch.tensor([1., .5, 2.], dtype=torch.float64)), cbs=Aux()))


def twice(ctx=None, early=True, bs=6, frozen=False, case='plain', **kwargs):
    "Two fits, in a context each, and predictions; the loaders were made before the process group where `early`"
    import fastdist.all
    from fastdist.world import setup_distrib, get_rank
    if ctx is not None and not early: setup_distrib()
    learn = quiet(learner(n=20, bs=bs, n_val=7, bn=True, lr=0.05, metrics=accuracy, splitter=lambda m: [list(m[:1].parameters()), list(m[1:].parameters())],
                          **CASES[case](), **kwargs))
    if ctx is not None: learn.dls.to(torch.device('cuda', torch.cuda.current_device()))  # as a DataBlock does it
    around = contextlib.nullcontext if ctx is None else partial(learn.distrib_ctx, **ctx)
    with around():
        if frozen: learn.freeze()
        learn.fit_one_cycle(1, 0.05)
    with around():
        if frozen: learn.unfreeze()
        learn.fit_one_cycle(1, 0.05)
        preds = [o.cpu() for o in learn.get_preds()]
    res = report(learn, preds)
    res.validated = learn.validate()  # by each worker alone
    if ctx is not None:
        res.rank, res.loader, res.gpu = get_rank(), str(torch.device(learn.dls.device)), own_gpu()
        res.elsewhere = [torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count()) if i != get_rank()]
    return res


def same(a, b, tol=1e-6):
    assert diff(a.weights, b.weights) < tol and diff(a.losses, b.losses) < tol
    assert all(diff([x for x in v if x is not None], [x for x in w if x is not None]) < tol for v, w in zip(a.values, b.values))
    assert a.preds is None or all(diff(x, y) < tol for x, y in zip(a.preds, b.preds))


@pytest.mark.parametrize('early,strategy', [(False, 'ddp'), (True, 'zero1'), (False, 'zero2'), (True, 'fsdp')])
def test_as_on_the_cpu(gpu_worlds, early, strategy):
    "Loaders that were made before the process group are of the GPU 0 in all workers; the learner stays on its worker's, with the optimizer's state"
    n, kwargs = (3, dict(opt=Adam)) if early == (strategy in ('zero1', 'fsdp')) else (2, dict(opt=partial(OptimWrapper, opt=torch.optim.AdamW), frozen=True))
    kwargs['case'] = dict(ddp=('weighted', 'accumulate'), zero1=('accumulate', 'clip'), zero2=('clip', 'weighted'), fsdp=('plain', 'clip'))[strategy][early]
    alone = twice(**kwargs)
    for o in gpu_worlds(n)(twice, ctx_of(strategy), early, **kwargs):
        same(o, alone)
        # as it was found: a sharded copy is for models that no GPU has room for
        assert o.devices == {'cpu' if strategy in ('zero2', 'fsdp') else o.gpu} and o.loader in (o.gpu, f'cuda:{o.rank}'), (o.rank, o.devices, o.loader)
        assert not any(o.elsewhere) or early or real_gpus.hide(), o.elsewhere
        assert diff(list(o.validated), list(alone.validated)) < 1e-6


def goes_on(strategy, opt):
    "A fit of a model that has been left on the CPU, with a parameter that is a number, in a context or not, and one after it, by this process alone on its GPU"
    import fastdist.all
    from fastdist.world import setup_distrib
    learn = quiet(learner(n=20, bs=6, lr=0.05, opt=opt, model=lambda: Scaled(False).double()))
    if strategy:
        setup_distrib()
        learn.dls.to(torch.device('cuda', torch.cuda.current_device()))
    with learn.distrib_ctx(**ctx_of(strategy)) if strategy else contextlib.nullcontext(): learn.fit(1)
    learn.fit(1)
    state = getattr(learn.opt, 'opt', learn.opt).state  # a torch optimizer has its own
    return weights(learn), {(k == 'step', o.device.type) for s in state.values() for k, o in s.items() if isinstance(o, torch.Tensor)}


@pytest.mark.parametrize('opt', [Adam, partial(OptimWrapper, opt=torch.optim.AdamW)])
def test_after_a_context(gpu_worlds, opt):
    "What the optimizer remembers follows the parameters to the GPU, but for counts of steps, which torch wants on the CPU"
    alone, _ = goes_on(None, opt)
    for found, places in gpu_worlds(2)(goes_on, 'fsdp', opt):
        assert diff(found, alone) < 1e-6 and places == ({(False, DEVICE)} if opt is Adam else {(False, DEVICE), (True, 'cpu')}), places


class FailsBefore(Callback):
    "Before the training batch of this number in its fit"
    def __init__(self, at): self.at = at
    def before_batch(self):
        if self.training and self.learn.train_iter == self.at: raise ZeroDivisionError('no batch')


class Averages(Callback):
    "The mean of the weights of a layer, from step to step"
    order = 50
    def after_step(self):
        now = self.model[-1].bias.detach()
        now = getattr(now, 'full_tensor', lambda: now)()
        self.mean = now.clone() if not hasattr(self, 'mean') else self.mean.lerp(now, .1)


def in_two_runs(strategy, folder, fails, torchs):
    """Two fits in a context, with `Resume` where there is a folder; an error before batch `fails` ends the first run; with PyTorch's loader
    for `torchs`. What is learned, or `None`"""
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    from fastdist.world import setup_distrib
    from_the_start()
    setup_distrib()
    learn = quiet(learner(n=20, bs=6, n_val=7, bn=True, lr=0.05, opt=Adam, cbs=Averages()))
    if torchs: learn.dls = DataLoaders(*[torch.utils.data.DataLoader(o.dataset, batch_size=6, shuffle=not i) for i, o in enumerate(learn.dls.loaders)])
    else: learn.dls.to(torch.device('cuda', torch.cuda.current_device()))
    with learn.distrib_ctx(**ctx_of(strategy), **(dict(resume=Resume(folder, every=1)) if folder else {})):
        try:
            learn.fit(1, cbs=FailsBefore(fails) if fails else None)
            learn.fit_one_cycle(1)
        except ZeroDivisionError: return
    res = report(learn, [learn.averages.mean.cpu()])
    res.devices.add(str(learn.averages.mean.device))
    return res


@pytest.mark.parametrize('strategy,torchs', [('ddp', True), ('fsdp', False)])
def test_going_on(gpu_worlds, strategy, torchs, tmp_path):
    "By one GPU, from a checkpoint of many, and by as many as there were"
    want, = gpu_worlds(1)(in_two_runs, 'ddp', None, None, torchs)
    for n in (1, 2):
        assert gpu_worlds(2)(in_two_runs, strategy, tmp_path/str(n), 2, torchs) == [None]*2
        for o in gpu_worlds(n)(in_two_runs, strategy, tmp_path/str(n), None, torchs):
            same(want, o)
            assert n > 1 or o.devices == {f'{DEVICE}:0'}


class Scales(Callback):
    "After each step the scale of the gradients, and whether it was made"
    order = MixedPrecision.order+1
    def before_fit(self): self.seen, self.made = [], False
    def before_step(self): self.made = True
    def after_step(self):
        self.seen.append((self.learn.scaler.get_scale(), self.made))
        self.made = False


def halves(ctx, mode, case):
    """Two fits in half precision by this GPU alone, and by all in contexts. Of 48 samples one has numbers whose gradients are beyond float16, twice: with
    these no parameter changes"""
    import fastdist.all
    from fastdist.world import setup_distrib
    setup_distrib()
    res = []
    for c in (None, ctx):
        learn = quiet(learner(n=48, bs=6, n_val=7, bn=case == 'bn', opt=SGD if case == 'bn' else Adam, dtype=torch.float32, shuffle=False, lr=0.02,
                              cbs=[Scales(), *dict(clip=[GradientClip(0.5)], accumulate=[GradientAccumulation(11)]).get(case, [])]))
        learn.to_fp16(init_scale=1024.) if mode == 'fp16' else learn.to_bf16()  # that of one process: see docs/limits.md
        if mode == 'fp16' and case != 'bn': learn.dls.train_ds.x[31] = 3e4
        learn.dls.to(torch.device('cuda', torch.cuda.current_device()))
        seen, types = [], set()
        hook = learn.model[-1].register_forward_hook(lambda m, xb, out: types.add(str(out.dtype)) if m.training else None)
        for _ in range(2):
            with contextlib.nullcontext() if c is None else learn.distrib_ctx(**c): learn.fit(1)
            seen += learn.scales.seen
        hook.remove()
        res.append(report(learn))
        res[-1].seen, res[-1].types = seen, types
    return res


def same_in_half(world, ctx, mode, case):
    "Of the numbers some three digits are exact"
    for alone, many in world(halves, ctx, mode, case):
        assert alone.types == many.types == {dict(fp16='torch.float16', bf16='torch.bfloat16')[mode]}
        assert many.seen == alone.seen and {o for _, o in many.seen} == ({True} if mode == 'bf16' or case == 'bn' else {True, False}), (case, alone.seen, many.seen)
        assert diff(many.weights, alone.weights) < (5e-3 if mode == 'fp16' else 3e-2), case
        assert all(abs(a-b) < 1e-2*max(a, 1) for a, b in zip(many.losses, alone.losses, strict=True)), case


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_half_precision(gpu_worlds, strategy):
    "`to_fp16` and `to_bf16`: a gradient that one worker finds too large is so for all"
    for n, mode, case in ((3, 'fp16', 'clip'), (3, 'fp16', 'bn')) if strategy in ('ddp', 'zero2') else ((2, 'fp16', 'accumulate'), (2, 'bf16', 'plain')): same_in_half(gpu_worlds(n), ctx_of(strategy), mode, case)


class Fails(Callback):
    "Raises in the rank 1, in the middle of a backward pass of all"
    order = 1001
    def before_backward(self):
        if dist.get_rank() == 1 and self.iter == 1: raise ZeroDivisionError('in rank 1')


def fails_once(ctx):
    "What an error in one worker is in each, what is left of the learner, and of the process group, and a fit afterwards"
    import fastdist.all, torch.distributed as dist
    from fastdist.world import get_rank
    Fails.before_backward.__globals__['dist'] = dist
    learn, res = quiet(learner(n=20, bs=6, bn=True, lr=0.05, shuffle=False)), SimpleNamespace()
    saved, rank = weights(learn), None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter('always')
        try:
            with learn.distrib_ctx(**ctx):
                rank = get_rank()
                learn.fit(1, cbs=Fails())
        except Exception as e: res.error = type(e).__name__, getattr(e, 'type', ''), str(e)
    res.warned = [str(o.message) for o in warned if 'not to be trusted' in str(o.message)]
    res.left = dist.is_initialized(), type(learn.model).__name__, {type(p).__name__ for p in learn.model.parameters()}
    res.hooks = sum(len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in learn.model.parameters())
    res.devices, res.rank, res.gpu = {str(p.device) for p in learn.model.parameters()}, rank, own_gpu()
    learn.model.load_state_dict(saved)
    learn.create_opt()
    set_seed(1)
    with learn.distrib_ctx(**ctx): learn.fit(1)
    res.weights = weights(learn)
    return res


@pytest.mark.parametrize('strategy', ['ddp', 'zero2', 'fsdp'])
def test_an_error_in_one_worker(gpu_worlds, strategy):
    "The others get it as a RemoteError, whatever is shaped is undone, and the next context makes a process group of all"
    alone = quiet(learner(n=20, bs=6, bn=True, lr=0.05, shuffle=False))
    set_seed(1)
    alone.fit(1)
    res = gpu_worlds(2)(fails_once, ctx_of(strategy))
    assert res[0].error[:2] == ('RemoteError', 'ZeroDivisionError') and res[1].error[0] == 'ZeroDivisionError', [o.error for o in res]
    assert res[0].warned and 'Load a checkpoint' in res[0].warned[0]  # it waited for the gradients of rank 1
    for o in res:
        assert o.left == (False, 'Sequential', {'Parameter'}) and not o.hooks, o.left
        assert o.devices == {'cpu' if strategy in ('zero2', 'fsdp') else o.gpu}
        assert diff(o.weights, weights(alone)) < 1e-6


class Begins(Callback):
    "Counts where the host waits, and what is sent, in each step of a fit but the first two"
    order, first = -1000, 2
    def before_fit(self): self.found, self.sent = [], []
    def before_batch(self):
        from fakegpu import HostSyncs, nccl
        self.counter = None
        if not self.training or self.iter < self.first: return
        self.counter, self.start = HostSyncs(), len(nccl.sent)
        self.counter.__enter__()


class Ends(Callback):
    "What `Begins` has begun"
    order = 2000
    def after_batch(self):
        from fakegpu import nccl
        b = self.learn.begins
        if b.counter is None: return
        b.counter.__exit__(None, None, None)
        b.found.append(dict(b.counter.found))
        b.sent.append(nccl.sent[b.start:])


LOSSES = dict(plain=CrossEntropyLossFlat, weighted=lambda: CrossEntropyLossFlat(weight=torch.tensor([1., .5, 2.])),
              masked=lambda: CrossEntropyLossFlat(ignore_index=0))


def waits(ctx, n=24, loss='plain', **kwargs):
    "Where the host waits in each step but the first two, what is sent, and what was learned"
    import fastdist.all
    bs = 4 if loss == 'masked' else 6  # some worker has no label that counts
    learn = quiet(learner(n=n, bs=bs, n_val=6, lr=0.05, opt=Adam, dtype=torch.float32, cbs=None if ctx is None else [Begins(), Ends()], loss=LOSSES[loss](),
                          **kwargs))
    with contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx): learn.fit(1)
    return (None, None) if ctx is None else (learn.begins.found, learn.begins.sent), report(learn)


# what all have agreed on in the batch before; fastai's average of the losses is not waited for
A_STEP_LATE = {('event', 'fastdist', 'trainer/step.py', 'receive'): 1}


@pytest.mark.parametrize('strategy,loss,n,bn', [*((s, 'plain', 24, s != 'ddp') for s in STRATEGIES), ('ddp', 'plain', 24, True), ('ddp', 'masked', 39, False), ('fsdp', 'weighted', 19, False)])
def test_the_host_waits_for_no_kernel_of_a_step(fake_gpu_worlds, strategy, loss, n, bn):
    """What all have agreed on fastdist reads a step late, when it is there, and fastai's average of the losses when somebody looks.
    Of 19 samples the last batch has one, and one worker none"""
    # what shares weigh, the loss, gradients, the parameters that each has stepped, or its rows of the gradients before; parts that are gathered as one; forward and backward of batch norm
    messages = dict(ddp=2, zero1=2+1, zero2=1+1+1, fsdp=1+(2+bn)*3)[strategy] + 2*bn + 1
    alone = waits(None, n, loss, bn=bn)[1] if n != 24 else None
    for (found, sent), learned in fake_gpu_worlds(2)(waits, ctx_of(strategy), n, loss, bn=bn):
        assert len(found) == (8 if loss == 'masked' else 2)
        if alone: same(learned, alone, 1e-5)
        for step, messages_of in zip(found, sent):
            assert step == A_STEP_LATE, step
            assert len(messages_of) == messages, messages_of


class Looks(Callback):
    "Looks at fastai's average after each batch"
    order = 70
    def before_fit(self): self.seen, self.own, self.average = [], [], torch.tensor(0.)
    def after_batch(self):
        if not self.training: return
        self.average = torch.lerp(self.loss.cpu(), self.average, .98)
        self.own.append(float(self.average/(1-.98**(self.iter+1))))
        self.seen.append((self.smooth_loss.item(), float(self.recorder.losses[-1])))


def averages(looks):
    """fastai's averages of the losses, and where they are, after a fit; what somebody who looks has seen, what a progress bar has shown (beside batches 2 to 5,
    and the last), and where the host has waited in steps 7 and 8, in which it shows nothing"""
    import fastdist.all
    from fastprogress.fastprogress import ConsoleProgressBar
    cbs, shown = [Looks()] if looks else [Begins(), Ends()], []
    learn = learner(n=108, bs=6, n_val=6, lr=0.05, dtype=torch.float32, cbs=cbs)
    learn.logger = noop
    if not looks: learn.begins.first = 6
    with pytest.MonkeyPatch.context() as m:
        m.setattr(ConsoleProgressBar, 'on_update', lambda self, val, text: shown.append(text))
        m.setattr(ConsoleProgressBar, 'update_every', 1e9)  # seconds
        with learn.distrib_ctx(): learn.fit(1)
    rec = learn.recorder
    left = {o.device.type for o in (*rec.losses, learn.smooth_loss, rec.smooth_loss.val)}
    return SimpleNamespace(losses=[o.item() for o in rec.losses], left=left, seen=looks and (cbs[0].seen, cbs[0].own), found=None if looks else learn.begins.found[:2],
                           shown=[o.split('... ')[1].rstrip(']') for o in shown if '... ' in o])


def test_an_average_that_nobody_waits_for(fake_gpu_worlds):
    "Whoever looks at it in between, as the bar does, sees what fastai has there; in the end all are on the CPU"
    plain, looked = (fake_gpu_worlds(2)(averages, looks) for looks in (False, True))
    for o in (*plain, *looked): assert o.losses == looked[0].losses and len(o.losses) == 9 and o.left == {'cpu'}, o
    for o in plain: assert o.found == [A_STEP_LATE]*2, o.found
    for o in looked:
        seen, own = o.seen
        assert seen == [(x, x) for x in own] and own == o.losses, o
    # beside each batch the average of the one before
    for o in (plain[0], looked[0]): assert o.shown == [f'{o.losses[i]:.4f}' for i in (0, 1, 2, 3, 7)], o.shown


def limits(watchdog, given=None):
    "How long nccl and gloo wait in a collective, in a context and after it"
    import fastdist.all, torch.distributed as dist
    from fakegpu import nccl
    from fastdist.world import setup_distrib
    setup_distrib(timeout=given)
    gloo = lambda: dist.group.WORLD._get_backend(torch.device('cpu')).options._timeout
    now = lambda: [o.total_seconds() for o in (nccl.groups[-1].limit, gloo())]
    learn = quiet(learner())
    before = now()
    with learn.distrib_ctx(watchdog=watchdog): inside = now()
    return before, inside, now(), dist.get_backend_config(), __import__('fastdist.world').world.get_backend()


def test_the_time_limits_of_backends_follow_the_watchdog(fake_gpu_worlds):
    "Theirs would end the process before the watchdog could say why, or make it useless that it waits longer"
    for before, inside, after, config, backend in fake_gpu_worlds(2)(limits, 3600):
        assert before == after == [1800, 1800] and min(inside) > 3600 and backend == 'nccl' and 'cpu:gloo' in config
    fake_gpu_worlds.end_groups()
    res = fake_gpu_worlds(2)(limits, 3600, 50)
    assert all(o[1] == [50, 50] for o in res), res


def one_visible(same):
    "Each worker sees one GPU, as wrappers of launchers have it; the `same` to all, it may be"
    import fakegpu.cuda, fastdist.all
    from fastdist.world import get_device, setup_distrib, teardown_distrib
    os.environ['CUDA_VISIBLE_DEVICES'] = '0' if same else os.environ['LOCAL_RANK']
    torch.cuda.device_count = lambda: 1
    try:
        setup_distrib(timeout=5)
        torch.distributed.barrier()  # who goes before another one has set up breaks its connections
        return get_device().index, torch.cuda.current_device()
    except (ValueError, TimeoutError) as e: return str(e)
    finally:
        torch.cuda.device_count = fakegpu.cuda.lib.fakegpu_count
        del os.environ['CUDA_VISIBLE_DEVICES']
        teardown_distrib()


def test_one_visible_gpu_each(fake_gpu_worlds):
    assert fake_gpu_worlds(2)(one_visible, False) == [(0, 0)]*2
    assert any("(CUDA_VISIBLE_DEVICES=0) is another worker's already" in o for o in fake_gpu_worlds(2)(one_visible, True))
    assert fake_gpu_worlds(2)(one_visible, False) == [(0, 0)]*2  # that one rank alone was refused does not part them


def over_links(rank, library, url, fn):
    "What `fn` raises in each of 3 workers, and how many seconds after, where links between GPUs tell nobody of what goes wrong"
    import fakegpu, torch.distributed as dist
    fakegpu.install(library)
    from fakegpu import nccl
    nccl.deaf = nccl.noticed = True
    from fastdist.world import RemoteError, distributed_init, fail_together
    distributed_init(init_method=url, rank=rank, world_size=3)
    t = torch.ones(4, device='cuda')
    try:
        with fail_together(watchdog=600 if fn is killed else 3):
            dist.all_reduce(t)
            begin = time.monotonic()
            fn(rank, t)
    except RemoteError as e: return e.rank, e.kind, time.monotonic()-begin, str(e)


def over_three(fn):
    url, envs = f'tcp://127.0.0.1:{free_port()}', [{'I': str(i), 'FAKEGPU_COUNT': '3'} for i in range(3)]
    return started(lambda library: over_links(int(os.environ['I']), library, url, fn), envs, str(fakegpu.build()), timeout=120)


def killed(rank, t):
    import torch.distributed as dist
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(t)


def test_a_killed_worker_is_noticed_by_its_heartbeat(fake_gpu_worlds):
    "Links between GPUs tell nobody: the collective would wait until the watchdog's 600 s are over. Nor does the group's end wait for nccl's watchdog"
    res = over_three(killed)
    assert res[1] is None
    for r in (0, 2): assert res[r][:2] == (1, 'ended') and res[r][2] < 60 and 'rank 1 (host' in res[r][3] and 'ended without a traceback' in res[r][3], res[r]


def parted(rank, t):
    import torch.distributed as dist
    if rank == 2:
        work = dist.broadcast(t, 0, async_op=True)
        work.wait()
    work = dist.all_reduce(t, async_op=True)
    work.wait()


def test_workers_that_part_ways_are_found_wherever_they_stand(fake_gpu_worlds):
    "On GPUs the main thread is not in the collective, but where it waits for the device, in a line of the user's own"
    for o in over_three(parted):
        assert o[:2] == (2, 'stalled') and 'the ranks are at different calls' in o[3] and 'in parted' in o[3], o


def peaks(ctx, found, width=WIDTH, layers=12):
    """What is in use of the device, in sizes of the model: before a context, the most while it begins, when it has begun, the most in a step, in a save and a load,
    and while it ends, and after it; where the learner is then. Of two contexts, and a fit by this worker alone in between"""
    import fastdist.all
    from fastdist.strategy import fsdp
    from fastdist.world import setup_distrib
    setup_distrib()
    set_seed(1)
    here = torch.empty(0, device=torch.device('cuda', torch.cuda.current_device())).device
    others = torch.cuda.memory_allocated()  # what tests before have left in this process
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)], nn.Linear(width, 3)).to(here if found == 'gpu' else 'cpu')
    x, y, size, res = torch.randn(24, width), torch.randint(0, 3, (24,)), sum(p.nbytes for p in model.parameters()), []
    dls = DataLoaders(*[DataLoader(list(zip(x, y)), bs=6, num_workers=0) for _ in range(2)])
    dls.to(here)
    learn = quiet(Learner(dls, model, CrossEntropyLossFlat(), opt_func=Adam, lr=1e-3))
    fsdp.at_once = size//layers  # what is gathered at once when a context ends is bounded by this number, which is of larger models
    reset = torch.cuda.reset_peak_memory_stats
    def now(): return (torch.cuda.memory_allocated()-others)/size
    def peak(): return (torch.cuda.max_memory_allocated()-others)/size
    class InSteps(Callback):
        "The last one: DistributedDataParallel makes its buckets anew after the first"
        order = 1000
        def before_batch(self):
            if self.training and self.iter == 3: reset()
        def after_train(self): o.step = peak()
    def devices(): return {str(t.device.type) for t in (*model.parameters(), *(v for s in learn.opt.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()))}
    for i in range(2):
        o = SimpleNamespace(before=now())
        reset()
        with learn.distrib_ctx(**ctx):
            o.begins, o.begun = peak(), now()
            learn.fit(1, cbs=InSteps())
            o.fitted = now()
            reset()
            if 'fsdp_plugin' in ctx:  # tensors of the pretended device have no way into a file
                learn.save('saved')
                learn.load('saved')
            o.saves = peak()
            reset()
        o.ends, o.after, o.devices = peak(), now(), devices()
        if 'fsdp_plugin' in ctx:
            o.saved = diff(torch.load(learn.path/learn.model_dir/'saved.pth', weights_only=False, map_location='cpu')['model'], weights(learn))
        res.append(vars(o))
        if i == 0:
            learn.fit(1)
            assert devices() == {here.type}
            if found == 'cpu': fastdist.trainer.loaders.move_learner(learn, torch.device('cpu'))
    return res


def sharded(**kwargs): return ctx_of('ddp') | dict(strategy='fsdp', fsdp_plugin=FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy='size_based_wrap', min_num_params=1, **kwargs))


def hybrid(): return sharded() | dict(strategy='hsdp', parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))


@pytest.mark.parametrize('n,found,offload', [(3, 'cpu', False), (2, 'gpu', True)])
def test_a_model_that_does_not_fit_one_gpu(gpu_worlds, n, found, offload):
    """With fsdp the device has shards, and one part of the model whole, from the beginning to the end: in a step four times (it and the next one, its gradient,
    and what that is sent from). All is left where it was found, a save in the context has all of it, and a fit in one process goes on from there"""
    part, activations = 1/12, 6//n*13/WIDTH/12  # of the model
    shards = 0 if offload else 4/n  # of parameters, gradients and Adam's two
    found_there = 4 if found == 'gpu' else 0
    def close(a, b): return abs(a-b) < .05*max(b, part) + BESIDE
    for first, second in gpu_worlds(n)(peaks, sharded(cpu_offload=offload), found):
        assert first['saved'] == second['saved'] == 0
        assert first['devices'] == second['devices'] == {DEVICE if found == 'gpu' else 'cpu'}
        assert close(first['begun'], shards/4) and close(second['begun'], shards), (first, second)
        for o, before in (first, found_there/4), (second, found_there):
            assert close(o['before'], before) and close(o['after'], found_there), o
            assert o['begins'] < 1.05*max(o['before'], o['begun']) + part*(1+1/n) + BESIDE, o
            assert close(o['fitted'], shards) and close(o['step'], shards + 4*part + activations), o
            assert o['saves'] < 1.05*(shards + 3*part) + BESIDE and o['ends'] < 1.05*max(shards + 3*part, found_there) + BESIDE, o


def test_shards_that_stand_twice(gpu_worlds):
    "hsdp: two times two workers have the numbers of one, in half precision too"
    world, alone = gpu_worlds(4), twice(opt=Adam, frozen=True)
    for o in world(twice, hybrid(), opt=Adam, frozen=True): same(o, alone)
    same_in_half(world, hybrid(), 'fp16', 'plain')


@pytest.mark.parametrize('n,strategy,formula', [(2, 'ddp', lambda n, m: 1+2+2), (3, 'zero1', lambda n, m: 1+2+2/n+m*(1+1/n)), (2, 'zero2', lambda n, m: 1+(1+1+2)/n+2/12)])
def test_the_most_that_a_step_takes(gpu_worlds, n, strategy, formula):
    """As docs/large-models.md has it, with `m` of the model in a message: all where that is less than 25 MB, else a layer. The message of zero1, of parameters, has
    them and this worker's rows; zero2 has a layer's gradient, and what that is sent from"""
    for first, _ in gpu_worlds(n)(peaks, ctx_of(strategy), 'cpu'): assert abs(first['step']/formula(n, 1/12 if real_gpus.hide() else 1)-1) < .05 + BESIDE, first


def test_whatever_a_model_has_comes_and_goes(gpu_worlds):
    "Buffers, weights in two places, frozen ones, and one that is a number; kept in CPU memory, and clipped there"
    pairs = [('clip', 'adam'), ('bn', 'lamb'), ('frozen', 'adamw')]
    alone = fits(None, pairs)
    for got in gpu_worlds(2)(fits, sharded(cpu_offload=True), pairs):
        for k, o in got.items(): assert diff(o.weights, alone[k].weights) < 1e-6 and diff(o.opt, alone[k].opt) < 1e-6, k


def gpu_streams():
    "Where the GPU's random numbers are in each step of a fit, and after it, of workers that were seeded otherwise each"
    import fastdist.all
    from fastdist.world import get_rank
    at = []
    class See(Callback):
        def before_step(self): at.append(torch.cuda.get_rng_state().tolist())
    learn = quiet(learner(n=20, bs=6, n_val=7, cbs=See()))
    torch.manual_seed(get_rank())
    with learn.distrib_ctx(split_batches=True): learn.fit(1)
    return at, torch.cuda.get_rng_state().tolist()


def test_callbacks_draw_the_same_on_gpus(gpu_worlds):
    "Also where a script has seeded the workers otherwise, as noise on gradients has to be the same in all"
    (a, after), (b, after1) = gpu_worlds(2)(gpu_streams)
    assert a == b and len(a) == 4 and after != after1
