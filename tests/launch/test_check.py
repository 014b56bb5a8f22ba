"P6: `fastdist check` says what a run will look like, and ends with all that is wrong and what to do, whatever that is"
import re, signal, socket, sys

import pytest
from harness import ROOT, free_port, launched, processes, wait_for
from hosts import ADDRESSES, Hosts, why_no_hosts

CHECK = [sys.executable, '-m', 'fastdist', 'check']
CPU = {'CUDA_VISIBLE_DEVICES': ''}
NEVER = 'import os, time\nif os.environ.get("RANK") == "1": time.sleep(300)\n'  # what Python runs before all else


@pytest.fixture
def never(tmp_path):
    "The environment in which rank 1 starts, and does nothing"
    (tmp_path/'site').mkdir()
    (tmp_path/'site'/'sitecustomize.py').write_text(NEVER)
    return {**CPU, 'PYTHONPATH': f'{tmp_path}/site:{ROOT}'}


def check(*args, env=None, timeout=120, cwd=None): return launched([*CHECK, *args], timeout, {**CPU, **(env or {})}, cwd)


def faults(res):
    "The faults in one line each; they have to be counted in the last line, which goes with the exit status"
    assert not res.left
    assert max(map(len, res.stdout.splitlines())) <= 100 or '/' in res.stdout  # a path is not broken
    text = re.sub(r'\n {7}', ' ', res.stdout)
    found = [o[7:] for o in text.splitlines() if o.startswith('FAULT')]
    last = res.stdout.splitlines()[-1]
    assert last.startswith('ready: ') if not found else last == f"{len(found)} fault{'s' if len(found) > 1 else ''}", res.stdout + res.stderr
    assert res.returncode == (1 if found else 0), res.stdout + res.stderr
    return found


def table(res): return re.sub(r'\n {14}', ' ', res.stdout.partition('\n\n')[0])
def rows(res): return [(o[:14].strip(), o[14:].strip()) for o in table(res).splitlines()]


@pytest.mark.parametrize('n,args', [(2, []), (3, ['-n', '3'])])
def test_good(n, args, tmp_path):
    res = check(*args, cwd=tmp_path)
    assert faults(res) == []
    said = rows(res)
    names = [k for k, _ in said]
    assert [k for k in names if k not in ('GPU', 'GPU links')] == ['machine', 'versions', 'CPU', 'network', 'backend', *(['workers'] if n == 2 else []), 'workers',
                                                                   socket.gethostname()[:13], 'folder', 'latency', 'bandwidth', 'bandwidth', 'gradients', 'training']
    text = table(res)
    assert f'{n} on 1 host, started by ' in text
    assert ('2 are started: with one' in text) == (n == 2)
    assert f'ranks 0-{n-1} on CPU' in text
    assert 'gloo: torch sees no GPU' in text
    assert 'written by rank 0, seen by all' in text
    assert 'the same weights in all workers' in text
    assert int(re.search(r'latency +(\d+) us', text)[1]) > 0
    found = re.findall(r'bandwidth +([\d.e+-]+) GB/s, on the bus ([\d.e+-]+) GB/s: all-reduce of (\d+) MB in ([\d.e+-]+) ms', text)
    assert [o[2] for o in found] == ['1', '25']
    for speed, bus, mb, ms in found:
        assert float(bus) == pytest.approx(float(speed) * 2 * (n-1) / n, rel=0.02)
        assert float(speed) == pytest.approx(float(mb) / float(ms), rel=0.02)
    assert res.stdout.splitlines()[-1] == f'ready: fastdist launch -n {n} train.py'
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cold
def test_one_worker(tmp_path):
    "In processes that import all by themselves"
    res = check('-n', '1', cwd=tmp_path)
    assert faults(res) == [] and 'one worker, so there is nothing to measure' in table(res) and list(tmp_path.iterdir()) == []


def test_nobody_reads():
    "As with `| head -1`: without a traceback, and no worker is left"
    res = launched(['bash', '-c', f'{sys.executable} -m fastdist check -n 2 | head -1'], 100)
    assert res.stdout.startswith('machine') and 'Traceback' not in res.stderr and not res.left, res


def test_wrong_interface():
    res = check('-n', '2', env={'GLOO_SOCKET_IFNAME': 'nope0'})
    found, = faults(res)
    assert found.startswith('GLOO_SOCKET_IFNAME=nope0 names nope0, which ') and ' or take one of ' in found and 'lo' in found
    assert 'latency' not in dict(rows(res))


def test_worker_that_never_comes(never):
    found, = faults(check('-n', '2', '--timeout', '8', env={**never, 'FASTDIST_STARTUP_SECONDS': '200'}))
    assert 'waiting for 2 workers: rank 0 waited 8' in found and 'ranks [1] have not come (node 0): does their log' in found


def test_node_that_never_comes():
    found, = faults(check('-n', '2', '--num_machines', '2', '--machine_rank', '0', '--main_process_ip', '127.0.0.1', '--main_process_port', free_port(), '--timeout', '1',
                          env={'FASTDIST_STARTUP_SECONDS': '4'}))
    assert 'nothing was heard for 5 s of the workers, of which none has started: the same command has to run on every node' in found and 'firewall' in found


def test_ctrl_c(never):
    def interrupt(p, mark):
        wait_for(lambda: sum('--worker' in o and 'fastdist launch' not in o for o in processes(mark).values()) == 2, 'both workers have been started')
        p.send_signal(signal.SIGINT)
    res = launched([*CHECK, '-n', '2'], 90, never, during=interrupt)
    assert res.returncode == 130 and not res.left


def test_several_faults(tmp_path):
    "In one worker: a port that is taken, no folder for temporary files, a folder that cannot be written"
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        s.listen()
        port = s.getsockname()[1]
        res = check('-n', '1', '--shared', '/proc', '--main_process_port', port, env={'TMPDIR': '/no/such', 'OMP_NUM_THREADS': '5000'}, cwd=tmp_path)
    tmp, taken, folder = sorted(faults(res), key=lambda o: ['TMP', 'por', 'ran'].index(o[:3]))
    assert tmp.startswith('TMPDIR=/no/such: files cannot be written there')
    assert taken.startswith(f'port {port} of localhost cannot be opened')
    assert folder.startswith('rank 0 on ') and 'cannot write in /proc' in folder and '--shared DIR' in folder
    assert 'NOTE   OMP_NUM_THREADS=5000' in res.stdout and 'one worker, so there is nothing to measure' in table(res)


@pytest.mark.parametrize('args,why', [(['-n', '0'], '-n 0: at least 1 worker'), (['train.py'], "'train.py': it takes no script"), (['--cpu', 'train.py'], "'train.py': it takes no script"), (['-m', 'train'], '-m: it takes no module')])
def test_refused(args, why):
    res = check(*args)
    assert res.returncode == 2 and why in res.stderr and not res.stdout


@pytest.mark.parametrize('command', [CHECK, [sys.executable, '-m', 'fastdist', 'launch', __file__]])
def test_wrong_startup_seconds(command):
    res = launched(command, 60, {'FASTDIST_STARTUP_SECONDS': 'soon'})
    assert res.returncode and res.stderr.splitlines()[-1].endswith('FASTDIST_STARTUP_SECONDS=soon: a number of seconds above 0 is needed'), res.stderr


def test_two_hosts(tmp_path):
    "Each with a folder of its own under the same name, and with its own fastcore"
    if why := why_no_hosts(): pytest.skip(why)
    stub = tmp_path/'stub'/'fastcore-0.9.9.dist-info'
    stub.mkdir(parents=True)
    (stub/'METADATA').write_text('Metadata-Version: 2.1\nName: fastcore\nVersion: 0.9.9\n')
    (tmp_path/'data').mkdir()
    cmd = f'{sys.executable} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --master-addr={ADDRESSES[0]} --master-port=29517 --node-rank=%d -m fastdist check --timeout 60 --shared {tmp_path}/data'
    with Hosts() as h:
        for i in range(2): assert h.run(i, ['mount', '-t', 'tmpfs', 'none', f'{tmp_path}/data']).returncode == 0
        paths = [f'{ROOT}', f'{tmp_path}/stub:{ROOT}']
        first, second = h.run_all([(i, ['sh', '-c', cmd % i], {**CPU, 'PYTHONPATH': paths[i]}) for i in range(2)], timeout=120)
    text = re.sub(r'\n {7}', ' ', first.stdout)
    versions, folder = [o for o in text.splitlines() if o.startswith('FAULT')]
    assert re.search(r'fastcore differs between hosts: [\d.]+ on n1; 0\.9\.9 on n2: install the same', versions)
    assert f'what rank 0 on n1 writes in {tmp_path}/data is not seen on n2: ' in folder
    assert '2 faults' in first.stdout and first.returncode != 0
    assert [re.search(rf'{k} +(.*)', first.stdout)[1] for k in ('workers', 'n1   ', 'n2   ')] == ['2 on 2 hosts, started by torchrun', 'rank 0 on CPU', 'rank 1 on CPU']
    assert re.search(r'node to node +n1, n2: [\d.]+ GB/s', first.stdout)
    assert 'FAULT' not in second.stdout and not first.left and not second.left


def test_slurm(slurm):
    res = slurm.run(['srun', '-N2', '-n3', *CHECK, '--timeout', '60'], CPU, 120)
    assert faults(res) == []
    assert '3 on 2 hosts, started by slurm' in res.stdout and 'ranks 0-1 on CPU' in res.stdout and 'rank 2 on CPU' in res.stdout
    assert 'node to node' in res.stdout and res.stdout.splitlines()[-1] == 'ready: start your script in the same way'
