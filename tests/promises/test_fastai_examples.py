"""fastai's own example scripts, in examples/fastai, as they stand, under the launchers. (contract/test_examples.py holds their numbers against one process.)"""
import importlib, re, sys

import pytest, warm
from harness import ROOT, launched

FOLDER = ROOT/'examples'/'fastai'
@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "Images of shapes, fewer than the examples draw"
    sys.path.insert(0, str(FOLDER))
    try: return importlib.import_module('shapes').get_shapes(tmp_path_factory.mktemp('shapes'), n=44, size=36)
    finally: sys.path.remove(str(FOLDER))


def more_shapes(path): return importlib.import_module('shapes').get_shapes(path/'more', n=220, size=36)


# As they stand, with the tables that they show: one for each fit
RUNS = dict(image_classifier=([], 2), imagenette=(['--epochs', '1', '--mixup', '0.4'], 1), segmentation=(['--bs', '16'], 2), keypoints=(['--epochs', '1'], 1), tabular=(['--epochs', '1'], 1),
            collab=(['--epochs', '1', '--use-nn'], 1), text_classifier=([], 2), from_pytorch=(['--epochs', '1', '--n', '300'], 1), dataloader_spawn=([], 1))
AS_SCRIPTS = """
import multiprocessing, runpy, sys
for name, args in {runs}.items():
    multiprocessing.set_start_method(None, force=True) # as at first: dataloader_spawn sets it
    sys.argv = [f'{folder}/{{name}}.py', *args]
    print('example', name, flush=True)
    runpy.run_path(sys.argv[0], run_name='__main__')
"""
IN_NOTEBOOK = """
import importlib
from accelerate import notebook_launcher
mains = {{o: importlib.import_module(o).main for o in {runs}}} # as a notebook has them: its forks import nothing
def run(name, kwargs): mains[name](**kwargs)
for name, kwargs in {runs}.items():
    print('example', name, flush=True)
    notebook_launcher(run, (name, kwargs), num_processes=2)
"""
PYTHON = [sys.executable]
FASTDIST = [*PYTHON, '-m', 'fastdist', 'launch', '-n', '2']
ACCELERATE = [*PYTHON, '-m', 'accelerate.commands.launch', '--multi_gpu', '--main_process_port', '0', '--num_processes', '2']


def kwargs_of(args):
    "What a command line's options are in a call"
    names = [o.removeprefix('--') for o in args if o.startswith('--')]
    return {o.replace('-', '_'): True if f'--{o}' == args[-1] else float(v) if '.' in (v := args[args.index(f'--{o}')+1]) else int(v) for o in names}


# What an example trains is held against one process above, and how workers start in launch/: so each runs once as it stands, by one of the ways. Loader
# processes that are spawned are warm: each would import all by itself, for some 7 CPU-seconds, in each epoch
IN_FORKS = ['image_classifier', 'keypoints', 'collab', 'text_classifier']
AS_FILES = [o for o in RUNS if o not in (*IN_FORKS, 'tabular', 'dataloader_spawn')]


@pytest.mark.parametrize('launcher,cmd,script,runs', [
    ('fastdist', FASTDIST, AS_SCRIPTS, AS_FILES), ('notebook', PYTHON, IN_NOTEBOOK, IN_FORKS), ('accelerate', ACCELERATE, AS_SCRIPTS, ['tabular']),
    ('fastdist', FASTDIST, AS_SCRIPTS, ['dataloader_spawn'])], ids=['fastdist', 'notebook', 'accelerate', 'spawned'])
def test_as_they_stand(launcher, cmd, script, runs, folder, tmp_path, request):
    "With their augmentations, dropout and loader processes: each fit shows one table, with numbers in each column"
    (tmp_path/'fastdist_shapes').symlink_to(more_shapes(tmp_path) if runs == ['dataloader_spawn'] else folder)
    (tmp_path/'all.py').write_text(script.format(folder=FOLDER, runs={o: kwargs_of(RUNS[o][0]) if launcher == 'notebook' else RUNS[o][0] for o in runs}))
    if launcher == 'notebook': request.getfixturevalue('default_port')
    r = launched([*cmd, tmp_path/'all.py'], 550, cwd=tmp_path,
                 env={warm.SPAWNS: '1', 'ACCELERATE_USE_CPU': 'true', 'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': f'{ROOT}:{FOLDER}', 'TMPDIR': str(tmp_path)})
    assert r.returncode == 0 and not r.left, r.stderr[-3000:]
    lines = [o.rpartition('\r')[2] for o in r.stdout.split('\n')]
    starts = {o: i for i, l in enumerate(lines) for o in runs if l.split() == ['example', o]}
    assert list(starts) == runs, r.stdout
    for (name, i), end in zip(starts.items(), [*list(starts.values())[1:], None]):
        assert sum('train_loss' in o for o in lines[i:end]) == RUNS[name][1], r.stdout
        assert len([o for o in lines[i:end] if re.match(r'0( +\d+\.\d+){3,} +\d\d:\d\d', o)]) == RUNS[name][1], r.stdout
