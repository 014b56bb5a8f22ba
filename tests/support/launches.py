"""One small training, started in every way: `run(way, n, kind, folder)` gives what its rank 0 said, with the seconds from the command to the first step.

`ways` are the launchers, `kind` is 'script', 'module' or 'notebook'. What is trained is exact for any number of workers, so `weights` are those of one process."""
import json, sys, textwrap, time
from pathlib import Path

from harness import launched

TRAIN = '''
    import json, os, time
    import torch
    from fastai.basics import *
    from fastdist.all import *

    class FirstStep(Callback):
        def after_batch(self):
            if not hasattr(self, 'at'): self.at = time.time()

    def train():
        set_seed(0)
        x = torch.linspace(-1, 1, 23, dtype=torch.float64)[:,None]
        ds = list(zip(x, 3*x+1))
        dls = DataLoaders.from_dsets(ds, ds, bs=8, num_workers=0)
        model = nn.Linear(1, 1).double()
        model.weight.data.fill_(0.5), model.bias.data.zero_()
        first = FirstStep()
        learn = Learner(dls, model, loss_func=MSELossFlat(), opt_func=SGD, lr=0.1, cbs=first, metrics=mae)
        with learn.distrib_ctx(split_batches=True, in_notebook=IN_NOTEBOOK):
            n = get_world_size()
            learn.fit(2)
        return dict(n=n, first=first.at, weights=[model.weight.item(), model.bias.item()])
    '''.replace('\n    ', '\n')
SCRIPT = TRAIN.replace('IN_NOTEBOOK', 'False') + '''
if __name__ == '__main__':
    found = train()
    if is_master(): print('found', json.dumps(found), flush=True)
'''
ARGS = ['--num_machines', '1', '--main_process_port', '0', '--mixed_precision', 'no', '--dynamo_backend', 'no']
WAYS = {'python': lambda n: [sys.executable],
        'fastdist launch': lambda n: [sys.executable, '-m', 'fastdist', 'launch', '-n', n],
        'accelerate launch': lambda n: [sys.executable, '-m', 'accelerate.commands.launch', *(['--multi_gpu'] if n > 1 else ['--cpu']), '--num_processes', n, *ARGS],
        'torchrun': lambda n: [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', n]}
IN_KERNEL = {'launch_in_notebook': 'found = launch_in_notebook(train, n={n})',
             'notebook_launcher': textwrap.dedent('''\
                 def shared(): # notebook_launcher gives nothing back
                     res = train()
                     if is_master(): Path('found.json').write_text(json.dumps(res))
                 notebook_launcher(shared, num_processes={n})
                 found = json.loads(Path('found.json').read_text())''')}
CASES = [('python', 1, 'script'), ('fastdist launch', 1, 'script'), ('fastdist launch', 2, 'module'), ('fastdist launch', 3, 'script'), ('accelerate launch', 2, 'script'),
         ('torchrun', 2, 'script'), ('launch_in_notebook', 2, 'notebook'), ('notebook_launcher', 2, 'notebook')]
# how a module is found, and that there are three workers, is our launcher's business: the worlds of all other tests are torchrun's


def plain():
    "The weights of the same training without fastdist, in this process"
    from fastai.basics import no_random
    scope = {}
    code = TRAIN.replace('with learn.distrib_ctx(split_batches=True, in_notebook=IN_NOTEBOOK):', 'with learn.no_bar():').replace('get_world_size()', '1')
    assert 'distrib_ctx' not in code
    with no_random(): exec(code, scope), scope.update(found=scope['train']())
    return scope['found']['weights']


def run(way, n, kind, folder, timeout=200):
    folder, env = Path(folder), {'ACCELERATE_USE_CPU': 'true', 'CUDA_VISIBLE_DEVICES': ''}
    if kind == 'notebook':
        import nbformat
        cells = [TRAIN.replace('IN_NOTEBOOK', 'True'), 'from accelerate import notebook_launcher\nbegin = time.time()\n' + IN_KERNEL[way].format(n=n),
                 "Path('result.json').write_text(json.dumps([begin, found]));"]
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells]), folder/'train.ipynb')
        cmd = [sys.executable, '-c', 'from nbclient.cli import main; main()', '--kernel_name=python3', f'--timeout={timeout}', 'train.ipynb']
        env.update(ACCELERATE_USE_CPU=None, OMP_NUM_THREADS=None)  # as a user has it
    else:
        (folder/'own').mkdir(exist_ok=True)
        (folder/'own'/'train.py').write_text(SCRIPT)
        cmd = [*map(str, WAYS[way](n)), *(['-m', 'own.train'] if kind == 'module' else ['own/train.py'])]
        if way in ('python', 'fastdist launch'): del env['ACCELERATE_USE_CPU']
    begin = time.time()
    res = launched(cmd, timeout, env=env, cwd=folder)
    assert res.returncode == 0 and res.left == {}, f'{res.stdout[-2000:]}\n{res.stderr[:2000]}...\n{res.stderr[-3000:]}'
    if kind == 'notebook': begin, found = json.loads((folder/'result.json').read_text())
    else: found = json.loads(res.stdout.partition('found ')[2].splitlines()[0])
    return {**found, 'seconds': found['first']-begin, 'stderr': res.stderr}
