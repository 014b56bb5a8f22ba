"fit, lr_find, predict, save, ...: what a Learner does, on many workers as on one"
import pytest
from harness import WorkerError
from learners import *
from fastai.learner import load_learner

SPLIT = dict(split_batches=True)


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


def in_ctx(learn, distrib, **ctx):
    import contextlib
    if not distrib: return contextlib.nullcontext()
    import fastdist.all
    return learn.distrib_ctx(**{**SPLIT, **ctx})


def accelerators():
    "What a script of fastai.distributed's asks its trainer's `Accelerator`; each trainer has one"
    learn = quiet(learner(n=22, bs=5))
    with in_ctx(learn, True):
        told = dict(ACCELERATE_MIXED_PRECISION='fp16', ACCELERATE_USE_FSDP='true', ACCELERATE_DYNAMO_BACKEND='EAGER')  # Accelerate refuses fp16 on the CPU
        with pytest.MonkeyPatch.context() as mp:
            for k, v in told.items(): mp.setenv(k, v)
            before = dict(os.environ)
            acc = learn.distributed_trainer.accelerator
            assert dict(os.environ) == before
        assert (acc.mixed_precision, acc.state.fsdp_plugin if hasattr(acc.state, 'fsdp_plugin') else None) == ('no', None)
        learn.fit(1)
        assert learn.distributed_trainer.accelerator is acc
        acc.wait_for_everyone()
        return acc.process_index, acc.num_processes, acc.gather(torch.tensor([acc.process_index])).tolist()


def test_accelerator(world2): assert world2(accelerators) == [(0, 2, [0, 1]), (1, 2, [0, 1])]


def lr_find(distrib, bs=5, **ctx):
    import tempfile
    with tempfile.TemporaryDirectory() as tmp:
        learn = quiet(learner(n=22, bs=bs, bn=True, opt=Adam, path=tmp))
        before = weights(learn)
        with in_ctx(learn, distrib, **ctx):
            found = learn.lr_find(num_it=30, start_lr=1e-4, show_plot=False)
            moved = diff(before, weights(learn))
            learn.fit(1)
        left = [str(o) for o in (Path(tmp)/'models').iterdir()]
    return list(found), [float(o) for o in learn.recorder.losses], moved, weights(learn), left


def test_lr_find(world):
    "The same suggestion on all workers, the weights restored on all, and no folder left"
    found, losses, _, w, _ = lr_find(False)
    for found1, losses1, moved, w1, left in world(lr_find, True):
        assert diff(found, found1) < 1e-6 and diff(losses, losses1) < 1e-5 and moved == 0 and diff(w, w1) < 1e-6 and left == []


def found_outside(distrib, opt):
    "The notebook that everybody has: lr_find, and then a fit; and once more"
    import tempfile
    with tempfile.TemporaryDirectory() as tmp:
        learn, res, moved = quiet(learner(n=22, bs=5, bn=True, opt=opt, path=tmp)), [], 0
        for _ in range(2):
            before = weights(learn)
            learn.lr_find(num_it=8, stop_div=False, show_plot=False)
            moved += diff(before, weights(learn))
            with in_ctx(learn, distrib): learn.fit(1, 0.01)
            res.append(weights(learn))
        return moved, res, [str(o) for o in (Path(tmp)/'models').iterdir()]


@pytest.mark.parametrize('opt', [Adam, SGD])
def test_lr_find_outside_of_a_context(world, opt):
    "It leaves the model and the optimizer as they were, in each worker"
    moved, res, _ = found_outside(False, opt)
    assert moved == 0
    for moved1, res1, left in world(found_outside, True, opt):
        assert moved1 == 0 and not left and all(diff(a, b) < 1e-6 for a, b in zip(res, res1))


def test_lr_find_with_batches_of_its_own(worlds):
    "The number of iterations counts steps of all workers"
    for size in (2, 3):
        found, losses, _, w, _ = lr_find(False, bs=5*size)
        for found1, losses1, moved, w1, _ in worlds(size)(lr_find, True, split_batches=False):
            assert diff(found, found1) < 1e-6 and diff(losses, losses1) < 1e-5 and moved == 0 and diff(w, w1) < 1e-6


def exported_folds(folder, distrib):
    "Three folds, drawn as the script goes on; learners are exported before, in and after a context"
    import fastdist.all
    def part(idxs):
        items = Items(24)
        items.x, items.y = items.x[idxs], items.y[idxs]
        return items
    set_seed(3)
    res = []
    for _ in range(3):
        idxs = random.sample(range(24), 24)
        learn = quiet(learner(n=24, bs=5, opt=Adam, path=folder))
        learn.dls = DataLoaders(TfmdDL(part(idxs[:17]), bs=5, shuffle=True), TfmdDL(part(idxs[17:]), bs=5))
        learn.export('a.pkl')
        for when in ('in', 'after'):
            with in_ctx(learn, distrib, **SPLIT):
                learn.fit(1)
                if when == 'in': learn.export('a.pkl')
            if when == 'after': learn.export('a.pkl')
        res.append(weights(learn))
    return res, [random.random(), float(np.random.rand()), float(torch.rand(1))]


def test_exports_and_goes_on(world, tmp_path):
    "Only rank 0 writes; what the others draw next, and their optimizers, are as rank 0's"
    one, drawn = exported_folds(tmp_path, False)
    for many, drawn1 in world(exported_folds, tmp_path, True): assert drawn1 == drawn and all(diff(a, b) < 1e-6 for a, b in zip(one, many))


def save_load(folder):
    import fastdist.all
    learn = quiet(learner(n=22, bs=5, opt=Adam, path=folder))
    with learn.distrib_ctx(**SPLIT):
        learn.fit(1)
        for i in range(5): learn.save('a')  # at once read by all
        saved = weights(learn)
        learn.fit(1)
        learn.load('a')
        assert diff(saved, weights(learn)) == 0
        learn.export('a.pkl')
        learn.fit(1)
    learn.save('b')
    learn.load('b')
    return saved, weights(learn)


def test_save_load_export(world, tmp_path):
    "Keys without a prefix; the exported learner has nothing of fastdist in it, and loads where there is none"
    import pickletools
    saved, last = world(save_load, tmp_path)[0]
    learn = learner(n=22, bs=5, opt=Adam, path=tmp_path)
    learn.load('a')
    assert diff(saved, weights(learn)) == 0
    learn.load('b')
    assert diff(last, weights(learn)) == 0
    exported = load_learner(tmp_path/'a.pkl')
    assert diff(saved, weights(exported)) == 0
    assert sorted(o.name for o in exported.cbs) == ['cast_to_tensor', 'recorder', 'train_eval'] and not hasattr(exported, 'distributed_trainer')
    import zipfile
    with zipfile.ZipFile(tmp_path/'a.pkl') as z: data = z.read([o for o in z.namelist() if o.endswith('data.pkl')][0])
    names = [arg.split(' ')[0].split('.')[0] for _, arg, _ in pickletools.genops(data) if isinstance(arg, str)]
    assert 'fastai' in names and 'fastdist' not in names and 'accelerate' not in names


def export_fails(strategy):
    import fastdist.all
    from fastdist.world import get_rank
    def close(*args): raise ValueError('no memory')
    learn = quiet(learner(n=22, bs=5, opt=Adam))
    with learn.distrib_ctx(strategy=strategy, **SPLIT):
        learn.fit(1)
        if get_rank(): learn.distributed_trainer.strategy.close = close
        learn.export('never.pkl')


@pytest.mark.parametrize('strategy', ['zero1', 'fsdp'])
def test_one_fails_in_an_export(world2, strategy):
    "While shards are put together: that is what both are told"
    with pytest.raises(WorkerError) as e: world2(export_fails, strategy)
    told = [e.value.problems[r].strip() for r in range(2)]
    assert 'RemoteError: ' in told[0] and all(o.endswith('ValueError: no memory') for o in told), told


class Unwritable:
    def __reduce__(self): raise OSError('disk full')


def save_fails(folder):
    "The last file, where the next one cannot be written to its end"
    import fastdist.all
    learn = quiet(learner(n=22, bs=5, path=folder))
    with learn.distrib_ctx(**SPLIT):
        learn.fit(1)
        learn.save('a')
        saved = weights(learn)
        learn.fit(1)
    learn.model._register_state_dict_hook(lambda m, state, *_: state.__setitem__('odd', Unwritable()))
    try: learn.save('a')
    except OSError as e: text = str(e)
    else: text = None
    return text, saved


def test_save_that_fails_leaves_the_last_file(world, tmp_path):
    every = world(save_fails, tmp_path)
    assert every[0][0] == 'disk full' and sorted(o.name for o in (tmp_path/'models').iterdir()) == ['a.pth']
    learn = learner(n=22, bs=5, path=tmp_path)
    learn.load('a')
    for _, saved in every: assert diff(saved, weights(learn)) == 0


def graph():
    import matplotlib; matplotlib.use('agg')
    import fastdist.all
    from fastai.callback.progress import ShowGraphCallback
    learn = learner(n=22, bs=5, cbs=ShowGraphCallback())
    cbs = list(learn.cbs)
    with learn.distrib_ctx(**SPLIT): learn.fit(2)
    return list(learn.cbs) == cbs


def test_show_graph(world2): assert world2(graph) == [True, True]


def alone():
    "Under a launcher, outside of a context and on one rank alone, with a process group alive"
    from fastdist.all import get_rank, setup_distrib
    learn = quiet(learner(n=9, bs=4, metrics=[accuracy, F1Score(average='macro')]))
    res = [list(learn.validate())]                      # before there is a group
    setup_distrib()
    if get_rank() == 0: res.append(list(learn.validate()))
    with learn.distrib_ctx(**SPLIT):
        learn.fit(1)
        if get_rank() == 0:                             # inside too, for what is no collective
            item = learn.dls.valid_ds[0][:1]
            learn.predict(item)
            learn.dls.one_batch(), learn.dls.valid.one_batch()
            learn.summary()
            learn.get_preds(dl=[learn.dls.valid.one_batch()])
    if get_rank() == 0:
        res.append(list(learn.validate()))
        learn.get_preds()
        learn.fit(1)
        learn.save('alone'); learn.load('alone')
        learn.lr_find(num_it=6, show_plot=False)
    return res


def warned():
    "How often a fit outside of a context warns, by how it is made"
    import fastdist.all, warnings
    from fastdist.world import init_group
    init_group()
    res, learn = [], quiet(learner(n=9, bs=4))
    def fits(f):
        with warnings.catch_warnings(record=True) as ws:
            warnings.simplefilter('always')
            f()
        res.append(sum('each of the' in str(w.message) for w in ws))
    def parallel():
        with learn.parallel_ctx(): learn.fit(1)
    def together():
        with learn.distrib_ctx(): learn.fit(1)
    for f in together, parallel, lambda: learn.fit(1), learn.validate: fits(f)
    return res


def test_a_fit_outside_of_a_context_warns(world):
    "Once, in rank 0: each worker trains a model of its own, as in a script that takes parallel_ctx where it finds no GPU"
    assert world(warned) == [[0, 1, 0, 0]] + [[0]*4]*(world.n-1)


def test_outside_of_a_context(world):
    "fastai by itself gathers there, and fails or hangs"
    res = world(alone)
    assert len(res[0]) == 3
    learn = quiet(learner(n=9, bs=4, metrics=[accuracy, F1Score(average='macro')]))
    assert diff(res[0][0], list(learn.validate())) < 1e-6
    for r in res: assert diff(r[0], res[0][0]) < 1e-6


class Attr(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.knob = mlp(), 7
    def forward(self, x): return self.body(x)


def users_model(distrib):
    "In a fit, whoever looks at learn.model finds the user's model"
    learn = quiet(learner(n=9, bs=4, model=Attr))
    model, seen = learn.model, []
    class Look(Callback):
        def look(self): seen.append(self.learn.model is model and self.learn.model.knob == 7 and isinstance(self.learn.model, Attr))
    for e in 'before_fit before_epoch before_train before_batch after_pred after_loss before_backward after_backward before_step after_step after_batch after_train before_validate after_validate after_epoch after_fit'.split():
        setattr(Look, e, Look.look)
    hooked = []
    hook = model.body[0].register_forward_hook(lambda m, i, o: hooked.append(learn.model is model))
    with in_ctx(learn, distrib): learn.fit(1, cbs=Look())
    hook.remove()
    return all(seen), len(seen), all(hooked), len(hooked)


def test_learn_model_is_the_users(world3):
    for ok, n, ok2, n2 in world3(users_model, True): assert ok and n > 20 and ok2 and n2 > 3


class Reaches(Attr):
    "A model with two parts that take turns, as in a GAN"
    def __init__(self):
        super().__init__()
        self.other, self.turn = nn.Linear(4, 3).double(), False
    def forward(self, x): return (self.other if self.turn else self.body)(x)


class Turns(Callback):
    def before_batch(self):
        if not self.training: return
        m = self.learn.model
        m.turn = not m.turn
        m.body.requires_grad_(not m.turn); m.other.requires_grad_(m.turn)


def turns(distrib):
    torch.manual_seed(4)
    learn = quiet(learner(n=22, bs=5, model=Reaches, cbs=Turns()))
    with in_ctx(learn, distrib): learn.fit(2)
    return weights(learn)


def test_layers_frozen_from_batch_to_batch(world):
    w = turns(False)
    for w1 in world(turns, True): assert diff(w, w1) < 2e-7


def cancels(distrib):
    "All workers skip the same backward, step or batch, the first ones too, by callbacks of several kinds; and a schedule that goes on in validation"
    from fastai.callback.core import CancelBackwardException, CancelBatchException, CancelStepException  # not a copy, sent by value
    class Early(Callback):
        order = -30
        def before_batch(self):
            if self.train_iter == 0: raise CancelBatchException
            self.opt.set_hyper('lr', .1/(1+self.iter))
    class Cancel(Callback):
        def before_backward(self):
            if self.train_iter == 1: raise CancelBackwardException
        def before_step(self):
            if self.train_iter == 3: raise CancelStepException
        def after_pred(self):
            if self.train_iter == 5 and self.training: raise CancelBatchException
    class ByCall(Callback):
        def __call__(self, event):
            if event == 'after_loss' and self.train_iter == 7 and self.training: raise CancelBatchException
    learn = quiet(learner(n=22, n_val=9, bs=5, bn=True, cbs=[Early(), Cancel(), ByCall()]))
    with in_ctx(learn, distrib):
        learn.fit(2)
        grad = deepcopy(learn).loss_grad # a worker without a batch in the validation would have that of training, with its graph
    return weights(learn), grad.requires_grad


def test_cancelled_by_all(world):
    w, graph = cancels(False)
    for w1, graph1 in world(cancels, True): assert diff(w, w1) < 2e-7 and not graph and not graph1


def shown():
    "What one worker prints"
    import contextlib, io
    import fastdist.all
    learn = learner(n=9, bs=4, metrics=accuracy)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        with learn.distrib_ctx(**SPLIT): learn.fit(2)
    return out.getvalue(), [o.name for o in learn.cbs], hasattr(learn, 'progress'), [list(o) for o in learn.recorder.values]


def test_one_table(world3):
    res = world3(shown)
    assert res[0][0].count('valid_loss') == 1 and [o[0] for o in res[1:]] == ['', '']
    for o in res: assert o[1:] == res[0][1:]


def set_by_a_seed(rank_too):
    import fastdist.all
    from fastdist.all import get_rank
    learn = quiet(learner(n=22, bs=5))
    set_seed(42 + (get_rank() if rank_too else 0))
    drawn = []
    class Draw(Callback):
        def after_pred(self): drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    with learn.distrib_ctx(**SPLIT):
        learn.fit(1, cbs=Draw())
        learn.fit(1, cbs=Draw())
    return drawn, (random.random(), np.random.rand(), torch.rand(1).item())


def test_augmentations_differ_and_splits_do_not(world3):
    "Workers draw from streams of their own from forward to backward, the same again after the same seed; afterwards the script's stream goes on in all alike"
    res, again = world3(set_by_a_seed, False), world3(set_by_a_seed, False)
    drawn = [d for ds, _ in res for d in ds]
    assert len(set(drawn)) == len(drawn)
    assert res[0][1] == res[1][1] == res[2][1]
    assert [o[0] for o in again] == [o[0] for o in res]


def collectives(n_val):
    "Collectives of each training step, and of an epoch's validation, by name; and those of predictions"
    import collections
    import torch.distributed as dist
    import fastdist.all
    from fastdist.comm import collectives as pack
    counts, res = collections.Counter(), []
    class Keeps(Metric): # of an unknown kind
        def reset(self): self.n = 0
        def accumulate(self, learn): self.n += len(learn.y)
        @property
        def value(self): return self.n
    learn = quiet(learner(n=40, bs=5, n_val=n_val, val_bs=2, metrics=[accuracy, worst, F1Score(average='macro'), Keeps()]))
    class Step(Callback):
        order = -1000
        def before_batch(self):
            if self.training: counts.clear()
        def before_validate(self): counts.clear()
    class Asked(Callback):
        def after_batch(self): self.seen = self.iter
    class StepEnd(Callback):
        order = 2000
        def after_batch(self): res.append(('step' if self.training else 'batch', dict(counts)))
        def after_validate(self): res.append(('validate', dict(counts)))
    blocking, all_reduce, reduced = [0], dist.all_reduce, pack.Reduced.__init__
    def seen(*args, **kwargs):
        blocking[0] += not kwargs.get('async_op')
        return all_reduce(*args, **kwargs)
    def small(*args, **kwargs):
        blocking[0] += sys._getframe(1).f_code.co_name != 'send_loss' # others wait at once
        reduced(*args, **kwargs)
    try:
        with counted_collectives(counts), learn.distrib_ctx(split_batches=True):
            learn.fit(1) # makes DDP
            dist.all_reduce, pack.Reduced.__init__ = seen, small
            learn.fit(1, cbs=[Step(), StepEnd()])
            fit, blocking[0] = blocking[0], 0
            counts.clear()
            learn.fit(1, cbs=Asked())
            res.append(('asked', dict(counts, blocking=blocking[0])))
            counts.clear()
            learn.get_preds()
            res.append(('preds', dict(counts)))
    finally:
        dist.all_reduce, pack.Reduced.__init__ = all_reduce, reduced
    return res, fit


def worst(pred, targ): return pred.max().abs().sqrt()


def test_collectives_counted(world2):
    "P4. In a step one, beside DDP's own, and nobody waits for it; in validation a number that does not depend on that of the batches"
    fits, few, many = (world2(collectives, n) for n in (20, 100, 300))
    assert [few[0][0][-2:], few[1][0][-2:]] == [many[0][0][-2:], many[1][0][-2:]], (few, many)
    for a, b in zip(fits[0][0][-2:], few[0][0][-2:]): assert all(n <= b[1][k] for k, n in a[1].items())  # what is small travels along
    for res, blocking in many:
        by = lambda k: [c for o, c in res if o == k]
        assert len(by('step')) == 8 and all(c == {'allreduce': 1} for c in by('step')[1:]), by('step')
        # of a fit: callbacks and random numbers compared, the latter in each epoch again; was Ctrl-C pressed? And of its validation: did a callback end it?
        # The metrics compared, and summed, and the kind of what is gathered for F1
        assert blocking == 8
        assert [c['blocking'] for c in by('asked')] == [blocking], by('asked') # a user's callback costs none
        assert not any(c for c in by('batch')), by('batch')
        assert 0 < sum(by('validate')[0].values()) <= 16 and 0 < sum(by('preds')[0].values()) <= 32, (by('validate'), by('preds'))


class Noise:
    "Noise in, a small picture out"
    def __init__(self, n):
        g = torch.Generator().manual_seed(1)
        self.z, self.x = torch.randn(n, 100, generator=g), torch.randn(n, 3, 16, 16, generator=g).clamp(-1, 1)
    def __len__(self): return len(self.z)
    def __getitem__(self, i): return self.z[i], self.x[i]


def gan(distrib, n_val=6, switch_eval=False):
    from fastai.vision.gan import FixedGANSwitcher, GANLearner, basic_critic, basic_generator
    set_seed(0)
    dls = DataLoaders(TfmdDL(Noise(24), bs=6, shuffle=True, num_workers=0), TfmdDL(Noise(n_val), bs=6, num_workers=0))
    generator, critic = basic_generator(16, 3, in_sz=100, n_features=8, n_extra_layers=0), basic_critic(16, 3, n_features=8, n_extra_layers=0, act_cls=partial(nn.LeakyReLU))
    learn = quiet(GANLearner.wgan(dls, generator, critic, opt_func=SGD, lr=1e-3, switch_eval=switch_eval, switcher=FixedGANSwitcher(n_crit=1, n_gen=1)))
    before = weights(learn)
    with in_ctx(learn, distrib): learn.fit(2)
    return weights(learn), diff(before, weights(learn))


@pytest.mark.parametrize('args', [(), (15, True)], ids=['wgan', 'default'])
def test_gan(world2, args):
    """fastai's own, whose callbacks reach into learn.model and freeze one half of it at a time. By default its generator is in training mode
    in a validation, so that batch norm's running statistics have all batches of it"""
    w, moved = gan(False, *args)
    assert moved > 1e-4
    for w1, _ in world2(gan, True, *args): assert diff(w, w1) < 2e-6


def test_no_bar_where_nobody_sees_it_in_one_process_either(monkeypatch):
    "fastai's would fill a file, frame by frame"
    import io, sys, fastdist.all
    learn, out = learner(n=10), io.StringIO()
    monkeypatch.setattr(sys, 'stdout', out)
    with learn.distrib_ctx(): learn.fit(1)
    assert '|' not in out.getvalue() and '█' not in out.getvalue() and 'train_loss' in out.getvalue()
    learn.fit(1)  # after it, as before
    assert '|' in out.getvalue()


class Notes(Callback):
    "Notes its events"
    def __init__(self, name, log): self.called, self.log = name, log
    def _note(self, event): self.log.append((self.called, event, self.training, self.epoch))
    def after_pred(self): self._note('after_pred')
    def after_batch(self): self._note('after_batch')


class Changes(Callback):
    "Changes the learner's callbacks as a fit goes on, in all workers alike"
    order = -3
    def __init__(self, log): self.log = log
    def before_batch(self):
        if not self.training: return
        a, b = [next(cb for cb in self.learn.cbs if getattr(cb, 'called', '') == o) for o in 'ab']
        if self.iter == 1: self.learn.add_cb(Notes(f'added in {self.epoch}', self.log))
        if self.iter == 2: a.order, b.order = b.order, a.order
        if self.iter == 3: a.before_step = partial(a._note, 'before_step')  # of this object, and not of its class
        if self.iter == 4: del a.before_step
        if self.iter == 5: b.run = self.epoch > 0
    def after_epoch(self):
        for cb in self.learn.cbs:
            if getattr(cb, 'called', '').startswith('added'): self.learn.remove_cb(cb)


def changing(distrib):
    log = []
    a, b = Notes('a', log), Notes('b', log)
    a.order, b.order = 3, 4
    learn = quiet(learner(n=24, n_val=12, bs=4, val_bs=6, cbs=[Changes(log), a, b]))
    with in_ctx(learn, distrib): learn.fit(2)
    return [o for o in log if o[2]], [[o for o in log if not o[2] and o[3] == i] for i in range(2)]


def test_callbacks_that_change_in_a_fit(world):
    "Their order, and which there are: the events are those of one process, in validation those of one of its two batches, or of none"
    want, of_valid = changing(False)
    assert {'added in 0', 'added in 1'} < {o[0] for o in want} and ('a', 'before_step', True, 0) in want
    for r, (got, valid) in enumerate(world(changing, True)):
        assert got == want and valid == [o[:len(o)//2*(r < 2)] for o in of_valid]
