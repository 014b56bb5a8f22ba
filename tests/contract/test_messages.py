"""P4: what a fit costs one of a thousand workers, in messages, requests to the store, and calls of functions, is what it costs one of two.

All others are taken to be like this one (support/echo), which is rank 0 and so has most to do."""
import os, sys
from collections import Counter

import fakegpu, pytest
from forked import started
from learners import *
from strategies import ctx_of


STRATEGIES = 'ddp', 'zero1', 'zero2', 'fsdp'


class Phases:
    "By phase: the collectives and their bytes, requests to the store, and calls of fastdist's functions"
    def __init__(self, store):
        import fastdist
        self.store, self.folder, self.found, self.now = store, os.path.dirname(fastdist.__file__)+os.sep, {}, None

    def begin(self, name):
        import echo
        self.now, self.calls, self.messages, self.asked = name, Counter(), len(echo.sent), self.store.count.copy()
        sys.setprofile(self._count)

    def _count(self, frame, event, arg):
        file = frame.f_code.co_filename
        if event == 'call' and file.startswith(self.folder): self.calls[file[len(self.folder):], frame.f_code.co_name] += 1

    def end(self):
        import echo
        sys.setprofile(None)
        self.found[self.now] = SimpleNamespace(sent=echo.sent[self.messages:], asked=dict(self.store.count-self.asked),
                                               calls=dict(self.calls))


class First(Callback):
    "Begins the phases of the second epoch, and ends those that end there"
    order = -1000
    def __init__(self, phases): self.phases = phases

    def before_train(self):
        if self.epoch == 1: self.phases.begin('an epoch begins')

    def before_batch(self):
        if self.epoch != 1 or not self.training: return
        if self.iter == 0: self.phases.end()
        if self.iter == 2: self.phases.begin('a step')

    def after_train(self):
        if self.epoch == 1: self.phases.begin('validation')

    def after_epoch(self):
        if self.epoch == 1: self.phases.end()


class Last(Callback):
    "Ends the step"
    order = 2000
    def __init__(self, phases): self.phases = phases
    def after_batch(self):
        if self.epoch == 1 and self.training and self.iter == 2: self.phases.end()


def costs_of(strategy, size, store, bn=True, batches=2):
    "With `batches` of a validation for each worker"
    import fastdist.all
    phases = Phases(store)
    learn = quiet(learner(n=4*size, n_val=2*batches*size, bs=size, val_bs=2, bn=bn, opt=Adam, metrics=[accuracy, error_rate],
                          cbs=[First(phases), Last(phases)]))
    for i in range(2):
        ctx = learn.distrib_ctx(**ctx_of(strategy))
        phases.begin(f'context {i} begins')
        ctx.__enter__()
        phases.end()
        if i == 0: learn.fit(2)
        phases.begin(f'context {i} ends')
        ctx.__exit__(None, None, None)
        phases.end()
    return phases.found


def costs():
    "By strategy and phase, as one of SIZE workers"
    import echo
    size, store = int(os.environ['SIZE']), echo.Asked()
    echo.join(0, size, store)
    return dict({o: costs_of(o, size, store) for o in STRATEGIES}, plain=costs_of('ddp', size, store, bn=False, batches=8))


PHASES = 'context 0 begins', 'an epoch begins', 'a step', 'validation', 'context 0 ends', 'context 1 begins', 'context 1 ends'
# messages in each phase, of a model with 6 parameters, 2 of which are batch norm's, with the same weights in all. What zero2 and fsdp
# send in a step and a forward is torch's own
MESSAGES = dict(ddp=(3, 3, 4, 3, 1, 3, 1), zero1=(3, 3, 5, 3, 4, 3, 4), zero2=(3, 3, None, None, 5, 3, 5), fsdp=(3, 3, None, None, 5, 3, 5))
# of a step of two workers with 664 bytes of parameters, and a number for each of them: has a worker used it? Those of fully_shard are torch's
BYTES = dict(ddp=1088, zero1=1432)
# of fastdist's functions, with ddp, at most; in a validation's there is an epoch's look at the model
CALLS = {'a step': 373, 'validation': 1031}


def test_messages():
    """Messages and requests are the same in number, in every phase and with every strategy, and so are bytes, but where rows are padded to
    as many for each worker, of which a worker has few here. Calls are no more"""
    if why := fakegpu.no_backend(): pytest.skip(why)
    two, many = started(costs, [{'SIZE': '2'}, {'SIZE': '1024'}], timeout=200)
    assert isinstance(two, dict) and isinstance(many, dict), (two, many)
    for o in two, many:  # batch norm has a message in a forward and one in a backward; a validation of 8 batches has those of one of 2
        assert [len(o['plain'][k].sent) for k in ('a step', 'validation')] == [2, 3], (o['plain']['a step'].sent,
            o['plain']['validation'].sent)
    for strategy in STRATEGIES:
        for phase, a in two[strategy].items():
            b, at = many[strategy][phase], (strategy, phase)
            expected = MESSAGES[strategy][PHASES.index(phase)]
            # zero1: what an owner has goes with the call's own message where it is little, as where there are many; and here
            # each of the many owns something
            owners = strategy == 'zero1' and phase.endswith('ends')
            assert len(a.sent) == len(b.sent)+owners and a.asked == b.asked, (at, a.sent, b.sent, a.asked, b.asked)
            assert expected in (None, len(a.sent)), (at, a.sent)
            if phase == 'a step' and strategy in BYTES: assert sum(n for _, n in a.sent) == BYTES[strategy], (at, a.sent)
            if phase in CALLS and strategy == 'ddp': assert sum(a.calls.values()) <= CALLS[phase], (at, a.calls)
            sizes = [sum(n for _, n in o.sent) for o in (a, b)]
            if strategy == 'ddp': assert sizes[1] <= sizes[0]*1.01+64, (at, a.sent, b.sent)
            # the first context looks at as many samples as there are, up to some number
            if phase == 'context 0 begins' or owners: continue
            most = sum(a.calls.values())*(1 if strategy == 'ddp' else 1.05)
            assert sum(b.calls.values()) <= most, (at, more(a.calls, b.calls))


def more(a, b): return {k: (a.get(k, 0), n) for k, n in b.items() if n > a.get(k, 0)}
