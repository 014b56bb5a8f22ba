"""What a checked call costs beside torch's own: microseconds per call, 2 processes over gloo.

    python benchmarks/talk.py [--repeats 15] [--sizes 100 10000 1000000]

Calls are interleaved, in rounds that are timed between barriers; medians of the rounds. Some 30 seconds."""
import argparse, os, statistics, subprocess, sys, time

from shared import environment, parser

VARIANTS = ['all_gather_list', 'dist.all_gather_object', 'all_reduce_dict', 'all_reduce', 'dist.all_reduce']


def child(sizes, repeats):
    import torch, torch.distributed as dist
    from fastdist.world import all_gather_list, all_reduce, all_reduce_dict
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    n, rows = dist.get_world_size(), []
    for size in sizes:
        o, t = os.urandom(size), torch.ones(size//4)
        calls = [lambda: all_gather_list(o), lambda: dist.all_gather_object([None]*n, o), lambda: all_reduce_dict({'t': t}), lambda: all_reduce(t, op='max'),
                 lambda: dist.all_reduce(t, dist.ReduceOp.MAX)]
        times, inner = [[] for _ in calls], 100 if size < 10**5 else 20
        for i in range(repeats+1):  # the first round warms up
            for c, ts in zip(calls, times):
                dist.barrier()
                start = time.perf_counter()
                for _ in range(inner): c()
                if i: ts.append((time.perf_counter()-start)/inner*1e6)
        rows.append((size, [statistics.median(ts) for ts in times]))
    if dist.get_rank() == 0:
        print(f"microseconds per call, medians of {repeats} rounds\n\n| bytes | {' | '.join(VARIANTS)} |\n{'|---'*(len(VARIANTS)+1)}|")
        for size, ts in rows: print(f"| {size:,} | {' | '.join(f'{t:,.0f}' for t in ts)} |")
    dist.destroy_process_group()


if __name__ == '__main__':
    p = parser(__doc__)
    p.add_argument('--repeats', type=int, default=15)
    p.add_argument('--sizes', type=int, nargs='+', default=[100, 10_000, 1_000_000])
    p.add_argument('--child', action='store_true', help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child: sys.exit(child(args.sizes, args.repeats))
    res = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', __file__, '--child',
                          '--repeats', str(args.repeats), '--sizes', *map(str, args.sizes)], env=environment(), capture_output=True, text=True)
    sys.exit(res.stderr if res.returncode else print(res.stdout, end=''))
