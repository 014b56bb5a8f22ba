"""Kubernetes: the command and the environment of the YAML in docs/clusters.md, in pods that are namespaces of this machine (hosts.Pods)"""
import re, textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest, torch, yaml
from harness import ROOT, wait_for
from hosts import ADDRESSES, Pods, why_no_hosts

CPU = {'CUDA_VISIBLE_DEVICES': ''}
TIMEOUT = 280
SECRETS = {('train', 'secret'): 'of both pods: 0123456789'}


def of_page(name):
    "The documents of a YAML of the page"
    text = re.search(rf'<!-- file: {name} -->\n```yaml\n(.*?)```', (ROOT/'docs'/'clusters.md').read_text(), re.S)[1]
    return list(yaml.safe_load_all(text))


def environment(container):
    "The variables of a container"
    def value(o):
        if 'value' in o: return o['value']
        ref = o['valueFrom']['secretKeyRef']
        return SECRETS[ref['name'], ref['key']]
    return {**CPU, **{o['name']: value(o) for o in container['env']}}


@pytest.fixture(scope='module')
def pods(tmp_path_factory):
    if why := why_no_hosts(): pytest.skip(why)
    with Pods(tmp_path_factory.mktemp('data')) as p: yield p


TRAIN = '''
    import os, time
    from fastai.basics import *
    from fastdist.all import *

    class Wait(Callback):
        "In the second epoch, in the pod that is to be deleted"
        def after_batch(self):
            if get_rank() == 0 or self.epoch != 1 or self.iter != 3 or not os.path.exists('waits'): return
            os.remove('waits')
            time.sleep(1000)

    set_seed(0)
    x = torch.randn(120, 3)
    items = list(zip(x, x.sum(1, keepdim=True)))
    dls = DataLoaders.from_dsets(items, items[:30], bs=8, num_workers=2)
    learn = Learner(dls, nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), loss_func=MSELossFlat(), cbs=Wait())
    with learn.distrib_ctx(split_batches=True): learn.fit(3, 1e-2)
    if is_master(): torch.save(learn.model.state_dict(), 'weights.pth')
    '''


def taken(folder, name):
    "The weights that a run has left, and its checkpoints are put away"
    (folder/'checkpoints').rename(folder/name)
    return torch.load((folder/'weights.pth').rename(folder/name/'weights.pth'))


def test_a_pod_comes_back(pods):
    "A TrainJob; and a Job, one pod of which is deleted, and comes back with another address. The weights are the same in the end"
    data = pods.data
    (data/'train.py').write_text(textwrap.dedent(TRAIN))
    [train_job], (service, job) = of_page('trainjob.yaml'), of_page('job.yaml')
    trainer, name = train_job['spec']['trainer'], train_job['metadata']['name']
    names = [f'{name}-node-0-{i}' for i in range(2)]
    pods.name(names, name)
    env = {**environment(trainer), 'PET_NNODES': str(trainer['numNodes']), 'PET_NPROC_PER_NODE': str(trainer['numProcPerNode']),
           'PET_MASTER_ADDR': f'{names[0]}.{name}', 'PET_MASTER_PORT': '29500'}  # as Kubeflow's trainer has them
    for r in pods.run_all([(i, trainer['command'], {'PET_NODE_RANK': str(i)}) for i in range(2)], env, TIMEOUT):
        assert r.returncode == 0 and not r.left, r.stderr
    whole = taken(data, 'train_job')

    spec, names = job['spec']['template']['spec'], [f"{job['metadata']['name']}-{i}" for i in range(job['spec']['completions'])]
    [container], service = spec['containers'], service['metadata']['name']
    assert spec['subdomain'] == service and {o['mountPath'] for o in container['volumeMounts']} == {'/data', '/tmp', '/dev/shm'}
    pods.name(names, service)
    (data/'waits').touch()
    def run(i): return pods.run(i, container['command'], environment(container), TIMEOUT)
    with ThreadPoolExecutor(2) as pool:
        first, second = [pool.submit(run, i) for i in range(2)]
        wait_for(lambda: not (data/'waits').exists() or first.done() or second.done(), 'the second epoch', TIMEOUT)
        pods.delete(1)
        second.result()
        pods.name(names, service, (ADDRESSES[0], '10.77.0.3'))
        a, b = pool.submit(run, 1).result(), first.result()
    for r in (a, b): assert r.returncode == 0 and not r.left, f'{a.stderr}\n{b.stderr}'
    assert f'rank 0 stopped because rank 1 (host {names[1]}' in b.stderr and 'Going on from' in b.stdout, b.stdout + b.stderr
    resumed = taken(data, 'job')
    assert whole.keys() == resumed.keys() and all(whole[k].equal(resumed[k]) for k in whole)


LARGE = '''
    from fastai.basics import *
    from fastdist.all import *
    class Images:
        def __len__(self): return 64
        def __getitem__(self, i): return torch.zeros(2**20), torch.zeros(1)
    dls = DataLoaders.from_dsets(Images(), Images(), bs=16, num_workers=2)
    learn = Learner(dls, nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Linear(1, 1)), loss_func=MSELossFlat())
    with learn.distrib_ctx(): learn.fit(1)
    '''


def test_shared_memory_is_full(pods):
    "Batches of 64 MB, where that is all that the loader's processes have for them"
    (pods.data/'large.py').write_text(textwrap.dedent(LARGE))
    pods.name(['train-0', 'train-1'], 'train')
    r = pods.run(0, ['fastdist', 'launch', '-n', '2', 'large.py'], CPU, TIMEOUT)
    assert r.returncode == 1 and not r.left, r.stderr
    assert '/dev/shm has 64 MiB' in r.stderr and 'mount an emptyDir of `medium: Memory` there' in r.stderr, r.stderr
