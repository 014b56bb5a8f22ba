"A training step without a trainer: each worker has a share of a batch, and all of them together what one process has of the whole batch"
import pytest
from learners import *

LOSSES = dict(mean=lambda: CrossEntropyLossFlat(), sum=lambda: CrossEntropyLossFlat(reduction='sum'),
              weights=lambda: CrossEntropyLossFlat(weight=torch.tensor([1., 3., .5])), ignored=lambda: CrossEntropyLossFlat(ignore_index=2))


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


def batch(kind, rows):
    "A learner that has computed the loss of these rows of a batch of 7"
    learn = learner(loss=LOSSES[kind](), dtype=torch.float32)
    x, y = Items(7, dtype=torch.float32)[:]
    learn.xb, learn.yb = (x[rows],), (y[rows],)
    learn.pred = learn.model(x[rows])
    learn.loss_grad = learn.loss_func(learn.pred, y[rows])
    learn.loss = learn.loss_grad.clone()
    return learn


def grads(learn): return {n: p.grad for n, p in learn.model.named_parameters()}


def shared(kind, known, total=7, press=None):
    "Loss and gradients of a batch whose rows go to the workers in turn; a worker that gets none has one that does not count"
    import torch.distributed as dist
    from fastdist.trainer.step import TrainingStep
    from fastdist.world import get_rank, get_world_size, setup_distrib
    setup_distrib()
    rank, size = get_rank(), get_world_size()
    mine = list(range(rank, total, size))
    learn = batch(kind, mine or [0])
    counts = (len(mine), total, total < size) if known else (None if mine else 0, None, False)
    step = TrainingStep(learn, counts, 'cpu')
    step.gather_batch()
    step.note_loss()
    step.send_loss([rank==press, False, False, False])
    (learn.loss_grad*step.share_scale(learn.loss_grad)).backward()
    for g in grads(learn).values():
        dist.all_reduce(g)
        g /= size
    step.receive_loss()
    return step.ends or (learn.loss.item(), grads(learn), step.total)


@pytest.mark.parametrize('known', [True, False])
@pytest.mark.parametrize('kind', list(LOSSES))
def test_shares_are_the_batch(world, kind, known):
    for total in (7, world.n-1):
        learn = batch(kind, list(range(total)))
        learn.loss_grad.backward()
        for loss, gs, n in world(shared, kind, known, total):
            assert diff(loss, learn.loss.item()) < 1e-6 and diff(gs, grads(learn)) < 1e-6 and n == total


def test_ctrl_c_ends_the_step_in_all(world3): assert world3(shared, 'mean', True, press=1) == [KeyboardInterrupt]*3
