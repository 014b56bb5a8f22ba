"What ends a job from outside: signals of schedulers, and launchers that start workers again. The same command goes on, with the weights of one process"
import json, re, sys, textwrap

import pytest
from harness import launched

LAUNCH = [sys.executable, '-m', 'fastdist', 'launch', '-n', '2', '--log-dir', 'logs']
SCRIPT = '''
    import json, os, signal, sys, time
    import torch
    from fastai.basics import *
    from fastdist.all import *
    from fastdist.world.ranks import from_env

    class At(Callback):
        "What happens at a step, once"
        order = 1000
        def after_batch(self):
            if not self.training: return
            step = self.train_iter
            print('step', step, flush=True)
            for rank, at, how in FAULTS:
                mark = Path(f'{at}.{rank}')
                if step == at and rank == from_env().rank and not mark.exists():
                    mark.touch()
                    how()

    set_seed(3)
    x = torch.randn(48, 4, dtype=torch.float64)
    ds = list(zip(x, x.sum(1, keepdim=True)))
    dls = DataLoaders.from_dsets(ds, ds, bs=8, num_workers=WORKERS)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    learn = Learner(dls, model, loss_func=MSELossFlat(), cbs=At())
    with learn.no_bar(), learn.distrib_ctx(split_batches=True, resume='ckpt'): learn.fit_one_cycle(4)
    if is_master(): print('found', json.dumps([get_world_size(), len(learn.recorder.losses), *[p.sum().item() for p in model.parameters()]]), flush=True)
    '''


def write(folder, faults='', workers=0):
    text = textwrap.dedent(SCRIPT).replace('FAULTS', f'[{faults}]').replace('WORKERS', str(workers))
    (folder/'s.py').write_text(text)
    return folder/'s.py'


def found(res): return json.loads(res.stdout.partition('found ')[2].splitlines()[0])


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    "The run that nobody has ended, in one process"
    d = tmp_path_factory.mktemp('alone')
    res = launched([sys.executable, write(d)], 120, cwd=d)
    assert res.returncode == 0, res.stderr
    return found(res)[1:]


def test_killed_restarted_and_stopped(tmp_path, alone):
    "A worker is killed, all start again and go on; Slurm's signal comes to the launcher, with loader processes; and the same command ends the run"
    file = write(tmp_path, "(1, 9, lambda: os.kill(os.getpid(), signal.SIGKILL)), (0, 15, lambda: os.kill(os.getppid(), signal.SIGUSR1))", workers=1)
    cmd = [*LAUNCH, '--max-restarts', '2', file]
    first = launched(cmd, 120, cwd=tmp_path)
    assert first.returncode == 143 and first.left == {}, first.stderr
    assert 'restart 1 of 2' in first.stderr and 'Going on from step-00000006: epoch 1, batch 0' in first.stdout and 'SIGUSR1: saved to' in first.stderr
    assert 'failed' not in first.stderr.partition('restart 1 of 2')[2], first.stderr
    steps = [int(o) for o in re.findall('step ([0-9]+)', first.stdout)]
    second = launched(cmd, 120, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert int(re.search('step ([0-9]+)', second.stdout)[1]) == steps[-1]+1  # nothing is trained twice
    assert found(second)[1:] == pytest.approx(alone, abs=1e-12)


def signalled(folder, who, at, training=True, workers=0):
    "What ended a fit in which rank `who` gets SIGTERM at step `at`, or in the validation after it, the steps that this rank has made, and the weights"
    import os, signal
    import torch
    from fastai.basics import Callback, DataLoaders, Learner, MSELossFlat, nn, set_seed
    from fastdist.all import get_rank
    from fastdist.world.errors import Stopped
    old, made = signal.getsignal(signal.SIGTERM), []  # what a callback has would be saved, and put back

    class At(Callback):
        def after_batch(self):
            if self.training: made.append(1)
            if get_rank() == who and self.train_iter == at and self.training == training: os.kill(os.getpid(), signal.SIGTERM)

    set_seed(3)
    x = torch.randn(48, 4, dtype=torch.float64)
    ds = list(zip(x, x.sum(1, keepdim=True)))
    dls = DataLoaders.from_dsets(ds, ds, bs=8, num_workers=workers)
    learn, status = Learner(dls, nn.Linear(4, 1).double(), loss_func=MSELossFlat(), cbs=At()), None
    try:
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(split_batches=True, resume=folder): learn.fit(3)
    except Stopped as e: status = e.code
    assert signal.getsignal(signal.SIGTERM) == old and [type(o).__name__ for o in learn.cbs if type(o).__name__ in ('Resume', 'DistributedTrainer')] == []
    return status, len(made), [p.tolist() for p in learn.model.parameters()]


def test_one_worker_is_asked_to_end(world2, tmp_path):
    "All end at the same step, and go on from there; what the context has done is undone"
    (s0, n0, _), (s1, n1, _) = world2(signalled, tmp_path/'a', 1, 8)
    assert (s0, s1) == (143, 143) and n0 == n1 in (8, 9)
    rest = world2(signalled, tmp_path/'a', None, 0)
    assert [(s, n) for s, n, _ in rest] == [(None, 18-n0)]*2 and rest[0][2] == rest[1][2]
    whole = world2(signalled, tmp_path/'b', None, 0)
    assert rest[0][2] == whole[0][2]  # bit for bit
    assert [(s, n) for s, n, _ in world2(signalled, tmp_path/'c', 1, 12, False)] == [(143, 12)]*2  # at the end of the validation
    rest = world2(signalled, tmp_path/'c', None, 0)
    assert [(s, n) for s, n, _ in rest] == [(None, 6)]*2 and rest[0][2] == whole[0][2]


COPIED = """
import os, signal
from fastdist.checkpoint.resume import Resume
r = Resume('ckpt')
r.signals.ask = lambda: os._exit(7)
if not (pid := os.fork()):
    r.signals.take()
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(1)
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_made_before_the_worker_was_forked(tmp_path):
    "As a cell makes it whose function `notebook_launcher` runs: the signal asks for a checkpoint, and does not end the worker"
    assert launched([sys.executable, '-c', COPIED], 100, cwd=tmp_path).returncode == 7
