"fit, lr_find, predict, save, ...: what a Learner does, on many workers as on one"
import pytest
from learners import *

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
    "In a context whose batches are the workers' own: the number of iterations counts steps of all"
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
    found, losses, _, w, _ = lr_find(False, bs=5*world.n)
    for found1, losses1, moved, w1, left in world(lr_find, True, split_batches=False):
        assert diff(found, found1) < 1e-6 and diff(losses, losses1) < 1e-5 and moved == 0 and diff(w, w1) < 1e-6 and left == []


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
