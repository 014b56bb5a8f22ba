"""What sharing a loader costs: the start of an epoch (time until the first batch, and peak extra memory), and each batch after it. And how
evenly texts that are sorted by length fall to the workers.

    python benchmarks/loaders.py [--repeats 5] [--sizes 1e5 1e6 1e7]

Beside a fastai loader in one process and `fastai.distributed` (whose broadcast, which needs a GPU, is done on the CPU). Two real processes over
gloo, runs interleaved, medians; one process is rank 0 while the other waits. The items are numbers and cost nothing. Some 12 minutes at 1e7."""
import statistics, tempfile, time, warnings

warnings.filterwarnings('ignore')
import torch, torch.distributed as dist, torch.multiprocessing as mp
from fastai.basics import *
from fastai.text.data import SortedDL
from shared import fastai_distributed, parser, tidy, with_memory
from fastdist.data.dl import DistributedDL
from fastdist.data.rng import WorkerRandom


class Numbers:
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): return i


LOADERS = {  # in rank 0 alone?, and the loader
    'one process': (True, lambda dl: dl),
    'fastdist, 2 processes': (False, lambda dl: DistributedDL(dl, split_batches=False)),
    'fastdist, worker 511 of 1024': (True, lambda dl: DistributedDL(dl, 511, 1024, split_batches=False)),
    'fastai.distributed, 2 processes': (False, lambda dl: fastai_distributed().DistributedDL(dl, dist.get_rank(), dist.get_world_size()))}


def start_of_epoch(dl):
    "Seconds until the first batch, and bytes at the highest point above those before"
    def begin():
        it = iter(dl)
        next(it)
        return it  # it would end, and with it its memory
    tidy()
    return with_memory(begin)[1:]


def per_batch(dl, n=1500):
    "Seconds per batch after the first"
    it = iter(dl)
    next(it)
    t = time.perf_counter()
    for _ in range(n): next(it)
    return (time.perf_counter()-t)/n


def measure(kinds, make, f, repeats):
    "Interleaved; results of rank 0, by kind"
    res = {k: [] for k in kinds}
    for i in range(repeats+1):
        for k, (alone, wrap) in kinds.items():
            dist.barrier()
            if alone and dist.get_rank() > 0: continue
            r = f(wrap(make()))
            if i: res[k].append(r)  # the first is a rehearsal
    return res


def balance(size=8):
    "Padded tokens of `size` workers, over texts about as long as film reviews, in batches of 16"
    lens = (np.random.RandomState(0).lognormal(5.2, .7, 8000).astype(int)+1).clip(1, 2000).tolist()
    print(f"\n| padded tokens, SortedDL, {size} workers | fewest | most | longest at each step, beside the mean |\n|---|---|---|---|")
    for shuffle in (True, False):
        for way, split in (('fastdist, steps', False), ('contiguous slices', None)):
            tokens = []
            for r in range(size):
                set_seed(1)
                dl = SortedDL(lens, res=lens, bs=16, shuffle=shuffle, num_workers=0)
                tokens.append([len(b)*max(b).item() for b in DistributedDL(dl, r, size, split_batches=split)])
            tokens = np.array(tokens)
            print(f"| {way}, {'shuffled' if shuffle else 'in order'} | {tokens.sum(1).min()} | {tokens.sum(1).max()} | {tokens.max(0).sum()/tokens.mean(0).sum():.2f} |")


def worker(rank, file, sizes, repeats):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', f'file://{file}', world_size=2, rank=rank)
    out = print if rank == 0 else noop
    for shuffle in (True, False):
        out(f"\n| start of an epoch, {'shuffled' if shuffle else 'in order'} | "+' | '.join(f'n = {n:.0e}: time, memory' for n in sizes)+' |\n|---|'+'---|'*len(sizes))
        rows = {k: [] for k in LOADERS}
        for n in sizes:
            res = measure(LOADERS, lambda: TfmdDL(Numbers(int(n)), bs=64, shuffle=shuffle, num_workers=0), start_of_epoch, repeats)
            if rank: continue
            med = {k: [statistics.median(o) for o in zip(*v)] for k, v in res.items()}
            t1, m1 = med['one process']
            for k, (t, m) in med.items():
                size = 1024 if '1024' in k else 2
                rows[k].append(f"{t*1e3:.1f} ms ({t/t1:.2f}), {m/2**20:.1f} MiB"+('' if k == 'one process' else f" ({(m-m1)*size/8/n:+.2f} x 8n/{size})"))
        for k, v in rows.items(): out(f"| {k} | {' | '.join(v)} |", flush=True)
    in_fit = WorkerRandom(rank)
    def fitted(dl):
        in_fit.enter()
        try: return per_batch(dl)
        finally: in_fit.exit()
    out('\n| per batch of 64 | microseconds | beside one process |\n|---|---|---|')
    kinds = {k: v for k, v in LOADERS.items() if '1024' not in k}
    make = lambda: TfmdDL(Numbers(10**6), bs=64, shuffle=True, num_workers=0)
    both = {'': measure(kinds, make, per_batch, 2*repeats), ', in a fit': measure({k: v for k, v in kinds.items() if 'fastdist' in k}, make, fitted, 2*repeats)}
    if rank == 0:
        base = statistics.median(both['']['one process'])
        for where, res in both.items():
            for k, v in res.items(): print(f'| {k}{where} | {statistics.median(v)*1e6:.0f} | {statistics.median(v)/base:.2f} |')
    dist.destroy_process_group()


if __name__ == '__main__':
    p = parser(__doc__)
    p.add_argument('--repeats', type=int, default=5)
    p.add_argument('--sizes', type=float, nargs='+', default=[1e5, 1e6, 1e7])
    a = p.parse_args()
    balance()
    with tempfile.TemporaryDirectory() as d: mp.spawn(worker, (f'{d}/store', a.sizes, a.repeats), nprocs=2)
