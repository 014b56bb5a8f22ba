"What rank 0 alone saves, and what all save after that: all load what was saved last; where each has a part, rank 0 alone cannot save"
import pytest
from strategies import *


def saved(ctx, path):
    "By case: what each has loaded, of weights that are the number of the save"
    import fastdist.all
    from fastdist.world import get_rank, world_store
    store, real, res, last = world_store(), torch.save, {}, [0]
    learn = quiet(learner(n=9, bs=4, path=path))
    file = learn.path/learn.model_dir
    def late(*args, **kwargs):  # the others are about to read
        store.wait(f'{case}/{last[0]}', timeout=60)
        real(*args, **kwargs)
    def filled(k):
        last[0] = k
        with torch.no_grad():
            for p in learn.model.parameters(): p.fill_(k)
    def save(k, who=range(9), nm='m', f=None, late_by=None):
        filled(k)
        if get_rank() not in who: return
        if get_rank() == 0 and late_by: torch.save = late
        try: (f or learn.save)(nm)
        finally: torch.save = real
    def loaded(f=None, nm='m'):
        if get_rank(): store.set(f'{case}/{last[0]}')
        filled(-1)
        (f or learn.load)(nm)
        res[case] = {float(p.detach().flatten()[0]) for p in learn.model.parameters()}
        if 'alone load' not in case: learn.validate()  # all have read, before it is written again
    with learn.distrib_ctx(**ctx):
        case = 'rank 0 alone, twice, and then all'
        save(1, [0]), save(2, [0]), save(3, late_by=True), loaded()
        case = 'rank 0 alone, which all load'
        save(4, [0], late_by=True), loaded()
        case = 'by hand'
        save(7, [0], f=lambda nm: torch.save(learn.model.state_dict(), file/f'{nm}.pth'), late_by=True), loaded()
        case = 'an export'
        def load_export(nm): learn.model.load_state_dict(load_learner(learn.path/nm).model.state_dict())
        save(9, [0], f=learn.export, nm='m.pkl', late_by=True), loaded(load_export, 'm.pkl')
        case = 'other ranks alone load'
        save(10, [0])
        learn.fit(1, lr=0.)
        if get_rank(): loaded()
        learn.validate()
        case = 'each has a file of its own'
        save(11+get_rank(), f=lambda nm: real(learn.model.state_dict(), file/f'{nm}.pth'), nm=f'm{get_rank()}'), loaded(nm=f'm{get_rank()}')
    return res


def test_all_load_what_was_saved_last(world2, tmp_path):
    for r, res in enumerate(world2(saved, dict(split_batches=True), tmp_path)):
        want = [3., 4., 7., 9., *([10.] if r else []), 11.+r]
        assert list(res.values()) == [{o} for o in want], (r, res)


def alone(strategy, folder):
    "What rank 0 alone cannot write, and all can, by name"
    import fastdist.all
    from fastdist.world import get_rank, teardown_distrib
    res = {}
    for nm, f in dict(save=lambda l: l.save('m'), export=lambda l: l.export('m.pkl'), opt=lambda l: l.opt.state_dict()).items():
        learn = quiet(learner(n=9, bs=4, opt=Adam, path=folder))
        try:
            with learn.distrib_ctx(**ctx_of(strategy)):
                learn.fit(1)
                f(learn)
                if get_rank() == 0: f(learn)
                learn.fit(1)
        except RuntimeError as e: res[nm] = str(e)
        teardown_distrib()
    return res


@pytest.mark.parametrize('world,strategy', [(2, 'zero1'), (3, 'zero2')])
def test_rank0_alone_has_a_part(worlds, world, strategy, tmp_path):
    for r, res in enumerate(worlds(world)(alone, strategy, tmp_path)):
        for nm in ('save', 'export', 'opt'):
            assert 'needs all workers, as each has a part of what is saved, and rank 1 does not make the call: it is at' in res[nm], (nm, res)
            assert 'Call it in all workers' in res[nm] and 'test_saved_by_rank0.py' in res[nm]


def encoder(path):
    "What a text learner says whose encoder is saved while its parameters are in shards, and after the context"
    import fastdist.all
    from fastai.text.learner import TextLearner
    base = learner(n=20, bs=5, model=lambda: Scaled(False).double().body[:2])
    model = nn.Sequential(base.model, nn.Linear(7, 3).double())
    learn, said = quiet(TextLearner(base.dls, model, loss_func=base.loss_func, path=path)), None
    learn.remove_cbs([o for o in learn.cbs if type(o).__module__ == 'fastai.callback.rnn'])
    try:
        with learn.distrib_ctx(**ctx_of('fsdp')):
            learn.fit(1)
            learn.save_encoder('e')
            learn.validate()
    except RuntimeError as e: said = str(e)
    learn.save_encoder('e')
    return said


def test_encoder(world2, tmp_path):
    "fastai's `save_encoder` knows no shards: an error says what to do instead"
    for o in world2(encoder, tmp_path): assert 'save after the context' in o, o
