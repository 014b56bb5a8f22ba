"Models with statistics of their own"
import pytest
from learners import *


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


class Stats(nn.Module):
    "Instance norm with running statistics, spectral norm, or an average that is nobody's business but its own"
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(3)
        self.kind, self.lin, self.out = kind, nn.Linear(4, 12), nn.Linear(12, 3)
        self.norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True) if kind == 'instance' else None
        if kind == 'spectral': self.lin = nn.utils.parametrizations.spectral_norm(self.lin)
        if kind == 'ema': self.register_buffer('ema', torch.zeros(12))
    def forward(self, x):
        x = self.lin(x)
        if self.norm is not None: x = self.norm(x.view(-1, 3, 4)).flatten(1)
        if self.training and self.kind == 'ema': self.ema.lerp_(x.detach().mean(0).to(self.ema.dtype), .1)
        return self.out(x.relu())


def stats(kind, distrib=True, n=22):
    import fastdist.all
    learn = quiet(learner(n=n, bs=6, model=lambda: Stats(kind).double(), metrics=accuracy))
    learn.recorder.train_metrics = True
    with warnings.catch_warnings(record=True) as seen, learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext():
        warnings.simplefilter('always')
        for _ in range(2): learn.fit(1)
    return weights(learn), [list(v) for v in learn.recorder.values], [str(o.message) for o in seen if 'the buffers' in str(o.message)]


def stats_of(kinds, distrib=True): return [stats(k, distrib, n) for k, n in kinds]


def test_running_statistics(world):
    "Of local batches of one size, 24 samples in batches of 6, the mean over workers is what one process has"
    kinds = [('spectral', 22), ('ema', 24), ('instance', 24)]  # what has been said once is not said again
    for r, every in enumerate(world(stats_of, kinds)):
        for (k, _), a, b in zip(kinds, stats_of(kinds, distrib=False), every):
            assert diff(a[0], b[0]) < 2e-7 and diff(a[1], b[1]) < 1e-6, k
            assert len(b[2]) == (k == 'ema' and r == 0) and all('buffers ema of' in o for o in b[2])
