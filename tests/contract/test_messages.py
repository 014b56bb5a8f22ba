"P4: what a training step and an evaluation cost in messages, which is the same for one of two workers and one of 1,024, and does not grow with the batches"
import os

import fakegpu, pytest
from forked import started
from table import *


class Counts(Callback):
    "(number, bytes) of the messages of each training step, from before its batch to after it, and of each validation"
    order = -1000
    def __init__(self): self.steps, self.validations = [], []
    def _seen(self):
        import echo
        return len(echo.sent), sum(n for _, n in echo.sent)
    def before_batch(self): self.begin = self._seen() if self.training else self.begin
    def before_validate(self): self.begin = self._seen()


class Ends(Callback):
    order = 2000
    def after_batch(self): self._note(self.learn.counts.steps) if self.training else None
    def after_validate(self): self._note(self.learn.counts.validations)
    def _note(self, to): to.append(tuple(a-b for a, b in zip(self.learn.counts._seen(), self.learn.counts.begin)))


def costs():
    "As one of SIZE workers, the others of which are pretended: a step with batch norm and without, and validations of 1 and of 4 batches a worker"
    import echo, fastdist.all
    size = int(os.environ['SIZE'])
    echo.join(0, size, torch.distributed.HashStore())
    res = {}
    for bn, batches in (False, 1), (True, 1), (True, 4):
        counts = Counts()
        learn = quiet(learner(n=4*size, n_val=2*batches*size, bs=size, val_bs=2, bn=bn, opt=Adam, metrics=[accuracy, error_rate], cbs=[counts, Ends()]))
        with learn.distrib_ctx(split_batches=True): learn.fit(3)
        res[bn, batches] = counts.steps[-3:], counts.validations[-1]
        learn.remove_cbs([counts, learn.ends])
    return res


def test_messages():
    if why := fakegpu.no_backend(): pytest.skip(why)
    two, many = started(costs, [{'SIZE': '2'}, {'SIZE': '1024'}], timeout=200)
    assert isinstance(two, dict) and isinstance(many, dict), (two, many)
    for k, (steps, validation) in two.items():
        for (n, size), (n1, size1) in zip([*steps, validation], [*many[k][0], many[k][1]], strict=True): assert n == n1 and size1 <= size*1.01+64, (k, two, many)
        assert len({n for n, _ in steps}) == 1 and steps[0][0] <= (5 if k[0] else 3), (k, steps)  # gradients and the loss; batch norm's, forward and backward
    assert two[True, 1][1] == two[True, 4][1] and two[True, 1][1][0] <= 4, two
