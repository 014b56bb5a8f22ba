"""One process that trains on several GPUs by torch's `DataParallel`. Where there are none they are pretended (support/fakegpu)."""
import pytest
from learners import *

# GPUs, samples, those of a batch: some parts are of one row, and some batches of fewer rows than GPUs
WAYS = dict(three=([0, 1, 2], 12, 7), accumulated=([0, 1, 2], 13, 5), all=(None, 13, 5))


def trained_on(way, one=False):
    "What comes of two fits, a validation and predictions, on one GPU or on those of the `way`"
    import fastdist.all
    torch.manual_seed(3)
    gpus, n, bs = WAYS[way]
    learn = quiet(learner(n=n, n_val=n, bs=bs, lr=.05, opt=Adam, metrics=accuracy))
    learn.dls.to(torch.device('cuda', 0))
    res, model = SimpleNamespace(), learn.model
    with contextlib.nullcontext() if one else learn.parallel_ctx(gpus and gpus[:torch.cuda.device_count()]):
        learn.fit_one_cycle(1, .05)
        res.first = [float(o) for o in learn.recorder.losses]
        learn.fit(1, cbs=[GradientAccumulation(2*bs)] if way == 'accumulated' else None)
        res.losses, res.values = [float(o) for o in learn.recorder.losses], [list(o) for o in learn.recorder.values]
        res.validated, res.preds = list(learn.validate()), [o.cpu() for o in learn.get_preds()]
        assert learn.model is model
    assert 'parallel_trainer' not in vars(learn)
    res.weights = weights(learn)
    return res


def both(way): return trained_on(way, one=True), trained_on(way)


@pytest.mark.parametrize('way', WAYS)
def test_numbers_of_one_gpu(gpu_worlds, way):
    "Of a model without batch norm"
    [(one, many)] = gpu_worlds(1)(both, way)
    assert diff(one.weights, many.weights) < 1e-10
    for o in 'first', 'losses', 'values', 'validated': assert diff(getattr(one, o), getattr(many, o)) < 1e-6
    for a, b in zip(one.preds, many.preds, strict=True): assert diff(a, b) < 1e-10


def refused():
    import fastdist.all
    try: quiet(learner(n=9, bs=4)).to_parallel([0, 9])
    except Exception as e: return f'{type(e).__name__}: {e}'


def test_a_gpu_that_is_not_there(fake_gpu_worlds):
    [text] = fake_gpu_worlds(1)(refused)
    assert text.startswith('ValueError: ') and 'device_ids=[0, 9]' in text


class FailsLast(Callback):
    def before_batch(self): raise KeyError('a bug')


def test_failed_before_the_forward():
    "The learner has its model again"
    from fastdist.all import ParallelTrainer
    learn = quiet(learner())
    model = learn.model
    with pytest.raises(KeyError): learn.fit(1, cbs=[ParallelTrainer(None), FailsLast()])
    assert learn.model is model
    with pytest.raises(KeyError), learn.parallel_ctx(): learn.fit(1, cbs=FailsLast())
    assert learn.model is model
