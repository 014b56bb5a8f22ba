"""The table of docs/clusters.md: for each way of running, seconds to the first step, how far the weights are from those of one process, and
what is read when worker 1 fails.

    python benchmarks/clusters.py [part of a way's name ...]

What a way needs and is not there (OpenMPI, Slurm, Ray, submitit, Dask, Hydra, root for two hosts) leaves it out."""
import os, shutil, sys, tempfile, textwrap, time
from importlib.util import find_spec
from pathlib import Path

import torch
import shared
from harness import ROOT, launched
from hosts import Hosts, Pods, Slurm, why_no_hosts, why_no_slurm
from launches import LAUNCHERS, PYTHON

TRAIN = '''
    import os, time
    import torch
    from fastai.basics import *
    from fastdist.all import *

    class First(Callback):
        def after_batch(self):
            if not hasattr(self, 'at'): self.at = time.time()
            if 'FAIL' in os.environ and get_rank() == 1 and self.iter == 3: raise ValueError('no such image')

    def train(config=None):
        torch.set_default_dtype(torch.float64)
        set_seed(0)
        x = torch.linspace(-1, 1, 50)[:,None]
        ds, first = list(zip(x, 3*x+1)), First()
        model = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        learn = Learner(DataLoaders.from_dsets(ds, ds[:20], bs=8, num_workers=0), model, loss_func=MSELossFlat(), cbs=first)
        with learn.distrib_ctx(split_batches=True, in_notebook=IN_NOTEBOOK), learn.no_bar(): learn.fit(3)
        if is_master(): torch.save((first.at, learn.model.state_dict()), os.environ['FOUND'])
    '''
MAIN = "\nif __name__ == '__main__': train()\n"
RAY = '''
import os, ray.train, train
from ray.train.torch import TorchTrainer
TorchTrainer(train.train, train_loop_config={}, scaling_config=ray.train.ScalingConfig(num_workers=2),
             run_config=ray.train.RunConfig(storage_path=os.getcwd())).fit()
'''
SUBMITIT = '''
import submitit, train
executor = submitit.LocalExecutor('logs')
executor.update_parameters(tasks_per_node=2, timeout_min=9)
if __name__ == '__main__': executor.submit(train.train).results()
'''
DASK = '''
import train
from dask.distributed import Client, LocalCluster
from dask_train import on_workers
if __name__ == '__main__':
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        on_workers(client, 2, train.train)
'''
HYDRA = '''
import hydra, train
@hydra.main(version_base=None)
def main(cfg): train.train()
if __name__ == '__main__': main()
'''
# Slurm's job is waited for, and its log shown
SUBMITTED = '''
fastdist slurm --submit --nodes 2 --workers 1 train.py
while [ -n "$(squeue --noheader)" ]; do sleep 0.1; done
cat logs/*.out
'''
IN_KERNEL = {'launch_in_notebook': 'launch_in_notebook(train, n=2)', 'notebook_launcher': 'notebook_launcher(train, num_processes=2)'}
CPU = {'CUDA_VISIBLE_DEVICES': '', 'FASTDIST_TEST_COLD': '1', 'FASTDIST_SECRET': 'of this benchmark'}
TIMEOUT = 600


def command(*cmd, **env): return lambda folder, more: [launched([*cmd, folder/'train.py'], TIMEOUT, {**env, **more}, folder)]


def notebook(call):
    def run(folder, env):
        import nbformat
        cells = [textwrap.dedent(TRAIN).replace('IN_NOTEBOOK', 'True'),
                 f"from accelerate import notebook_launcher\nPath('begin').write_text(str(time.time()))\n{call};"]
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells]), folder/'train.ipynb')
        cmd = [PYTHON, '-c', 'from nbclient.cli import main; main()', '--kernel_name=python3', f'--timeout={TIMEOUT}', 'train.ipynb']
        return [launched(cmd, TIMEOUT, {**env, 'OMP_NUM_THREADS': None}, folder)]
    return run


def engine(script, *launcher):
    def run(folder, env):
        (folder/'begin.py').write_text(script)
        path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT/'examples'), str(folder), os.environ.get('PYTHONPATH')]))
        cmd = [*(launcher or (PYTHON,)), 'begin.py']
        return [launched(cmd, TIMEOUT, {**env, 'PYTHONPATH': path, 'PYTHONWARNINGS': 'ignore'}, folder)]
    return run


def slurm(*cmd):
    def run(folder, env):
        with Slurm() as s:
            (folder/'begin').write_text(str(time.time()))
            return [s.run(cmd, env, TIMEOUT, folder)]
    return run


def hosts(folder, env):
    with Hosts() as h:
        (folder/'begin').write_text(str(time.time()))
        cmd = [*LAUNCHERS['fastdist'](2), '--nnodes', 2, '--rdzv-endpoint', 'n1:29500', 'train.py']
        return h.run_all([(i, cmd) for i in range(2)], env, TIMEOUT, folder)


def pods(folder, env):
    with Pods(folder) as p:
        p.name(['train-0', 'train-1'], 'train')
        (folder/'begin').write_text(str(time.time()))
        cmd = ['torchrun', '--nnodes=2', '--nproc-per-node=1', '--rdzv-backend=c10d', '--rdzv-endpoint=train-0.train:29500', 'train.py']
        return p.run_all([(i, cmd) for i in range(2)], {**env, 'FOUND': '/data/found'}, TIMEOUT)


def ways():
    "(name, function of the folder and the environment that gives the results, why it cannot run)"
    on_cpu, ompi = dict(ACCELERATE_USE_CPU='true'), ['mpirun', '--allow-run-as-root', '--oversubscribe', '-n', '2', PYTHON]
    def needs(module): return None if find_spec(module) else f'{module} is not installed'
    return [('python', command(PYTHON), None),
            ('fastdist launch', command(*LAUNCHERS['fastdist'](2)), None), ('torchrun', command(*LAUNCHERS['torchrun'](2), **on_cpu), None),
            ('accelerate launch', command(*LAUNCHERS['accelerate'](2), **on_cpu), None),
            *((nm, notebook(call), None) for nm, call in IN_KERNEL.items()),
            ('fastdist launch on two machines', hosts, why_no_hosts()),
            ('fastdist slurm', slurm('bash', '-c', SUBMITTED), why_no_slurm()),
            ('srun', slurm('srun', '-N2', '-n2', PYTHON, 'train.py'), why_no_slurm()),
            ('torchrun in two pods', pods, why_no_hosts()), ('Ray', engine(RAY), needs('ray')),
            ('mpirun', command(*ompi), None if shutil.which('mpirun') else 'OpenMPI is not installed'),
            ('submitit', engine(SUBMITIT), needs('submitit')), ('Dask', engine(DASK), needs('distributed')),
            ('Hydra', engine(HYDRA, *LAUNCHERS['fastdist'](2)), needs('hydra'))]


def run(way, env):
    "The results, and the folder in which it ran"
    folder = Path(tempfile.mkdtemp())
    (folder/'train.py').write_text(textwrap.dedent(TRAIN).replace('IN_NOTEBOOK', 'False') + MAIN)
    begin = time.time()
    res = way(folder, {**CPU, 'FOUND': str(folder/'found'), **env})
    if (folder/'begin').exists(): begin = float((folder/'begin').read_text())
    found = torch.load(folder/'found') if (folder/'found').exists() else (None, None)
    shutil.rmtree(folder)
    return res, begin, *found


if __name__ == '__main__':
    reference, rows = run(command(PYTHON), {})[-1], []
    for name, way, why in ways():
        if why: print(f'{name}: not run, {why}', file=sys.stderr)
        if why or sys.argv[1:] and not any(o in name for o in sys.argv[1:]): continue
        res, begin, at, weights = run(way, {})
        assert all(r.returncode == 0 and not r.left for r in res) and at, '\n'.join((r.stdout+r.stderr)[-3000:] for r in res)
        rows.append(f"| `{name}` | {max((v-reference[k]).abs().max().item() for k, v in weights.items()):.0e} | {at-begin:.1f} |")
        if name != 'python':
            for r in run(way, {'FAIL': '1'})[0]:
                print(f'--- {name}, a worker fails, status {r.returncode}\n{(r.stdout+r.stderr)[-2500:]}', file=sys.stderr)
    print('| way of running | largest difference | seconds to the first step |\n|---|---|---|', *rows, sep='\n')
