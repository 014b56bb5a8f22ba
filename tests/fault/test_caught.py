"""P2: a script catches what ends a fit, and goes on in the same context: right where all workers have it, and told to all within seconds
where one alone has it"""
import pytest
from strategies import *


class Fails(Callback):
    "In the third batch of a fit, or in a late one of an evaluation, in these ranks"
    order = 3000
    def __init__(self, ranks): self.ranks = ranks
    def before_batch(self):
        from fastdist.world import get_rank
        if get_rank() in self.ranks and self.iter == (2 if self.training else get_rank()+3): raise ValueError('no such image')


def caught(ranks, calls, distrib=True):
    "What has come of `calls` of a learner, of which the first fails in `ranks`, and of the end of their context"
    import fastdist.all
    learn, res = quiet(learner(n=23, n_val=43, bs=5, bn=True)), []
    def call(f, *args, **kwargs):
        try: res.append(f(*args, **kwargs))
        except Exception as e: res.append((type(e).__name__, getattr(e, 'rank', None), str(e)))
    def run():
        with learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext():
            for i, nm in enumerate(calls): call(getattr(learn, nm), *[2-i][:nm == 'fit'], cbs=[Fails(ranks)][i:])
    call(run)
    return res, weights(learn)


def test_by_all(worlds):
    "As in one process: the weights go on from where the first fit has left them"
    want, w = caught([0], ['fit', 'fit'], distrib=False)
    assert want[0][0] == 'ValueError' and want[1:] == [None, None]
    for n in (2, 3):
        for res, o in worlds(n)(caught, range(n), ['fit', 'fit']): assert res == want and diff(w, o) < 2e-7


@pytest.mark.parametrize('calls', [['fit', 'validate'], ['validate', 'fit']], ids='-'.join)
def test_by_one(world3, calls):
    """The others are stopped, and what this one calls next does not meet what they wait in, which ended the process. At the end of the
    context all say so"""
    for rank, (res, _) in enumerate(world3(caught, [1], calls)):
        first, *others = res
        assert first[:2] == (('ValueError', None) if rank == 1 else ('RemoteError', 1)), res
        assert len(others) == len(calls)
        for o in others: assert o[0] == ('RuntimeError' if rank == 1 else 'RemoteError') and 'no such image' in o[2], res


def evaluated_again():
    "What comes of evaluations that a callback ends as they begin, and of one after them: of a context, and then outside of it"
    import fastdist.all
    learn, res = quiet(learner(n=23, n_val=43)), []
    class Fails(Callback):
        def before_fit(self): raise ValueError('no such image')
    def call(f):
        with (learn.distrib_ctx(split_batches=True) if f else contextlib.nullcontext()):
            for cbs in [Fails()], [Fails()], []:
                for evaluate in learn.validate, learn.get_preds:
                    try: res.append(len(evaluate(cbs=cbs)))
                    except Exception as e: res.append(type(e).__name__)
    call(True)
    call(False)
    return res, [type(o).__name__ for o in learn.cbs], learn.lock.locked()


def test_an_evaluation_that_fails_as_it_begins(world2):
    "Leaves the learner as it was: fastai's keeps the learner's lock, and the next evaluation waited for it for ever"
    for res, cbs, locked in world2(evaluated_again):
        assert res == [*['ValueError']*4, 1, 2]*2 and 'Fails' not in cbs and not locked


class FailsAt(Callback):
    "Before the step of another batch in each rank, or in some ranks never"
    def __init__(self, at): self.at = at
    def before_step(self):
        from fastdist.world import get_rank
        if self.learn.train_iter == self.at[get_rank()]: raise ValueError(f'batch {self.train_iter}')


def fit_again(strategy, at, accumulated, w0=None):
    "A fit that fails, caught outside of its context, and one in another: the weights with which the second has begun and ended"
    import fastdist.all
    learn = quiet(learner(n=22, bs=5, shuffle=False, cbs=[GradientAccumulation(8)] if accumulated else []))
    if w0 is None:
        try:
            with learn.distrib_ctx(**ctx_of(strategy)): learn.fit(1, cbs=FailsAt(at))
        except (ValueError, RuntimeError): pass
        with learn.distrib_ctx(**ctx_of(strategy)):
            w0 = {k: v.full_tensor() if hasattr(v, 'full_tensor') else v for k, v in weights(learn).items()}
    else: learn.model.load_state_dict(w0)
    with learn.distrib_ctx(**ctx_of(strategy)) if strategy else contextlib.nullcontext(): learn.fit(1)
    return w0, weights(learn)


@pytest.mark.parametrize('strategy,at,accumulated', [('ddp', [2, 1], False), ('fsdp', [1, 3, None], True)])
def test_gradients_of_a_fit_that_has_failed(worlds, strategy, at, accumulated):
    """Are in no later one: workers may have got to different places. They went into the first step of their worker alone, and the replicas
    diverged"""
    every = worlds(len(at))(fit_again, strategy, at, accumulated)
    _, want = fit_again(None, None, accumulated, every[0][0])
    for w0, w in every: assert diff(w0, every[0][0]) == 0 and diff(w, want) < 2e-7


class Waits(Callback):
    "The first rank fails where the others wait for it, in what is to be undone: one in torch.no_grad, one in a finally of its own"
    undone = 0
    def undo(self): self.undone += 1
    def after_loss(self):
        import torch.distributed as dist
        from fastdist.world import get_rank
        if get_rank() == 0: raise ValueError('no such image')
        work = dist.all_reduce(torch.ones(1), async_op=True)
        if get_rank() == 1:
            with torch.no_grad(): work.wait()
        try: work.wait()
        finally: self.undo()


def ended_wait():
    "What is left of it, and then of a fit that nobody ends"
    import fastdist.all
    learn, cb = quiet(learner(n=23, n_val=43)), Waits()
    try:
        with learn.distrib_ctx(): learn.fit(1, cbs=cb)
    except Exception as e: found = type(e).__name__, getattr(e, 'rank', None)
    found = *found, cb.undone, torch.is_grad_enabled()
    with learn.distrib_ctx(): learn.fit(1)
    return found


def test_what_was_on_is_undone(world3):
    """A wait that ends by an error undoes what it was in, such as torch.no_grad: what is raised for another rank does not come between,
    and the next fit trains"""
    first, *others = world3(ended_wait)
    assert first == ('ValueError', None, 0, True)
    assert others == [('RemoteError', 0, 0, True), ('RemoteError', 0, 1, True)]


def group_of_script(ranks):
    "What the script's own group does for it after a fit that has failed in `ranks`, in the context that has begun next"
    import fastdist.all, torch.distributed as dist
    from fastdist.world import all_reduce, setup_distrib
    setup_distrib()
    group, learn = dist.new_group(), quiet(learner(n=23))
    for cbs in [Fails(ranks)], []:
        try:
            with learn.distrib_ctx():
                found = caught_of(lambda: all_reduce(1, group=group))
                learn.fit(1, cbs=cbs)
        except Exception: pass
    return found


def caught_of(f):
    try: return f()
    except Exception as e: return str(e)


def test_a_group_of_the_script(world2):
    "Ends with the process group in which a fit has failed in one worker alone: the error says so. Where it has failed in all it stays"
    for o in world2(group_of_script, [1]): assert 'this group has ended with the process group' in o and 'new_group) when' in o, o
    assert world2(group_of_script, [0, 1]) == [2, 2]


class Pruned(Exception): "As Optuna's: it ends a trial, and the next one begins"


class Prunes(Callback):
    "After the first epoch, in these ranks"
    def __init__(self, ranks): self.ranks = ranks
    def after_epoch(self):
        from fastdist.world import get_rank
        if get_rank() in self.ranks: raise Pruned('worse than the median')


def held():
    "What this process holds: tensors, threads, and files with sockets"
    import gc, os, threading
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()), threading.active_count(), len(os.listdir('/proc/self/fd'))


def swept(trials, distrib=True, counts=()):
    "What each trial of a sweep has raised, and its weights; and what the process holds after some of them"
    import fastdist.all
    found, seen = [], []
    for i, (lr, cb) in enumerate(trials):
        learn, raised = quiet(learner(n=23, n_val=13, bs=5, bn=True, lr=lr)), None
        try:
            with learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext(): learn.fit(2, cbs=cb)
        except Exception as e: raised = type(e).__name__, getattr(e, 'rank', None), getattr(e, 'type', None)
        found.append((raised, weights(learn)))
        del learn, cb
        if i in counts:
            found = []
            seen.append(held())
    return found, seen


@pytest.mark.parametrize('n', [2, 3])
def test_a_sweep(worlds, n):
    """Of learners: pruned in all workers, or in rank 0 alone, which knows the study; one that fails in a worker. Each is caught, and the next
    one trains as in one process"""
    trials = [(.1, None), (.2, Prunes(range(n))), (.3, None), (.1, Prunes([0])), (.2, None), (.3, Fails([1])), (.1, None)]
    want = swept([(lr, cb and (Prunes([0]) if i == 1 else None)) for i, (lr, cb) in enumerate(trials)], distrib=False)[0]
    for rank, (found, _) in enumerate(worlds(n)(swept, trials)):
        raised = [o and o[:2] for o, _ in found]
        one = lambda name, by: (name, None) if rank == by else ('RemoteError', by)
        assert raised == [None, ('Pruned', None), None, one('Pruned', 0), None, one('ValueError', 1), None], raised
        assert rank == 0 or found[3][0][2] == 'Pruned' # by which a script knows it
        for i in 0, 1, 2, 4, 6: assert diff(found[i][1], want[i][1]) < 2e-7


def test_a_long_sweep(world2):
    "Holds no more after 30 learners than after six: tensors, threads, files, sockets. Every third one is pruned, by all or by one"
    for _, (early, late) in world2(swept, [(.1, [None, None, Prunes(o)][i%3]) for i, o in enumerate([[0, 1], [0]]*15)], counts=(5, 29)):
        assert early == late
