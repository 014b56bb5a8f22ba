"""Kills a fit again and again, at random moments and while checkpoints are written: workers, the launcher, all of them. Holds its end against the run that was never killed.

    python tools/kills.py -n 20 --seed 1                          2 workers: the same, bit for bit
    python tools/kills.py -n 20 --workers 2 1 3                   the numbers of workers of the starts, in turn: the same up to rounding
    python tools/kills.py -n 20 --strategy ddp fsdp               the strategies of the starts, in turn

The exit status is 1 where the end differs, or a process has outlived its launcher."""
import argparse, itertools, math, os, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault('OMP_NUM_THREADS', '1')
sys.path[:0] = [str(ROOT), str(ROOT/'tests'/'support'), str(ROOT/'tests'/'checkpoint')]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('-n', type=int, default=20, help='how many times to kill')
    p.add_argument('--seed', type=int, default=0, help='of the moments, and of who is killed')
    p.add_argument('--who', nargs='*', choices=['worker', 'workers', 'launcher', 'all'], help='by default each, in random order')
    p.add_argument('--workers', type=int, nargs='+', default=[2])
    p.add_argument('--strategy', nargs='+', default=['ddp'], choices=['ddp', 'zero1', 'zero2', 'fsdp'])
    a = p.parse_args()
    from kills import WHO
    from test_kills import compared, mixed
    hits = [o for o in mixed(a.n*len(WHO), a.seed) if o[0] in (a.who or WHO)][:a.n]
    how = [(w, s) for w, s, _ in zip(itertools.cycle(a.workers), itertools.cycle(a.strategy), range(math.lcm(len(a.workers), len(a.strategy))))]
    with tempfile.TemporaryDirectory() as d: bad, told = compared(Path(d), hits, a.seed, how)
    for i, o in enumerate(told):
        print(f"kill {i+1}: {o.who} of {o.workers}, after step {o.step} of all starts; newest checkpoint of step {o.saved}{', and a part of another' if o.draft else ''}")
    print(f'{len(told)} kills, {sum(o.draft for o in told)} of them in the middle of a save')
    if len(told) < a.n: return print(f'of {a.n}: the fit had ended') or 1
    if len(set(how)) > 1:
        print('largest differences:', ', '.join(f'{k} {v:.1g}' for k, v in bad.items()))
        return int(bad['weights'] >= 1e-9)
    print(*(f"rank {r} differs in {', '.join(o)}" for r, o in bad.items()) if bad else ['the same in all workers, bit for bit'])
    return int(bool(bad))


if __name__ == '__main__':
    import warm
    warm.install(all_kinds=True)
    sys.exit(main())
