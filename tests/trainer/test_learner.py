"What a learner does around a fit: files, fits outside of a context, bars, and callbacks that come and go"
import pytest
from learners import *

SPLIT = dict(split_batches=True)


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


def in_ctx(learn, distrib, **ctx):
    if not distrib: return contextlib.nullcontext()
    import fastdist.all
    return learn.distrib_ctx(**{**SPLIT, **ctx})


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
        learn.save('alone')
        learn.load('alone')
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
