"P6: `fastdist check` says what a run will look like, and ends with all that is wrong and what to do, whatever that is"
import re, socket, sys
from importlib.metadata import version

import pytest
from harness import ROOT, launched
from hosts import ADDRESSES

CHECK = [sys.executable, '-m', 'fastdist', 'check']
CPU = {'CUDA_VISIBLE_DEVICES': ''}


def check(*args, env=None, timeout=120, cwd=None): return launched([*CHECK, *args], timeout, {**CPU, **(env or {})}, cwd)


def rows(res): return [(o[:14].strip(), o[14:].strip()) for o in res.stdout.partition('\n\n')[0].splitlines()]


def test_good(tmp_path):
    res = check('-n', '3', cwd=tmp_path)
    assert res.returncode == 0 and not res.left and 'FAULT' not in res.stdout, res.stdout + res.stderr
    assert res.stdout.splitlines()[-1] == 'ready: start your script in the same way' and list(tmp_path.iterdir()) == []
    said, host = rows(res), socket.gethostname()[:13]
    assert [k for k, _ in said] == ['versions', 'workers', host, 'folder', *['all-reduce']*3, 'gradients', 'training']
    text = dict(said)
    assert f'torch {version("torch")}, fastai {version("fastai")}, accelerate {version("accelerate")}' in text['versions']
    assert text['workers'].startswith('3 on 1 host, started by ') and text[host].startswith('ranks 0-2 on CPU; 1 thread each; ')
    assert text['folder'].endswith('shared by all workers') and text['training'].endswith('the same weights in all workers')
    found = [re.fullmatch(r'(\d+) MB in ([\d.e+-]+) ms: ([\d.e+-]+) GB/s, on the bus ([\d.e+-]+) GB/s', v) for k, v in said]
    for mb, ms, speed, bus in (map(float, o.groups()) for o in found if o):
        assert speed == pytest.approx(mb/ms, rel=0.02) and bus == pytest.approx(speed*2*2/3, rel=0.02)
    assert [o[1] for o in found if o] == ['1', '25']


def test_wrong_interface():
    "What keeps the workers from training is an error, as in a run"
    res = check('-n', '2', env={'GLOO_SOCKET_IFNAME': 'nope0'})
    assert res.returncode not in (0, None) and not res.left and 'Unable to find address for: nope0' in res.stderr
    assert 'workers' in dict(rows(res)) and 'all-reduce' not in dict(rows(res))


def test_two_hosts(hosts, tmp_path):
    "Each with a folder of its own under the same name, and with its own fastcore"
    stub = tmp_path/'stub'/'fastcore-0.9.9.dist-info'
    stub.mkdir(parents=True)
    (stub/'METADATA').write_text('Metadata-Version: 2.1\nName: fastcore\nVersion: 0.9.9\n')
    (tmp_path/'data').mkdir()
    torchrun = f'torch.distributed.run --nnodes=2 --nproc-per-node=1 --master-addr={ADDRESSES[0]} --master-port=29517'
    cmd = f'cd {tmp_path}/data; {sys.executable} -m {torchrun} --node-rank=%d -m fastdist check --timeout 60'
    for i in range(2): assert hosts.run(i, ['mount', '-t', 'tmpfs', 'none', f'{tmp_path}/data']).returncode == 0
    paths = [f'{ROOT}', f'{tmp_path}/stub:{ROOT}']
    first, second = hosts.run_all([(i, ['sh', '-c', cmd % i], {**CPU, 'PYTHONPATH': paths[i]}) for i in range(2)], timeout=120)
    versions, folder = [o for o in first.stdout.splitlines() if o.startswith('FAULT')]
    assert re.search(r'fastcore differs: [\d.]+ on n1; 0\.9\.9 on n2: install the same', versions)
    assert f'what rank 0 writes in {tmp_path}/data is not seen on n2: ' in folder
    assert '2 faults' in first.stdout and first.returncode != 0
    text = dict(rows(first))
    assert text['workers'].startswith('2 on 2 hosts, started by torchrun')
    assert text['n1'].startswith('rank 0 on CPU') and text['n2'].startswith('rank 1 on CPU')
    assert 'FAULT' not in second.stdout and not first.left and not second.left
