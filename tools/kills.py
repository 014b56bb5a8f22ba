"Kills a fit of two workers at random moments, and holds its end against the run that was never killed: `python tools/kills.py -n 20 --seed 1`"
import argparse, os, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault('OMP_NUM_THREADS', '1')
sys.path[:0] = [str(ROOT), str(ROOT/'tests'/'support'), str(ROOT/'tests'/'checkpoint')]

if __name__ == '__main__':
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('-n', type=int, default=20, help='how many times to kill')
    p.add_argument('--seed', type=int, default=0, help='of the moments, and of who is killed')
    args = p.parse_args()
    from test_kills import compared
    with tempfile.TemporaryDirectory() as d: bad, told = compared(Path(d), args.n, args.seed)
    for i, (step, saved) in enumerate(told): print(f'kill {i+1}: after step {step} of all runs, newest checkpoint of step {saved}')
    if len(told) < args.n: bad = {**bad, 'kills': f'the fit had ended after {len(told)}'}
    print(f"differs in {', '.join(bad)}" if bad else 'the same, bit for bit')
    sys.exit(bool(bad))
