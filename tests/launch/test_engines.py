"submitit, Dask and Hydra start the workers: the weights of one process, and what is read when a worker fails. None of them is a dependency"
import json, os, sys, textwrap
from importlib.util import find_spec

import pytest
from harness import ROOT, launched

pytestmark = pytest.mark.cold


def needs(module, package): return pytest.mark.skipif(find_spec(module) is None, reason=f'{module} is not installed: pip install {package}')


JOB = '''
    import json, os, signal, sys, time
    from fastai.basics import *
    from fastai.callback.progress import ProgressCallback
    from fastdist.all import *

    class At1(Callback):
        "What rank 1 does in a batch of the second epoch"
        def __init__(self, what): self.what = what
        def after_batch(self):
            if get_rank() == 1 and self.epoch == 1 and self.training and self.iter == 1: self.what()

    def fails(): raise ValueError('no such image')
    def is_killed(): os.kill(os.getpid(), signal.SIGKILL)

    def train(lr=0.1, cbs=()):
        "The number of workers, and the weights, in float64"
        set_seed(42)
        x = torch.randn(40, 5, dtype=torch.float64)
        items = list(zip(x, (x.sum(1) > 0).long()))
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()
        learn = Learner(DataLoaders.from_dsets(items[:30], items[30:], bs=8, num_workers=0), model, loss_func=CrossEntropyLossFlat(), opt_func=SGD)
        learn.remove_cbs(learn._grab_cbs(ProgressCallback))
        with learn.distrib_ctx(split_batches=True):
            learn.fit(3, lr, cbs=cbs)
            n = get_world_size()
        return n, [o for p in model.parameters() for o in p.detach().flatten().tolist()]

    def raised(f, *args):
        try: f(*args)
        except Exception as e: return f'{type(e).__name__}: {e}'
    '''


def found(tmp_path, script, *args, launcher=(sys.executable,)):
    "What `script`, beside the job, prints as JSON"
    for name, text in ('job', JOB), ('script', script): (tmp_path/f'{name}.py').write_text(textwrap.dedent(text))
    path = os.pathsep.join(filter(None, [str(ROOT/'examples'), os.environ.get('PYTHONPATH')]))
    res = launched([*launcher, 'script.py', *args], 500, env=dict(PYTHONPATH=path, PYTHONWARNINGS='ignore'), cwd=tmp_path)
    rows = [json.loads(o[6:]) for o in res.stdout.splitlines() if o.startswith('found')]
    assert rows and not res.left, (res.returncode, res.stdout[-2000:], res.stderr[-3000:], res.left)
    return rows, res


def same(many, one): return many[0] == 2 and one[0] == 1 and max(abs(a-b) for a, b in zip(many[1], one[1])) < 1e-7


@needs('submitit', 'submitit')
def test_submitit(tmp_path):
    "Two tasks; a worker that fails; and one that submitit warns of the time limit: all save, the job is requeued, and ends as if it had not been"
    one, whole, requeued, error, log = found(tmp_path, '''
        import submitit
        from job import *
        from submitit_train import Requeued

        class Warn(Callback):
            def after_batch(self):
                mark = Path(f'mark{get_rank()}')
                if self.epoch != 1 or self.iter != 1 or mark.exists(): return
                mark.touch()
                os.kill(os.getpid(), signal.SIGUSR2)

        if __name__ == '__main__':
            def run(f, *args):
                executor = submitit.LocalExecutor('logs')
                executor.update_parameters(tasks_per_node=2, timeout_min=9)
                job = executor.submit(f, *args)
                return job.results(), job.task(0).stdout()
            def told(resume): return train(cbs=[resume, Warn()])
            (whole, _), (requeued, log) = run(train), run(Requeued(told, 'ckpt'))
            for o in train(), whole, requeued, raised(run, train, .1, [At1(fails)]), log: print('found', json.dumps(o))
        ''')[0]
    assert all(same(o, one) for o in (*whole, *requeued)) and 'Going on from' in log and log.count('Starting with') == 2, log
    assert 'RemoteError' in error and 'rank 1' in error and 'no such image' in error


@needs('distributed', "'dask[distributed]'")
def test_dask(tmp_path):
    "Two worker processes: one fails, both train, and one is killed"
    rows, _ = found(tmp_path, '''
        from dask.distributed import Client, LocalCluster
        from job import *
        from dask_train import on_workers

        if __name__ == '__main__':
            print('found', json.dumps(train()))
            with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
                def failed(what): return raised(on_workers, client, 2, train, .1, [At1(what)])
                for o in failed(fails), on_workers(client, 2, train), failed(is_killed): print('found', json.dumps(o))
        ''')
    one, failed, after, killed = rows
    assert 'no such image' in failed and 'rank 1' in killed, (failed, killed)
    assert all(same(o, one) for o in after)


@needs('hydra', 'hydra-core')
def test_hydra(tmp_path):
    "Two runs one after the other, in the same workers, which agree on rank 0's folder"
    script = '''
        import hydra
        from hydra.core.config_store import ConfigStore
        from hydra.core.hydra_config import HydraConfig
        from job import *

        ConfigStore.instance().store('job', dict(lr=0.1))

        @hydra.main(version_base=None, config_name='job')
        def main(cfg):
            found = train(cfg.lr)
            folder = rank0_read(lambda: HydraConfig.get().runtime.output_dir)
            if is_master(): print('found', json.dumps([*found, cfg.lr, folder]))

        if __name__ == '__main__': main()
        '''
    args = '-m', 'lr=0.1,0.2'
    one, _ = found(tmp_path, script, *args)
    many, res = found(tmp_path, script, *args, launcher=('fastdist', 'launch', '-n', '2'))
    assert res.returncode == 0 and [o[2] for o in many] == [.1, .2] and len({o[3] for o in many}) == 2
    assert all(same(a, b) for a, b in zip(many, one))
