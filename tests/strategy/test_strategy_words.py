"Strategies by a word, by Accelerate's plugins, and of one's own"
from accelerate.parallelism_config import ParallelismConfig
from strategies import *

PLUGIN = partial(FullyShardedDataParallelPlugin, fsdp_version=2, auto_wrap_policy='size_based_wrap', min_num_params=1)


def test_hsdp(worlds):
    "Shards within a node and replicates across: one node of 4 by the word, and 2 x 2 by sizes"
    pairs = [('plain', 'adam'), ('frozen', 'lamb'), ('accumulate', 'adam'), ('clip', 'lamb'), ('bn', 'adam')]
    one = fits(None, pairs)
    for how, some in (dict(strategy='hsdp'), pairs[:2]), (dict(parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)),
                                                          pairs[1:]):
        for m in worlds(4)(fits, dict(split_batches=True, fsdp_plugin=PLUGIN(), **how), some, timeout=200):
            for k in some:
                assert diff(one[k].weights, m[k].weights) < 1e-7 and diff(one[k].opt, m[k].opt) < 1e-6
                assert diff(one[k].losses, m[k].losses) < 1e-6 and diff(one[k].values, m[k].values) < 1e-6


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


def policy():
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
    plugin = PLUGIN(mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32,
                                                                output_dtype=torch.float32))
    with learn.distrib_ctx(split_batches=True, fsdp_plugin=plugin): learn.fit(1)
    return weights(learn), seen


def test_mixed_precision_policy(world2):
    "Forward and backward in bfloat16, weights and steps in float32"
    one = fit('plain', partial(SGD, mom=0.9), n=20, dtype=torch.float32).weights
    for w, seen in world2(policy):
        assert all(o.dtype==torch.float32 for o in w.values()) and 1e-6 < diff(one, w) < 2e-3
        assert {torch.float32} in seen and (torch.float32, torch.float32) in seen


def test_cpu_offload_and_reshard(world2):
    plugin = PLUGIN(cpu_offload=True, reshard_after_forward=False)
    for m in world2(fits, dict(split_batches=True, fsdp_plugin=plugin), [('clip', 'adam')]): assert diff(fit('clip', Adam).weights,
        m['clip', 'adam'].weights) < 1e-7
