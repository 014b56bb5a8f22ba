"""What validation costs: samples per second, and peak extra memory, of cheap samples on 2 workers.

    python benchmarks/validation.py [--repeats 3] [--samples 1e6] [--bs 256]

Beside one process and beside `fastai.distributed` (whose broadcast, which needs a GPU, is done on the CPU). Metrics: accuracy, which is a sum, and
F1, which needs all predictions. Real processes over gloo, one thread each, runs interleaved, medians. Some 5 minutes."""
import argparse, contextlib, json, os, statistics, subprocess, sys, tempfile, warnings
from pathlib import Path

from shared import environment, fastai_distributed, parser, tidy, with_memory

VARIANTS = {'one process': 1, 'fastdist, 2 processes': 2, 'fastai.distributed, 2 processes': 2}


def child(variant, n, bs, out):
    warnings.filterwarnings('ignore')
    import torch
    from fastai.basics import DataLoaders, Learner, TfmdDL, CrossEntropyLossFlat, nn
    from fastai.metrics import F1Score, accuracy
    from learners import quiet
    torch.set_num_threads(1)
    rank = int(os.environ.get('RANK', 0))
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, 8, generator=g), torch.randint(0, 4, (n,), generator=g)
    class Cheap:
        def __init__(self, n): self.n = n
        def __len__(self): return self.n
        def __getitem__(self, i): return x[i], y[i]
    dls = DataLoaders(*[TfmdDL(Cheap(o), bs=bs, num_workers=0) for o in (bs, n)])
    torch.manual_seed(0)
    learn = quiet(Learner(dls, nn.Linear(8, 4), loss_func=CrossEntropyLossFlat(), metrics=[accuracy, F1Score(average='macro')]))
    if variant.startswith('fastdist'):
        import fastdist.all
        ctx = learn.distrib_ctx()
    elif variant.startswith('fastai'):
        fastai_distributed()
        ctx = learn.distrib_ctx(sync_bn=False, cpu=True)
    else: ctx = contextlib.nullcontext()
    with ctx:
        learn.validate(dl=TfmdDL(Cheap(bs*4), bs=bs, num_workers=0))
        tidy()
        values, seconds, memory = with_memory(learn.validate)
        res = dict(seconds=seconds, memory=memory, values=[float(o) for o in values])
    Path(f'{out}.{rank}').write_text(json.dumps(res))


def run(variant, n, bs):
    with tempfile.TemporaryDirectory() as d:
        size = VARIANTS[variant]
        launch = [] if size == 1 else ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(size)]
        cmd = [sys.executable, *launch, __file__, '--child', variant, '--samples', str(n), '--bs', str(bs), '--out', f'{d}/out']
        res = subprocess.run(cmd, env=environment(ACCELERATE_USE_CPU='true'), cwd=d, capture_output=True, text=True)
        if res.returncode: sys.exit(res.stderr)
        ranks = [json.loads(Path(f'{d}/out.{r}').read_text()) for r in range(size)]
    return max(o['seconds'] for o in ranks), max(o['memory'] for o in ranks), ranks[0]['values']


if __name__ == '__main__':
    p = parser(__doc__)
    p.add_argument('--repeats', type=int, default=3)
    p.add_argument('--samples', type=float, default=1e6)
    p.add_argument('--bs', type=int, default=256)
    p.add_argument('--child', help=argparse.SUPPRESS)
    p.add_argument('--out', help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child: sys.exit(child(args.child, int(args.samples), args.bs, args.out))
    runs = {v: [] for v in VARIANTS}
    for _ in range(args.repeats):
        for v in VARIANTS: runs[v].append(run(v, int(args.samples), args.bs))
    base = statistics.median(s for s, _, _ in runs['one process'])
    print(f'{int(args.samples):,} samples in batches of {args.bs}, medians of {args.repeats} runs\n\n| | samples per second | beside one process | peak memory of a worker | loss, accuracy, F1 |\n|---|---|---|---|---|')
    for v, rs in runs.items():
        s = statistics.median(o[0] for o in rs)
        print(f'| {v} | {args.samples/s:,.0f} | {base/s:.2f} | {statistics.median(o[1] for o in rs)/2**20:.0f} MiB | {", ".join(f"{x:.7f}" for x in rs[0][2])} |')
