"P7: an argument that is wrong, or does not fit what the learner is, raises at once, with its name and the way out, and leaves the learner as it was"
from test_no_trace import snapshot
from table import *


def frozen():
    learn = quiet(learner())
    learn.model.requires_grad_(False)
    return learn


def errors(folder):
    "By what was tried: the error, and what of the learner is not as before"
    import fastdist.all
    from accelerate.utils import DataLoaderConfiguration, ProfileKwargs
    from fastdist.all import DistributedDL, GlobalBatchLoss, Resume, get_rank, rank0_first
    res = {}
    def tried(nm, f, learn=None):
        learn = learn or quiet(learner(n=9, bs=4))
        if learn.opt is None and nm != 'frozen': learn.create_opt()
        before = snapshot(learn)
        try: f(learn); err = None
        except Exception as e: err = f'{type(e).__name__}: {e}'
        after = snapshot(learn)
        res[nm] = err, [k for k in before if before[k] != after[k]]
    def ctx(nm, f=lambda l: l.fit(1), learn=None, **kwargs):
        def g(learn):
            with learn.distrib_ctx(**kwargs): f(learn)
        tried(nm, g, learn)
    def within(outer, inner):
        def f(learn):
            with getattr(learn, outer)(), (inner if callable(inner) else getattr(learn, inner))(): pass
        return f
    for k, v in dict(sync_bm=True, mixed_precision='fp16', gradient_accumulation_steps=0, strategy='zero9', watchdog=-1, log_with='wandb', resume='', kwargs_handlers=[ProfileKwargs()],
                     split_batches='yes', activation_checkpointing='x', dataloader_config=DataLoaderConfiguration(dispatch_batches=True)).items(): ctx(k, **{k: v})
    ctx('both', split_batches=False, dataloader_config=DataLoaderConfiguration(split_batches=True))
    ctx('frozen', learn=frozen())
    ctx('too few', learn=quiet(learner(n=9, bs=5, drop_last=True)))
    tried('nested', lambda l: within('distrib_ctx', partial(l.distrib_ctx, sync_bn=False))(l))
    tried('parallel', within('parallel_ctx', 'distrib_ctx'))
    tried('in parallel', within('distrib_ctx', 'parallel_ctx'))
    tried('split already', lambda l: ctx('', lambda l: l.validate(dl=torch.utils.data.DataLoader(Items(9), batch_size=2, sampler=torch.utils.data.DistributedSampler(Items(9))))) or (_ for _ in ()).throw(ValueError(res[''][0])))
    ctx('other sizes', learn=quiet(learner(n=9+get_rank(), bs=4)))
    for nm, f in dict(path=lambda l: Resume(''), every=lambda l: Resume(folder, every='soon'), loss_func=lambda l: GlobalBatchLoss(None), rank=lambda l: DistributedDL(l.dls.train, rank='0', world_size=2),
                      rank0_first=lambda l: rank0_first(3), device_ids=lambda l: l.to_parallel(device_ids=[-1])).items(): tried(nm, f)
    ctx('well')
    return res


TEXTS = {'sync_bm': 'sync_bn', 'mixed_precision': 'to_fp16', 'kwargs_handlers': 'Profile', 'dataloader_config': 'dispatch_batches', 'both': 'split_batches', 'frozen': 'gradient',
         'too few': '9 samples', 'nested': 'distrib_ctx', 'parallel': 'parallel_ctx', 'in parallel': 'distrib_ctx', 'split already': 'DistributedSampler',
         'other sizes': 'seed', 'well': None}


def test_wrong_arguments(world2, tmp_path):
    for rank, res in enumerate(world2(errors, str(tmp_path/'ckpt'))):
        faults = {k: (err, trace) for k, (err, trace) in res.items() if trace or (err is not None if TEXTS.get(k, k) is None else not err or TEXTS.get(k, k) not in err or len(err) < 40)}
        faults.pop('', None)
        assert not faults, (rank, faults)
