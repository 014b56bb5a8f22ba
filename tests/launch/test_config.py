"`fastdist train config.toml`: what it says of a wrong config, and that the number of workers changes nothing else"
import importlib.util, os, re, subprocess, sys, textwrap
from pathlib import Path

import pytest
from harness import ROOT, free_port, launched
from learners import diff

from fastdist.launch.train.config import keys, read_config
from fastdist.launch.train.cli import launch_args

DOCNN = ROOT/'examples'/'docnn'
TRAIN = [sys.executable, '-m', 'fastdist', 'train']
NO_GPU = {'CUDA_VISIBLE_DEVICES': ''}

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
        def __call__(self, inp, targ, **kwargs): return self.func(inp.as_subclass(torch.Tensor), targ.as_subclass(torch.Tensor), **kwargs).float()

    class Groups(Callback):
        "Says in each batch whether there is a process group, and of how many"
        def before_batch(self): Path(f"group{os.environ.get('RANK', 0)}").write_text(str(dist.get_world_size() if dist.is_initialized() else None))

    class Said(Callback):
        "Says what it was told"
        def __init__(self, word): self.word = word
        def after_fit(self): print('said', self.word, self.learn.gradient_clip.max_norm, flush=True)

    class Ends(Callback):
        def after_batch(self): raise CancelFitException

    def get(n=23, bs=5, fails=None):
        if fails is not None and int(os.environ.get('RANK', 0))==fails: raise ValueError("no data here")
        dls = DataLoaders(TfmdDL(Items(n), bs=bs, shuffle=True), TfmdDL(Items(17, 1), bs=bs))
        return Learner(dls, nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double(), loss_func=Double(), metrics=accuracy, cbs=Groups())
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


def train(*words, cwd, timeout=150, env=None):
    res = launched([*TRAIN, *words], timeout, env={**NO_GPU, **(env or {})}, cwd=cwd)
    assert not res.left
    return res


def test_loader_processes_that_are_not_forked(folder):
    "Python's default from 3.14 on: what they need is imported once, by the server that forks them, and not by each in each epoch"
    with open('mine.py', 'a') as f: f.write(textwrap.dedent("""
        import multiprocessing
        multiprocessing.set_start_method('forkserver', force=True)
        with open('imports', 'a') as f: f.write('x')
        def with_processes(): return Learner(DataLoaders(*[TfmdDL(Items(8), bs=4, num_workers=1) for _ in range(2)]), nn.Linear(4, 3).double(), loss_func=Double())
        """))
    res = train('c.toml', 'learner=mine:with_processes', cwd=folder)
    assert res.returncode == 0, res.stderr
    assert (folder/'imports').read_text() == 'xx'


def test_no_epoch_is_done(folder):
    "A callback ends the fit in its first epoch: what there is is said, and saved"
    res = train('c.toml', 'callbacks={"mine:Ends" = {}}', 'save=l.pkl', cwd=folder)
    assert res.returncode == 0 and 'fastdist: valid_loss ' in res.stdout and (folder/'l.pkl').exists(), res


def figures(res):
    "The last line of a run: figures by name, number of workers, samples a second"
    assert res.returncode == 0, f'{res.stdout}\n{res.stderr}'
    (line, n, speed), = re.findall(r'(?m)^fastdist: (train_loss .*); (\d+) workers?, (\d+) samples/s$', res.stdout.replace('\r', '\n'))
    assert res.stdout.rstrip().endswith('samples/s') and int(speed) > 0
    return {k: float(v) for k, v in (o.rsplit(' ', 1) for o in line.split(', '))}, int(n)


GOOD = 'learner = "mine:get"'
FAULTS = [  # the config, words of the command line, and the beginnings of what is said, in this order, and no more
    (GOOD, ['epochs=three'], ['argument epochs=three: an integer of at least 1 is needed']),
    (f'{GOOD}\nepochs = "three"', [], ['c.toml:2: epochs = "three": an integer of at least 1 is needed']),
    (f'{GOOD}\nepochs = 0\nepoch = 2', [], ['c.toml:2: epochs = 0: an integer of at least 1', 'c.toml:3: epoch = 2: there is no such key: did you mean epochs?']),
    (f'{GOOD}\nworld_size = 2', [], ['c.toml:2: world_size = 2: there is no such key: did you mean distributed_world_size?']),
    (f'{GOOD}\nuse_cuda_if_available = 1', [], ['c.toml:2: use_cuda_if_available = 1: true or false is needed']),
    (f'{GOOD}\nbs = 3', [], ['c.toml:2: bs = 3: it is a parameter of mine:get, and stands below the line [learner_args]']),
    (f'{GOOD}\n[learner_args]\nseed = 3', [], ['c.toml:3: learner_args.seed = 3: it is a key of its own, and stands above']),
    (f'{GOOD}\n[learner_args]\nbsz = 3', [], ['c.toml:3: learner_args.bsz = 3: mine:get has no such parameter: did you mean bs?']),
    (GOOD, ['learner_args.bsz=3'], ['argument learner_args.bsz=3: mine:get has no such parameter: did you mean bs?']),
    (f'{GOOD}\nlearner_args = 3', [], ['c.toml:2: learner_args = 3: a table of arguments is needed']),
    ('\nlearner = "mine:needs"', [], ['c.toml:2: learner = "mine:needs": it needs an argument path: learner_args.path is missing']),
    ('learner = "mine:gte"', [], ['c.toml:1: learner = "mine:gte": mine has no function gte: did you mean get?']),
    ('learner = "mined:get"', [], ['c.toml:1: learner = "mined:get": there is no module mined, neither in ']),
    ('learner = "mine.py"', [], ['c.toml:1: learner = "mine.py": "module:function" is needed']),
    ('epochs = 2', [], ['c.toml: learner: it is missing']),
    (f'{GOOD}\nlearning_rate = nan', [], ['c.toml:2: learning_rate = nan: a number above 0 is needed']),
    (f'{GOOD}\nprecision = "fp8"', [], ['c.toml:2: precision = "fp8": one of fp32, fp16, bf16 is needed']),
    (f'{GOOD}\nprecision = "bf16"\nuse_cuda_if_available = false', [], ['c.toml:2: precision = "bf16": workers are on the CPU here']),
    (f'{GOOD}\ndistributed_world_size = 9', [], ['c.toml:2: distributed_world_size = 9: 9 workers on this machine, which has 8 GPUs']),
    (GOOD, ['distributed_world_size=9'], ['argument distributed_world_size=9: 9 workers on this machine, which has 8 GPUs']),
    (f'{GOOD}\nnodes = 2', ['distributed_world_size=18'], [
        'c.toml:2: nodes = 2: workers of several machines need', 'c.toml:2: nodes = 2: node_rank is the number of this machine, from 0:', 'argument distributed_world_size=18: 9 workers on this machine, which has 8 GPUs']),
    (f'{GOOD}\nnodes = 2', ['distributed_world_size=3', 'node_rank=2', 'distributed_init_method=tcp://n1:2'], [
        'argument distributed_world_size=3: it is the number of workers on all 2', 'argument node_rank=2: it goes from 0 to 1']),
    (f'{GOOD}\ndistributed_init_method = "tcp://n1"', [], ['c.toml:2: distributed_init_method = "tcp://n1": env://, tcp://host:port or file:///path']),
    (f'{GOOD}\ndistributed_init_method = "file:///no/such/folder/f"', ['distributed_world_size=2'], [
        'c.toml:2: distributed_init_method = "file:///no/such/folder/f": there is no folder /no/such/folder']),
    (f'{GOOD}\nlog_dir = "c.toml"', ['resume=c.toml/ckpt'], [
        'c.toml:2: log_dir = "c.toml": it is no folder', 'argument resume=c.toml/ckpt: /']),
    (f'{GOOD}\nsave = "no/l.pkl"', [], ['c.toml:2: save = "no/l.pkl": no is not a folder']),
    (f'{GOOD}\nseed = [\n -1,\n]\nepochs = 0', [], ['c.toml:2: seed = [-1]: an integer of at least 0', 'c.toml:5: epochs = 0']),
    (f'{GOOD}\nfit = "fit_sgdr"', [], ['c.toml:2: fit = "fit_sgdr": one of fit, fit_one_cycle, fit_flat_cos, fine_tune, or a table is needed']),
    (f'{GOOD}\n[fit]\nmethod = "fit_flat_cos"\npct_strt = 0.5\nn_epoch = 3', [], [
        'c.toml:4: fit.pct_strt = 0.5: fit_flat_cos has no such argument: did you mean pct_start?', 'c.toml:5: fit.n_epoch = 3: it is the key epochs, and stands above the line [fit]']),
    (f'{GOOD}\n[fit]\nmethod = ["fit"]', [], ['c.toml:3: fit.method = ["fit"]: one of fit, fit_one_cycle, fit_flat_cos, fine_tune is needed']),
    (GOOD, ['learner_args.n=False', 'learner_args.bs=.5'], ['argument learner_args.n=False: False would be a text: a config has true, false', 'argument learner_args.bs=.5: .5 would be a text']),
    (f'{GOOD}\n[fit]\nmethod = "fit_sgdr"', [], ['c.toml:3: fit.method = "fit_sgdr": one of fit, fit_one_cycle, fit_flat_cos, fine_tune is needed']),
    (f'{GOOD}\n[context]\nwatchdg = 9\nsync_bn = true', [], [
        'c.toml:3: context.watchdg = 9: distrib_ctx has no such argument: did you mean watchdog?', 'c.toml:4: context.sync_bn = true: it is the key sync_bn, and stands above the line [context]']),
    (f'{GOOD}\n[callbacks]\nSaveModelCallbck = {{}}\nGradientClip = 0.1\n"nowhere:Cb" = {{}}', [], [
        'c.toml:3: callbacks.SaveModelCallbck: fastai and fastdist have no such callback: did you mean SaveModelCallback?',
        'c.toml:4: callbacks.GradientClip = 0.1: a table of its arguments is needed', 'c.toml:5: callbacks.nowhere:Cb: there is no such module']),
    (GOOD, ['callbacks.GradientClip.max_norm=1', 'context=1'], ['argument context=1: a table of arguments is needed']),
    (f'{GOOD}\n[callbacks]\nGradientClip = {{max_nrm = 1}}\n"mine:Cb" = {{}}\n"mine:Any" = {{x = 1}}', [], [
        'c.toml:3: callbacks.GradientClip.max_nrm = 1: GradientClip has no such argument: did you mean max_norm?',
        'c.toml:4: callbacks.mine:Cb: it needs an argument n']),
    (GOOD, ['epochs', 'save="a', 'epochs.x=3'], ['argument epochs: what follows the config is like key=value', 'argument save="a: "a is not complete', 'argument epochs.x=3: a'])]


@pytest.mark.parametrize('text,words,want', FAULTS, ids=[w[0].partition(': ')[2][:40] for *_, w in FAULTS])
def test_faults(folder, text, words, want):
    (folder/'mine.py').write_text('def get(n=23, bs=5): ...\ndef needs(path): ...\nclass Cb:\n def __init__(self, n): ...\nclass Any:\n def __init__(self, **kwargs): ...\n')
    (folder/'c.toml').write_text(text+'\n')
    with pytest.raises(SystemExit) as e: read_config('c.toml', words, n_gpus=lambda: 8)
    head, *got = str(e.value).split('\n')
    assert head == 'fastdist train: nothing was started'
    assert len(got) == len(want) and all(g.startswith(w) for g, w in zip(got, want)), '\n'.join(got)


@pytest.mark.parametrize('text,want', [
    ('epochs = 2\nprecision = fp16', 'c.toml:2: precision = fp16: Invalid value, at column 13; a text stands in quotes'),
    ('sync_bn = True', 'c.toml:1: sync_bn = True: Invalid value'), ('epochs: 3', "c.toml:1: epochs: 3: Expected '='"),
    ('a = 1\nb = 2\na = 3', 'c.toml:3: a = 3: Cannot overwrite a value'), ('\n[learner_args', 'c.toml:2: [learner_args: '), ('a = 1\n\nb = [1,\n\n# no more\n', 'c.toml:3: b = [1,: it is not finished'), ('a = 1\nb =', 'c.toml:2: b =: Invalid value'), ('a.b = 1\na = 2', 'c.toml:2: a = 2: Cannot overwrite')])
def test_no_toml(folder, text, want):
    (folder/'c.toml').write_text(text)
    with pytest.raises(SystemExit, match=re.escape(f'fastdist train: {want}')): read_config('c.toml')


def test_windows_file(folder):
    "as Notepad writes it"
    (folder/'c.toml').write_bytes(b'\xef\xbb\xbflearner = "mine:get"\r\nepochs = 4\r\nseed = -1\r\n')
    with pytest.raises(SystemExit, match='c.toml:3: seed = -1'): read_config('c.toml')
    assert read_config('c.toml', ['seed=1']).epochs == 4


def test_devices(folder):
    "PyText's rule: 1 turns it off, more than there are is an error, and without a GPU the workers are on the CPU"
    def of(n, gpus, *words): return read_config('c.toml', [f'distributed_world_size={n}', *words], n_gpus=lambda: gpus)
    for o in ((4, 0), (4, 4, 'precision=fp16'), (5, 4, 'use_cuda_if_available=false')): of(*o)
    with pytest.raises(SystemExit, match='5 workers on this machine, which has 4 GPUs, and each needs its own: start 4 at most'): of(5, 4)
    for o in ((4, 0), (4, 4, 'use_cuda_if_available=false')):
        with pytest.raises(SystemExit, match='workers are on the CPU here'): of(*o, 'precision=fp16')
    asked = []
    c = read_config('c.toml', n_gpus=lambda: asked.append(1))
    assert launch_args(c, ['c.toml']) is None and not asked  # one process needs not know
    c = read_config('c.toml', ['distributed_world_size=3'], n_gpus=lambda: 3)
    assert launch_args(c, ['c.toml']) == ['-n', '3', '-m', 'fastdist', 'train', 'c.toml']
    c = read_config('c.toml', ['distributed_world_size=6', 'nodes=2', 'node_rank=1', 'distributed_init_method=tcp://n1:29500'], n_gpus=lambda: 3)
    assert launch_args(c, ['c.toml']) == ['-n', '3', '--nnodes', '1', '-m', 'fastdist', 'train', 'c.toml']


@pytest.mark.cold
def test_wrong_config_at_once(folder):
    "One process, which imports no torch, says all that is wrong; `--help` has all keys"
    (folder/'c.toml').write_text('learner = "mine:gets"\nepoch = 3\nsave = "no/l.pkl"\n')
    (folder/'mine.py').write_text('def get(): ...\n')
    code = "import sys; from fastdist.__main__ import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    res = launched([sys.executable, '-c', code, 'train', 'c.toml', 'seed=x'], 60, cwd=folder)
    assert res.returncode == 1 and res.stdout == 'False\n'
    lines = res.stderr.rstrip().split('\n')
    assert [o.partition(': ')[0] for o in lines] == ['fastdist train', 'c.toml:1', 'c.toml:2', 'c.toml:3', 'argument seed=x']
    res = launched([sys.executable, '-c', code, 'train', '--help'], 60, cwd=folder)
    assert res.returncode == 0 and res.stdout.endswith('False\n')
    assert all(f'\n  {k}' in res.stdout for k in keys) and '\n  epochs = 1\n' in res.stdout


def test_dry_run(folder):
    res = train('c.toml', '--dry-run', 'distributed_world_size=2', 'use_cuda_if_available=false', 'learner_args.n=7', cwd=folder)
    assert res.returncode == 0 and not list(folder.glob('group*'))
    assert res.stdout.rstrip().endswith('fastdist launch -n 2 --cpu -m fastdist train c.toml distributed_world_size=2 use_cuda_if_available=false learner_args.n=7')
    rows = dict(re.findall(r'(?m)^(\w+ = .*?) +# (.*)$', res.stdout))
    assert rows['epochs = 2'] == 'c.toml:3' and rows['seed = 0'] == 'default' and rows['distributed_world_size = 2'] == 'argument distributed_world_size=2'
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
    assert not list(folder.glob('*.trial'))


def test_tables(folder, monkeypatch):
    "A schedule, a callback of fastai's, one of one's own and an argument of the context: as the same calls in one process. The values of a run are beside its logs"
    tables = """
[fit]
method = "fit_flat_cos"
pct_start = 0.5
[context]
gradient_accumulation_steps = 1
[callbacks]
GradientClip = {max_norm = 0.05}
"mine:Said" = {word = "a b"}
"""
    (folder/'c.toml').write_text(textwrap.dedent(CONFIG) + tables)
    res = train('c.toml', 'distributed_world_size=2', 'save=l.pkl', 'log_dir=run', cwd=folder)
    figures(res)
    assert res.stdout.count('said a b 0.05') == 1
    assert {o.name for o in (folder/'run').iterdir()} == {'config.toml', *(f'rank{r}.{o}.log' for r in range(2) for o in ('stdout', 'stderr'))}
    written = [o.partition(' # ')[0].rstrip() for o in (folder/'run'/'config.toml').read_text().splitlines()]
    # as a user types it: its module is where the first run was, and not beside it
    again = launched([str(Path(sys.executable).with_name('fastdist')), 'train', 'run/config.toml', '--dry-run'], 60, env={**NO_GPU, 'PYTHONPATH': str(ROOT)}, cwd=folder)
    assert again.returncode == 0, again.stderr
    shown = [o.partition(' # ')[0].rstrip() for o in again.stdout.splitlines()]
    assert written == shown[:len(written)] and 'fit = {method = "fit_flat_cos", pct_start = 0.5}' in written
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
    assert diff(*exported(folder, monkeypatch, 'l.pkl', 'plain.pkl')) < 1e-7
    (folder/'c.toml').write_text(textwrap.dedent(CONFIG) + '[callbacks."mine:Ends"]\nx = 1')
    res = train('c.toml', cwd=folder)
    assert res.returncode == 1 and "c.toml:5: callbacks.mine:Ends: AssertionError: " in res.stderr and 'Traceback' not in res.stderr, res.stderr


def test_learning_rate(folder, monkeypatch):
    "The weights hardly move with one of 1e-9, and do with one of 0.05"
    for i, (lr, epochs) in enumerate(((1e-9, 1), (1e-9, 2), (0.05, 2))): figures(train('c.toml', f'learning_rate={lr}', f'epochs={epochs}', f'save={i}.pkl', cwd=folder))
    little, more, much = exported(folder, monkeypatch, *(f'{i}.pkl' for i in range(3)))
    moved = lambda a, b: max(diff(a[k], b[k]) for k in a if k.endswith(('weight', 'bias')))
    assert moved(little, more) < 1e-6 and moved(more, much) > 1e-3


def test_two_machines(folder, monkeypatch):
    "The command once on each of two machines, which meet by tcp://: four workers, the weights of one"
    words = ['c.toml', 'distributed_world_size=4', 'nodes=2', f'distributed_init_method=tcp://127.0.0.1:{free_port()}', 'epochs=1', 'learner_args.bs=8', 'save=many.pkl']
    env = {k: v for k, v in os.environ.items() if not k.startswith('SLURM_')} | {**NO_GPU, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    second = subprocess.Popen([*TRAIN, *words, 'node_rank=1'], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        many, n = figures(train(*words, 'node_rank=0', cwd=folder))
        out = second.communicate(timeout=100)[0]
        assert second.returncode == 0 and 'samples/s' not in out, out
    finally: second.kill()
    assert n == 4 and {o.name: o.read_text() for o in folder.glob('group*')} == {f'group{r}': '4' for r in range(4)}
    one, _ = figures(train('c.toml', 'epochs=1', 'learner_args.bs=8', 'save=one.pkl', cwd=folder))
    assert many == pytest.approx(one, abs=2e-6)
    assert diff(*exported(folder, monkeypatch, 'many.pkl', 'one.pkl')) < 1e-7


def test_other_launchers(folder):
    "A process that torchrun has started is a worker; another number of them than the config's is an error"
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', '-m', 'fastdist', 'train', 'c.toml']
    env = {**NO_GPU, 'ACCELERATE_USE_CPU': 'true'}
    res = launched([*torchrun, 'distributed_world_size=2', f'distributed_init_method=file://{folder}/meet', 'strategy=zero1'], 150, env=env, cwd=folder)
    assert figures(res)[1] == 2 and not (folder/'meet').exists()
    res = launched(torchrun, 100, env=env, cwd=folder)
    assert res.returncode != 0 and 'c.toml: distributed_world_size = 1: torchrun has started 2 workers: start 1, or give distributed_world_size=2' in res.stderr


@pytest.mark.parametrize('n', [pytest.param(1, marks=pytest.mark.cold), 2])  # what a worker imports, one shows
def test_one_fails(folder, n):
    res = train('c.toml', f'distributed_world_size={n}', f'learner_args.fails={n-1}', cwd=folder)  # its own limit is far below the watchdog's
    assert res.returncode == 1 and 'ValueError: no data here' in res.stderr and 'samples/s' not in res.stdout


@pytest.fixture(scope='module')
def docstrings(tmp_path_factory):
    "Sentences of docstrings of three small libraries"
    folder = tmp_path_factory.mktemp('docnn')
    res = launched([sys.executable, DOCNN/'make_docstrings.py', 'data', '--libraries', 'accelerate', 'fastai', 'numpy', '--most', '250'], 100, cwd=folder)
    assert res.returncode == 0, res.stderr
    return folder


def rows(file): return [o.rpartition('\t')[::2] for o in file.read_text().rstrip('\n').split('\n')]


def module(name):
    spec = importlib.util.spec_from_file_location(name, DOCNN/f'{name}.py')
    m = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(m)
    return m


def test_docstrings(docstrings, tmp_path):
    "SST-2's layout; as many of each library; no sentence of dev.tsv in train.tsv; the same files again"
    head, *train_rows = rows(docstrings/'data'/'train.tsv')
    dev_head, *dev_rows = rows(docstrings/'data'/'dev.tsv')
    assert head == dev_head == ('sentence', 'label') and len(train_rows) == 600 and len(dev_rows) == 150
    words = [[' '.join(re.findall(r'\w+', s.lower())) for s, _ in o] for o in (train_rows, dev_rows)]
    assert len(set(words[0])) == 600 and len(set(words[1])) == 150 and not set(words[0]) & set(words[1])
    labels = [l for o in (train_rows, dev_rows) for _, l in o]
    assert {o: labels.count(o) for o in set(labels)} == {'accelerate': 250, 'fastai': 250, 'numpy': 250}
    module('make_docstrings').make(tmp_path, ('accelerate', 'fastai', 'numpy'), 250)
    assert all((tmp_path/o).read_text() == (docstrings/'data'/o).read_text() for o in ('train.tsv', 'dev.tsv'))


def test_docnn(docstrings):
    "PyText's tutorial: 2 workers learn what 1 does, and more than chance"
    words = [DOCNN/'demo.toml', 'learner_args.path=data', 'learner_args.p=0', 'epochs=4']  # dropout draws other numbers in each worker
    one, two = (figures(train(*words, f'distributed_world_size={n}', f'save=l{n}.pkl', cwd=docstrings, timeout=200)) for n in (1, 2))
    assert (one[1], two[1]) == (1, 2)
    assert two[0] == pytest.approx(one[0], abs=2e-3) and one[0]['accuracy'] > 0.55  # 1/3 is chance
    code = "from docnn import *; rows = read_tsv('data/dev.tsv'); print(sum(a == b for a, (_, b) in zip(classify(load_learner('l2.pkl'), [s for s, _ in rows]), rows)))"
    res = launched([sys.executable, '-W', 'ignore', '-c', code], 100, env={'PYTHONPATH': os.pathsep.join([str(DOCNN), str(ROOT)])}, cwd=docstrings)
    assert res.returncode == 0 and int(res.stdout) == round(150*two[0]['accuracy']), res.stderr


def test_docnn_files(docstrings, tmp_path):
    "A file without its header, as `sed 1d` leaves it; a line that is not like the others; the padding, which changes nothing"
    import torch
    docnn = module('docnn')
    for nm in ('train', 'dev'):
        lines = (docstrings/'data'/f'{nm}.tsv').read_text().splitlines(keepends=True)
        (tmp_path/f'{nm}_tiny.tsv').write_text(''.join(lines[1:101]))
    learn = docnn.learner(tmp_path, tiny=True, bs=7)
    assert [dl.n for dl in learn.dls.loaders] == [100, 100]
    assert docnn.read_tsv(tmp_path/'dev_tiny.tsv') == docnn.read_tsv(docstrings/'data'/'dev.tsv')[:100]
    (tmp_path/'dev_tiny.tsv').write_text('good\t1\nbad\n')
    with pytest.raises(ValueError, match=r"dev_tiny.tsv:2: 'bad' is not like sentence<TAB>label"): docnn.read_tsv(tmp_path/'dev_tiny.tsv')
    model = learn.model.eval()
    ds = learn.dls.train_ds
    xs, _ = docnn.pad_batch([ds[i] for i in range(20)] + [(torch.tensor([1]), torch.tensor(0)), (torch.tensor([], dtype=torch.long), torch.tensor(0))])
    assert len({int((x != 0).sum()) for x in xs}) > 5 and xs.shape[1] > 12
    with torch.no_grad():
        together = model(xs)
        for x, want in zip(xs, together): assert torch.allclose(model(x[:max(5, int((x != 0).sum()))][None])[0], want, atol=1e-6)


@pytest.mark.parametrize('text,says', [('learner = "quits:get"', "quits ends the process while it is imported, by sys.exit(0)"),
                                       ('learner = "mine:get"\ndistributed_init_method = "tcp://["', 'c.toml:2: distributed_init_method = "tcp://["')])
def test_neither_status_0_nor_a_traceback(folder, text, says):
    (folder/'quits.py').write_text('import sys\nsys.exit(0)\n')
    (folder/'c.toml').write_text(text)
    with pytest.raises(SystemExit) as e: read_config('c.toml')
    assert says in str(e.value), e.value
