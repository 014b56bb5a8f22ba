"What a callback of one worker alone may do with the model and the loaders: the others hear nothing of it, and all train as one process without it"
from strategies import *


class Looks(Callback):
    "Passes of its own, such as for a saliency map, and a forward in training, which is no batch of the others"
    order = -30
    def __init__(self): self.seen = 0
    def look(self):
        if not self.training: return
        learn, ps = self.learn, [p for p in self.learn.model.parameters()]
        grads, buffers = [p.grad for p in ps], {n: b.clone() for n, b in learn.model.named_buffers()}
        for p in ps: p.grad = None
        x = torch.cat([self.xb[0], 2*self.xb[0]+1]).requires_grad_() # batch norm wants two rows
        learn.loss_func(learn.model(x), torch.cat([self.yb[0]]*2)).backward()
        assert x.grad.abs().sum() > 0
        for p, g in zip(ps, grads): p.grad = g
        for n, b in learn.model.named_buffers(): assert b.equal(buffers[n]) or n.endswith('num_batches_tracked'), n  # which counts forwards
        self.seen += 1
    before_batch = after_backward = after_batch = look
    def after_epoch(self): self.read = [sum(len(b[0]) for b in dl) for dl in self.dls.loaders]


def uncounted(learn): return {k: v for k, v in weights(learn).items() if not k.endswith('num_batches_tracked')}


def looked(ctx=None, who=None):
    import fastdist.all
    from fastdist.world import get_rank
    learn = quiet(learner(n=22, n_val=9, bn=True, opt=partial(SGD, mom=.9)))
    mine = who is not None and get_rank() == who
    if mine: learn.add_cb(Looks())
    with contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx): learn.fit(2)
    return uncounted(learn), learn.recorder.values[-1], (learn.looks.seen, learn.looks.read) if mine else None


def test_passes_of_its_own(world3):
    w, values, _ = looked()
    for r, (w1, values1, seen) in enumerate(world3(looked, ctx_of('ddp'), 2)):
        assert diff(w, w1) < 2e-7 and diff(values, values1) < 2e-6 and seen == ((30, [22, 9]) if r == 2 else None)
