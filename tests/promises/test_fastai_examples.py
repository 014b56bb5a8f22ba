"""fastai's own example scripts, in examples/fastai, as they stand, under the launcher. (contract/test_examples.py holds the numbers of all of them against one process.)"""
import importlib, re, sys

import warm
from harness import ROOT, launched

FOLDER = ROOT/'examples'/'fastai'
# with the tables that they show: one for each fit
RUNS = dict(imagenette=(['--epochs', '1', '--mixup', '0.4'], 1), from_pytorch=(['--epochs', '1', '--n', '300'], 1), dataloader_spawn=([], 1))
SCRIPT = """
import multiprocessing, runpy, sys
for name, args in {runs}.items():
    multiprocessing.set_start_method(None, force=True) # as at first: dataloader_spawn sets it
    sys.argv = [f'{folder}/{{name}}.py', *args]
    print('example', name, flush=True)
    runpy.run_path(sys.argv[0], run_name='__main__')
"""


def test_as_they_stand(tmp_path, monkeypatch):
    """With their augmentations, dropout and loader processes: each fit shows one table, with numbers in each column. Loader processes that are spawned are warm:
    each would import all by itself, for some 7 CPU-seconds, in each epoch"""
    monkeypatch.syspath_prepend(FOLDER)
    importlib.import_module('shapes').get_shapes(tmp_path/'fastdist_shapes', n=220, size=36)  # fewer than they draw, where they do not find them
    (tmp_path/'all.py').write_text(SCRIPT.format(folder=FOLDER, runs={k: args for k, (args, _) in RUNS.items()}))
    r = launched([sys.executable, '-m', 'fastdist', 'launch', '-n', '2', tmp_path/'all.py'], 550, cwd=tmp_path,
                 env={warm.SPAWNS: '1', 'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': f'{ROOT}:{FOLDER}', 'TMPDIR': str(tmp_path)})
    assert r.returncode == 0 and not r.left, r.stderr[-3000:]
    lines = [o.rpartition('\r')[2] for o in r.stdout.split('\n')]
    starts = [i for i, l in enumerate(lines) if l.startswith('example ')]
    assert [lines[i].split()[1] for i in starts] == list(RUNS), r.stdout
    for i, end, (_, n) in zip(starts, [*starts[1:], None], RUNS.values()):
        assert sum('train_loss' in o for o in lines[i:end]) == n == len([o for o in lines[i:end] if re.match(r'0( +\d+\.\d+){3,} +\d\d:\d\d', o)]), r.stdout
