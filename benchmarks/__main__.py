"""All that says what fastdist costs, in one go, as Markdown; some 10 minutes on 2 quiet cores.

    python -m benchmarks [--only training strategies ...] [--scale]

Each is a script of its own, with fewer repeats here than by itself: see its first lines for what it measures, and beside what. `pip install lightning-fabric`
adds a row to the first. `--scale` adds what grows with the number of workers, up to 16,384, of which one is there."""
import argparse, subprocess, sys, time
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNS = {'training': ['--rounds', '9'], 'strategies': ['--steps', '14', '--limit', '9'], 'batch_norm': ['--steps', '15', '--limit', '9'],
        'validation': ['--repeats', '3', '--samples', '2e5'], 'evaluation': ['--rounds', '7'], 'loaders': ['--repeats', '3', '--sizes', '1e5'], 'talk': ['--repeats', '7']}
SCALE = {'scale': []}


if __name__ == '__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--only', nargs='+', default=list(RUNS), choices=list(RUNS))
    p.add_argument('--scale', action='store_true')
    a, failed = p.parse_args(), []
    runs = RUNS | SCALE
    for name in a.only+list(SCALE)*a.scale:
        begin = time.monotonic()
        print(f'\n## {name}: `python benchmarks/{name}.py {" ".join(runs[name])}`\n', flush=True)
        if subprocess.run([sys.executable, '-W', 'ignore', HERE/f'{name}.py', *runs[name]]).returncode: failed.append(name)
        print(f'\n{time.monotonic()-begin:.0f} s', flush=True)
    if failed: sys.exit(f'failed: {", ".join(failed)}')
