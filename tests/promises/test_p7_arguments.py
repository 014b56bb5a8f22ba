"P7: each argument of `distrib_ctx` arrives, or is an error that names it, its value and the way out"
import inspect, os
from datetime import timedelta
from functools import partial

import pytest, torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import (AutocastKwargs, DDPCommunicationHookType, DistributedDataParallelKwargs, DynamoBackend,
                              FullyShardedDataParallelPlugin, GradScalerKwargs, InitProcessGroupKwargs, TorchDynamoPlugin)
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

fsdp = partial(FullyShardedDataParallelPlugin, fsdp_version=2)
DDP, Hook = DistributedDataParallelKwargs, DDPCommunicationHookType
ACCEPTED = ['split_batches', 'gradient_accumulation_steps', 'cpu', 'kwargs_handlers', 'fsdp_plugin', 'parallelism_config', 'dynamo_backend',
            'dynamo_plugin', 'project_dir']


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for k in list(os.environ):
        if k.startswith(('ACCELERATE_', 'FSDP_', 'PARALLELISM_CONFIG_', 'MEGATRON_LM_')): monkeypatch.delenv(k)
    yield
    os.environ.pop('FSDP_CPU_RAM_EFFICIENT_LOADING', None)  # the plugin writes it


def asked(strategy=None, **kwargs):
    from fastdist.trainer.args import check_args
    return check_args({**kwargs, 'strategy': strategy})


def error(strategy=None, cls=ValueError, **kwargs):
    with pytest.raises(cls) as e: asked(strategy, **kwargs)
    return str(e.value)


def set_env(monkeypatch, **kwargs):
    for k, v in kwargs.items(): monkeypatch.setenv(k, v)


class Own:
    def setup(self): pass
    def forward(self): pass
    def close(self): pass


# What else shows that an argument has its effect: callbacks/test_accumulate.py, model/test_units.py, strategy/test_strategy_words.py
@pytest.mark.parametrize('kwargs,field,value', [
    (dict(split_batches=True), 'split_batches', True), (dict(gradient_accumulation_steps=3), 'accumulation_steps', 3),
    (dict(dynamo_backend='no'), 'dynamo', None), (dict(cpu=True), 'strategy', 'ddp'),
    *((dict(kwargs_handlers=[DDP(), InitProcessGroupKwargs(timeout=timedelta(seconds=9))]), k, v)
      for k, v in dict(ddp=DDP(), init=InitProcessGroupKwargs(timeout=timedelta(seconds=9))).items())])
def test_accepted(kwargs, field, value): assert getattr(asked(**kwargs), field) == value


FAR, DEEPSPEED = "use strategy='fsdp', which shards the parameters as well", "use strategy='zero1', 'zero2' or 'fsdp' for ZeRO stage 1, 2 or 3"


@pytest.mark.parametrize('kwargs,cls,msg', [
    # what is not accepted, whatever it is
    (dict(mixed_precision='fp16'), TypeError, "mixed_precision='fp16' is not accepted: fastai does mixed precision: call learn.to_fp16()"),
    (dict(log_with='wandb'), TypeError, "log_with='wandb' is not accepted: fastai does logging: add a callback"),
    (dict(deepspeed_plugin=3), TypeError, DEEPSPEED), (dict(megatron_lm_plugin=3), TypeError, FAR),
    (dict(stratgy='ddp'), TypeError, "stratgy='ddp' is not accepted: fastdist has no argument of this name; did you mean strategy?"),
    # what is not what it should be
    (dict(split_batches=None), ValueError, 'split_batches=None is not accepted: it is True or False'), (dict(cpu=2), ValueError, 'cpu=2 is not accepted'),
    *((dict(gradient_accumulation_steps=n), ValueError, f'gradient_accumulation_steps={n!r} is not accepted: it is the number of batches')
      for n in (0, 2.5, '2')),
    (dict(project_dir=3), ValueError, 'project_dir=3 is not accepted: it is the path of a folder'),
    (dict(rng_types=['torch']), TypeError, "rng_types=['torch'] is not accepted: the order of samples"),
    (dict(fsdp_plugin=3), ValueError, "fsdp_plugin=3 is not accepted: it is Accelerate's FullySharded"),
    (dict(dynamo_plugin=3), ValueError, 'dynamo_plugin=3'),
    (dict(dynamo_backend='inducter'), ValueError, "dynamo_backend='inducter' is not accepted: torch.compile does not take it"),
    (dict(dynamo_plugin=TorchDynamoPlugin(backend='inductor', use_regional_compilation=True)), ValueError, 'dynamo_plugin.use_regional_compilation=True is not accepted: the model is compiled as one'),
    (dict(dynamo_backend='cudagraphs'), ValueError, "dynamo_backend='cudagraphs' is not accepted: CUDA graphs write over"),
    (dict(dynamo_backend='eager', dynamo_plugin=TorchDynamoPlugin(backend='eager')), ValueError, "dynamo_backend='eager' is not accepted: dynamo_plugin is given too"),
    # what is in a list of handlers
    (dict(kwargs_handlers=AutocastKwargs()), ValueError, 'it is a list'), (dict(kwargs_handlers=[3]), ValueError, 'kwargs_handlers=3 is not accepted: only DistributedDataParallelKwargs'),
    (dict(kwargs_handlers=[DDP()]*2), ValueError, 'there are two DistributedDataParallelKwargs'),
    (dict(kwargs_handlers=[GradScalerKwargs()]), ValueError, 'learn.to_fp16('),
    (dict(kwargs_handlers=[DDP(comm_hook='fp16')]), ValueError, "comm_hook='fp16'"),
    (dict(kwargs_handlers=[DDP(comm_hook=Hook.BATCHED_POWER_SGD)]), ValueError, 'it is one of')])
def test_refused(kwargs, cls, msg):
    text = error(cls=cls, **kwargs)
    assert text.startswith('rank 0: ') and msg in text


def test_no_argument_of_accelerates_is_swallowed():
    "A value that means nothing is an error for each of them, and for those that are not accepted any value"
    for k in inspect.signature(Accelerator.__init__).parameters:
        if k == 'self': continue
        assert f'{k}=3.5 is not accepted' in error(cls=ValueError if k in ACCEPTED else TypeError, **{k: 3.5})


def test_words():
    for word, near in dict(zero3='fsdp', oss='zero1', dddp='ddp').items():
        msg = error(word)
        assert msg.startswith(f'rank 0: strategy={word!r} is not accepted: it is one of ddp, zero1, zero2, fsdp, hsdp, auto')
        assert f'did you mean {near!r}?' in msg
    assert 'learn.parallel_ctx()' in error('dp')
    own = Own()
    for o in 'ddp', 'zero1', 'zero2', 'fsdp', 'hsdp', 'auto', own: assert asked(o).strategy == o
    class Half(Own): forward = None
    assert 'has no method forward' in error(Half()) and "it is a class: give an object, as in strategy=Own()" in error(Own)
    assert 'setup' in error(3) and 'did you mean' not in error('something else')


POLICY = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
NAMED = partial(fsdp, auto_wrap_policy='transformer_based_wrap')


@pytest.mark.parametrize('plugin,field,value', [
    (fsdp(), 'reshard', True), (fsdp(reshard_after_forward=False), 'reshard', False),
    (fsdp(activation_checkpointing=True), 'activation_checkpointing', True), (fsdp(activation_checkpointing=True, activation_checkpointing_offload=True), 'activation_offload', True),
    (NAMED(transformer_cls_names_to_wrap=['A', 'B']), 'modules', ['A', 'B']),
    (fsdp(auto_wrap_policy='size_based_wrap', min_num_params=77), 'min_numel', 77),
    (fsdp(mixed_precision_policy=POLICY), 'mp_policy', MixedPrecisionPolicy(**POLICY)), (fsdp(cpu_offload=CPUOffloadPolicy(pin_memory=False)), 'cpu_offload', CPUOffloadPolicy(pin_memory=False))])
def test_fsdp_plugin(plugin, field, value):
    o = asked(fsdp_plugin=plugin)
    assert o.strategy == 'fsdp' and getattr(o.fsdp, field) == value and asked('hsdp', fsdp_plugin=plugin).strategy == 'hsdp'


def after(**kwargs):
    "A plugin with fields that were set later, as version 2 would not take them at once, or sets them back"
    plugin = fsdp()
    for k, v in kwargs.items(): setattr(plugin, k, v)
    return plugin


@pytest.mark.parametrize('plugin,msg', [
    (lambda: FullyShardedDataParallelPlugin(fsdp_version=1), 'fsdp_version=1 is not accepted: torch replaces it by version 2'),
    *((lambda k=k, v=v: after(**{k: v}), f'{k}={v!r} is not accepted: it has no effect') for k, v in dict(sharding_strategy='FULL_SHARD', forward_prefetch=True, param_init_fn=print).items()),
    (lambda: fsdp(auto_wrap_policy='size_based_wrap'), 'auto_wrap_policy='), (lambda: fsdp(min_num_params=10), 'auto_wrap_policy=None'), (lambda: fsdp(ignored_modules='head'), "ignored_modules='head' is not accepted: it has no effect")])
def test_fsdp_plugin_refused(plugin, msg): assert f'rank 0: fsdp_plugin.{msg}' in error(fsdp_plugin=plugin())


@pytest.mark.parametrize('sizes,word', [((3, 1), 'ddp'), ((1, 3), 'fsdp'), ((2, 3), 'hsdp')])
def test_parallelism(sizes, word, monkeypatch):
    config = ParallelismConfig(*sizes)
    for s in None, word: assert (asked(s, parallelism_config=config).strategy, asked(s, parallelism_config=config).mesh) == (word, sizes)
    for s in {'ddp', 'zero1', 'zero2', 'fsdp', 'hsdp', 'auto'}-{word}:
        assert f'strategy={s!r} is not accepted: parallelism_config=' in (msg := error(s, parallelism_config=config)) and f'means {word!r}' in msg
    set_env(monkeypatch, ACCELERATE_USE_PARALLELISM_CONFIG='true')
    assert 'use_parallelism_config=True is not accepted: (of the launcher) give distrib_ctx the argument parallelism_config=' in error()


LAUNCH = dict(ACCELERATE_USE_FSDP='true', FSDP_VERSION='2', FSDP_SHARDING_STRATEGY='FULL_SHARD', FSDP_RESHARD_AFTER_FORWARD='true', FSDP_OFFLOAD_PARAMS='false', FSDP_MIN_NUM_PARAMS='100000000',
              FSDP_FORWARD_PREFETCH='false', FSDP_USE_ORIG_PARAMS='true', FSDP_CPU_RAM_EFFICIENT_LOADING='true', FSDP_SYNC_MODULE_STATES='true', FSDP_ACTIVATION_CHECKPOINTING='false',
              FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD='false') # what `accelerate launch --use_fsdp --fsdp_version 2` sets


def test_launched_with_fsdp(monkeypatch):
    set_env(monkeypatch, **LAUNCH)
    assert asked().strategy == 'fsdp' and asked('hsdp').strategy == 'hsdp' and asked(fsdp_plugin=fsdp()).strategy == 'fsdp'
    for o in 'ddp', 'zero1', 'zero2', 'auto', Own(): assert 'use_fsdp (of the launcher)=True' in error(o)
    assert asked(parallelism_config=ParallelismConfig(2, 2)).strategy == 'hsdp'
    assert "use_fsdp (of the launcher)=True is not accepted: parallelism_config=" in error(parallelism_config=ParallelismConfig(2))
    set_env(monkeypatch, FSDP_RESHARD_AFTER_FORWARD='false', FSDP_OFFLOAD_PARAMS='true', FSDP_ACTIVATION_CHECKPOINTING='true', FSDP_AUTO_WRAP_POLICY='SIZE_BASED_WRAP', FSDP_MIN_NUM_PARAMS='99',
            FSDP_STATE_DICT_TYPE='FULL_STATE_DICT')
    o = asked().fsdp
    assert (o.reshard, bool(o.cpu_offload), o.activation_checkpointing, o.min_numel) == (False, True, True, 99)
    set_env(monkeypatch, FSDP_AUTO_WRAP_POLICY='TRANSFORMER_BASED_WRAP', FSDP_TRANSFORMER_CLS_TO_WRAP='A,B')
    assert asked().fsdp.modules == ['A', 'B']


@pytest.mark.parametrize('env,msg', [
    (dict(LAUNCH, FSDP_STATE_DICT_TYPE='LOCAL_STATE_DICT'), "FSDP2 does not support LOCAL_STATE_DICT"),
    (dict(ACCELERATE_USE_DEEPSPEED='true'), f'use_deepspeed=True is not accepted: (of the launcher) {DEEPSPEED}'), (dict(ACCELERATE_USE_MEGATRON_LM='true'), FAR),
    (dict(ACCELERATE_GRADIENT_ACCUMULATION_STEPS='two'), "gradient_accumulation_steps (of the launcher)='two'"),
    (dict(ACCELERATE_DYNAMO_BACKEND='NONSENSE'), "dynamo_backend='nonsense'")])
def test_launched_refused(env, msg, monkeypatch):
    set_env(monkeypatch, **env)
    assert msg in error()


@pytest.mark.parametrize('key,value', dict(comm_hook=Hook.FP16, bucket_cap_mb=7, find_unused_parameters=True).items())
def test_ddp_kwargs(key, value):
    handlers = [DDP(**{key: value})]
    for o in 'ddp', 'zero1': assert getattr(asked(o, kwargs_handlers=handlers).ddp, key) == value
    for o in 'zero2', 'fsdp', 'hsdp', Own():
        msg = error(o, kwargs_handlers=handlers)
        assert msg.startswith(f'rank 0: {key}={value!r} is not accepted: ') and "use strategy='ddp' or 'zero1'" in msg


def test_dynamo(monkeypatch):
    for o in 'eager', 'EAGER', DynamoBackend.EAGER: assert asked(dynamo_backend=o).dynamo.backend == DynamoBackend.EAGER
    plugin = TorchDynamoPlugin(backend='inductor', mode='max-autotune-no-cudagraphs', fullgraph=True, dynamic=True)
    assert asked(dynamo_plugin=plugin).dynamo is plugin
    set_env(monkeypatch, ACCELERATE_DYNAMO_BACKEND='NO', ACCELERATE_DYNAMO_MODE='default', ACCELERATE_DYNAMO_USE_FULLGRAPH='False', ACCELERATE_DYNAMO_USE_DYNAMIC='False',
            ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION='False')  # what `accelerate launch` sets by default
    assert asked().dynamo is None and asked(dynamo_backend='eager').dynamo.backend == DynamoBackend.EAGER
    set_env(monkeypatch, ACCELERATE_DYNAMO_BACKEND='AOT_EAGER', ACCELERATE_DYNAMO_USE_FULLGRAPH='True')
    assert (asked().dynamo.backend, asked().dynamo.fullgraph, asked(dynamo_backend='aot_eager').dynamo.fullgraph) == (DynamoBackend.AOT_EAGER, True, True)
    for o in 'eager', 'no': assert f"dynamo_backend={o!r} is not accepted: the launcher was told 'aot_eager'" in error(dynamo_backend=o)


def with_arguments(folder):
    "By argument: the weights of a fit"
    import fastdist.all
    from learners import learner, quiet, weights
    given = dict(plain={}, project_dir=dict(project_dir=folder),
                 comm_hook=dict(kwargs_handlers=[DDP(comm_hook=Hook.BF16)]))
    res, mesh = {}, None
    for k, kwargs in given.items():
        learn = quiet(learner(n=22))
        path = learn.path
        with learn.distrib_ctx(split_batches=True, **kwargs):
            learn.fit(1)
            if k == 'project_dir': learn.save('a')
        assert learn.path == path
        res[k] = weights(learn)
    try:
        with learn.distrib_ctx(parallelism_config=ParallelismConfig(1, 3)): pass
    except ValueError as e: mesh = str(e)
    return res, mesh


def test_effects(world2, tmp_path):
    "Files in another folder, gradients that are sent in bfloat16; and sizes for another number of workers are an error"
    from learners import diff
    (first, text), (other, text1) = world2(with_arguments, tmp_path)
    w = first['plain']
    assert diff(w, first['project_dir']) == 0 and diff(torch.load(tmp_path/'models/a.pth', weights_only=False)['model'], w) == 0
    assert 1e-6 < diff(w, first['comm_hook']) < .1
    for r, o in enumerate((text, text1)): assert f'rank {r}: parallelism_config=' in o and 'there are 2 workers' in o


WRONG = {'fail_together(float("inf")).__enter__()': 'watchdog=inf', 'world_store(timeout="long")': "timeout='long'", 'setup_distrib(gpu="x")': "gpu='x'",
         'distributed_init("file://shared/meet", rank=0, world_size=2)': "init_method='file://shared/meet'", 'call_main(3)': 'main=3', 'call_main(len, n="2")': "n='2'",
         'rank0_read(3)': 'rank0_read was given a int', 'parallel(["gpu"])': "device_ids=['gpu']"}  # the contract has those of a context


def wrong_calls(calls, folder):
    "What each says; and that numbers of NumPy's are numbers"
    import numpy as np
    from fastai.basics import DataLoader, DataLoaders, Learner, MSELossFlat
    from fastdist.all import Resume
    from fastdist.world import call_main, distributed_init, fail_together, rank0_read, setup_distrib, world_store
    setup_distrib()
    dl = DataLoader([(torch.ones(1), torch.ones(1))]*7, bs=3)

    def learner(): return Learner(DataLoaders(dl, dl), nn.Sequential(nn.Linear(1, 1)), loss_func=MSELossFlat())
    def parallel(ids):
        with (learn := learner()).parallel_ctx(ids), learn.no_bar(), learn.no_logging(): learn.fit(1)
    with (learn := learner()).distrib_ctx(watchdog=np.float32(60), gradient_accumulation_steps=np.int64(2)), learn.no_bar(), learn.no_logging():
        learn.fit(1, cbs=Resume(folder, every=np.int64(2), keep=np.int64(1)))
    said = []
    for o in calls:
        try: said.append(repr(eval(o, {**globals(), **locals()})))
        except (TypeError, ValueError) as e: said.append(str(e))
    return said


def test_wrong_calls(world2, tmp_path):
    "Each names the argument and the value in all workers, none of which waits for another"
    for said in world2(wrong_calls, [*WRONG], str(tmp_path/'ckpt')):
        for text, name in zip(said, WRONG.values(), strict=True): assert name in text and len(text) > len(name) + 15, (name, text)
