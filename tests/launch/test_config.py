"`fastdist train config.toml`: what it says of a wrong config, and that the number of workers changes nothing else"
import os, re, subprocess, sys, textwrap

import pytest
from configs import LAST, NO_GPU, TRAIN, figures, train
from harness import ROOT, free_port, launched
from learners import diff

from fastdist.launch.config import keys, read_config


# float64, and 23 samples, which neither 2 nor 3 workers can share out evenly
MINE = '''
    import os
    import torch.distributed as dist
    from fastai.basics import *
    from fastai.metrics import accuracy

    class Items:
        def __init__(self, n, seed=0):
            g = torch.Generator().manual_seed(seed)
            self.x,self.y = torch.randn(n, 4, generator=g, dtype=torch.float64),torch.randint(0, 3, (n,), generator=g)
        def __len__(self): return len(self.x)
        def __getitem__(self, i): return self.x[i],self.y[i]
        def new_empty(self): return Items(0)

    class Double(CrossEntropyLossFlat):
        def __call__(self, inp, targ, **kwargs):
            return self.func(inp.as_subclass(torch.Tensor), targ.as_subclass(torch.Tensor), **kwargs).float()

    class Groups(Callback):
        "Says in each batch whether there is a process group, and of how many"
        def before_batch(self):
            Path(f"group{os.environ.get('RANK', 0)}").write_text(str(dist.get_world_size() if dist.is_initialized() else None))

    class Said(Callback):
        def __init__(self, word): self.word = word
        def after_fit(self): print('said', self.word, self.learn.gradient_clip.max_norm, flush=True)

    class Fails(Callback):
        "Once"
        def before_batch(self):
            if self.epoch!=1 or self.iter!=3 or Path('failed').exists(): return
            Path('failed').touch()
            raise RuntimeError('failed')

    def get(n=23, bs=5):
        dls = DataLoaders(TfmdDL(Items(n), bs=bs, shuffle=True), TfmdDL(Items(17, 1), bs=bs))
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
        return Learner(dls, model, loss_func=Double(), metrics=accuracy, cbs=Groups())
    '''
CONFIG = '''\
    learner = "mine:get"
    split_batches = true
    epochs = 2
    learning_rate = 0.05
    '''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path/'mine.py').write_text(textwrap.dedent(MINE))
    (tmp_path/'c.toml').write_text(textwrap.dedent(CONFIG))
    monkeypatch.chdir(tmp_path)
    for k in ('WORLD_SIZE', 'RANK', 'SLURM_PROCID', 'SLURM_JOB_NUM_NODES'): monkeypatch.delenv(k, raising=False)
    return tmp_path


GOOD = 'learner = "mine:get"'
FAULTS = [  # the config, words of the command line, and the beginnings of what is said, in this order, and no more
    (f'{GOOD}\nepochs = 0\nepoch = 2', ['seed=x'],
     ['c.toml: epoch = 2: there is no such key: did you mean epochs? What', 'c.toml: epochs = 0: an integer of at least 1 is needed',
      'argument seed=x: seed: an integer of at least 0 is needed']),
    ('epochs = 2', [], ['c.toml: learner: it is missing']),
    (GOOD, ['learner_args.n=False'], ['argument learner_args.n=False: False is no TOML, where it is true, false, 0.5']),
    ('precision = fp16', [], ['c.toml: Invalid value (at line 1, column 13). In TOML a text stands in quotes'])]


@pytest.mark.parametrize('text,words,want', FAULTS, ids=[w[0].partition(': ')[2][:40] for *_, w in FAULTS])
def test_faults(folder, text, words, want):
    (folder/'c.toml').write_bytes(b'\xef\xbb\xbf' + text.replace('\n', '\r\n').encode())  # as Notepad writes it
    with pytest.raises(SystemExit) as e: read_config('c.toml', words)
    got = str(e.value).split('\n')
    assert len(got) == len(want) and all(g.startswith(f'fastdist train: {w}') for g, w in zip(got, want)), '\n'.join(got)


@pytest.mark.parametrize('words,want', [
    (['learner_args.bsz=3', 'distributed_world_size=2'],
     "argument learner_args.bsz=3: learner_args: got an unexpected keyword argument 'bsz'"),
    (['learner=mine:gte'], "module 'mine' has no attribute 'gte'"),
    (['resume=ckpt', 'resume_every=0 steps'], 'resume_every'),
    (['fit.method=fit_flat_cos', 'fit.pct_strt=0.5'], "fit: got an unexpected keyword argument 'pct_strt'"),
    (['callbacks={"fastai.callback.all:GradientClp" = {}}'], "has no attribute 'GradientClp'")])
def test_what_python_does_not_take(folder, words, want):
    "What is called says what is wrong; the key is named, and there is no traceback"
    res = train('c.toml', *words, cwd=folder)
    assert res.returncode == 1 and want in res.stderr and 'Traceback' not in res.stderr and not re.search(LAST, res.stdout), res.stderr


@pytest.mark.cold
def test_wrong_config_at_once(folder):
    "One process, which imports no torch, says all that is wrong; `--help` has all keys"
    (folder/'c.toml').write_text('learner = "mine:gets"\nepoch = 3\nseed = -1\n')
    code = "import sys; from fastdist.__main__ import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    res = launched([sys.executable, '-c', code, 'train', 'c.toml'], 60, cwd=folder)
    assert res.returncode == 1 and res.stdout == 'False\n' and re.findall('c.toml: (.*?) =', res.stderr) == ['epoch', 'seed']
    res = launched([sys.executable, '-c', code, 'train', '--help'], 60, cwd=folder)
    assert res.returncode == 0 and res.stdout.endswith('False\n')
    assert all(f'\n  {k}' in res.stdout for k in keys) and '\n  epochs = 1\n' in res.stdout


def test_dry_run(folder):
    res = train('c.toml', '--dry-run', 'distributed_world_size=4', 'use_cuda_if_available=false', 'learner_args.n=7', cwd=folder)
    assert res.returncode == 0 and not list(folder.glob('group*'))
    assert 'fastdist launch -n 4 --cpu -m fastdist train c.toml distributed_world_size=4' in res.stdout
    rows = dict(re.findall(r'(?m)^(\w+ = .*?) +# (.*)$', res.stdout))
    assert rows['epochs = 2'] == 'c.toml' and rows['seed = 0'] == 'default'
    assert rows['learner_args = {n = 7}'] == 'argument learner_args.n=7'


def exported(folder, monkeypatch, *names):
    "The weights of exported learners"
    from fastai.learner import load_learner
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, 'mine', raising=False)
    try: return [load_learner(folder/o).model.state_dict() for o in names]
    finally: sys.modules.pop('mine', None)


def test_number_of_workers_changes_nothing(folder, monkeypatch):
    "Weights and figures of 1, 2 and 3 workers are equal; 1 makes no process group"
    found = {}
    for n in (1, 2, 3):
        res = train('c.toml', f'distributed_world_size={n}', f'save=l{n}.pkl', cwd=folder)
        found[n], workers = figures(res)
        assert workers == n and found[n].keys() == {'train_loss', 'valid_loss', 'accuracy'}
        assert {o.name: o.read_text() for o in folder.glob('group*')} == {f'group{r}': str(None if n == 1 else n) for r in range(n)}
        assert len(re.findall(r'epoch +train_loss', res.stdout)) == 1
    one, *many = exported(folder, monkeypatch, *(f'l{n}.pkl' for n in found))
    for n, w in zip((2, 3), many):
        assert found[n] == pytest.approx(found[1], abs=2e-6)
        assert diff(w, one) < 1e-7  # losses are float32 in fastai


def test_tables(folder, monkeypatch):
    """A schedule, a callback of fastai's, one of one's own and an argument of the context: as the same calls in one process. The values of
    a run are beside its logs"""
    with open('c.toml', 'a') as f: f.write("""
[fit]
method = "fit_flat_cos"
pct_start = 0.5
[context]
gradient_accumulation_steps = 1
[callbacks]
"fastai.callback.all:GradientClip" = {max_norm = 0.05}
"mine:Said" = {word = "a b"}
""")
    res = train('c.toml', 'distributed_world_size=2', 'save=l.pkl', 'log_dir=run', cwd=folder)
    figures(res)
    assert res.stdout.count('said a b 0.05') == 1
    # its module is where the first run was, and not beside it
    again = train('run/config.toml', 'save=again.pkl', 'log_dir=run2', cwd=folder)
    assert again.stdout.count('said a b 0.05') == 1
    code = """
from mine import *
from fastai.callback.all import *
set_seed(0)
learn = get()
learn.fit_flat_cos(2, 0.05, pct_start=0.5, cbs=GradientClip(0.05))
learn.export('plain.pkl')
"""
    res = launched([sys.executable, '-c', code], 100, env=NO_GPU, cwd=folder)
    assert res.returncode == 0, res.stderr
    plain, *found = exported(folder, monkeypatch, 'plain.pkl', 'l.pkl', 'again.pkl')
    assert all(diff(o, plain) < 1e-7 for o in found)


def test_resume(folder, monkeypatch):
    """A run that fails in its second epoch goes on when the same command is typed again, and ends with the weights of one that has not
    failed"""
    words = ['c.toml', 'callbacks={"mine:Fails" = {}}', 'resume=ckpt', 'resume_every=2 steps']
    res = train(*words, 'save=l.pkl', cwd=folder)
    assert res.returncode != 0 and 'RuntimeError' in res.stderr and (folder/'failed').exists()
    figures(train(*words, 'save=l.pkl', cwd=folder))
    figures(train('c.toml', 'save=plain.pkl', cwd=folder))
    assert diff(*exported(folder, monkeypatch, 'l.pkl', 'plain.pkl')) < 1e-7


def test_two_machines(folder, monkeypatch):
    "The launcher on each of two machines: four workers, the weights of one"
    words = ['-m', 'fastdist', 'train', 'c.toml', 'distributed_world_size=4', 'epochs=1', 'learner_args.bs=8', 'save=many.pkl']
    env = {k: v for k, v in os.environ.items() if not k.startswith('SLURM_')} | {**NO_GPU, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    launch = [sys.executable, '-m', 'fastdist', 'launch', '--nnodes', '2', '--nproc-per-node', '2', '--rdzv-endpoint', f'127.0.0.1:{free_port()}', '--cpu', '--node-rank']
    second = subprocess.Popen([*launch, '1', *words], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        many, n = figures(launched([*launch, '0', *words], 100, env=env, cwd=folder))
        out = second.communicate(timeout=100)[0]
        assert second.returncode == 0 and not re.search(LAST, out), out
    finally: second.kill()
    assert n == 4 and {o.name: o.read_text() for o in folder.glob('group*')} == {f'group{r}': '4' for r in range(4)}
    one, _ = figures(train('c.toml', 'epochs=1', 'learner_args.bs=8', 'save=one.pkl', cwd=folder))
    assert many == pytest.approx(one, abs=2e-6)
    assert diff(*exported(folder, monkeypatch, 'many.pkl', 'one.pkl')) < 1e-7


def test_other_launchers(folder):
    "A process that torchrun has started is a worker; another number of them than the config's is an error"
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', '-m', 'fastdist', 'train', 'c.toml']
    env = {**NO_GPU, 'ACCELERATE_USE_CPU': 'true'}
    res = launched([*torchrun, 'distributed_world_size=2', 'strategy=zero1'], 150, env=env, cwd=folder)
    assert figures(res)[1] == 2
    res = launched(torchrun, 100, env=env, cwd=folder)
    assert res.returncode != 0 and 'there are 2 workers started, by torchrun: start 1, or give distributed_world_size=2' in res.stderr
