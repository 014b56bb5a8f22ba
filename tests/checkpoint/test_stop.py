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


def test_a_signal_while_workers_are_asked(tmp_path):
    "It counts, whenever it comes: here again and again, while nothing is done but asking"
    import signal
    from fastdist.checkpoint.resume import Resume
    resume, came, lost = Resume(tmp_path/'ckpt'), 0, 0
    def ask(*_):
        nonlocal came
        came += 1
        resume.request(stop=True)
    resume.fit, old = object(), signal.signal(signal.SIGVTALRM, ask)
    try:
        for i in range(100):
            signal.setitimer(signal.ITIMER_VIRTUAL, 1e-4)
            wishes = []
            while came == i or len(wishes) < 2: wishes = [*wishes[-1:], resume.wish()]
            lost += not any((*wishes, resume.wish()))
    finally: signal.signal(signal.SIGVTALRM, old)
    assert not lost


def test_evaluations_are_no_fits(tmp_path):
    "In the context, and in a callback of a fit, where fastai calls `before_fit` and `after_fit` for an evaluation too"
    import torch
    from fastai.basics import Callback
    from fastai.test_utils import synth_learner
    from fastdist.checkpoint.files import checkpoints
    from fastdist.checkpoint.resume import Resume
    import fastdist.trainer.learner

    class Evaluates(Callback):
        def after_step(self): self.looks = True
        def after_epoch(self):
            if getattr(self, 'looks', False):
                self.looks = False
                self.learn.validate()
    learn = synth_learner(cbs=Evaluates())
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(resume=Resume(tmp_path/'ckpt', keep=9)):
        learn.validate()
        learn.fit(2)
        learn.validate()
        learn.get_preds()
    assert [[c.summary[k] for k in ('ended', 'epoch', 'batch', 'validated')] for c in checkpoints(tmp_path/'ckpt')] == [[True, 2, 0, True], [False, 1, 0, True]]


def test_a_signal_at_the_end_of_a_fit(tmp_path):
    "While the last checkpoint is made: it ends the script there, which goes on with the next fit"
    import os, signal
    import fastdist.all
    from fastai.basics import Callback
    from fastai.test_utils import synth_learner
    from fastdist.checkpoint.resume import Resume
    from fastdist.checkpoint.files import checkpoints
    from fastdist.world.errors import Stopped
    class Asked(Callback):
        def after_fit(self): os.kill(os.getpid(), signal.SIGTERM)
    learn = synth_learner()
    with learn.no_bar(), learn.no_logging(), pytest.raises(Stopped): learn.fit(1, cbs=[Resume(tmp_path/'step-size'), Asked()])
    assert [o.summary['ended'] for o in checkpoints(tmp_path/'step-size')] == [True] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    from fastdist.launch.checkpoint.inspect import main
    assert main([str(tmp_path/'step-size')]) == 0  # a folder of checkpoints, whatever its name begins with
