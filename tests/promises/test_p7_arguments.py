"P7: each argument of `distrib_ctx` arrives, or is an error that names it, its value and the way out"
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest, torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import *
from accelerate.utils import (AORecipeKwargs, AutocastKwargs, DDPCommunicationHookType, DynamoBackend, FP8RecipeKwargs, MSAMPRecipeKwargs,
                              ProfileKwargs, RNGType, TERecipeKwargs, TorchDynamoPlugin)
from torch import nn

fsdp = partial(FullyShardedDataParallelPlugin, fsdp_version=2)
Hook = DDPCommunicationHookType


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for k in list(os.environ):
        if k.startswith(('ACCELERATE_', 'FSDP_', 'PARALLELISM_CONFIG_', 'MEGATRON_LM_')): monkeypatch.delenv(k)
    yield
    os.environ.pop('FSDP_CPU_RAM_EFFICIENT_LOADING', None)  # the plugin writes it


def asked(strategy=None, **kwargs):
    from fastdist.trainer.args.accelerate_args import check_args
    return check_args(kwargs, strategy)


def error(strategy=None, cls=ValueError, **kwargs):
    with pytest.raises(cls) as e: asked(strategy, **kwargs)
    return str(e.value)


def set_env(monkeypatch, **kwargs):
    for k, v in kwargs.items(): monkeypatch.setenv(k, v)


class Own:
    def setup(self): pass
    def forward(self): pass
    def close(self): pass


def test_nothing_asked():
    o = asked()
    assert vars(o.fsdp) == dict(reshard=None, mp_policy=None, cpu_offload=False, modules=None, min_numel=None, activation_checkpointing=False,
                                activation_offload=False, ignored=None)
    del o.fsdp
    assert vars(o) == dict(split=False, ddp=None, init=None, accumulation=None, autocast=None, scaler=None, rng_types=None, project_dir=None, data_seed=None, non_blocking=False,
                           dynamo=None, strategy='ddp', mesh=None)


def test_words():
    for o in 'ddp', 'zero1', 'zero2', 'fsdp', 'hsdp', 'auto': assert asked(o).strategy == o
    own = Own()
    assert asked(own).strategy is own


@pytest.mark.parametrize('strategy,near', [('zero3', 'fsdp'), ('FSDP', 'fsdp'), ('zero_1', 'zero1'), ('oss', 'zero1'), ('HYBRID_SHARD', 'hsdp'), ('dddp', 'ddp')])
def test_near_words(strategy, near):
    msg = error(strategy)
    assert msg.startswith(f'rank 0: strategy={strategy!r} is not accepted: it is one of ddp, zero1, zero2, fsdp, hsdp, auto') and f'did you mean {near!r}?' in msg


def test_own_strategy_without_a_hook():
    class Half(Own): forward = None
    assert 'has no method forward' in error(Half()) and "it is a class: give an object, as in strategy=Own()" in error(Own)
    assert 'setup' in error(3) and 'did you mean' not in error('something else')


POLICY = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
BLOCK = nn.Linear(2, 2)


@pytest.mark.parametrize('kwargs,field,value', [
    (dict(reshard_after_forward=False), 'reshard', False), (dict(), 'reshard', True), (dict(cpu_offload=False), 'cpu_offload', False),
    (dict(activation_checkpointing=True), 'activation_checkpointing', True),
    (dict(activation_checkpointing=True, activation_checkpointing_offload=True), 'activation_offload', True),
    (dict(ignored_modules=[BLOCK]), 'ignored', [BLOCK]), (dict(ignored_modules='head.*'), 'ignored', 'head.*'),
    (dict(auto_wrap_policy='transformer_based_wrap', transformer_cls_names_to_wrap=['A', 'B']), 'modules', ['A', 'B']),
    (dict(auto_wrap_policy='transformer_based_wrap', transformer_cls_names_to_wrap='A, B'), 'modules', ['A', 'B']),
    (dict(auto_wrap_policy='size_based_wrap', min_num_params=77), 'min_numel', 77),
    (dict(auto_wrap_policy='no_wrap'), 'modules', None), (dict(auto_wrap_policy='no_wrap'), 'min_numel', None),
    (dict(state_dict_type='FULL_STATE_DICT'), 'reshard', True), (dict(state_dict_type='SHARDED_STATE_DICT'), 'reshard', True)])
def test_fsdp_plugin(kwargs, field, value):
    o = asked(fsdp_plugin=fsdp(**kwargs))
    assert o.strategy == 'fsdp' and getattr(o.fsdp, field) == value
    for s in 'fsdp', 'hsdp': assert asked(s, fsdp_plugin=fsdp(**kwargs)).strategy == s


def test_fsdp_plugin_objects():
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
    policy, offload = MixedPrecisionPolicy(**POLICY), CPUOffloadPolicy(pin_memory=False)
    for given in policy, POLICY: assert asked(fsdp_plugin=fsdp(mixed_precision_policy=given)).fsdp.mp_policy == policy
    assert asked(fsdp_plugin=fsdp(mixed_precision_policy='bf16')).fsdp.mp_policy.reduce_dtype == torch.bfloat16
    assert asked(fsdp_plugin=fsdp(cpu_offload=offload)).fsdp.cpu_offload is offload
    assert isinstance(asked(fsdp_plugin=fsdp(cpu_offload=True)).fsdp.cpu_offload, CPUOffloadPolicy)
    assert asked(fsdp_plugin=fsdp(auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=5))).fsdp.min_numel == 5
    assert asked(fsdp_plugin=fsdp(auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}))).fsdp.modules == ['Linear']
    plugin = fsdp()
    plugin.reshard_after_forward = 2
    assert asked(fsdp_plugin=plugin).fsdp.reshard == 2


def test_every_field_of_the_fsdp_plugin_is_known():
    import dataclasses
    taken = {'fsdp_version', 'reshard_after_forward', 'mixed_precision_policy', 'auto_wrap_policy', 'cpu_offload', 'ignored_modules', 'state_dict_type', 'state_dict_config',
             'optim_state_dict_config', 'activation_checkpointing', 'activation_checkpointing_offload', 'cpu_ram_efficient_loading', 'transformer_cls_names_to_wrap', 'min_num_params'}
    from fastdist.trainer.args.strategy_args import _instead
    assert {o.name for o in dataclasses.fields(FullyShardedDataParallelPlugin)} == taken | set(_instead)


def after(**kwargs):
    "A plugin with fields that were set later, as version 2 would not take them at once, or sets them back"
    plugin = fsdp()
    for k, v in kwargs.items(): setattr(plugin, k, v)
    return plugin


@pytest.mark.parametrize('plugin,msg', [
    (lambda: FullyShardedDataParallelPlugin(fsdp_version=1), 'fsdp_version=1 is not accepted: torch replaces it by version 2: give FullyShardedDataParallelPlugin(fsdp_version=2)'),
    (lambda: fsdp(sharding_strategy='FULL_SHARD', reshard_after_forward=True), "sharding_strategy='FULL_SHARD' is not accepted: version 2 goes by reshard_after_forward"),
    (lambda: after(backward_prefetch='BACKWARD_POST'), "backward_prefetch='BACKWARD_POST' is not accepted: version 2 prefetches by itself"),
    (lambda: after(forward_prefetch=True), 'forward_prefetch=True'), (lambda: fsdp(limit_all_gathers=False), 'limit_all_gathers=False'),
    (lambda: after(use_orig_params=False), 'use_orig_params=False'), (lambda: after(sync_module_states=False), "sync_module_states=False is not accepted: all workers get rank 0's weights"),
    (lambda: fsdp(param_init_fn=print), 'param_init_fn='), (lambda: fsdp(cpu_ram_efficient_loading=True), 'cpu_ram_efficient_loading=True'),
    (lambda: fsdp(state_dict_config=torch.distributed.fsdp.FullStateDictConfig(offload_to_cpu=False)), 'state_dict_config=FullStateDictConfig'),
    (lambda: fsdp(optim_state_dict_config=torch.distributed.fsdp.ShardedOptimStateDictConfig(offload_to_cpu=False)), 'optim_state_dict_config=Sharded'),
    (lambda: fsdp(auto_wrap_policy=lambda *args: True), 'auto_wrap_policy=<function'), (lambda: fsdp(auto_wrap_policy='size_based_wrap'), 'min_num_params=0'),
    (lambda: fsdp(auto_wrap_policy='transformer_based_wrap'), "transformer_cls_names_to_wrap=None is not accepted: auto_wrap_policy='transformer_based_wrap' needs"),
    (lambda: fsdp(transformer_cls_names_to_wrap=['A']), "transformer_cls_names_to_wrap=['A'] is not accepted: it is for auto_wrap_policy='transformer_based_wrap'"),
    (lambda: fsdp(min_num_params=10), "min_num_params=10 is not accepted: it is for auto_wrap_policy='size_based_wrap'"),
    (lambda: fsdp(ignored_modules=[3]), 'ignored_modules=3'), (lambda: fsdp(ignored_modules='('), "ignored_modules='('"), (lambda: after(reshard_after_forward=-1), 'reshard_after_forward=-1'),
    ])
def test_fsdp_plugin_refused(plugin, msg): assert f'rank 0: fsdp_plugin.{msg}' in error(fsdp_plugin=plugin())


@pytest.mark.parametrize('sizes,word', [((3, 1), 'ddp'), ((1, 3), 'fsdp'), ((2, 3), 'hsdp')])
def test_parallelism(sizes, word, monkeypatch):
    config = ParallelismConfig(*sizes)
    for s in None, word:
        o = asked(s, parallelism_config=config)
        assert (o.strategy, o.mesh) == (word, sizes)
    for s in {'ddp', 'zero1', 'zero2', 'fsdp', 'hsdp', 'auto'}-{word}:
        msg = error(s, parallelism_config=config)
        assert f'strategy={s!r} is not accepted: parallelism_config=ParallelismConfig( dp_replicate_size={sizes[0]}, dp_shard_size={sizes[1]}' in msg and f'means {word!r}' in msg
    set_env(monkeypatch, ACCELERATE_USE_PARALLELISM_CONFIG='true', PARALLELISM_CONFIG_DP_REPLICATE_SIZE=str(sizes[0]), PARALLELISM_CONFIG_DP_SHARD_SIZE=str(sizes[1]))
    assert (asked().strategy, asked().mesh) == (word, sizes) == (asked(parallelism_config=ParallelismConfig()).strategy, asked(parallelism_config=ParallelismConfig()).mesh)
    assert 'use_parallelism_config (of the launcher)' in error('zero1')
    assert 'means' in error(parallelism_config=ParallelismConfig(4, 1))


def test_parallelism_of_one():
    assert asked('zero1', parallelism_config=ParallelismConfig()).strategy == 'zero1' and asked(parallelism_config=ParallelismConfig()).mesh is None


@pytest.mark.parametrize('kind', ['tp', 'cp', 'sp'])
def test_other_parallelism(kind, monkeypatch):
    config = ParallelismConfig()
    setattr(config, f'{kind}_size', 2)
    msg = error(parallelism_config=config)
    assert f'parallelism_config.{kind}_size=2' in msg and "strategy='fsdp'" in msg
    config = ParallelismConfig()
    setattr(config, f'{kind}_handler', object())
    assert f'parallelism_config.{kind}_handler=' in error(parallelism_config=config)
    set_env(monkeypatch, **{'ACCELERATE_USE_PARALLELISM_CONFIG': 'true', f'PARALLELISM_CONFIG_{kind.upper()}_SIZE': '2'})
    assert f'{kind}_size=2' in error() and "strategy='fsdp'" in error()


def test_mesh_and_workers():
    from fastdist.trainer.args.strategy_args import check_mesh
    for mesh, n in ((None, 3), ((2, 3), 6), ((1, 3), 3), ((1, 3), 1)): check_mesh(mesh, n)
    for mesh, n in (((2, 3), 5), ((3, 1), 2), ((1, 2), 3)):
        with pytest.raises(ValueError, match=rf'{mesh[0]} x {mesh[1]}.*there are {n} workers: dp_replicate_size times dp_shard_size has to be {n}'): check_mesh(mesh, n)


def mesh_in_a_group(mesh):
    from accelerate.parallelism_config import ParallelismConfig
    from fastdist.trainer.args.accelerate_args import check_args
    from fastdist.world import setup_distrib
    setup_distrib()
    try: return check_args(dict(parallelism_config=ParallelismConfig(*mesh))).mesh
    except ValueError as e: return str(e)


def test_mesh_in_a_group(world3):
    for r, o in enumerate(world3(mesh_in_a_group, (1, 2))): assert f'rank {r}: parallelism_config=' in o and 'there are 3 workers' in o
    assert world3(mesh_in_a_group, (1, 3)) == [(1, 3)]*3


@pytest.mark.parametrize('stage,word', [(0, 'ddp'), (1, 'zero1'), (2, 'zero2'), (3, 'fsdp')])
def test_deepspeed(stage, word, monkeypatch):
    way_out = f'for ZeRO stage {stage} use strategy={word!r}'
    plugin = DeepSpeedPlugin(zero_stage=stage)
    for kwargs in dict(deepspeed_plugin=plugin), dict(deepspeed_plugins=plugin), dict(deepspeed_plugin=dict(a=plugin)):
        assert f'{list(kwargs)[0]}=' in error(**kwargs) and way_out in error(**kwargs) and way_out in error(word, **kwargs)
    set_env(monkeypatch, ACCELERATE_USE_DEEPSPEED='true', ACCELERATE_DEEPSPEED_ZERO_STAGE=str(stage))
    assert 'use_deepspeed=True' in error() and way_out in error()


def test_megatron_and_tensor_parallel(monkeypatch):
    for k, v in dict(torch_tp_plugin=SimpleNamespace(tp_size=2), megatron_lm_plugin=SimpleNamespace(tp_degree=2)).items():
        assert f'{k}=namespace(tp_' in error(**{k: v}) and "use strategy='fsdp'" in error(**{k: v})
    set_env(monkeypatch, ACCELERATE_USE_MEGATRON_LM='true')
    assert 'use_megatron_lm=True' in error() and "use strategy='fsdp'" in error()


LAUNCH = dict(ACCELERATE_USE_FSDP='true', FSDP_VERSION='2', FSDP_SHARDING_STRATEGY='FULL_SHARD', FSDP_RESHARD_AFTER_FORWARD='true', FSDP_OFFLOAD_PARAMS='false', FSDP_MIN_NUM_PARAMS='100000000',
              FSDP_FORWARD_PREFETCH='false', FSDP_USE_ORIG_PARAMS='true', FSDP_CPU_RAM_EFFICIENT_LOADING='true', FSDP_SYNC_MODULE_STATES='true', FSDP_ACTIVATION_CHECKPOINTING='false',
              FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD='false') # what `accelerate launch --use_fsdp --fsdp_version 2` sets


def test_launched_with_fsdp(monkeypatch):
    set_env(monkeypatch, **LAUNCH)
    assert asked().strategy == 'fsdp' and asked('hsdp').strategy == 'hsdp' and asked(fsdp_plugin=fsdp()).strategy == 'fsdp'
    for o in 'ddp', 'zero1', 'zero2', 'auto', Own(): assert 'use_fsdp (of the launcher)=True' in error(o)
    config = ParallelismConfig(2, 2)
    assert asked(parallelism_config=config).strategy == 'hsdp'
    assert "use_fsdp (of the launcher)=True is not accepted: parallelism_config=" in error(parallelism_config=ParallelismConfig(2))
    set_env(monkeypatch, FSDP_RESHARD_AFTER_FORWARD='false', FSDP_OFFLOAD_PARAMS='true', FSDP_ACTIVATION_CHECKPOINTING='true', FSDP_AUTO_WRAP_POLICY='SIZE_BASED_WRAP', FSDP_MIN_NUM_PARAMS='99',
            FSDP_STATE_DICT_TYPE='FULL_STATE_DICT', FSDP_IGNORED_MODULES='head')
    o = asked().fsdp
    assert (o.reshard, bool(o.cpu_offload), o.activation_checkpointing, o.min_numel, o.ignored) == (False, True, True, 99, 'head')
    set_env(monkeypatch, FSDP_AUTO_WRAP_POLICY='TRANSFORMER_BASED_WRAP', FSDP_TRANSFORMER_CLS_TO_WRAP='A,B')
    assert asked().fsdp.modules == ['A', 'B']


def test_launched_with_fsdp_and_a_mesh(monkeypatch):
    set_env(monkeypatch, **LAUNCH, ACCELERATE_USE_PARALLELISM_CONFIG='true', PARALLELISM_CONFIG_DP_REPLICATE_SIZE='1', PARALLELISM_CONFIG_DP_SHARD_SIZE='3', PARALLELISM_CONFIG_TP_SIZE='1',
            PARALLELISM_CONFIG_CP_SIZE='1', PARALLELISM_CONFIG_CP_BACKEND='torch', PARALLELISM_CONFIG_SP_SIZE='1', PARALLELISM_CONFIG_SP_BACKEND='deepspeed')  # `--use_parallelism_config` needs `--use_fsdp`
    assert (asked().strategy, asked().mesh) == ('fsdp', (1, 3)) and "strategy='hsdp' is not accepted: use_parallelism_config" in error('hsdp')
    set_env(monkeypatch, PARALLELISM_CONFIG_DP_REPLICATE_SIZE='2')
    assert (asked().strategy, asked().mesh) == ('hsdp', (2, 3)) == (asked('hsdp').strategy, asked(fsdp_plugin=fsdp()).mesh)
    set_env(monkeypatch, PARALLELISM_CONFIG_DP_SHARD_SIZE='x')
    assert "PARALLELISM_CONFIG_DP_SHARD_SIZE='x'" in error()


@pytest.mark.parametrize('k,v', [('VERSION', '1'), ('SHARDING_STRATEGY', 'HYBRID_SHARD'), ('BACKWARD_PREFETCH', 'BACKWARD_POST'), ('FORWARD_PREFETCH', 'true'),
                                 ('USE_ORIG_PARAMS', 'false'), ('SYNC_MODULE_STATES', 'false')])
def test_launched_with_fsdp_refused(k, v, monkeypatch):
    set_env(monkeypatch, **{**LAUNCH, f'FSDP_{k}': v})
    assert f'fsdp_{k.lower()}={v!r} is not accepted: (of the launcher)' in error()
    if k == 'VERSION': assert 'fsdp_version: 2' in error() and 'fsdp_version: 2' in error(fsdp_plugin=fsdp())


def test_launched_with_settings_that_accelerate_refuses(monkeypatch):
    set_env(monkeypatch, **LAUNCH, FSDP_STATE_DICT_TYPE='LOCAL_STATE_DICT')
    assert "rank 0: the launcher's settings for FSDP are not accepted: FSDP2 does not support LOCAL_STATE_DICT" in error()


def test_plugin_and_word():
    for o in 'ddp', 'zero1', 'zero2', 'auto', Own():
        msg = error(o, fsdp_plugin=fsdp())
        assert msg.startswith('rank 0: strategy=') and 'fsdp_plugin=FullyShardedDataParallelPlugin(' in msg and "means 'fsdp' or 'hsdp'" in msg


def ddp(**kwargs): return dict(kwargs_handlers=[DistributedDataParallelKwargs(**kwargs)])


@pytest.mark.parametrize('kwargs,words', [
    (dict(comm_hook=Hook.FP16), 'ddp zero1'), (dict(comm_hook=Hook.POWER_SGD, comm_wrapper=Hook.BF16, comm_state_option=dict(matrix_approximation_rank=2)), 'ddp zero1'),
    (dict(broadcast_buffers=False), 'ddp zero1'), (dict(bucket_cap_mb=7), 'ddp zero1'), (dict(find_unused_parameters=True), 'ddp zero1 zero2'), (dict(static_graph=True), 'ddp zero1 zero2'),
    (dict(), 'ddp zero1 zero2 fsdp hsdp')])
def test_ddp_kwargs(kwargs, words):
    from fastdist.strategy.select import check_ddp
    for o in 'ddp', 'zero1', 'zero2', 'fsdp', 'hsdp', Own():
        if o in words.split() or not kwargs:
            got = asked(o, **ddp(**kwargs)).ddp
            assert all(getattr(got, k) == v for k, v in kwargs.items()) and isinstance(got, DistributedDataParallelKwargs)
        else:
            msg = error(o, **ddp(**kwargs))
            k, v = list(kwargs.items())[0]
            assert msg.startswith(f'rank 0: {k}={v!r} is not accepted: ') and "use strategy='ddp' or 'zero1'" in msg and ("'zero2'" in msg.partition('use ')[2]) == ('zero2' in words)
    got = asked('auto', **ddp(**kwargs)).ddp
    if kwargs:
        with pytest.raises(ValueError, match=list(kwargs)[0]): check_ddp(got, 'fsdp')


@pytest.mark.parametrize('kwargs,msg', [
    (dict(check_reduction=True), 'check_reduction=True'), (dict(dim=1), 'dim=1'), (dict(comm_hook='fp16'), "comm_hook='fp16'"),
    (dict(comm_wrapper=Hook.FP16), 'there is no comm_hook'), (dict(comm_hook=Hook.FP16, comm_wrapper=Hook.POWER_SGD), 'comm_wrapper='),
    (dict(comm_hook=Hook.FP16, comm_state_option=dict(a=1)), "comm_state_option={'a': 1} is not accepted: it is for the hook of PowerSGD"),
    (dict(comm_hook=Hook.BATCHED_POWER_SGD), 'give POWER_SGD'), (dict(comm_hook=Hook.POWER_SGD, comm_state_option=dict(rank=1)), "comm_state_option={'rank': 1} is not accepted: torch's PowerSGDState"),
    (dict(comm_hook=Hook.POWER_SGD, comm_state_option=dict(start_powerSGD_iter=1)), "comm_state_option={'start_powerSGD_iter': 1}")])
def test_ddp_kwargs_refused(kwargs, msg):
    for o in 'ddp', 'auto': assert msg in error(o, **ddp(**kwargs))


def test_handlers():
    from datetime import timedelta
    given = [GradScalerKwargs(init_scale=8., growth_factor=3., backoff_factor=0.25, growth_interval=7, enabled=False), AutocastKwargs(enabled=False, cache_enabled=True),
             InitProcessGroupKwargs(backend='gloo', timeout=timedelta(seconds=9)), DistributedDataParallelKwargs(bucket_cap_mb=3)]
    o = asked(kwargs_handlers=given)
    assert [o.scaler, o.autocast, o.init, o.ddp] == given and o.scaler is given[0]


@pytest.mark.parametrize('h,msg', [
    (ProfileKwargs(), 'torch.profiler.profile'), (FP8RecipeKwargs, 'learn.to_bf16()'), (AORecipeKwargs, 'learn.to_bf16()'), (TERecipeKwargs, 'learn.to_bf16()'), (MSAMPRecipeKwargs, 'learn.to_bf16()'),
    (3, 'kwargs_handlers=3 is not accepted: only DistributedDataParallelKwargs'), (GradScalerKwargs(init_scale=0.), 'GradScalerKwargs.init_scale=0.0'), (GradScalerKwargs(growth_factor=1.), 'growth_factor=1.0'),
    (GradScalerKwargs(backoff_factor=1.), 'backoff_factor=1.0'), (GradScalerKwargs(growth_interval=0), 'growth_interval=0'), (GradScalerKwargs(enabled=1), 'enabled=1'), (AutocastKwargs(cache_enabled=1), 'AutocastKwargs.cache_enabled=1')])
def test_handlers_refused(h, msg):
    if isinstance(h, type): h = object.__new__(h)  # some want a package that need not be there; which handler it is decides
    try: repr(h)
    except AttributeError: type(h).__repr__ = object.__repr__
    assert msg in error(kwargs_handlers=[h])


def test_handlers_twice():
    assert 'there are two AutocastKwargs' in error(kwargs_handlers=[AutocastKwargs(), AutocastKwargs(enabled=False)])
    assert 'it is a list' in error(kwargs_handlers=AutocastKwargs())


def test_dataloader_config():
    o = asked(dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=False, use_seedable_sampler=True, data_seed=5, non_blocking=True))
    assert (o.split, o.data_seed) == (True, 5)
    assert asked(split_batches=True).split is True and asked(dataloader_config=DataLoaderConfiguration(dispatch_batches=False)).split is False
    assert asked(split_batches=True, dataloader_config=DataLoaderConfiguration(non_blocking=True)).split is True  # whose False nobody has said


@pytest.mark.parametrize('k,v', [('dispatch_batches', True), ('data_seed', 'x'), ('data_seed', True), ('split_batches', 1), ('even_batches', None), ('non_blocking', 2), ('use_seedable_sampler', 'yes'),
                                 ('use_stateful_dataloader', True)])
def test_dataloader_config_refused(k, v):
    config = DataLoaderConfiguration()
    setattr(config, k, v)
    assert f'rank 0: dataloader_config.{k}={v!r} is not accepted: ' in error(dataloader_config=config)


def test_dataloader_config_other():
    assert 'dataloader_config=3' in error(dataloader_config=3) and 'split_batches=False' in error(split_batches=False, dataloader_config=DataLoaderConfiguration(split_batches=True))


def test_rng_types():
    assert asked(rng_types=['torch', RNGType.GENERATOR]).rng_types == ['torch', 'generator'] and asked(rng_types=()).rng_types == []
    for o in 'xla', 'mlu', 'npu', RNGType.HPU: assert f'rng_types={getattr(o, "value", o)!r} is not accepted: it is a list of torch, cuda, generator; fastai does not train on such a device' in error(rng_types=['torch', o])
    assert "rng_types='numpy'" in error(rng_types=['numpy']) and "rng_types='torch'" in error(rng_types='torch')
    if torch.cuda.is_available(): assert asked(rng_types=['cuda']).rng_types == ['cuda']
    else: assert "rng_types='cuda' is not accepted: there is no GPU here" in error(rng_types=['cuda'])


def test_project():
    for kwargs in (dict(project_dir='a/b'), dict(project_dir=Path('a/b')), dict(project_config=ProjectConfiguration('a/b')), dict(project_dir='a/b', project_config=ProjectConfiguration('a/b')),
                   dict(project_dir='a/b', project_config=ProjectConfiguration()), dict(project_config=ProjectConfiguration('a/b', logging_dir='a/b'))): assert asked(**kwargs).project_dir == Path('a/b')
    assert asked(project_config=ProjectConfiguration()).project_dir is None


@pytest.mark.parametrize('kwargs,msg', [(dict(logging_dir='logs'), "project_config.logging_dir='logs'"), (dict(automatic_checkpoint_naming=True), 'automatic_checkpoint_naming=True'),
                                        (dict(total_limit=3), 'total_limit=3'), (dict(iteration=1), 'iteration=1'), (dict(save_on_each_node=True), 'save_on_each_node=True')])
def test_project_refused(kwargs, msg): assert msg in error(project_config=ProjectConfiguration('a', **kwargs))


def test_project_twice():
    assert "project_dir='b' is not accepted: project_config says 'a'" in error(project_dir='b', project_config=ProjectConfiguration('a'))
    assert 'project_dir=3' in error(project_dir=3) and 'project_config=3' in error(project_config=3)


def test_dynamo(monkeypatch):
    for o in 'eager', 'EAGER', DynamoBackend.EAGER: assert asked(dynamo_backend=o).dynamo.backend == DynamoBackend.EAGER
    for o in 'no', DynamoBackend.NO: assert asked(dynamo_backend=o).dynamo is None
    assert asked(dynamo_plugin=TorchDynamoPlugin()).dynamo is None
    plugin = TorchDynamoPlugin(backend='inductor', mode='max-autotune-no-cudagraphs', fullgraph=True, dynamic=True)
    assert asked(dynamo_plugin=plugin).dynamo is plugin
    set_env(monkeypatch, ACCELERATE_DYNAMO_BACKEND='NO', ACCELERATE_DYNAMO_MODE='default', ACCELERATE_DYNAMO_USE_FULLGRAPH='False', ACCELERATE_DYNAMO_USE_DYNAMIC='False',
            ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION='False')  # what `accelerate launch` sets by default
    assert asked().dynamo is None and asked(dynamo_backend='eager').dynamo.backend == DynamoBackend.EAGER
    set_env(monkeypatch, ACCELERATE_DYNAMO_BACKEND='AOT_EAGER', ACCELERATE_DYNAMO_USE_FULLGRAPH='True')
    o = asked().dynamo
    assert (o.backend, o.fullgraph, o.dynamic) == (DynamoBackend.AOT_EAGER, True, False) == (asked(dynamo_backend='aot_eager').dynamo.backend, True, False)
    for o in 'eager', 'no': assert f"dynamo_backend={o!r} is not accepted: the launcher was told 'aot_eager'" in error(dynamo_backend=o)
    set_env(monkeypatch, ACCELERATE_DYNAMO_BACKEND='NONSENSE')
    assert "dynamo_backend='nonsense'" in error()


@pytest.mark.parametrize('kwargs,msg', [
    (dict(dynamo_backend='inducter'), "dynamo_backend='inducter' is not accepted: it is one of no, inductor, aot_eager, eager and others; did you mean 'inductor'?"),
    (dict(dynamo_backend='fx2trt'), "dynamo_backend='fx2trt' is not accepted: this torch has no such backend, but inductor, aot_eager"),
    (dict(dynamo_plugin=TorchDynamoPlugin(mode='max-autotune')), "dynamo_plugin.mode='max-autotune' is not accepted: dynamo_plugin has backend='no'"),
    (dict(dynamo_plugin=TorchDynamoPlugin(backend='inductor', mode='fast')), "dynamo_plugin.mode='fast'"),
    (dict(dynamo_plugin=TorchDynamoPlugin(backend='inductor', mode='max-autotune', options=dict(a=1))), "dynamo_plugin.options={'a': 1}"),
    (dict(dynamo_plugin=TorchDynamoPlugin(backend='inductor', use_regional_compilation=True)), 'dynamo_plugin.use_regional_compilation=True is not accepted: the model is compiled as one'),
    (dict(dynamo_plugin=TorchDynamoPlugin(backend='inductor', mode='reduce-overhead')), "dynamo_plugin.mode='reduce-overhead' is not accepted: CUDA graphs write over"),
    (dict(dynamo_plugin=TorchDynamoPlugin(backend='inductor', options={'triton.cudagraphs': True})), "dynamo_plugin.options={'triton.cudagraphs': True} is not accepted: CUDA graphs"),
    (dict(dynamo_backend='cudagraphs'), "dynamo_backend='cudagraphs' is not accepted: CUDA graphs"),
    (dict(dynamo_plugin=3), 'dynamo_plugin=3'), (dict(dynamo_backend='eager', dynamo_plugin=TorchDynamoPlugin(backend='eager')), "dynamo_backend='eager' is not accepted: dynamo_plugin is given too")])
def test_dynamo_refused(kwargs, msg): assert msg in error(**kwargs)


def test_still_refused():
    assert 'device_placement=False' in error(device_placement=False)
    for k, v in dict(mixed_precision='fp16', log_with='wandb', step_scheduler_with_optimizer=False, stratgy='ddp').items(): assert f'{k}={v!r}' in error(cls=TypeError, **{k: v})
    assert 'did you mean strategy?' in error(cls=TypeError, stratgy='ddp')
    assert 'parallelism_config=3' in error(parallelism_config=3) and 'fsdp_plugin=3' in error(fsdp_plugin=3)


def test_no_argument_of_accelerates_is_swallowed():
    "What no check looks at would be swallowed: a value that means nothing is an error for each of them"
    import inspect
    from accelerate import Accelerator
    for k in inspect.signature(Accelerator.__init__).parameters:
        if k in ('self', 'mixed_precision', 'log_with', 'step_scheduler_with_optimizer'): continue
        msg = error(**{k: 3.5})
        assert k in msg and '3.5' in msg, msg


WRONG = ['fail_together(float("inf")).__enter__()', 'fail_together(1e12).__enter__()', 'world_store(timeout="long")', 'setup_distrib(gpu="x")',
         'distributed_init(init_method=3)', 'distributed_init("file://shared/meet", rank=0, world_size=2)', 'call_main(3)', 'call_main(len, n="2")', 'rank0_first(3)', 'rank0_read(3)',
         'DistributedDL(dl, rank="0", world_size=2)', 'Resume(None)', 'Resume("")', 'GlobalBatchLoss(None)', 'train(watchdog=float("inf"))',
         'train(watchdog=1e12)', 'train(activation_checkpointing="x")', 'parallel(0)', 'parallel([-1])', 'parallel([])', 'parallel(["gpu"])']
NAMES = ['watchdog=inf', 'watchdog=1000000000000.0', "timeout='long'", "gpu='x'", 'init_method=3', "init_method='file://shared/meet'", 'main=3', "n='2'", 'rank0_first was given a int',
         'rank0_read was given a int', "rank='0' and world_size=2", 'path=None', "path=''", 'loss_func=None', 'watchdog=inf', 'watchdog=1000000000000.0',
         "activation_checkpointing='x'", 'device_ids=0', 'device_ids=[-1]', 'device_ids=[]', "device_ids=['gpu']"]


def wrong_calls(calls, folder):
    "What each says; and that numbers of NumPy's are numbers, and a long time is one"
    import numpy as np
    from fastai.basics import DataLoader, DataLoaders, Learner, MSELossFlat
    from fastdist.all import DistributedDL, DivergenceCheck, GlobalBatchLoss, Resume
    from fastdist.world import call_main, distributed_init, fail_together, rank0_first, rank0_read, setup_distrib, world_store
    setup_distrib()
    dl = DataLoader([(torch.ones(1), torch.ones(1))]*7, bs=3)

    def learner(): return Learner(DataLoaders(dl, dl), nn.Sequential(nn.Linear(1, 1)), loss_func=MSELossFlat())
    def train(cbs=None, **kwargs):
        with (learn := learner()).distrib_ctx(**kwargs), learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=cbs)
    def parallel(ids):
        with (learn := learner()).parallel_ctx(ids), learn.no_bar(), learn.no_logging(): learn.fit(1)
    for o in np.int64(60), np.float32(60), 1e9: train(watchdog=o)
    train(gradient_accumulation_steps=np.int64(2))
    for o in DivergenceCheck(np.int64(2)), Resume(folder, every=np.int64(2), keep=np.int64(1)): train(cbs=o)
    said = []
    for o in calls:
        try: said.append(repr(eval(o, {**globals(), **locals()})))
        except (TypeError, ValueError) as e: said.append(str(e))
    return said


def test_wrong_calls(world2, tmp_path):
    "Each names the argument and the value in all workers, none of which waits for another"
    for said in world2(wrong_calls, WRONG, str(tmp_path/'ckpt')):
        for text, name in zip(said, NAMES, strict=True): assert name in text and len(text) > len(name) + 15, (name, text)


def test_a_seed_that_a_loader_does_not_draw_by():
    import fastdist.all
    from fastai.basics import DataLoaders, Learner, MSELossFlat, nn
    from fastai.callback.data import PartialDL
    learn = Learner(DataLoaders(PartialDL(list(range(9)), bs=4, partial_n=8, shuffle=True), []), nn.Linear(1, 1), loss_func=MSELossFlat())
    with pytest.raises(ValueError, match=r'PartialDL draws its order from the global generators: call set_seed\(3\)'):
        with learn.distrib_ctx(dataloader_config=DataLoaderConfiguration(data_seed=3)): pass
