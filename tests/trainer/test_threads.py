"A script's own threads beside a fit"
import threading

from loaders import *


def beside(who, call, epochs=2):
    "What `call(learn)` in a thread of the ranks `who` has raised, where it begins in the middle of a fit and ends before that goes on; the weights after the fit"
    import fastdist.all
    from fastdist.world.ranks import get_rank
    raised = []
    def run(learn):
        try: call(learn)
        except Exception as e: raised.append(f'{type(e).__name__}: {e}')
    class Beside(Callback):
        def after_pred(self):
            if self.epoch or self.iter != 1 or not self.training or get_rank() not in who: return
            thread = threading.Thread(target=run, args=(self.learn,))
            thread.start()
            thread.join()
    set_seed(1)
    learn = learn_of(dl(n=23, bs=6, shuffle=True), dl(n=9, bs=4, seed=1))
    with learn.distrib_ctx(split_batches=True):
        learn.fit(epochs, cbs=Beside())
        got = len(learn.get_preds()[0])
    return raised, weights(learn), got


def get_preds(learn): learn.get_preds()
def validate(learn): learn.validate()
def fit(learn): learn.fit(1)
def own_loader(learn): list(dl(n=5))
def forward(learn): learn.model(torch.ones(1, 4, dtype=torch.float64))


def test_a_learner_does_one_thing_at_a_time(world2):
    w = [w for _, w, _ in world2(beside, (), get_preds)][0]
    for call in get_preds, validate, fit:
        for r, (raised, w1, n) in enumerate(world2(beside, (1,), call)):
            assert diff(w, w1) == 0 and n == 9
            assert len(raised) == r and all('another thread' in o and 'copy.deepcopy(learn)' in o for o in raised), raised


def evaluates_first():
    "A fit that begins while another thread evaluates says so, and leaves nothing of it"
    import fastdist.all
    inside, go, said = threading.Event(), threading.Event(), []
    class Waits(Callback):
        def before_validate(self):
            if threading.current_thread() is threading.main_thread(): return
            inside.set()
            go.wait()
    learn = learn_of(dl(n=23, bs=6, shuffle=True), dl(n=3, bs=4, seed=1), cbs=Waits())
    with learn.distrib_ctx():
        thread = threading.Thread(target=learn.get_preds)
        thread.start()
        inside.wait()
        try: learn.fit(1)
        except RuntimeError as e: said.append(str(e))
        go.set()
        thread.join()
        learn.fit(1)
    return said

def test_a_fit_waits_for_no_other_thread(world2):
    for said in world2(evaluates_first): assert len(said) == 1 and 'another thread' in said[0], said


def test_other_threads_do_as_they_like(world2):
    for call in own_loader, forward:
        for raised, *_ in world2(beside, (0, 1), call): assert raised == []


def forward_beside_a_loss():
    import fastdist.all
    model, raised, began, done = mlp(), [], threading.Event(), threading.Event()
    def run():
        began.wait()
        try: model(torch.ones(1, 4, dtype=torch.float64))
        except Exception as e: raised.append(str(e))
        done.set()
    def loss(p, t):
        if not torch.is_grad_enabled(): # fastdist tries it out
            began.set()
            done.wait()
        return F.cross_entropy(p, t).float()
    threading.Thread(target=run).start()
    learn = learn_of(dl(n=23, bs=6), dl(n=9, bs=4, seed=1), model, loss, metrics=[])
    with learn.distrib_ctx(split_batches=True): learn.fit(1)
    return raised

def test_a_forward_of_another_thread_is_none_of_the_loss_function(world2): assert world2(forward_beside_a_loss) == [[], []]


def fails_in_a_thread():
    "What a thread raises in a process group that the main thread has made, where rank 1 fails; and a call after that"
    from fastdist.world import all_reduce, fail_together, get_rank, setup_distrib
    setup_distrib()
    raised, done = [], threading.Event()
    def run():
        try:
            with fail_together():
                if get_rank() == 1: raise KeyError('no such image')
                while True: all_reduce(torch.ones(1))
        except Exception as e: raised.append(type(e).__name__)
        done.set()
    threading.Thread(target=run).start()
    while True:
        try:
            if done.wait(10): break
        except RuntimeError: pass  # the signal that ends a wait comes to the main thread
    with fail_together(): return raised, all_reduce(torch.ones(1)).item()

def test_a_failure_in_a_thread(world2):
    "Is told as it is, and leaves no process group: signals are the main thread's, which was the error instead"
    assert world2(fails_in_a_thread) == [(['RemoteError'], 2.), (['KeyError'], 2.)]
