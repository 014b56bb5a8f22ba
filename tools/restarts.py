"""Do workers that are started again form a group, each time?

    python tools/restarts.py [-n 40] [--launcher fastdist torchrun accelerate] [--workers 2] [--seed 0]

Of each launcher, one run in which a worker is killed by SIGKILL n times, at a random moment of the set-up of the group, and after it, in turn. Prints how
many groups there were, of those that had to be, and the seconds of each run. The exit status is 1 where one is missing."""
import argparse, os, sys, tempfile, textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/'tests'/'support'))
os.environ.setdefault('OMP_NUM_THREADS', '1')
import warm
from harness import launched
from launches import LAUNCHERS as COMMANDS, PYTHON

LAUNCHERS = {'fastdist': lambda w, n: [*COMMANDS['fastdist'](w), '--max-restarts', n],
             'torchrun': lambda w, n: [PYTHON, '-m', 'torch.distributed.run', '--rdzv-backend', 'c10d', '--rdzv-endpoint', '127.0.0.1:0', '--nproc-per-node', w, '--max-restarts', n],
             'accelerate': lambda w, n: [*COMMANDS['accelerate'](w), '--max_restarts', n]}
SCRIPT = '''
    import os, random, signal, threading, time
    count, times, seed = int(os.environ['TORCHELASTIC_RESTART_COUNT']), int(os.environ['TIMES']), os.environ['SEED']
    moment = random.Random(f'{seed} {count}')
    who, when, secs = moment.randrange(int(os.environ['WORLD_SIZE'])), moment.choice(['start', 'group']) if count%2 else 'work', moment.random()*0.3
    def killed(at):
        if count < times and when == at and who == int(os.environ['RANK']): threading.Timer(secs, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    killed('start')
    import torch, torch.distributed as dist
    from fastdist.world import *
    killed('group')
    setup_distrib(timeout=60)
    found = all_reduce(torch.ones(1)).item()
    if is_master(): print('group', count, found, flush=True)
    killed('work')
    while count < times: dist.all_reduce(torch.ones(1))  # until somebody is killed
    '''


def run(launcher, n, workers, seed, timeout=600):
    "What `launched` returns, and the restarts after which all workers formed a group"
    with tempfile.TemporaryDirectory(prefix='fastdist') as d:
        (file := Path(d)/'s.py').write_text(textwrap.dedent(SCRIPT))
        env = dict(ACCELERATE_USE_CPU='true', CUDA_VISIBLE_DEVICES='', TIMES=str(n), SEED=str(seed))
        res = launched([*map(str, LAUNCHERS[launcher](workers, n)), file], timeout, env=env, cwd=d)
    met = {int(o.split()[1]) for o in res.stdout.splitlines() if o.startswith('group ') and o.split()[2] == f'{workers}.0'}
    return res, met


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('-n', type=int, default=40)
    p.add_argument('--launcher', nargs='*', default=list(LAUNCHERS), choices=LAUNCHERS)
    p.add_argument('--workers', type=int, default=2)
    p.add_argument('--seed', type=int, default=0)
    a = p.parse_args()
    good = True
    for o in a.launcher:
        res, met = run(o, a.n, a.workers, a.seed)
        want = {0, *range(2, a.n, 2), a.n}  # in the others a worker was killed before
        missing = sorted(want-met)
        ok = res.returncode == 0 and not missing and not res.left
        good &= ok
        print(f'{o:10} {a.n} restarts; {len(want)-len(missing)} of {len(want)} groups; {res.seconds:.0f} s', flush=True)
        if not ok: print(f'missing {missing}, status {res.returncode}, left {res.left}\n{res.stderr[-3000:]}')
    return 0 if good else 1


if __name__ == '__main__':
    warm.install(all_kinds=True)
    sys.exit(main())
