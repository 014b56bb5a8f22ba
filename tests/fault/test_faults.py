"""P2: whatever goes wrong in one worker ends it in all of them, within seconds, and each says why. `python tools/fault_table.py` has more
of these rows"""
import json, os, pickle, signal, sys, textwrap

import pytest, warm
from forked import start, started
from harness import ROOT, free_port, launched, wait_for
from launches import LAUNCHERS

sys.path.insert(0, str(ROOT/'tools'))
import fault_table

ROWS = {'fastdist launch': ['raises before the group', 'rank0_first fails', 'slow end of rank 0', 'killed', 'segmentation fault',
                            'sys.exit(0)', 'leaves the group',
                            'holds the interpreter lock', 'a loader process is killed', 'a loader process sleeps',
                            'rank 0 leaves between two rank0_first', 'another collective', 'the launcher is killed'],
        'torchrun': ['raises', 'busy', 'returns early', 'rank 0 leaves before the context', 'saves alone'],
        'accelerate launch': ['raises in a loader process', 'os._exit(0)'],
        'launch_in_notebook': ['raises in a callback', 'killed']}


@pytest.mark.parametrize('way,name', [(way, name) for way, names in ROWS.items() for name in names])
def test_ends_and_says_why(way, name):
    fault, = [o for o in fault_table.FAULTS if o.name == name]
    seconds, found = fault_table.run(fault, way, 3, show=True)
    assert found and all(found.values()), found
    assert float(seconds) < 60  # not the time limits of collectives and of the start, which are minutes


FRESH = """
    import ctypes, multiprocessing, time, torch.distributed as dist
    from fastai.data.load import DataLoader
    from fastdist.all import DistributedDL
    from fastdist.world import *
    class Unsendable:
        def __reduce__(self): raise TypeError('it stays here')
    def crash(i): return ctypes.string_at(0)
    def unsendable(items): return Unsendable()
    def later(i): return i if i == 0 else time.sleep(1000)
    def read(**kwargs): return iter(DistributedDL(DataLoader([0, 1], bs=1, num_workers=1, **kwargs), 0, 1))
    if __name__ == '__main__':
        multiprocessing.set_start_method('forkserver', force=True)
        setup_distrib(timeout=100)
        for kwargs in (dict(after_item=crash), dict(create_batch=unsendable)) if get_rank() == 1 else ():
            try: list(read(**kwargs))
            except RuntimeError: pass
        it = read(after_item=later)
        next(it)
        dist.barrier()
        with fail_together(watchdog=6):
            if get_rank() == 1: next(it)
            dist.barrier()
    """


def test_loader_processes_that_a_rank_has_not_forked(tmp_path):
    """They say where they have crashed, what they could not send, and where they are stuck; the rank waited for a batch that could not be
    sent"""
    (tmp_path/'train.py').write_text(textwrap.dedent(FRESH))
    r = launched([*LAUNCHERS['fastdist'](2), '--log-dir', 'logs', tmp_path/'train.py'], 100, cwd=tmp_path, env={warm.SPAWNS: '1'})
    assert r.returncode not in (0, None) and r.left == {}, r.stderr
    said = (tmp_path/'logs'/'rank1.stderr.log').read_text() + r.stderr
    for o in ('Segmentation fault', 'in crash', 'cannot send a batch', 'TypeError: it stays here', 'rank 1 has kept the others waiting',
              'its loader process', 'in later'):
        assert o in said, said


# Without a launcher, which would end the others

def in_a_group(fn, *args, n=3, timeout=300, envs=None):
    "What `fn(rank, *args)` returns in each of n processes of a group; `fn` begins it by `begin`"
    url = f'tcp://127.0.0.1:{free_port()}'
    return started(lambda: fn(int(os.environ['I']), *args),
                   [{'I': str(i), 'URL': url, 'N': str(n), **(envs[i] if envs else {})} for i in range(n)], timeout=timeout)


def begin():
    from fastdist.world import distributed_init
    distributed_init(init_method=os.environ['URL'], rank=int(os.environ['I']), world_size=int(os.environ['N']))


def reached(rank, how):
    "Seconds from an error in rank 1 until the others have raised it; three times, after each of which all make a new process group"
    import time, torch, torch.distributed as dist
    from fastdist.world import RemoteError, fail_together, world_store
    begin()
    at, kv = 0, world_store()
    for i in range(3):
        now = None
        try:
            with fail_together():
                group = dist.new_group([0, 1, 2]) if how == 'subgroup' else None
                dist.barrier()
                if group: time.sleep(1.5)  # in which the monitor has seen the new group
                if rank == 1:
                    kv.set(f'at{i}', time.monotonic())
                    raise ValueError('no disk')
                try:
                    if how == 'collective': dist.all_reduce(torch.ones(4))
                    if how == 'subgroup': dist.all_reduce(torch.ones(4), group=group)
                    if how == 'store': kv.wait('never')
                    while how == 'busy': pass
                except RemoteError as e:
                    now = time.monotonic()
                    raise
        except RemoteError as e:
            assert (e.rank, e.type) == (1, 'ValueError') and 'no disk' in e.traceback
            assert f'rank {rank} stopped because rank 1' in str(e)
            now = now or time.monotonic()  # it came before this rank was where it was to be
            at = max(at, now - kv.get(f'at{i}'))
        except ValueError: pass
        begin()
        t = torch.tensor([rank+1.])
        dist.all_reduce(t)
        assert t.item() == 6
    return at


@pytest.mark.parametrize('how', ['collective', 'subgroup', 'busy', 'store'])
def test_reaches_all(how):
    res = in_a_group(reached, how)
    assert res[1] == 0 and all(o < 60 for o in res), res  # far below the group's time limit; 0.5 to 0.7 on a quiet machine


def ends(rank, how):
    "What a `RemoteError` has for its fields, where rank 1, or 0, fails, sleeps, or is killed"
    import time, torch, torch.distributed as dist
    from fastdist.world import RemoteError, fail_together
    begin()
    def step():
        if rank == 1 and how == 'raises': raise FileNotFoundError(2, 'no disk', 'a.txt')
        if rank == 1 and how == 'sleeps': time.sleep(1000)
        if f'killed {rank}' == how: os.kill(os.getpid(), signal.SIGKILL)
        if f'stopped {rank}' == how: os.kill(os.getpid(), signal.SIGSTOP)
        while True: dist.all_reduce(torch.ones(3))
    try:
        with fail_together(watchdog=5):
            dist.barrier()
            step()
    except RemoteError as e: return vars(e), str(e)
    except FileNotFoundError: return


def ended(tmp_path, how):
    "The same, and the JSON records, where torch's launcher looks for them"
    files = [tmp_path/f'{i}.json' for i in range(3)]
    res = in_a_group(ends, how, envs=[{'TORCHELASTIC_ERROR_FILE': str(f)} for f in files], timeout=60)
    return res, [json.loads(f.read_text()) if f.exists() else None for f in files]


def test_an_error_is_data(tmp_path):
    res, records = ended(tmp_path, 'raises')
    assert res[1] is None
    for r in 0, 2:
        e, _ = res[r]
        assert (e['rank'], e['by'], e['kind'], e['function']) == (1, 1, 'error', 'step')
        assert e['type'] == 'FileNotFoundError' and e['text'] == "[Errno 2] no disk: 'a.txt'"
        assert e['file'] == __file__ and 'raise FileNotFoundError' in e['traceback']
    for r, o in enumerate(records):
        assert set(o) == {'message', 'fastdist'} and o['fastdist']['rank'] == 1 and o['fastdist']['line'] == res[0][0]['line']
        assert o['message']['message'].startswith('FileNotFoundError: ' if r == 1 else f'RemoteError: rank {r} stopped because rank 1')


def test_the_one_that_is_late_ends_too(tmp_path):
    "Nobody else would end it: srun waits for all. Each knows where it is, and where the others wait"
    res, records = ended(tmp_path, 'sleeps')
    for (e, text), record in zip(res, records):
        assert (e['rank'], e['kind'], e['file'], e['function']) == (1, 'stalled', __file__, 'step')
        assert 'rank 1 has kept the others waiting' in text
        assert {o['rank']: o['call'] for o in e['others']} == {0: 'all_reduce', 2: 'all_reduce'}
        assert record['fastdist']['others'] == e['others']
        assert all([__file__, 'step'] in [[f[0], f[2]] for f in o['stack']] for o in e['others'])


@pytest.mark.parametrize('who', [0, 1])
def test_killed_without_a_launcher(tmp_path, who):
    "Nobody tells the others; with rank 0 the store has gone, too"
    res, _ = ended(tmp_path, f'killed {who}')
    assert res[who] is None
    for r in {0, 1, 2} - {who}:
        assert res[r][1].startswith(f'rank {r} ') and 'stopped because' in res[r][1], res[r]
        if who: assert res[r][0]['rank'] == 1 and 'rank 1 (host' in res[r][1] and 'ended without a traceback' in res[r][1], res[r]


def test_stopped_with_the_store():
    "Rank 0 has the store in its process: it cannot be asked any more either"
    url = f'tcp://127.0.0.1:{free_port()}'
    procs, lines = start(lambda: ends(int(os.environ['I']), 'stopped 0'), [{'I': str(i), 'URL': url, 'N': '3'} for i in range(3)])
    try:
        for r in 1, 2:
            procs[r].join(80)
            assert procs[r].exitcode is not None, 'it waits on'
            try: _, said = pickle.loads(lines[r].recv_bytes())[1]
            except EOFError: continue  # it could not react, and was ended
            assert 'has not answered' in said or 'has gone' in said, said
    finally:
        for p in procs:
            p.kill()
            p.join()


INTERRUPT = '''
    import time, torch, torch.distributed as dist
    from fastdist.world import *
    setup_distrib()
    dist.barrier()
    with fail_together():
        print('ready', flush=True)
        if get_rank(): dist.all_reduce(torch.ones(2))
        else: time.sleep(1000)
    '''


def test_ctrl_c(tmp_path):
    "The terminal sends it to all; they end once, and quietly"
    (tmp_path/'train.py').write_text(textwrap.dedent(INTERRUPT))
    def press(proc, mark):
        wait_for(lambda: sum('ready' in o.read_text() for o in (tmp_path/'logs').glob('*.stdout.log')) == 3, 'all workers are ready')
        os.killpg(proc.pid, signal.SIGINT)
    r = launched([*LAUNCHERS['fastdist'](3), '--log-dir', 'logs', 'train.py'], 120, cwd=tmp_path, during=press)
    assert r.returncode == 130 and r.left == {} and 'Traceback' not in r.stderr and r.stderr.count('Ctrl-C') <= 1, r.stderr


LOOKED_AT = """
import ctypes, os, threading, time
from fastdist.fault.stacks import stack_of
def look():
    while True:
        stack_of(main)
        time.sleep(1e-4)
def closes(i): f = open('/dev/null', 'rb', buffering=0)  # which lets other threads run as it goes, when the innermost frame is one of C's
@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def enters(_): pass
libc = ctypes.CDLL(None)
def begin():
    threads = (ctypes.c_ulong*8)()
    while True:
        for i in range(8): libc.pthread_create(ctypes.byref(threads, 8*i), None, enters, None)
        for t in threads: libc.pthread_join(ctypes.c_ulong(t), None)
main = threading.get_ident()
for f in (look, begin, begin, begin): threading.Thread(target=f, daemon=True).start()
for _ in range(20):
    list(map(closes, range(200)))
    time.sleep(.1)
os._exit(0)
"""


def test_looking_at_a_rank_does_not_end_it():
    "As `faulthandler` does while threads of C enter Python (3.11), or where the innermost frame is one of C's (3.13.0)"
    res = launched([sys.executable, '-c', LOOKED_AT], 60)
    assert res.returncode == 0, res.stderr
