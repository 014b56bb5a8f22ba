"""One process that trains on several GPUs by torch's `DataParallel`. Where there are none they are pretended (support/fakegpu)."""
import pytest
from learners import *

# GPUs, samples, those of a batch: some parts are of one row, and some batches of fewer rows than GPUs
WAYS = dict(two=([0, 1], 8, 3), three=([0, 1, 2], 12, 7), accumulated=([0, 1, 2], 13, 5), all=(None, 13, 5))


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


class Fails(nn.Module):
    "The part of GPU 1 fails"
    def __init__(self):
        super().__init__()
        self.lin, self.fails = nn.Linear(4, 3), True
    def forward(self, x):
        if self.fails and x.device.index == 1: raise ZeroDivisionError('in a part')
        return self.lin(x)


def failing():
    import fastdist.all
    learn = quiet(learner(n=10, bs=5, model=lambda: Fails().double()))
    learn.dls.to(torch.device('cuda', 0))
    model, text = learn.model, None
    with learn.parallel_ctx([0, 1, 2]):
        try: learn.fit(1)
        except Exception as e: text = f'{type(e).__name__}: {e}'
        model.fails = False
        learn.fit(1)
    return text, learn.model is model, len(learn.recorder.losses)


def test_a_part_that_fails(fake_gpu_worlds):
    "The next fit trains, and the learner has its model again"
    [(text, same, n)] = fake_gpu_worlds(1)(failing)
    assert text.startswith('ZeroDivisionError: ') and 'in a part' in text and same and n == 2


def refused():
    import fastdist.all
    try: quiet(learner(n=9, bs=4)).to_parallel([0, 9])
    except Exception as e: return f'{type(e).__name__}: {e}'


def test_a_gpu_that_is_not_there(fake_gpu_worlds):
    [text] = fake_gpu_worlds(1)(refused)
    assert text.startswith('ValueError: ') and '[9]' in text


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


class Evaluates(Callback):
    "Evaluates after the first batch, and after the first epoch"
    order, busy = 70, False
    def once(self, at):
        if self.busy or at in vars(self): return
        setattr(self, at, True)
        self.busy = True
        was = {k: getattr(self.learn, k) for k in ('epoch', 'train_iter', 'pct_train', 'dl', 'iter', 'n_iter', 'training')}
        self.learn.validate()
        for k, v in was.items(): setattr(self.learn, k, v)
        self.learn.model.train(self.training)
        self.busy = False
    def after_batch(self):
        if self.training: self.once('in_epoch')
    def after_epoch(self): self.once('behind_it')


def test_an_evaluation_in_a_fit():
    "The fit goes on, with the numbers that it has without `parallel_ctx`"
    import fastdist.all
    one, learn = quiet(learner(cbs=Evaluates())), quiet(learner(cbs=Evaluates()))
    one.fit(2)
    with learn.parallel_ctx(): learn.fit(2)
    assert diff({k: v.cpu() for k, v in one.model.state_dict().items()}, {k: v.cpu() for k, v in learn.model.state_dict().items()}) < 1e-12


class Looks(Callback):
    "Passes over the first batch, and evaluates within the fit"
    def before_batch(self):
        if self.training and self.learn.train_iter == 0 and self.iter == 0: raise CancelBatchException()
    def after_train(self): self.learn.get_preds()


def looked(parallel):
    import fastdist.all
    learn = quiet(learner(n=11, bs=4, cbs=Looks()))
    with learn.parallel_ctx() if parallel else contextlib.nullcontext(): learn.fit(2)
    return weights(learn)


def test_a_first_batch_without_a_forward_and_an_evaluation_in_the_fit():
    "The end of the evaluation leaves the fit its wrapper; here on the CPU"
    assert diff(looked(False), looked(True)) == 0
