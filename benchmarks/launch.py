"""Seconds from the command to the first training step, for each way of starting, each kind of program, and 1, 2 and 3 workers.

    python benchmarks/launch.py [rounds]

Medians of 3 rounds, in which the ways take turns. A script and a module import torch and fastai first, which is most of it; a notebook has them."""
import statistics, sys, tempfile

import shared
from launches import CASES, run

if __name__ == '__main__':
    times = {}
    for i in range(int((sys.argv[1:] or [3])[0])):
        for way, n, kind in CASES:
            with tempfile.TemporaryDirectory() as folder: times.setdefault((way, kind), {}).setdefault(n, []).append(run(way, n, kind, folder)['seconds'])
            print(f'round {i+1}: {way}, {kind}, {n}: {times[way, kind][n][-1]:.1f} s', file=sys.stderr, flush=True)
    print('| started by | as a | 1 worker | 2 workers | 3 workers |\n|---|---|---|---|---|')
    for (way, kind), row in times.items(): print(f'| {way} | {kind} |', ' | '.join(f'{statistics.median(row[n]):.1f}' if n in row else '' for n in (1, 2, 3)), '|')
