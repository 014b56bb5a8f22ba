"""What `learn.validate` and `learn.get_preds` cost on 2 workers, beside one process and the same written by hand.

    python benchmarks/evaluation.py [--rounds 5] [--sizes cheap small medium large wide] [--ways 'one process' fastdist]

A network of linear layers, batches of 64, over gloo, one thread each: `cheap` has a batch of some 0.9 ms in one process, `small` of 1.3, `medium` of 1.6 (the model 1.0), `large`
of 2.2, with accuracy. `wide` is `get_preds` of 1e5 predictions of 1,000 floats, 400 MB, with their softmax, and, as fastai does it, loss and accuracy. By hand each worker has the
first or the second half of the samples, adds up what it finds, and gathers predictions with one `all_gather_single`, so that no order is to be put back. As in training.py: processes
stay, ways take turns. Medians of milliseconds a batch, of the ratio to one process in the same round, with quartiles, and the peak of rank 0's extra memory."""
import argparse, statistics

import training
from shared import parser, with_memory
from training import WORKERS, in_context

SIZES = {'cheap': (256, 10, 25600, 64), 'small': (512, 10, 25600, 64), 'medium': (768, 10, 25600, 64), 'large': (1024, 10, 25600, 64), 'wide': (64, 1000, 100_000, 256)}  # width, outputs, samples, batch size


def parts(size):
    import torch
    from torch import nn
    width, out, n, bs = SIZES[size]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out))
    return model, list(zip(torch.randn(n, 256), torch.randint(0, out, (n,)))), bs


def learner(size):
    from fastai.basics import CrossEntropyLossFlat, DataLoaders, Learner, TfmdDL, accuracy
    from learners import quiet
    model, items, bs = parts(size)
    return quiet(Learner(DataLoaders(*[TfmdDL(items, bs=bs, num_workers=0) for _ in range(2)]), model, loss_func=CrossEntropyLossFlat(), metrics=accuracy))


def evaluate(learn, size): return (lambda: learn.get_preds()) if size == 'wide' else (lambda: learn.validate())
def one_process(size): return evaluate(learner(size), size)


def fastdist(size):
    import fastdist.all
    learn = learner(size)
    keep = in_context(learn)
    run = evaluate(learn, size)
    return lambda: (keep, run())[1]


def by_hand(size, alone=False):
    import torch, torch.distributed as dist
    from fastai.basics import TfmdDL, accuracy
    from torch.nn.functional import cross_entropy
    dist.init_process_group('gloo')
    model, items, bs = parts(size)
    half = len(items)//WORKERS
    dl = TfmdDL(items[dist.get_rank()*half:][:half], bs=bs, num_workers=0)
    gather = getattr(dist, 'all_gather_single', dist.all_gather_into_tensor)
    def together(ts):
        mine = torch.cat(ts)
        res = mine.new_empty(len(items), *mine.shape[1:])
        gather(res, mine)
        return res
    @torch.no_grad()
    def run():
        model.eval()
        sums, preds, targs = torch.zeros(3), [], []
        for x, y in dl:
            pred = model(x)
            if not alone: sums += torch.stack([cross_entropy(pred, y)*len(y), accuracy(pred, y)*len(y), torch.tensor(float(len(y)))])
            if size == 'wide':
                preds.append(pred.softmax(-1))
                targs.append(y)
        dist.all_reduce(sums)
        return (sums[:2]/sums[2]).tolist(), [together(o) for o in (preds, targs) if o]
    return run


WAYS = {'one process': one_process, 'by hand': by_hand, 'by hand, no loss, no accuracy': lambda size: by_hand(size, True), 'fastdist': fastdist}


if __name__ == '__main__':
    p = parser(__doc__)
    p.add_argument('--rounds', type=int, default=5)
    p.add_argument('--sizes', nargs='+', default=list(SIZES), choices=list(SIZES))
    p.add_argument('--ways', nargs='+', default=list(WAYS), choices=list(WAYS))
    p.add_argument('--child', help=argparse.SUPPRESS)
    a = p.parse_args()
    def measured():
        run = WAYS[a.child](a.sizes[0])
        return lambda: with_memory(run)[2]
    if a.child: training.child(measured)
    for size in a.sizes:
        _, _, n, bs = SIZES[size]
        res = training.measure(size, a.rounds, [o for o in a.ways if size == 'wide' or 'no loss' not in o], __file__)
        print(f'\n{size}, {a.rounds} rounds of {-(-n//bs)} batches, {WORKERS} workers\n\n| | ms a batch | CPU ms a batch | one process / this | quartiles | MB |\n|---|---|---|---|---|---|')
        for name, rs in res.items():
            wall, cpu, extra = [statistics.median(o) for o in zip(*rs)]
            print(f'| {name} | {wall*bs/n*1e3:.2f} | {cpu*bs/n*1e3:.2f} | {training.beside(res["one process"], rs)} | {extra/1e6:.0f} |', flush=True)
