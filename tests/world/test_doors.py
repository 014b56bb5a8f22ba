"Who reaches a port of a job runs nothing in it; on one machine nobody else reaches one; and nothing that was made for a job stays"
import json, os, pickle, signal, stat, sys, textwrap
from dataclasses import asdict
from pathlib import Path

import psutil, pytest
from harness import launched, wait_for
from test_start import PYTHON

SCRIPT = textwrap.dedent('''
    import json, os, sys, psutil, time, torch, torch.distributed as dist
    from pathlib import Path
    from torch.utils.data import DataLoader
    from fastdist.world import *

    def listening(procs):
        return sorted({(p.pid == os.getppid(), c.laddr.ip) for p in procs for c in p.net_connections('inet') if c.status == 'LISTEN'})

    def main(what):
        setup_distrib()
        group = dist.new_group([0, 1])
        same = all_gather_list(Path('a'), group=group) == [Path('a')]*2  # a class: it has to be signed
        if what == 'listens':
            top = psutil.Process(os.getppid())
            found = listening([top, *top.children(recursive=True)])
            if is_master(): print('found', json.dumps([same, found, os.environ['GLOO_SOCKET_IFNAME']]), flush=True)
        elif what == 'fails' and get_rank() == 1: raise ValueError('no')
        elif what == 'waits':  # with a process of a loader that has sent a tensor
            loader = iter(DataLoader(torch.ones(100, 3), num_workers=1))
            next(loader)
            if get_rank() == 1: Path('ready').touch()
            time.sleep(1000)
        all_gather_list(0)

    if __name__ == '__main__':
        if sys.argv[1] == 'call_main': call_main(main, 'listens', n=2)
        else: main(sys.argv[1])
    ''')
LAUNCH = [PYTHON, '-m', 'fastdist', 'launch', '-n', '2', '--cpu']
TORCHRUN = [PYTHON, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
ACCELERATE = [PYTHON, '-m', 'accelerate.commands.launch', '--multi_gpu', '--num_processes', '2', '--main_process_port', '0', '--num_machines', '1',
              '--mixed_precision', 'no', '--dynamo_backend', 'no']


@pytest.fixture
def run(tmp_path):
    "A command with the script; its files for the while are in `tmp`"
    (tmp_path/'tmp').mkdir()
    (tmp_path/'s.py').write_text(SCRIPT)
    def go(cmd, what, **kwargs):
        env = {'TMPDIR': str(tmp_path/'tmp'), 'ACCELERATE_USE_CPU': 'true', 'CUDA_VISIBLE_DEVICES': '', 'GLOO_SOCKET_IFNAME': None, 'FASTDIST_SECRET': None}
        return launched([*cmd, 's.py', what], 120, env=env, cwd=tmp_path, **kwargs)
    return go


def made(tmp_path):
    "What is there of fastdist's and of Python's own, by its name up to what is drawn"
    return sorted(o.name for o in (tmp_path/'tmp').iterdir() if o.name.startswith(('fastdist', 'pymp')))


def found(res):
    assert res.returncode == 0 and not res.left, res.stderr[-3000:]
    same, listens, nic = json.loads(res.stdout.partition('found ')[2].splitlines()[0])
    assert same and any(a.address == '127.0.0.1' for a in psutil.net_if_addrs()[nic])
    return [tuple(o) for o in listens]


def test_launch(run, tmp_path):
    "On one machine launcher and workers listen on loopback only. Of a launcher that was killed the logs stay, and nothing else; of a good run nothing"
    def kill(proc, mark):
        wait_for((tmp_path/'ready').exists, 'the loader has sent a batch')
        for p in [psutil.Process(proc.pid), *psutil.Process(proc.pid).children(recursive=True)]: p.kill()
    assert run(LAUNCH, 'waits', during=kill).returncode == -signal.SIGKILL
    logs = [o for o in made(tmp_path) if (tmp_path/'tmp'/o/'rank1.stderr.log').exists()]  # what clears the rest may have been killed too
    assert set(found(run(LAUNCH, 'listens'))) == {(True, '127.0.0.1'), (False, '127.0.0.1')}
    assert len(logs) == 1 and made(tmp_path) == logs


def test_logs_of_a_failed_run_stay(run, tmp_path):
    "They are for their owner alone, and another run, which `call_main` starts, leaves them and nothing else"
    assert run(LAUNCH, 'fails').returncode == 1
    folder, = made(tmp_path)
    modes = {o.name: stat.S_IMODE(o.stat().st_mode) for o in (tmp_path/'tmp'/folder).iterdir()}
    assert modes == {f'rank{r}.{o}.log': 0o600 for r in (0, 1) for o in ('stdout', 'stderr')}
    assert stat.S_IMODE((tmp_path/'tmp'/folder).stat().st_mode) == 0o700
    assert {ip for _, ip in found(run([PYTHON], 'call_main'))} == {'127.0.0.1'}
    assert made(tmp_path) == [folder]


@pytest.mark.parametrize('cmd', [TORCHRUN, ACCELERATE], ids=['torchrun', 'accelerate'])
def test_other_launchers(run, tmp_path, cmd):
    "Workers listen on loopback only, and have found a secret by themselves; of what they have made nothing stays"
    assert {ip for launcher, ip in found(run(cmd, 'listens')) if not launcher} == {'127.0.0.1'}  # the launcher's own store is torch's
    assert made(tmp_path) == []


class Bomb:
    def __init__(self, folder): self.folder = folder
    def __reduce__(self): return os.mkdir, (f'{self.folder}/burst-{os.urandom(4).hex()}',)


def caught(f):
    from fastdist.world.secret import SignatureError
    try: return f()
    except SignatureError as e: return e.key, e.rank, 'FASTDIST_SECRET' in str(e)


def under_attack(folder, no_secret):
    """Rank 1 is another user's process, too, that has only the address of the store: it writes a bomb under each key that is read. `no_secret`:
    workers who have found no way to agree on one"""
    import torch.distributed as dist
    from datetime import timedelta
    from fastdist.world import all_gather_list, get_rank, rank0_first, rank0_read, setup_distrib, world_store
    from fastdist.comm.collectives import from_rank0
    from fastdist.fault.supervisor import monitor
    from fastdist.world.errors import Failure
    from fastdist.world.secret import signed_json
    from fastdist.world.state import current_world
    setup_distrib()
    bomb, r = pickle.dumps(Bomb(folder)), get_rank()
    intruder = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False, wait_for_workers=False)
    came, = intruder.get('fastdist//came/2/came').decode().split()[-1:]
    job = f"fastdist//{json.loads(intruder.get(f'fastdist//came/2/start/{came}')[64:])}"
    def write(**keys):
        for k, v in keys.items(): intruder.set(f'{job}/{k}', v)
        intruder.check([f'{job}/{k}' for k in keys])  # answered when they have been written: `set` does not wait for that
    def here(): dist.barrier()
    if no_secret: current_world().cache['secret'] = monitor().records.secret = None
    here()
    world_store().set('x', [1, Path('a')])
    here()
    if r:
        wait_for(lambda: intruder.check([f'{job}/user/value/x']), 'what has been set under these keys is there')
        write(**{f'user/{k}/x': v for k, v in (('value', bomb), ('by/0', bytes(32)+bomb))})
        write(**{'rank0/first/1': json.dumps(['value', 1]), 'rank0/first/1/0': bomb, 'rank0/read/2': json.dumps(['value', 1]), 'rank0/read/2/0': bomb})
    here()
    res = [caught(lambda: world_store().get('x')), caught(lambda: world_store().get('x', rank=0))]
    if r:
        res += [caught(lambda: rank0_first(len, 'ab')), caught(lambda: rank0_read(len, 'ab'))]
        if not no_secret:  # that rank 0 is done, or has asked all to end well, in the form of a rank that has no secret
            none, end = b'0'*64, json.dumps(asdict(Failure(0, 'n1', 'stopped', args=[0]))).encode()
            write(**{'rank0/first/3': none+b'["done", 0]', 'rank0/first/4': none+b'["failure", 1]', 'rank0/first/4/0': none+end})
            res += [caught(lambda: rank0_first(len, 'ab')), caught(lambda: rank0_first(len, 'ab'))]
    here()
    res.append(caught(lambda: all_gather_list([r, 'text'])))
    res.append(caught(lambda: from_rank0({'x': (1, 2.)})))
    res.append([o if isinstance(o, tuple) else len(o) for o in [caught(lambda: all_gather_list(Path('a')))]][0])
    from fastdist.fault.watch.monitor import Scope
    m = monitor()
    def looked(n): wait_for(lambda: m.n > n+2 or not m.threads[0].is_alive(), 'the monitors have looked at it')
    forged, places = json.dumps(asdict(Failure(1, 'n1', text='forged', by=7))).encode(), ('fail/job', 'beat/0', 'link/a:1>b:1', 'ack/job/0')
    links = []
    # with the same secret, but of another start of the workers
    replayed = signed_json(json.loads(forged), next(iter(current_world().secrets.values())), 'fail/job').encode()
    wrong = [bomb, b'{', b'[1]', b'0'*64+b'[1]', b'0'*64+b'{"rank": "x"}'] + ([] if no_secret else [forged, b'0'*64+forged, b'1'*64+forged, replayed])
    for o in wrong:  # without a secret anybody's JSON is a worker's
        if r: write(**{f'fault/{k}': o for k in places}, **{'fault/failed/0': b'job'})  # so that `fail/job` is read
        here()
        looked(m.n)
        m.others()  # reads heartbeats
        links += m.records.get_all(['link/a:1>b:1'])
    res.append([m.threads[0].is_alive(), m.job.failure is None, m.records.refused, 'job' in m.failed, no_secret or set(links) == {None}])
    if r:
        m.store.set('fail/9/9', wrong[-1])
        m.store.get('fail/9/9')  # it is there
    here()
    if not r: m._publish_failure(Scope('9/9'), Failure(0, 'n1', text='true'))
    here()
    res.append(m.records.get('fail/9/9', Failure).text)
    return res


@pytest.mark.parametrize('no_secret', [False, True], ids=['secret', 'no secret'])
def test_intruder(world2, tmp_path, no_secret):
    "A bomb under each key that workers read, with and without the form of a signature: none is opened, and the error says which key it was"
    here = tmp_path.resolve()
    res = world2(under_attack, here, no_secret, timeout=100)
    assert os.listdir(here) == []
    for r, (value, by0, *rank0, every, first, objects, monitors, told) in enumerate(res):
        assert value == ('value/x', r, True) and by0 == ('by/0/x', r, True)
        keys = ['first/1', 'read/2', *([] if no_secret else ['first/3', 'first/4'])]
        assert rank0 == ([(k, 1, True) for k in keys] if r else [])
        assert every == [[0, 'text'], [1, 'text']] and first == {'x': (1, 2.)}  # plain data needs no secret
        assert objects == (('message', r, True) if no_secret else 2)
        assert monitors == [True]*5 and told == 'true'  # what is forged ends nothing, and does not keep a failure from being told
