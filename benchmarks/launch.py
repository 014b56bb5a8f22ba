"""Seconds from the command to the first training step, for each way of starting, each kind of program, and 1, 2 and 3 workers.

    python benchmarks/launch.py [rounds]

Medians of 3 rounds, in which the ways take turns. A script and a module import torch and fastai first, which is most of it; a notebook has them."""
import json, statistics, sys, tempfile, textwrap, time
from pathlib import Path

import shared
from harness import launched
from launches import LAUNCHERS

TRAIN = '''
    import json, os, time
    import torch
    from fastai.basics import *
    from fastdist.all import *

    class FirstStep(Callback):
        def after_batch(self):
            if not hasattr(self, 'at'): self.at = time.time()

    def train():
        x = torch.linspace(-1, 1, 23)[:,None]
        ds = list(zip(x, 3*x+1))
        first = FirstStep()
        learn = Learner(DataLoaders.from_dsets(ds, ds, bs=8, num_workers=0), nn.Linear(1, 1), loss_func=MSELossFlat(), cbs=first)
        with learn.distrib_ctx(split_batches=True, in_notebook=IN_NOTEBOOK): learn.fit(2)
        return first.at
    '''
MAIN = '''
    if __name__ == '__main__':
        at = train()
        if is_master(): print('found', at, flush=True)
    '''
IN_KERNEL = {'launch_in_notebook': 'found = launch_in_notebook(train, n={n})',
             'notebook_launcher': textwrap.dedent('''\
                 def shared(): # notebook_launcher gives nothing back
                     res = train()
                     if is_master(): Path('found.json').write_text(json.dumps(res))
                 notebook_launcher(shared, num_processes={n})
                 found = json.loads(Path('found.json').read_text())''')}
CASES = [('python', 1, 'script'), ('fastdist', 1, 'script'), ('fastdist', 2, 'module'), ('fastdist', 3, 'script'), ('accelerate', 2, 'script'), ('torchrun', 2, 'script'),
         ('launch_in_notebook', 2, 'notebook'), ('notebook_launcher', 2, 'notebook')]


def seconds(way, n, kind, folder, timeout=200):
    "From the command, or the cell, to the first step"
    folder, env, train = Path(folder), {'ACCELERATE_USE_CPU': 'true', 'CUDA_VISIBLE_DEVICES': ''}, textwrap.dedent(TRAIN)
    if kind == 'notebook':
        import nbformat
        cells = [train.replace('IN_NOTEBOOK', 'True'), 'from accelerate import notebook_launcher\nbegin = time.time()\n' + IN_KERNEL[way].format(n=n),
                 "Path('result.json').write_text(json.dumps([begin, found]));"]
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells]), folder/'train.ipynb')
        cmd = [sys.executable, '-c', 'from nbclient.cli import main; main()', '--kernel_name=python3', f'--timeout={timeout}', 'train.ipynb']
        env.update(ACCELERATE_USE_CPU=None, OMP_NUM_THREADS=None)  # as a user has it
    else:
        (folder/'own').mkdir()
        (folder/'own'/'train.py').write_text(train.replace('IN_NOTEBOOK', 'False') + textwrap.dedent(MAIN))
        cmd = [*LAUNCHERS[way](n), *(['-m', 'own.train'] if kind == 'module' else ['own/train.py'])]
        if way in ('python', 'fastdist'): del env['ACCELERATE_USE_CPU']
    begin = time.time()
    res = launched(cmd, timeout, env=env, cwd=folder)
    assert res.returncode == 0 and res.left == {}, f'{res.stdout[-2000:]}\n{res.stderr[:2000]}...\n{res.stderr[-3000:]}'
    if kind == 'notebook': begin, found = json.loads((folder/'result.json').read_text())
    else: found = float(res.stdout.partition('found ')[2].split()[0])
    return found-begin


if __name__ == '__main__':
    times = {}
    for i in range(int((sys.argv[1:] or [3])[0])):
        for way, n, kind in CASES:
            with tempfile.TemporaryDirectory() as folder: times.setdefault((way, kind), {}).setdefault(n, []).append(seconds(way, n, kind, folder))
            print(f'round {i+1}: {way}, {kind}, {n}: {times[way, kind][n][-1]:.1f} s', file=sys.stderr, flush=True)
    print('| started by | as a | 1 worker | 2 workers | 3 workers |\n|---|---|---|---|---|')
    for (way, kind), row in times.items(): print(f'| {way} | {kind} |', ' | '.join(f'{statistics.median(row[n]):.1f}' if n in row else '' for n in (1, 2, 3)), '|')
