"""Make the pictures of docs/monitor.md again: `python tools/pictures.py`. Each is `plot()` of two workers that train examples/digits.py, with a fault that is made on purpose."""
import os, subprocess, sys, tempfile, time
from functools import partial, partialmethod
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT/'examples')]
FAULTS = 'straggler', 'data'


def train(fault):
    "In each worker; rank 0 saves the picture"
    import digits
    from fastai.basics import Callback, Learner, plt
    from fastdist.all import DistMonitor, is_master

    class Slow(Callback):
        def after_pred(self):
            if self.training and os.environ['RANK'] == '1': time.sleep(0.1)

    class SlowItems(list):
        def __getitem__(self, i):
            time.sleep(0.003)
            return super().__getitem__(i)

    def slow_dls():
        dls = get_dls()
        dls.train.dataset = SlowItems(dls.train.dataset)
        return dls

    get_dls, monitor = digits.get_dls, DistMonitor()
    if fault == 'data': digits.get_dls = slow_dls
    # in batch norm one of two workers waits for the other, so that both look slow
    if fault == 'straggler': Learner.distrib_ctx = partialmethod(Learner.distrib_ctx, sync_bn=False)
    digits.Learner = partial(Learner, cbs=[monitor, *([Slow()] if fault == 'straggler' else [])])
    digits.main(epochs=4)
    monitor.plot(figsize=(11, 3))
    if is_master(): plt.savefig(ROOT/'docs'/f'monitor-{fault}.png', dpi=80)


if __name__ == '__main__':
    if 'RANK' in os.environ: train(sys.argv[1])
    else:
        for fault in FAULTS: subprocess.run([sys.executable, '-m', 'fastdist', 'launch', '-n', '2', __file__, fault], cwd=tempfile.mkdtemp(), check=True,
                                            env={**os.environ, 'PYTHONPATH': str(ROOT), 'MPLBACKEND': 'agg'})
