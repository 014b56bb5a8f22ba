"A fit of two workers that is killed with SIGKILL again and again, at random moments, and started again each time as the same command would be"
import os, pickle, random, signal, time
from multiprocessing.connection import wait
from pathlib import Path

from forked import start
from harness import free_port, wait_for


def envs(n=2):
    port = str(free_port())
    return [dict(RANK=str(r), WORLD_SIZE=str(n), LOCAL_RANK=str(r), LOCAL_WORLD_SIZE=str(n), MASTER_ADDR='127.0.0.1', MASTER_PORT=port, ACCELERATE_USE_CPU='true',
                 FASTDIST_STARTUP_SECONDS='60') for r in range(n)]


def steps(file): return len(file.read_bytes()) if file.exists() else 0


def killed(fit, folder, kills, seed, *args):
    "What `fit(folder, *args)` returns in rank 0 in the end, and [(steps that were trained when it was killed, the newest checkpoint's step)]; it writes a byte to `folder/'steps'` with each step"
    from fastdist.checkpoint.folder import checkpoints
    rng, told, file = random.Random(seed), [], Path(folder)/'steps'
    while True:
        before, more = steps(file), rng.randint(1, 8)
        procs, lines = start(fit, envs(), folder, *args)
        try:
            def over(): return all(not p.is_alive() for p in procs) or lines[0].poll()
            if len(told) < kills: wait_for(lambda: steps(file) >= before+more or over(), 'a fit that goes on', 180)
            if len(told) < kills and not over():
                time.sleep(rng.random()/30)  # any moment: while a batch is trained, or a checkpoint written
                for p in rng.choice([procs, procs[:1], procs[1:]]): os.kill(p.pid, signal.SIGKILL)
                for p in procs: p.join(120)
                assert not any(p.is_alive() for p in procs), 'a worker did not end after the other was killed'
                told.append((steps(file), next((o.summary['step'] for o in checkpoints(Path(folder)/'ckpt')), 0)))
                continue
            assert wait(lines[:1], 180), 'the fit does not end'
            ok, res = pickle.loads(lines[0].recv_bytes())
            assert ok, res
            for p in procs: p.join(60)
            return res, told
        finally:
            for p in procs:
                if p.is_alive(): p.kill()
                p.join()
