"P5: a context leaves nothing behind, however it ends"
import io

from fastai.data.core import Datasets
from table import *

EVENTS = 'before_fit before_train before_batch after_pred after_loss before_backward after_backward after_step before_validate after_epoch after_fit'.split()
# what a fit itself leaves on a learner, in one process too
FIT_LEAVES = set('''dl xb yb pred loss loss_grad epoch n_epoch n_iter iter pct_train train_iter training smooth_loss final_record'''.split())


def hooks(m): return {k: len(v) for k, v in vars(m).items() if 'hook' in k and isinstance(v, dict)}


def snapshot(learn):
    "What a user could see of the learner: by identity, class and name"
    mods, ps = list(learn.model.modules()), list(learn.model.parameters())
    return dict(
        model=(id(learn.model), type(learn.model)), modules=[(id(m), type(m), hooks(m), sorted(vars(m))) for m in mods], keys=list(learn.model.state_dict()),
        params=[(id(p), type(p), p.shape, p.requires_grad, sorted(vars(p)), bool(p._backward_hooks)) for p in ps], forwards=[m.forward.__func__ for m in mods],
        dls=(id(learn.dls), [(id(o), type(o), sorted(vars(o))) for o in learn.dls.loaders]), cbs=[id(o) for o in learn.cbs], logger=learn.logger,
        metrics=[(id(o), type(o)) for o in learn.metrics], loss=(id(learn.loss_func), type(learn.loss_func), sorted(vars(learn.loss_func))),
        opt=(id(learn.opt), type(learn.opt), sorted(getattr(learn.opt, '__dict__', ())), learn.opt_func), attrs=sorted(o for o in vars(learn) if o not in FIT_LEAVES), functions=functions())


def functions():
    "What of torch's and fastai's is in its place"
    from fastai.callback.core import Callback
    from fastai.learner import Learner, Recorder
    return [F.batch_norm, torch.nn.functional.batch_norm, torch.batch_norm, nn.BatchNorm1d.forward, Learner.fit, Learner._do_one_batch, Learner.get_preds, Recorder.after_batch, Callback.__call__]


def silent(*args): "A logger that prints nothing, and is not the one that other ranks than 0 get in a context"


def ended(how, rank, strategy='ddp', **ctx):
    "What was raised, what differs afterwards, and what the script draws next; `how` is an event of a callback, of which rank 0 or all raise"
    import fastdist.all
    from fastdist.all import get_rank
    learn = learner(n=24, bs=6, bn=True, metrics=[accuracy], opt=Adam)
    learn.remove_cbs(learn._grab_cbs(ProgressCallback))  # after an error it leaves its own logger, in one process too
    learn.logger = silent
    learn.create_opt()
    set_seed(7)
    learn.dls.train.one_batch()  # fastai's loaders have attributes from their first pass on
    before = snapshot(learn)
    exc = {'Ctrl-C': KeyboardInterrupt}.get(how, KeyError)
    def fail(*args): raise exc('a bug')
    class Fail(Callback): order = 5
    if how in (*EVENTS, 'before_step'): setattr(Fail, how, fail)
    if how == 'Ctrl-C': Fail.after_backward = fail
    data = learn.dls.train.dataset
    if how == 'data set': data.__class__ = type('Fails', (type(data),), dict(__getitem__=fail))
    hook = learn.model[1].register_forward_hook(fail) if how == 'forward' else None
    if hook: before['modules'] = snapshot(learn)['modules']
    kept = None
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            with learn.distrib_ctx(**ctx_of(strategy), **ctx):
                assert snapshot(learn) != before
                learn.fit(1, cbs=Fail() if rank is None or get_rank() == rank else None)
        except BaseException as e: kept = e  # somebody keeps it, and with its traceback all that was wrapped
    after = snapshot(learn)
    faults = [k for k in before if before[k] != after[k]]
    drawn = torch.rand(1).item(), random.random(), np.random.rand()
    for k in 'dl', 'loss_func', 'model', 'opt': assert 'fastdist' not in type(vars(learn).get(k)).__module__, k
    # and it works as in one process: on rank 0 alone nobody is waited for
    if hook: hook.remove()
    if how == 'data set': data.__class__ = Items
    if get_rank() == 0:
        quiet(learn)
        learn.fit(1)
        learn.validate()
        learn.save('alone')
        learn.load('alone')
    return type(kept).__name__, faults, drawn


ENDS = [*[(o, None, {}) for o in (None, *EVENTS, 'forward', 'data set', 'Ctrl-C')], (None, None, dict(sync_bn=False)), ('after_pred', None, dict(sync_bn=False)),
        *[(o, None, dict(strategy=s)) for s in ('zero1', 'zero2', 'fsdp') for o in (None, 'after_pred', 'after_backward')], ('Ctrl-C', None, dict(strategy='fsdp')),
        *[('before_step', 1, dict(strategy=s)) for s in STRATEGIES]]


def all_ended(): return [ended(how, rank, **ctx) for how, rank, ctx in ENDS]


def test_ends(world2):
    "By its end, an error at any event, in the model, or in the data set, in all workers or in one, and by Ctrl-C"
    every = world2(all_ended)
    for how, r, ctx, *res in zip(*zip(*ENDS), *every):
        for rank, (raised, faults, drawn) in enumerate(res):
            assert raised == ('RemoteError' if r not in (None, rank) else {None: 'NoneType', 'Ctrl-C': 'KeyboardInterrupt'}.get(how, 'KeyError')), (how, ctx, rank, raised)
            assert faults == [] and (drawn == res[0][-1] or r or how == 'data set'), (how, ctx, rank, faults)  # a worker's own random numbers are those of a fit


def pickled():
    "Copies and pickles made in a context are of the user's learner"
    import fastdist.all, cloudpickle
    from copy import deepcopy
    learn, res = quiet(learner(n=10, bs=4, bn=True)), []
    class Copy(Callback):
        def after_pred(self):
            if self.iter == 0 and self.training: res.append(cloudpickle.dumps(self.learn.model))
    with learn.distrib_ctx(split_batches=True):
        learn.fit(1, cbs=Copy())
        res += [cloudpickle.dumps(learn), cloudpickle.dumps(deepcopy(learn))]
    return [bool(re.search(rb'fastdist\.\w|accelerate\.\w|Distributed', o)) for o in res]  # modules, not the folder of this file


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
    return np.allclose([inside, after, again], [one]*3), [(len(dl), sum(len(o[0]) for o in dl)) for dl in dls], int(interp.confusion_matrix().sum())


def memory(learn):
    states = [v for s in learn.opt.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [o.data_ptr() for o in (*learn.model.parameters(), *learn.model.buffers(), *states)]


def stays():
    "Is the memory the same in a context, and after it?"
    import fastdist.all
    learn = quiet(learner(n=24, bs=6, bn=True, opt=Adam))
    learn.fit(1)
    before = memory(learn)
    with learn.distrib_ctx():
        inside = memory(learn)
        learn.fit(1)
    return before == inside == memory(learn)


def shown():
    "What this worker prints"
    import fastdist.all
    learn, out = learner(n=9, bs=4, metrics=accuracy), io.StringIO()
    with contextlib.redirect_stdout(out), learn.distrib_ctx(split_batches=True): learn.fit(2)
    return out.getvalue().count('valid_loss'), 'progress' in [o.name for o in learn.cbs]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
    def forward(self, x): return x+self.a(x).relu()


def alive(strategy):
    "Parameters and modules that are left of a learner after its context and its end"
    import fastdist.all, gc
    def count():
        gc.collect()
        found = [o for o in gc.get_objects() if issubclass(type(o), (Tensor, Residual))]  # by its type first: torch asks in Python whether it is a parameter
        return [sum(isinstance(o, c) for o in found) for c in (nn.Parameter, Residual)]
    before = count()
    learn = quiet(learner(n=20, bs=5, opt=Adam, model=lambda: nn.Sequential(nn.Linear(4, 6), *[Residual() for _ in range(3)], nn.Linear(6, 3)).double()))
    learn._do_epoch_validate = noop  # a forward without gradients would let go of the last graph
    with learn.distrib_ctx(**ctx_of(strategy)): learn.fit(1)
    during = count()
    del learn
    return [a-b for a, b in zip(during, before)], [a-b for a, b in zip(count(), before)]


def the_rest(): return dict(copies=pickled(), loaders=kept(), memory=stays(), shown=shown(), alive=[alive(o) for o in STRATEGIES])


def test_what_stays(world2):
    "Copies made in a context, loaders made there, memory, what is printed, and what is kept alive"
    for rank, res in enumerate(world2(the_rest)):
        assert res['copies'] == [False]*3 and res['loaders'] == (True, [(4, 10), (4, 7), (3, 11)], 10) and res['memory'], res
        assert res['shown'] == (rank == 0, True), res['shown']
        for (params, modules), after in res['alive']: assert modules == 3 and params >= 10 and after[0] <= 0 and after[1] == 0, res['alive']
