"""Kubernetes, as docs/clusters.md has it: pods that are network namespaces, with the command and the environment of the page's YAML.
What a container has is of these as well: see `hosts.Pods`"""
import os, re, textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest, torch, yaml
from harness import ROOT, wait_for
from hosts import ADDRESSES, Pods, why_no_hosts

pytestmark = pytest.mark.skipif(why_no_hosts() is not None, reason=f'{why_no_hosts()}')

# without `ACCELERATE_USE_CPU` torchrun's workers would look for GPUs
GIVEN = {'train': {'secret': 'of a Secret that both pods have'}}
CPU = {'CUDA_VISIBLE_DEVICES': ''}
TIMEOUT = 240

TRAIN = '''
    import os, time
    from fastai.basics import *
    from fastdist.all import *

    class Wait(Callback):
        "In the second epoch, until the pod has been deleted"
        def after_batch(self):
            if self.epoch != 1 or self.iter != 3 or not os.path.exists('wait'): return
            (Path('ready')/str(get_rank())).touch()
            if get_rank() == 1: time.sleep(1000)

    set_seed(0)
    x = torch.randn(120, 3)
    items = list(zip(x, x.sum(1, keepdim=True)))
    dls = DataLoaders.from_dsets(items, items[:30], bs=8, num_workers=2)
    learn = Learner(dls, nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), loss_func=MSELossFlat(), cbs=Wait())
    with learn.distrib_ctx(split_batches=True): learn.fit(3, 1e-2)
    if is_master(): torch.save(learn.model.state_dict(), 'weights.pth')
    '''


def of_page(name):
    "The documents of a YAML of the page"
    text = (ROOT/'docs'/'clusters.md').read_text()
    return list(yaml.safe_load_all(re.search(rf'<!-- file: {name} -->\n```yaml\n(.*?)```', text, re.S)[1]))


def environment(container):
    "Its variables; a value of a Secret's is one that the test has"
    def value(o):
        ref = o.get('valueFrom', {}).get('secretKeyRef')
        return GIVEN[ref['name']][ref['key']] if ref else o['value']
    return {**CPU, **{o['name']: value(o) for o in container['env']}}


@pytest.fixture(scope='module')
def pods(tmp_path_factory):
    data = tmp_path_factory.mktemp('data')
    (data/'train.py').write_text(textwrap.dedent(TRAIN))
    (data/'ready').mkdir()
    (data/'ready').chmod(0o777)
    with Pods(data) as p: yield p


def test_jobs(pods):
    "A TrainJob; and a Job whose second pod is deleted and comes back with another address. They end with the same weights"
    [train_job], (service, job) = of_page('trainjob.yaml'), of_page('job.yaml')
    trainer, name = train_job['spec']['trainer'], train_job['metadata']['name']
    names = [f'{name}-node-0-{i}' for i in range(2)]
    pods.name(names, name)
    env = {**environment(trainer), 'PET_NNODES': str(trainer['numNodes']), 'PET_NPROC_PER_NODE': str(trainer['numProcPerNode']),
           'PET_MASTER_ADDR': f'{names[0]}.{name}', 'PET_MASTER_PORT': '29500'}
    results = pods.run_all([(i, trainer['command'], {'PET_NODE_RANK': str(i)}) for i in range(2)], env, TIMEOUT)
    for r in results: assert r.returncode == 0 and not r.left, r.stderr
    print(results)
    whole = torch.load(pods.data/'weights.pth')

    (pods.data/'weights.pth').unlink()
    (pods.data/'checkpoints').rename(pods.data/'others')
    (pods.data/'wait').touch()
    spec, name = job['spec']['template']['spec'], job['metadata']['name']
    [container], names = spec['containers'], [f'{name}-{i}' for i in range(2)]
    pods.name(names, service['metadata']['name'])
    def run(i): return pods.run(i, container['command'], environment(container), TIMEOUT)
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(run, i) for i in range(2)]
        wait_for(lambda: len(list((pods.data/'ready').iterdir())) == 2 or any(o.done() for o in jobs), 'second epoch')
        pods.delete(1)
        print('deleted', jobs[1].result())
        (pods.data/'wait').unlink()
        pods.name(names, service['metadata']['name'], (ADDRESSES[0], '10.77.0.3'))
        results = [pool.submit(run, 1).result(), jobs[0].result()]
    print(results)
    for r in results: assert r.returncode == 0 and not r.left, r.stderr
    resumed = torch.load(pods.data/'weights.pth')
    assert all(whole[k].equal(v) for k, v in resumed.items())
