"""A fit under `fastdist launch` that is killed with SIGKILL again and again, and started again each time by the same command.

Who is killed: one worker, all workers, the launcher, or the launcher and all workers. When: at any moment, or while a checkpoint is
written."""
import os, pickle, random, signal, sys, time
from dataclasses import dataclass
from pathlib import Path

from harness import TESTS, _signal, launched

WHO, WHEN = ('worker', 'workers', 'launcher', 'all'), ('any', 'save')
SCRIPT = f'''
import os, pickle, sys
from pathlib import Path
sys.path[:0] = {[str(TESTS/'support'), str(TESTS/'checkpoint')]!r}
folder, rank = Path(sys.argv[1]), os.environ.get('RANK', '0')
(folder/f'pid{{rank}}').write_text(str(os.getpid()))
import test_kills
res = getattr(test_kills, sys.argv[2])(folder, *map(eval, sys.argv[3:]))
(folder/f'result{{rank}}').write_bytes(pickle.dumps(res))
'''


@dataclass
class Kill:
    who: str
    when: str
    workers: int
    step: int  # steps that all starts together had trained, some of them twice
    saved: int  # step of the newest checkpoint then
    draft: bool  # a checkpoint that is not whole was left


def steps(folder):
    "How many were trained in all starts; rank 0 writes a byte with each"
    return (folder/'steps').stat().st_size if (folder/'steps').exists() else 0


def drafts(folder): return [o for o in os.listdir(folder/'ckpt') if o.startswith('.draft-')] if (folder/'ckpt').exists() else []


def _watch(cond, proc, seconds=180):
    "Is `cond()` true before the process ends? It is looked at all the time: a checkpoint is written within milliseconds"
    end = time.monotonic() + seconds
    while not cond():
        if proc.poll() is not None: return False
        assert time.monotonic() < end, 'the fit does not go on'
        time.sleep(0.001)
    return True


def _signal_all(pids, sig):
    for p in pids: _signal(p, sig)


def _strike(proc, folder, n, rng, who, when):
    "Kill, in a run that has just begun; `False` where it had ended"
    before, more = steps(folder), rng.randint(1, 6)
    if not _watch(lambda: steps(folder) >= before+more, proc): return False
    pids = [int((folder/f'pid{r}').read_text()) for r in range(n)]
    victims = dict(worker=[rng.choice(pids)], workers=pids, launcher=[proc.pid], all=[proc.pid, *pids])[who]
    if when == 'any': time.sleep(rng.random()/30)
    while when == 'save':
        if not _watch(lambda: drafts(folder), proc): return False
        time.sleep(rng.random()/500)
        _signal_all(pids, signal.SIGSTOP)  # is it still being written?
        if drafts(folder): break
        _signal_all(pids, signal.SIGCONT)
    _signal_all(victims, signal.SIGKILL)
    _signal_all(pids, signal.SIGCONT)
    return True


def killed(fit, folder, hits, seed, *args, how=((2, 'ddp'),)):
    """What `test_kills.fit(folder, strategy, *args)` returns in the end, by rank, and the `Kill`s: one for each (who, when) of `hits`. The
    starts have the numbers of workers and strategies of `how` in turn"""
    from fastdist.checkpoint.files import checkpoints
    folder, rng, told = Path(folder), random.Random(seed), []
    folder.mkdir(exist_ok=True)
    (folder/'s.py').write_text(SCRIPT)
    while True:
        n, strategy = how[len(told)%len(how)]
        hit, struck = hits[len(told)] if len(told) < len(hits) else None, []
        for r in range(n): (folder/f'pid{r}').unlink(missing_ok=True)
        cmd = [sys.executable, '-m', 'fastdist', 'launch', '-n', n, '--cpu', folder/'s.py', folder, fit, repr(strategy), *map(repr, args)]
        res = launched(cmd, 300, cwd=folder, grace=60,
                       during=lambda proc, mark: hit and struck.append(_strike(proc, folder, n, rng, *hit)))
        assert res.left == {}, f'{hit} was killed, and there run on {res.left}'
        if struck == [True]:
            assert res.returncode, (hit, res.stderr)
            told.append(Kill(*hit, n, steps(folder), next((o.summary['step'] for o in checkpoints(folder/'ckpt')), 0),
                             bool(drafts(folder))))
            continue
        assert res.returncode == 0, res.stderr
        return [pickle.loads((folder/f'result{r}').read_bytes()) for r in range(n)], told
