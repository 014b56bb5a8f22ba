"Strategies by a word, by Accelerate's plugins, by the launcher, and of one's own"
import os, pytest
from accelerate.parallelism_config import ParallelismConfig
from strategies import *

CASES2, OPTS2 = ['plain', 'frozen', 'accumulate', 'clip', 'bn'], ['adam', 'lamb']


@pytest.fixture(scope='module')
def world4(worlds): return worlds(4)


@pytest.mark.parametrize('by', ['word', 'sizes'])
def test_hsdp(world4, by):
    "Shards within a node and replicates across: 2 x 2, and one node of 4"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy='size_based_wrap', min_num_params=1)
    ctx = dict(split_batches=True, fsdp_plugin=plugin, **(dict(strategy='hsdp') if by=='word' else dict(parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))))
    # how it is asked for is one thing, what is trained another: each way of stepping by the word, and three, with the other optimizer, by the sizes
    pairs = [(c, o) for c in CASES2 for o in OPTS2][1::4] if by=='sizes' else [(c, o) for c in CASES2 for o in OPTS2][::2]
    every = world4(fits, ctx, pairs, timeout=200)
    for c, o in pairs:
        one = fit(c, OPTS[o])
        for m in every:
            assert diff(one.weights, m[c, o].weights) < 1e-7 and diff(one.opt, m[c, o].opt) < 1e-6
            assert diff(one.losses, m[c, o].losses) < 1e-6 and diff(one.values, m[c, o].values) < 1e-6


def placements(ctx):
    import fastdist.all
    learn = quiet(learner(n=8, bs=4, model=lambda: Scaled(False).double(), splitter=splitter))
    with learn.distrib_ctx(**ctx):
        p = learn.model.body[0].weight
        return (str(p.placements), p.device_mesh.shape, len(p.to_local()), type(learn.model).__name__) if hasattr(p, 'placements') else (type(p).__name__, len(p))


def by_launcher(env):
    import fastdist.all
    old = dict(os.environ)
    os.environ.update(env)
    try: return placements({})
    finally:
        os.environ.clear()
        os.environ.update(old)


def test_launcher(world2):
    "What `accelerate launch --use_fsdp` sets, on the CPU too, where Accelerate alone trains with DDP"
    env = dict(ACCELERATE_USE_FSDP='true', FSDP_VERSION='2', FSDP_RESHARD_AFTER_FORWARD='true')
    assert [o[2] for o in world2(by_launcher, env)]==[4, 3]


def chosen(free):
    import io, contextlib, psutil
    from fastdist.callbacks.fastai_patches import trainer_of
    class Memory:
        available = free*2
    old, psutil.virtual_memory = psutil.virtual_memory, Memory
    learn, out = quiet(learner(n=8, bs=4, opt=Adam, model=lambda: nn.Sequential(nn.Linear(4, 4096), nn.ReLU(), nn.Linear(4096, 3)).double())), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), learn.distrib_ctx(strategy='auto'):
            learn.fit(1)
            return trainer_of(learn).strategy.name, out.getvalue()
    finally: psutil.virtual_memory = old


def test_auto(world2):
    "By the bytes: parameters P, gradients G and what they are sent from, state O=2P; 60 % of the memory may be taken"
    P = 8*(4*4096+4096+4096*3+3)
    for free, word in ((8.5, 'ddp'), (7, 'zero1'), (5.5, 'fsdp'), (.1, 'fsdp')):
        every = world2(chosen, int((free-1)*P) if free > 1 else 1000)
        assert [o[0] for o in every]==[word]*2, (free, every)
        assert f"strategy='auto': '{word}', which needs" in every[0][1] and every[1][1]==''


def own():
    import fastdist.all, torch.distributed as dist
    from fastdist.strategy.base import Strategy
    class Average(Strategy):
        def __init__(self): "What a strategy has by itself is in its class"
        def setup(self, learn, device):
            super().setup(learn, device)
            self.handles = [p.register_post_accumulate_grad_hook(self.average_one) for p in self.model.parameters()]
        def average_one(self, p):
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        def forward(self, sync): pass
        def close(self, group=None): [h.remove() for h in self.handles]
    strategy = Average()
    res = fit('plain', Adam, dict(strategy=strategy, split_batches=True))
    return res.weights


def test_own(worlds):
    for size in (2, 3):
        for m in worlds(size)(own): assert diff(fit('plain', Adam).weights, m) < 1e-7


def errors(**ctx):
    import fastdist.all
    learn = quiet(learner(n=8, bs=4))
    try:
        with learn.distrib_ctx(**ctx): learn.fit(1)
    except Exception as e: return str(e)


def test_wrong_words(world2):
    from accelerate.utils import DistributedDataParallelKwargs
    assert all("strategy='zero3'" in m and "'fsdp'" in m for m in world2(errors, strategy='zero3'))
    assert all("strategy='dp'" in m and "learn.parallel_ctx()" in m for m in world2(errors, strategy='dp'))
    assert all('3' in m and '2' in m for m in world2(errors, parallelism_config=ParallelismConfig(dp_shard_size=3)))
    assert all('offload_to_cpu=True' in m for m in world2(errors, offload_to_cpu=True))
    assert all('forward' in m for m in world2(errors, strategy=SimpleNamespace(setup=print, close=print)))


def policy(reduce):
    from torch.distributed.fsdp import MixedPrecisionPolicy
    import fastdist.all
    seen = []
    class Look(Callback):
        def after_pred(self): seen.append((self.pred.dtype, self.model.scale.dtype))
        def before_step(self): seen.append({p.grad.dtype for p in self.model.parameters()})
    def model():
        torch.manual_seed(3)
        return Scaled(False)
    learn = quiet(learner(n=20, bs=5, opt=partial(SGD, mom=0.9), lr=0.05, wd=0.1, model=model, splitter=splitter, dtype=torch.float32, cbs=Look()))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy='size_based_wrap', min_num_params=1,
                                            mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce, output_dtype=torch.float32))
    with learn.distrib_ctx(split_batches=True, fsdp_plugin=plugin): learn.fit(1)
    return weights(learn), seen


@pytest.mark.parametrize('reduce', [torch.float32, torch.bfloat16])
def test_mixed_precision_policy(world2, reduce):
    "Forward and backward in bfloat16, weights and steps in float32"
    one = fit('plain', partial(SGD, mom=0.9), n=20, dtype=torch.float32).weights
    for w, seen in world2(policy, reduce):
        assert all(o.dtype==torch.float32 for o in w.values()) and 1e-6 < diff(one, w) < 2e-3
        assert {torch.float32} in seen and (torch.float32, torch.float32) in seen


def offloaded(reshard):
    import fastdist.all
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy='size_based_wrap', min_num_params=1, cpu_offload=True, reshard_after_forward=reshard)
    return fits(dict(split_batches=True, fsdp_plugin=plugin), [('plain', 'adam'), ('clip', 'adam')])


@pytest.mark.parametrize('reshard', [False, True])
def test_cpu_offload_and_reshard(world2, reshard):
    for m in world2(offloaded, reshard):
        for k in m: assert diff(fit(k[0], Adam).weights, m[k].weights) < 1e-7
