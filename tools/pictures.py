"""Make the pictures of docs/ again: `python tools/pictures.py [straggler] [data] [many]`.

monitor-*.png is `plot()` of two workers that train examples/digits.py, with a fault that is made on purpose.
many-workers.png has losses of the same training on one worker and on four."""
import os, subprocess, sys, tempfile, time
from functools import partial, partialmethod
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT/'examples')]
FAULTS = 'straggler', 'data'
EPOCHS, LR, SAMPLES = 10, 1e-3, 1347  # of many-workers.png; SAMPLES are in an epoch


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


def valid_losses(runs):
    "Of the training of examples/digits.py with each of these arguments, after each epoch"
    from fastai.basics import CrossEntropyLossFlat, Learner, set_seed
    from digits import get_dls, get_model
    losses = []
    for lr,split in runs:
        set_seed(42)
        learn = Learner(get_dls(), get_model(), loss_func=CrossEntropyLossFlat())
        with learn.distrib_ctx(split_batches=split), learn.no_bar(), learn.no_logging(): learn.fit(EPOCHS, lr)
        losses.append([o[1] for o in learn.recorder.values])
    return losses


def plot_many():
    "docs/many-workers.png"
    import matplotlib.pyplot as plt
    from fastdist.all import launch_in_notebook
    one, = valid_losses([(LR, False)])
    same, scaled, split = launch_in_notebook(valid_losses, [(LR, False), (4*LR, False), (LR, True)], n=4)
    plt.rcParams.update({'font.size': 14, 'axes.spines.top': False, 'axes.spines.right': False})
    fig, ax = plt.subplots(figsize=(6.4, 5.6), layout='constrained')
    for values, label, style in ((one, '1 worker, batch of 64', dict(lw=9, color='#c4d3e8', solid_capstyle='round')),
                                 (split, '4 workers share the batch of 64', dict(lw=2.5, color='#1f4e9c', ls='--')),
                                 (scaled, '4 workers x 64, 4 times the learning rate', dict(lw=2.5, color='#2c8c4a', marker='o')),
                                 (same, '4 workers x 64, the same learning rate', dict(lw=2.5, color='#d1495b', marker='s'))):
        print(f'{label}:', *(f'{o:.4f}' for o in values))
        ax.plot([SAMPLES*(i+1) for i in range(EPOCHS)], values, label=label, **style)
    ax.set(xlabel='training samples seen', ylabel='validation loss', ylim=(0, None))
    fig.legend(loc='outside upper left', frameon=False)
    fig.savefig(ROOT/'docs'/'many-workers.png', dpi=90)


if __name__ == '__main__':
    if 'RANK' in os.environ: train(sys.argv[1])
    else:
        wanted = sys.argv[1:] or [*FAULTS, 'many']
        for fault in set(FAULTS) & set(wanted):
            subprocess.run([sys.executable, '-m', 'fastdist', 'launch', '-n', '2', __file__, fault], cwd=tempfile.mkdtemp(), check=True,
                           env={**os.environ, 'PYTHONPATH': str(ROOT), 'MPLBACKEND': 'agg'})
        if 'many' in wanted: plot_many()
