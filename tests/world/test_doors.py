"Who reaches a port of a job runs nothing in it; on one machine nobody else reaches one; and nothing that was made for a job stays"
import json, os, pickle, signal, stat, textwrap
from pathlib import Path

import psutil, pytest
from harness import launched, wait_for
from launches import LAUNCHERS, PYTHON

SCRIPT = textwrap.dedent('''
    import json, os, sys, psutil, time, torch, torch.distributed as dist
    from pathlib import Path
    from torch.utils.data import DataLoader
    from fastdist.data import DistributedDL
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
            loader = iter(DistributedDL(DataLoader(torch.ones(100, 3), num_workers=1)))
            next(loader)
            if get_rank() == 1: Path('ready').touch()
            time.sleep(1000)
        all_gather_list(0)

    if __name__ == '__main__':
        if sys.argv[1] == 'call_main': call_main(main, 'listens', n=2)
        else: main(sys.argv[1])
    ''')
LAUNCH = [*LAUNCHERS['fastdist'](2), '--cpu']


@pytest.fixture
def run(tmp_path):
    "A command with the script; its files for the while are in `tmp`"
    (tmp_path/'tmp').mkdir()
    (tmp_path/'s.py').write_text(SCRIPT)
    def go(cmd, what, **kwargs):
        env = {'TMPDIR': str(tmp_path/'tmp'), 'ACCELERATE_USE_CPU': 'true', 'CUDA_VISIBLE_DEVICES': '', 'GLOO_SOCKET_IFNAME': None,
               'FASTDIST_SECRET': None}
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
    """On one machine launcher and workers listen on loopback only. Of a launcher that was killed the logs stay, and nothing else; of a
    good run nothing"""
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


@pytest.mark.parametrize('how', ['torchrun', 'accelerate'])
def test_other_launchers(run, tmp_path, how):
    "Workers listen on loopback only, and have found a secret by themselves; of what they have made nothing stays"
    # the launcher's own store is torch's
    assert {ip for launcher, ip in found(run(LAUNCHERS[how](2), 'listens')) if not launcher} == {'127.0.0.1'}
    assert made(tmp_path) == []


class Bomb:
    def __init__(self, folder): self.folder = folder
    def __reduce__(self): return os.mkdir, (f'{self.folder}/burst-{os.urandom(4).hex()}',)


def caught(f):
    from fastdist.world.secret import SignatureError
    try: return f()
    except SignatureError as e: return 'FASTDIST_SECRET' in str(e) and str(e)
    except (RuntimeError, ValueError) as e: return str(e)


def under_attack(folder):
    """Rank 1 is another user's process, too, that has only the address of the store: it writes a bomb under each key that is read, and
    sends one"""
    import torch.distributed as dist
    from fastdist.comm import collectives
    from fastdist.world import all_gather_list, broadcast_object, get_rank, rank0_first, setup_distrib, world_store
    setup_distrib()
    bomb, r = pickle.dumps(Bomb(folder)), get_rank()
    intruder = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False, wait_for_workers=False)
    drawn = intruder.add('fastdist//2/drawn', 0)
    job = f"fastdist//2/{intruder.get(f'fastdist//2/start/{drawn}').decode()}"
    def write(**keys):
        for k, v in keys.items(): intruder.set(f'{job}/{k}', v)
        intruder.check([f'{job}/{k}' for k in keys])  # answered when they have been written: `set` does not wait for that
    def here(): dist.barrier()
    here()
    if r: write(**{'user/x': bomb, 'rank0/first/1': bomb})
    here()
    res = [caught(lambda: world_store().get('x'))]
    if r: res.append(caught(lambda: rank0_first(len, 'ab')))
    here()
    # who has reached gloo's connections, and sends what it likes by a call of all workers, has no secret either
    real = collectives.sign
    if r: collectives.sign = lambda *_: b'0'*32
    try:
        res += [caught(lambda: all_gather_list(Bomb(folder) if r else 'x')), caught(lambda: broadcast_object(Bomb(folder), src=1) and None),
                caught(lambda: broadcast_object(Path('a')))]
    finally: collectives.sign = real
    res.append(len(all_gather_list(Path('a'))))
    return res


def test_intruder(world2, tmp_path):
    """A bomb under each key that workers read, and in each message, with and without the form of a signature: none is opened, and the
    error says which it was"""
    here = tmp_path.resolve()
    res = world2(under_attack, here, timeout=100)
    assert os.listdir(here) == []
    for r, (value, *rank0, gathered, sent, first, after) in enumerate(res):
        assert value == f'rank {r}: x is no JSON: no worker has written it'
        if r: assert 'codec' in rank0[0]
        unsigned = f'rank {r}: message has not the signature of this job'
        assert gathered.startswith(unsigned) and (sent is None if r else sent.startswith(unsigned)) and after == 2
        assert first == Path('a')  # rank 0 has the secret
