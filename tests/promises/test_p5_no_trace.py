"P5: a context leaves nothing behind, however it ends. P7: wrong arguments are errors, and leave the learner as it was"
import contextlib, io

import pytest
from fastai.data.core import Datasets
from fastai.data.transforms import RandomSplitter
from learners import *

EVENTS = '''before_fit before_epoch before_train before_batch after_pred after_loss before_backward after_backward before_step after_step
            after_batch after_train before_validate after_validate after_epoch after_fit'''.split()


def snapshot(learn):
    "What a user could see of the learner: by identity, class and name"
    mods = list(learn.model.modules())
    return dict(model=(id(learn.model), type(learn.model)), modules=[(id(m), type(m)) for m in mods], keys=list(learn.model.state_dict()),
                vars=[sorted(vars(m)) for m in mods], hooks=[(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in mods],
                grads=[p.requires_grad for p in learn.model.parameters()], params=[sorted(vars(p)) for p in learn.model.parameters()], param_hooks=[bool(p._backward_hooks) for p in learn.model.parameters()],
                memory=[t.untyped_storage().resizable() for t in learn.model.state_dict().values()],
                dls=(id(learn.dls), [id(o) for o in learn.dls.loaders], [type(o) for o in learn.dls.loaders], [sorted(vars(o)) for o in learn.dls.loaders]),
                cbs=[id(o) for o in learn.cbs], metrics=[(id(o), type(o)) for o in learn.metrics], logger=learn.logger, opt=type(learn.opt),
                loss=id(learn.loss_func), attrs=sorted(o for o in vars(learn) if o not in FIT_LEAVES))


# what a fit itself leaves on a learner, in one process too
FIT_LEAVES = set('''dl xb yb pred loss loss_grad epoch n_epoch n_iter iter pct_train train_iter training smooth_loss final_record opt'''.split())


def silent(*args): "A logger that prints nothing, and is not the one that other ranks than 0 get in a context"


def ended(event, rank_only=None, sync_bn=True, exc=KeyError, strategy=None):
    import fastdist.all
    learn = learner(n=24, bs=5, bn=True, metrics=[accuracy])
    learn.remove_cbs(learn._grab_cbs(ProgressCallback))  # after an error it leaves its own logger, in one process too
    learn.logger = silent
    learn.create_opt()
    set_seed(7)
    before = snapshot(learn)
    class Fail(Callback):
        order = 5
    if event: setattr(Fail, event, lambda self: (_ for _ in ()).throw(exc('a bug')))
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            with learn.distrib_ctx(split_batches=True, sync_bn=sync_bn, strategy=strategy):
                assert snapshot(learn) != before
                learn.fit(1, cbs=Fail() if event else None)
            raised = None
        except Exception as e: raised = type(e)
    after = snapshot(learn)
    faults = [k for k in before if before[k] != after[k]]
    drawn = torch.rand(1).item(), random.random(), np.random.rand()
    # and it works as in one process: on rank 0 alone nobody is waited for
    import torch.distributed as dist
    if dist.get_rank() == 0:
        quiet(learn)
        learn.fit(1)
        learn.validate()
    dl = vars(learn).get('dl')
    return raised, faults, type(dl).__name__, drawn


@pytest.mark.parametrize('strategy', [None, 'zero1', 'zero2', 'fsdp'])
def test_after_the_end(world3, strategy):
    every = world3(ended, None, strategy=strategy)
    for raised, faults, *_ in every: assert raised is None and faults == []
    assert len({drawn for *_, drawn in every}) == 1  # a worker's own random numbers are those of a fit


@pytest.mark.parametrize('sync_bn', [True, False])
def test_after_an_error_at_any_event(world2, sync_bn):
    def all_events(): return [(e, *ended(e, sync_bn=sync_bn)) for e in EVENTS]
    every = world2(all_events)
    for res in every:
        for event, raised, faults, dl, _ in res: assert (raised, faults) == (KeyError, []) and dl != 'DistributedDL', event
    for (event, *_, a), (*_, b) in zip(*every): assert a == b, event  # the random numbers that the script draws next


def kept_alive(event):
    "An error between forward and backward, whose traceback somebody keeps, and with it all that was wrapped"
    import fastdist.all, torch.distributed as dist
    learn = quiet(learner(n=22, bs=5))
    class Fail(Callback): pass
    setattr(Fail, event, lambda self: 1/0)
    try:
        with learn.distrib_ctx(split_batches=True): learn.fit(1, cbs=Fail())
    except ZeroDivisionError as e: kept = e
    if dist.get_rank() == 0: learn.fit(1)
    return kept is not None


def test_one_process_after_an_error_before_the_backward(world2):
    for event in 'after_pred', 'after_loss', 'before_backward': assert world2(kept_alive, event) == [True, True]


class Kaput(Exception): pass


def error_in_forward():
    import fastdist.all
    learn = quiet(learner(n=22, bs=5, bn=True))
    before = snapshot(learn)
    def fail(m, i): raise Kaput('in the model')
    try:
        with learn.distrib_ctx(split_batches=True):
            hook = learn.model[1].register_forward_pre_hook(fail)
            learn.fit(1)
    except Kaput: pass
    hook.remove()
    learn.opt = None
    after = snapshot(learn)
    return [k for k in before if before[k] != after[k]]


def test_after_an_error_in_the_forward(world2): assert world2(error_in_forward) == [[], []]


def frozen_learner():
    learn = quiet(learner())
    learn.model.requires_grad_(False)
    return learn


def errors():
    "(what was tried, the error, was the learner as before)"
    import fastdist.all
    from fastdist.all import DistributedDL, DistributedTrainer
    from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, ProfileKwargs
    res = []
    def tried(nm, learn, f):
        before = snapshot(learn)
        try: f(learn); err = None
        except Exception as e: err = f'{type(e).__name__}: {e}'
        learn.opt = None
        before['opt'] = type(None)
        after = snapshot(learn)
        res.append((nm, err, [k for k in before if before[k] != after[k]]))
    def ctx(nm, f=None, learn=None, **kwargs):
        def g(learn):
            with learn.distrib_ctx(**kwargs): (f or (lambda l: l.fit(1)))(learn)
        tried(nm, learn or quiet(learner(n=9, bs=4)), g)
    ctx('unknown', sync_bm=True)
    ctx('mixed_precision', mixed_precision='fp16')
    ctx('accumulation', gradient_accumulation_steps=0)
    ctx('fsdp', fsdp_plugin=FullyShardedDataParallelPlugin())
    ctx('handler', kwargs_handlers=[ProfileKwargs()])
    ctx('view', kwargs_handlers=[DistributedDataParallelKwargs(dim=1)])
    ctx('config', dataloader_config=3)
    ctx('no gradients', learn=frozen_learner())
    def nested(learn):
        with learn.distrib_ctx(sync_bn=False): pass
    ctx('nested', nested)
    def joined(learn):
        with learn.distrib_ctx(split_batches=False): learn.fit(1)
        learn.fit(1)
    ctx('joined', joined)
    def parallel(learn):
        with learn.parallel_ctx():
            with learn.distrib_ctx(): pass
    tried('parallel', quiet(learner()), parallel)
    def parallel_in(learn):
        with learn.parallel_ctx(): pass
    ctx('parallel in', parallel_in)
    ctx('too few', learn=quiet(learner(n=9, bs=5, drop_last=True)))
    ctx('split already', lambda l: l.validate(dl=torch.utils.data.DataLoader(Items(9), batch_size=2, sampler=torch.utils.data.DistributedSampler(Items(9)))))
    unused = nn.ModuleDict(dict(a=nn.Linear(4, 3), b=nn.Linear(1, 1))).double()
    unused.forward = unused['a'].forward
    ctx('unused', learn=quiet(learner(n=9, bs=4, model=lambda: unused)))
    ctx('unused allowed', learn=quiet(learner(n=9, bs=4, model=lambda: unused)), kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    os.environ['ACCELERATE_MIXED_PRECISION'] = 'fp16'
    ctx('launched with fp16')
    del os.environ['ACCELERATE_MIXED_PRECISION']
    ctx('well')
    return res


EXPECTED = {
    'unknown': "TypeError: rank {r}: sync_bm=True is not accepted: fastdist has no argument of this name; did you mean sync_bn?",
    'mixed_precision': "learn.to_fp16()", 'accumulation': "gradient_accumulation_steps=0", 'fsdp': 'fsdp_plugin.fsdp_version=1', 'handler': 'only DistributedDataParallelKwargs',
    'view': 'dim=1', 'config': 'dataloader_config=3 is not accepted',
    'no gradients': 'rank {r}: no parameter of Sequential needs a gradient', 'nested': "rank {r}: this learner is in distrib_ctx", 'joined': None,
    'parallel': 'rank {r}: this learner is in parallel_ctx', 'parallel in': 'this learner is in distrib_ctx', 'too few': '9 samples do not fill one global batch of 10',
    'split already': 'rank {r}: torch.utils.data.dataloader.DataLoader is split already, by its DistributedSampler', 'unused': 'rank {r}: the loss does not depend on b.weight, b.bias', 'unused allowed': None,
    'launched with fp16': "mixed_precision='fp16'", 'well': None}


def test_wrong_arguments(world2):
    for r, res in enumerate(world2(errors)):
        assert [o[0] for o in res] == list(EXPECTED)
        for nm, err, faults in res:
            if EXPECTED[nm] is None: assert err is None, nm
            else: assert err and EXPECTED[nm].format(r=r) in err, (nm, err)
            assert faults == [], nm


def other_data(kind):
    "A random split that nobody seeded, and a loader of another size"
    import fastdist.all
    from fastdist.all import get_rank
    learn = quiet(learner(n=9+(get_rank() if kind == 'size' else 0), bs=4))
    if kind == 'split':
        random.seed(os.urandom(4)); torch.seed()
        ds = Datasets([f'{i}.png' for i in range(200)], [[lambda o: 1.], [lambda o: 1]], splits=RandomSplitter()(range(200)))
        learn.dls = ds.dataloaders(bs=4, num_workers=0)
    before = snapshot(learn)
    try:
        with learn.distrib_ctx(): pass
    except ValueError as e: return str(e), snapshot(learn) == before


def test_workers_with_other_data(world2):
    for kind in 'size', 'split':
        for o, ok in world2(other_data, kind): assert 'has other data than that of rank 0' in o and 'seed=42' in o and ok


def pickled():
    "Copies and pickles made in a context are of the user's learner"
    import fastdist.all, pickle, cloudpickle
    from copy import deepcopy
    learn = quiet(learner(n=10, bs=4, bn=True))
    res = []
    class Copy(Callback):
        def after_pred(self):
            if self.iter == 0 and self.training: res.append(cloudpickle.dumps(self.learn.model))
    with learn.distrib_ctx(split_batches=True):
        learn.fit(1, cbs=Copy())
        res += [cloudpickle.dumps(learn), cloudpickle.dumps(deepcopy(learn))]
    return [bool(re.search(rb'fastdist\.\w|accelerate\.\w|Distributed', o)) for o in res]  # modules, not the folder of this file


def test_copies_in_a_context(world2): assert world2(pickled) == [[False]*3]*2


def copied(strategy):
    "What copies and pickles say where each worker has a part of the optimizer; `export` puts it together"
    import fastdist.all, pickle
    from copy import deepcopy
    from fastdist.world import get_rank
    learn, said = quiet(learner(n=10, bs=4, opt=Adam)), []
    with learn.distrib_ctx(strategy=strategy):
        quiet(deepcopy(learn))  # there is nothing yet of which each has a part
        learn.fit(1)
        for f in deepcopy, pickle.dumps:
            try: f(learn)
            except RuntimeError as e: said.append(str(e))
        learn.export('copied.pkl')
    return said, deepcopy(learn).opt is not None

@pytest.mark.parametrize('strategy', ['zero1', 'zero2'])
def test_no_copies_of_a_part(world2, strategy):
    for said, whole in world2(copied, strategy): assert len(said) == 2 and all('has its optimizer in shards: call learn.export' in o for o in said) and whole, said


def kept():
    "Loaders that a script has made, or kept, in a context, and uses after it"
    import fastdist.all
    from fastai.interpret import ClassificationInterpretation
    items = Items(21)
    dsets = Datasets(range(21), [[lambda i: items[i][0]], [lambda i: int(items[i][1]), Categorize(vocab=[0, 1, 2])]], splits=[range(11), range(11, 21)])
    learn = quiet(learner())
    learn.dls = dsets.dataloaders(bs=3, num_workers=0, drop_last=False)
    with learn.distrib_ctx():
        learn.fit(1)
        dls = learn.dls.valid, learn.dls.test_dl(range(7), with_labels=True, bs=2), learn.dls.train.new(bs=4)
        interp = ClassificationInterpretation.from_learner(learn)
        inside = [learn.validate(dl=dl)[0] for dl in dls[:2]]
    one = [learn.validate(dl=dl)[0] for dl in (learn.dls.valid, learn.dls.test_dl(range(7), with_labels=True))]
    after = [learn.validate(dl=dl)[0] for dl in dls[:2]]
    with learn.distrib_ctx(): again = [learn.validate(dl=dl)[0] for dl in dls[:2]]
    return np.allclose([inside, after, again], [one]*3), [(len(dl), sum(len(o[0]) for o in dl)) for dl in dls], interp.confusion_matrix().sum()


def test_loaders_that_a_script_keeps(world2): assert world2(kept) == [(True, [(4, 10), (4, 7), (3, 11)], 10)]*2


def memory(learn): return [o.data_ptr() for o in (*learn.model.parameters(), *learn.model.buffers(), *(v for s in learn.opt.state.values() for v in s.values() if isinstance(v, Tensor)))]


def stays():
    "Is the memory the same in a context, and after it?"
    import fastdist.all
    learn = quiet(learner(n=24, bs=6, bn=True, opt=Adam))
    learn.fit(1)
    before = memory(learn)
    with learn.distrib_ctx():
        inside = memory(learn)
        learn.fit(1)
    return before == inside, before == memory(learn)


def test_nothing_is_copied_on_the_cpu(world2):
    "to where it is already, which is called cpu:0 by Accelerate"
    assert world2(stays) == [(True, True)]*2
