"A checkpoint that is damaged, half, of another run or of another model is never loaded as if whole: it is named, and the one before it is taken"
import random, shutil, time
import pytest
from test_resume import *


def two_workers(folder, seed=0):
    "Two checkpoints, of steps 1 and 2, of two workers; written by this process for both"
    from fastdist.checkpoint.files import Saver
    g = torch.Generator().manual_seed(seed)
    both = [Saver(folder, f'run{seed}', r, 2) for r in range(2)]
    for step in (1, 2):
        for r, s in enumerate(both): s.start(dict(step=step, ended=False, validated=False, metrics={}, fit=0), [('w', (4, 3), 2*r, torch.randn(2, 3, generator=g))], dict(rank=r, n=seed+step))
        for s in both: assert s.finish()
    return folder


def flip(c, rng, other):
    f = rng.choice(sorted(o for o in c.iterdir() if o.stat().st_size))
    b = bytearray(f.read_bytes())
    b[rng.randrange(len(b))] ^= 1 << rng.randrange(8)
    f.write_bytes(b)

def cut(c, rng, other):
    f = rng.choice(sorted(c.iterdir()))
    f.write_bytes(f.read_bytes()[:rng.randrange(f.stat().st_size)])

def missing(c, rng, other): rng.choice(sorted(c.iterdir())).unlink()

def of_another_run(c, rng, other):
    nm = rng.choice(['summary.json', 'rank-0.pt', 'rank-1.pt', 'tensors-0.pt', 'tensors-1.pt'])
    shutil.copy(other/nm, c/nm)

def of_the_step_before(c, rng, other):
    nm = rng.choice(['summary.json', 'rank-0.pt', 'tensors-0.pt', 'tensors-1.pt'])
    shutil.copy(c.parent/'step-00000001'/nm, c/nm)

def swapped(c, rng, other):
    a, b = rng.choice([('rank-0.pt', 'rank-1.pt'), ('tensors-0.pt', 'tensors-1.pt')])
    (c/a).rename(c/'x'), (c/b).rename(c/a), (c/'x').rename(c/b)


DAMAGES = [flip]*50 + [cut]*15 + [missing]*10 + [of_another_run]*10 + [of_the_step_before]*7 + [swapped]*8


def test_none_of_a_hundred_is_loaded(tmp_path):
    from fastdist.checkpoint.files import DamagedCheckpoint, checkpoints
    rng, whole, other = random.Random(3), two_workers(tmp_path/'whole'), two_workers(tmp_path/'other', 5)/'step-00000002'
    assert checkpoints(whole)[0].verify().summary['step'] == 2 and len(DAMAGES) == 100
    for i, damage in enumerate(DAMAGES):
        folder = shutil.copytree(whole, tmp_path/'now')
        damage(folder/'step-00000002', rng, other)
        last, before = checkpoints(folder)
        with pytest.raises(DamagedCheckpoint, match='step-00000002 is damaged: '): last.verify()
        assert before.verify().path.name == 'step-00000001', (i, damage)
        shutil.rmtree(folder)


def test_new_ones_stay_where_damaged_ones_of_later_steps_lie(tmp_path):
    from fastdist.checkpoint.files import Saver, checkpoints
    def save(run, step):
        s = Saver(tmp_path, run, keep=1)
        s.start(dict(step=step, ended=False, validated=False, metrics={}, fit=0), [('w', (2,), 0, torch.ones(2))], dict(rank=0))
        assert s.finish()
    save('a', 300)
    (tmp_path/'step-00000300'/'tensors-0.pt').write_bytes(b'damaged')
    time.sleep(1.1)  # when one was saved is known in seconds
    for step in (150, 200):
        save('b', step)
        assert f'step-{step:08d}' in [c.path.name for c in checkpoints(tmp_path)]


def fitted(folder, epochs=2, **kwargs):
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    from_the_start()
    learn = made(folder, **kwargs)
    Trained.steps.clear()
    learn.fit(epochs, cbs=[Resume(folder/'ckpt', every=2), Trained()])
    return found(learn), len(Trained.steps)


def test_a_fit_goes_on_from_the_one_before(tmp_path, capfd):
    "A damaged one is passed over; one of another model, optimizer or fit is an error, which says in what"
    want, n = fitted(tmp_path/'a')
    assert n == 12
    shutil.copytree(tmp_path/'a', tmp_path/'b')
    folder = tmp_path/'b'/'ckpt'
    newest, middle = folder/'step-00000012', folder/'step-00000012.1'
    assert middle.exists() and newest.exists()
    with open(middle/'rank-0.pt', 'r+b') as f: f.write(b'damage')
    (newest/'tensors-0.pt').unlink()
    with pytest.warns(UserWarning, match='step-00000012.1 is damaged: rank-0.pt has other contents'): res, n = fitted(tmp_path/'b')
    assert n == 2 and not differ(want, res)
    other = lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    with pytest.raises(ValueError, match='is of a model of other tensors'): fitted(tmp_path/'b', model=other)
    with pytest.raises(ValueError, match='is of another optimizer'): fitted(tmp_path/'b', opt=SGD)
    with pytest.raises(ValueError, match='is of a fit of another length .n_epoch 2, here 3'): fitted(tmp_path/'b', epochs=3)
    every = list(folder.glob('step-*'))
    for o in every: (o/'rank-0.pt').unlink()
    with pytest.raises(ValueError, match='none of the checkpoints is whole'), pytest.warns(UserWarning, match='is damaged'): fitted(tmp_path/'b')
    for o in folder.glob('step-*'): shutil.rmtree(o)
    res, n = fitted(tmp_path/'b')
    assert n == 12 and not differ(want, res)


def test_disk_full_or_read_only(tmp_path, capfd, monkeypatch):
    "A folder that cannot be written is an error before the first step; a disk that is full later a notice, and training goes on"
    (tmp_path/'file').touch()
    with pytest.raises(OSError, match='Not a directory|File exists'): fitted_to(tmp_path/'file'/'ckpt', tmp_path)
    def full(*args): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(torch, 'save', full)
    learn = fitted_to(tmp_path/'ckpt', tmp_path)
    assert len(learn.recorder.losses) == 6 and 'was NOT saved' in (err := capfd.readouterr().err) and 'No space left on device' in err
    assert not [o for o in (tmp_path/'ckpt').iterdir() if o.name.startswith(('step', '.draft'))]


def fitted_to(ckpt, path):
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    learn = made(path, more=False)
    learn.fit(1, cbs=Resume(ckpt, every=2))
    return learn
