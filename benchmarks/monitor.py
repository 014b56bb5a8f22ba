"""What `DistMonitor` costs in a training step on 2 workers: a fit with it beside one without, in turns.

    python benchmarks/monitor.py [--rounds 15] [--sizes tiny small]

The model, loaders and sizes of training.py; the message of an epoch is not in it. Medians of the milliseconds of a step, and of the ratio to the fit without in
the same round, with quartiles."""
import argparse, statistics

import shared, training
from training import SIZES, beside, in_context, learner


def monitored(size):
    from fastdist.all import DistMonitor
    learn = learner(size)
    learn.add_cb(DistMonitor())
    return in_context(learn, sync_bn=False)


WAYS = {'without': training.fastdist, 'with DistMonitor': monitored}


if __name__ == '__main__':
    p = shared.parser(__doc__)
    p.add_argument('--rounds', type=int, default=15)
    p.add_argument('--sizes', nargs='+', default=list(SIZES), choices=list(SIZES))
    p.add_argument('--child', help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.child: training.child(lambda: WAYS[a.child](a.sizes[0]))
    for size in a.sizes:
        steps, res = SIZES[size][3], training.measure(size, a.rounds, WAYS, __file__)
        print(f'\n{size}, {a.rounds} rounds of {steps} steps, {training.WORKERS} workers\n\n| | ms a step | without / this | quartiles |\n|---|---|---|---|')
        for name, rs in res.items(): print(f'| {name} | {statistics.median(o[0] for o in rs)/steps*1e3:.2f} | {beside(res["without"], rs)} |', flush=True)
