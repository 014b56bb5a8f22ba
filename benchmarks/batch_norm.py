"""What batch norm over the global batch costs, beside each worker's own: `sync_bn=True` and `sync_bn=False`.

    python benchmarks/batch_norm.py [--steps 30] [--size 64] [--batch 8] [--limit 1.15]

torchvision's ResNet-18 in DistributedDataParallel, 2 workers over gloo, forward and backward of the same batch, in turn with and without. Medians of both, the
ratio of the medians, and the quartiles of the ratios of neighbours; CPU seconds of rank 0 as well. Ends with 1 if the ratio is above the limit."""
import statistics, sys, tempfile, time

import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18
from shared import parser


def work(rank, size, file, a, res):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{file}', rank=rank, world_size=size)
    from fastdist.model.batchnorm import global_batch_norm, norm_scope_of
    torch.manual_seed(0)
    models = [DistributedDataParallel(resnet18(num_classes=10), broadcast_buffers=False) for _ in range(2)]
    norms = global_batch_norm(models[1])
    norms.__enter__() # until the process ends
    torch.manual_seed(rank)
    x, times = torch.randn(a.batch, 3, a.size, a.size), ([], [])
    for i in range(a.steps+3):
        for j in ((0, 1), (1, 0))[i % 2]:
            dist.barrier()
            begin = time.perf_counter(), time.process_time()
            with norm_scope_of(('local', 'global')[j]): models[j](x).square().mean().backward()
            took = [b-e for b, e in zip((time.perf_counter(), time.process_time()), begin)]
            if i > 2: times[j].append(took)
    if rank == 0: res.put(times)
    dist.barrier()
    dist.destroy_process_group()


def main():
    p = parser(__doc__)
    p.add_argument('--steps', type=int, default=30)
    p.add_argument('--size', type=int, default=64)
    p.add_argument('--batch', type=int, default=8)
    p.add_argument('--limit', type=float, default=1.15)
    a = p.parse_args()
    res = mp.get_context('spawn').SimpleQueue()
    with tempfile.TemporaryDirectory() as d:
        ctx = mp.start_processes(work, (2, f'{d}/rendezvous', a, res), 2, join=False, start_method='spawn')
        plain, shared = res.get()
        while not ctx.join(): pass
    for k, unit in enumerate(('ms', 'CPU-ms')):
        one, two = ([o[k]*1000 for o in ts] for ts in (plain, shared))
        ratio, (low, _, high) = statistics.median(two)/statistics.median(one), statistics.quantiles([b/o for o, b in zip(one, two)])
        print(f'each its own {statistics.median(one):.1f} {unit}, over all {statistics.median(two):.1f} {unit}: {ratio:.3f} (quartiles {low:.3f} to {high:.3f})')
        if k == 0: worst = ratio
    sys.exit(worst > a.limit)


if __name__ == '__main__': main()
