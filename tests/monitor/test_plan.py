"What `learn.distrib_plan` predicts is what real runs have, to the byte; and it changes nothing of the learner"
import pytest
from harness import WorkerError
from learners import *

STRATEGIES = 'ddp', 'zero1', 'zero2', 'fsdp', 'hsdp'
OPTS = dict(adam=Adam, momentum=partial(SGD, mom=0.9))


def model():
    "Two parts of 2**16 parameters and more, which are gathered as one, and a head; rows that neither 2 nor 3 workers share evenly"
    torch.manual_seed(3)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 301), nn.ReLU(), nn.Linear(301, 307), nn.ReLU()),
                         nn.Sequential(nn.Linear(307, 311), nn.ReLU()), nn.Linear(311, 3)).double()


class Measures(Callback):
    "Of the third step: bytes of parameters, gradients and optimizer state of this worker, and what it sends"
    order = 2000
    def after_batch(self):
        import counting
        if self.training: self.step, self.begin = counting.sent[self.begin:] if self.iter else [], len(counting.sent)
    def after_step(self):
        from fastdist.comm.collectives import local
        from fastdist.strategy.base import state_tensors
        ps = [*self.model.parameters()]
        self.bytes = dict(params=sum(local(p).nbytes for p in ps), grads=sum(local(p.grad).nbytes for p in ps),
                          state=sum(local(t).nbytes for t in state_tensors(self.opt)))


def measured():
    "By optimizer and strategy"
    import counting, fastdist.all
    counting.join()
    res = {}
    for o, opt in OPTS.items():
        for strategy in STRATEGIES:
            cb = Measures()
            learn = quiet(learner(n=18, n_val=6, bs=6, opt=opt, model=model, cbs=cb))
            with learn.distrib_ctx(split_batches=True, strategy=strategy): learn.fit(1)
            res[o, strategy] = cb.bytes, cb.step
    return res


@pytest.mark.parametrize('n', [2, 3])
def test_bytes(worlds, n):
    "Of the worker that has most, and of what each sends; beside it there is the message with the loss, the same with every strategy"
    from fastdist.monitor.plan import bytes_sent
    from fastdist.strategy.select import memory_of
    found = worlds(n)(measured)
    for (o, s), found in {k: [r[k] for r in found] for k in found[0]}.items():
        plan = memory_of(s, model(), n, state=dict(adam=2, momentum=1)[o])
        plan.pop('messages')
        if s == 'zero2': plan['params'] -= sum(p.nbytes for p in model().parameters())  # gathered in a step
        assert plan == {k: max(b[k] for b, _ in found) for k in plan}, (o, s)
        for _, step in found: assert sum(b for _, b in step) == pytest.approx(sum(bytes_sent(s, model(), n, n))+104*(n-1)), (o, s, step)


class Drops(nn.Module):
    "Draws random numbers, and counts"
    def __init__(self):
        super().__init__()
        self.net, self.bn = model().float(), nn.BatchNorm1d(3)
    def forward(self, x): return self.bn(F.dropout(self.net(x)))


def fitted(plans):
    "Losses, weights and the lines of a log, of two fits, with a plan between them or without one"
    import counting, fastdist.all
    from fastai.callback.progress import CSVLogger
    from fastdist.data.rng import generator_states, generators_in, rng_state
    learn = quiet(learner(n=18, n_val=6, bs=6, model=Drops, dtype=torch.float32, opt=Adam, path=f'plans{plans}', loss=CrossEntropyLossFlat(),
                          cbs=[CSVLogger(append=True), GradientAccumulation(12)]))
    learn.path.mkdir(exist_ok=True)
    def has(): return rng_state()[0], generator_states(generators_in(learn.dls.train)), [*map(type, learn.cbs)], sorted(vars(learn)), learn.recorder.log, weights(learn), len(counting.sent)
    with learn.distrib_ctx(split_batches=True):
        learn.fit(1)
        before = has()
        if plans: learn.distrib_plan(8, 1e9)
        assert repr(has()) == repr(before)
        learn.fit(1)
    return [float(o) for o in learn.recorder.losses], weights(learn), (learn.path/'history.csv').read_text().count('\n')


def fitted_twice(together=False):
    "Without a plan, and with one"
    import counting
    if together: counting.join()
    return fitted(False), fitted(True)


def test_changes_nothing(worlds, tmp_path, monkeypatch):
    "In one process, and in a context, where it sends nothing: the next fit is that without a plan"
    monkeypatch.chdir(tmp_path)
    for (losses, ws, lines), (also, others, more) in fitted_twice(), worlds(2)(fitted_twice, True)[0]:
        assert losses == also and diff(ws, others) == 0 and lines == more == 4


def planned(strategy):
    "In a context of `strategy`"
    import fastdist.all
    learn = quiet(learner())
    with learn.distrib_ctx(strategy=strategy): return learn.distrib_plan(8, 1e9).shape


def test_where_there_are_shards(world2):
    "There is no copy of a model in shards: the error says what to do"
    with pytest.raises(WorkerError, match="with strategy='fsdp' no worker can train alone.*leave the context first"):
        world2(planned, 'fsdp')
    assert world2(planned, 'zero1') == [(4, 9)]*2


def test_step():
    "What is kept for the backward of a batch of 6, and what optimizers remember"
    import fastdist.all
    from fastdist.monitor.plan import measure_step
    for opt, state in (Adam, 2), (partial(SGD, mom=0.9), 1), (SGD, 0):
        seconds, kept, found = measure_step(learner(bs=6, opt=opt, model=model), torch.device('cpu'))
        assert seconds > 0 and found == state
        # inputs of layers, the predictions' log-probabilities, targets, and the total weight of these
        assert kept == 6*8*(4+301+307+311+3)+6*8+8, kept
    learn = quiet(learner(bs=6, opt=Adam, model=model))
    plan, part = learn.distrib_plan(8, 1e6), learn.distrib_plan(8, 1e6, 'fsdp', split_batches=True)
    mb = sum(p.nbytes for p in learn.model.parameters())/1e6
    assert plan.loc['ddp', ['params', 'grads', 'state', 'sent']].tolist() == [round(o*mb, 1) for o in (1, 1, 2, 7/4)]
    assert plan.fits.all() and (plan.step >= (plan.sent-0.05)*1e3).all() and [*part.index] == ['fsdp']


@pytest.mark.parametrize('kwargs,msg', [(dict(world_size=8.5), 'world_size=8.5'), (dict(world_size=0), 'world_size=0'), (dict(node_size=0), 'node_size=0'),
                                        (dict(link=0), 'link=0'), (dict(node_link=-1), 'node_link=-1'), (dict(world_size=12, strategy='hsdp'), 'node_size=8.*12 workers')])
def test_arguments(kwargs, msg):
    "They are refused before anything is measured"
    import fastdist.all
    learn = learner()
    learn.dls = None
    with pytest.raises(ValueError, match=msg): learn.distrib_plan(**dict(dict(world_size=8, link=1e9), **kwargs))


def test_an_optimizer_that_is_given():
    "It is not stepped: its own state counts, or two numbers for each that is trained"
    import fastdist.all
    from fastdist.monitor.plan import measure_step
    learn, cpu = quiet(learner(model=model)), torch.device('cpu')
    learn.opt_func = OptimWrapper(opt=torch.optim.SGD(learn.model.parameters(), lr=0.1, momentum=0.9))
    assert measure_step(learn, cpu)[2] == 2
    learn.fit(1)
    assert measure_step(learn, cpu)[2] == 1


def test_a_step_that_does_not_fit():
    import fastdist.all
    class Twice(nn.Linear):
        "Memory runs out in its second forward"
        n = 0
        def forward(self, x):
            self.n += 1
            if self.n > 1: raise torch.OutOfMemoryError('injected')
            return super().forward(x)
    with pytest.raises(torch.OutOfMemoryError, match='a step of 5 samples does not fit'): quiet(learner(model=lambda: Twice(4, 3).double())).distrib_plan(8, 1e9)
