"""The largest differences between one process and 2 and 3 CPU workers, row by row:

    python benchmarks/exact.py

Weights are float64, so that rounding hides nothing; their loss is a float32, as fastai's recorder needs, and so are losses and metrics.
Predictions are compared in order and length too. Takes about a minute."""
import shared
import test_p1_exact as t
from harness import World
from learners import *

SPLIT = dict(split_batches=True)
FITS = {
    'SGD, batches of 5 from 22': dict(n=22, bs=5),
    'SGD, weight decay 0.1': dict(n=22, bs=5, wd=0.1),
    'Adam': dict(n=22, bs=5, opt=Adam),
    'Adam, weight decay 0.1': dict(n=22, bs=5, opt=Adam, wd=0.1),
    'SGD, batch norm (sync_bn)': dict(n=22, bs=5, bn=True),
    'Adam, batch norm, weight decay 0.1': dict(n=22, bs=5, opt=Adam, bn=True, wd=0.1),
    'last batch of 1 sample (21 by 5)': dict(n=21, bs=5),
    '1 sample in all': dict(n=1, bs=8),
    'batches of 1 (fewer than workers)': dict(n=3, bs=1),
    '31 by 6, 2 loader processes': dict(n=31, bs=6, num_workers=2),
    'cross entropy with class weights': dict(n=22, bs=5, loss=Double(weight=torch.tensor([1., 5., 0.5]).double())),
    'accumulation of 11 samples': dict(n=22, bs=5, cbs=GradientAccumulation(11)),
}
SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 17, 29]


def relative(a, b): return max(diff(x, y)/max(1e-12, max(map(abs, x))) for x, y in zip(a, b))


def main():
    worlds = {n: World(n) for n in (2, 3)}
    def row(name, f): print(f"| {name} | {' | '.join(f'{f(n, w):.1e}' for n, w in worlds.items())} |", flush=True)
    print('| weights after 2 epochs, split_batches=True | 2 workers | 3 workers |\n|---|---|---|')
    for name, kw in FITS.items():
        one = trained(**kw)
        row(name, lambda n, w: max(diff(one.weights, m.weights) for m in w(trained, True, ctx=SPLIT, **kw)))
    row('split_batches=False, against one process with bs*workers', lambda n, w: max(
        diff(trained(n=38, bs=4*n, val_bs=4, bn=True).weights, m.weights) for m in w(trained, True, ctx={}, n=38, bs=4, val_bs=4, bn=True)))
    print('\n| evaluation of sets of ' + ', '.join(map(str, SIZES)) + ' | 2 workers | 3 workers |\n|---|---|---|')
    one = t.val_values(False, SIZES)
    row('loss, accuracy, F1, perplexity, a metric by the batch, a metric of one\'s own (relative)', lambda n, w: max(relative(one, m) for m in w(t.val_values, True, SIZES)))
    one_preds = t.preds(False, SIZES)
    row('get_preds: inputs, predictions, targets, losses', lambda n, w: max(
        diff(a, b) for m in w(t.preds, True, SIZES) for x, y in zip(one_preds, m) for p, q in zip(x, y) for a, b in zip(p, q)))
    for w in worlds.values(): w.stop()


if __name__ == '__main__': main()
