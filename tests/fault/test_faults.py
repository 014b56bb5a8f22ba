"P2: whatever goes wrong in one worker of a plain loop ends it in all of them, within seconds, and each says why"
import os, pickle, re, signal, subprocess, sys, textwrap, time

import pytest, warm
from forked import start, started
from harness import free_port, launched, wait_for

FASTDIST = [sys.executable, '-m', 'fastdist', 'launch', '-n', '3']
SCRIPT = '''
    import os, signal, sys, time, torch, torch.distributed as dist
    from fastdist.world import *
    from fastdist.world.ranks import from_env
    def fault():
        print('fault at', time.time(), flush=True)
    rank = from_env().rank
    BEFORE
    setup_distrib(timeout=100)
    WITHOUT
    with fail_together(watchdog=6):
        t = torch.ones(4)
        dist.barrier()
        if rank == 1:
            fault()
            FAULT
        for i in range(1000): dist.all_reduce(t)
        print('got through', flush=True)
    '''
# what happens in rank 1; what the others, or the launcher, say; seconds in which all have to have ended
FAULTS = dict(
    before_init=dict(before="if rank == 1: fault(); raise ValueError('no disk')", says='ValueError: no disk'),
    outside=dict(without="if rank == 1: fault(); raise ValueError('no disk')\n    time.sleep(1000)", says=['rank 0 stopped because rank 1', 'ValueError: no disk']),
    others_in_a_collective=dict(fault="raise ValueError('no disk')", says=['rank 0 stopped because rank 1', 'rank 2 stopped because rank 1', 'ValueError: no disk']),
    rank0_first=dict(without="rank0_first(lambda: 1/0 if rank == 0 else print('called'))", says=['rank 1 stopped because rank 0', 'ZeroDivisionError'], who=0),
    killed_loader_process=dict(fault='''
            from torch.utils.data import DataLoader
            class Items:
                def __len__(self): return 8
                def __getitem__(self, i):
                    if i == 0: os.kill(os.getpid(), 9) # with a batch on its way, torch may say that the connection was reset
                    return i
            for o in DataLoader(Items(), batch_size=2, num_workers=1): pass''', says=['rank 0 stopped because rank 1', 'is killed by signal']),
    sigkill=dict(fault='os.kill(os.getpid(), signal.SIGKILL)', says='worker 1 was killed by signal 9'),
    sigstop=dict(fault='os.kill(os.getpid(), signal.SIGSTOP)', says=['rank 1 has kept the others waiting', 'has no heartbeat any more', 'waits in all_reduce', 'worker 1 was stuck first']),
    returns_early=dict(fault='sys.exit()', says=['rank 0 stopped because rank 1', 'SystemExit']),
    leaves_the_context=dict(without='''
    def leave():
        with fail_together(watchdog=6):
            dist.barrier()
            fault()
    if rank == 1:
        leave()
        teardown_distrib()
        time.sleep(1000)''', says=['it has left the process group']),
    another_call=dict(fault='all_gather_list(rank)', without="dist.all_reduce = all_reduce", says=['rank 1 at all_gather_list', "ranks 0, 2 are at all_reduce(op='sum')"], who=None),
    another_collective=dict(fault='dist.broadcast(t, 0)', says=['the ranks are at different calls', 'in broadcast', 'in all_reduce'], who=None),
    # its own connection to a server, while all ranks are there
    own_connection=dict(fault="raise RuntimeError('the server: Connection reset by peer')", says=['rank 0 stopped because rank 1', 'RuntimeError: the server: Connection reset by peer']),
    exits_with_0_in_rank_0=dict(without="if rank == 0:\n        with fail_together(): dist.barrier(); sys.exit(0) # here", says=['worker 0 failed (SystemExit) first', 'SystemExit: 0', 'sys.exit(0) # here'], who=0),
    slow_end_of_rank_0=dict(without='''
    def download():
        fault()
        raise OSError('no such host')
    try: rank0_first(download)
    finally: time.sleep(3*(rank == 0))''', before='setup_distrib = lambda **_: None', says=['OSError: no such host', 'in download', 'worker 0 failed (OSError)'], who=0),
    rank_0_tidies_up=dict(fault="raise ValueError('no disk')", without='''
    plain = dist.all_reduce
    def all_reduce(t):
        try: plain(t)
        finally: time.sleep(int(rank == 0)) # it knows of the failure, and has not said it yet
    dist.all_reduce = all_reduce''', says=['rank 0 stopped because rank 1', 'ValueError: no disk']),
    segmentation_fault=dict(fault='import ctypes; ctypes.string_at(0)', says=['worker 1 was killed by signal 11', 'Fatal Python error: Segmentation fault', 'train.py", line 16 in <module>']),
    keeps_the_interpreter_lock=dict(fault='import ctypes; ctypes.PyDLL(None).sleep(1000)', says=['rank 1 has kept the others waiting', 'train.py:16 in <module>', 'worker 1 was stuck first']),
    crashed_and_stuck_loader_process=dict(fault='''
            import ctypes
            from fastai.data.load import DataLoader
            def item(i):
                if i == 0: ctypes.string_at(0)
            def later(i): time.sleep(1000)
            try: list(DistributedDL(DataLoader(list(range(8)), bs=2, num_workers=1, after_item=item), 0, 1))
            except RuntimeError: pass
            list(DistributedDL(DataLoader(list(range(8)), bs=2, num_workers=1, after_item=later), 0, 1))''',
        before='from fastdist.all import DistributedDL',
        says=['Fatal Python error: Segmentation fault', 'in item', 'rank 1 has kept the others waiting', 'its loader process', 'in later']),
    # rank 2 is told by the end of its connections, before its monitor has heard of it
    sleeps=dict(before='if rank == 2:\n        from fastdist.fault.supervisor import Monitor\n        Monitor.deliver = lambda *args: None',
                fault='time.sleep(1000)', says=['rank 1 has kept the others waiting', 'in <module>', 'waits in all_reduce']),
    busy=dict(fault='while True: pass', says=['rank 1 has kept the others waiting']))


@pytest.mark.parametrize('fault', list(FAULTS))
def test_ends_and_says_why(tmp_path, fault):
    f = dict(dict(before='', without='', fault='pass', who=1), **FAULTS[fault])
    text = textwrap.dedent(SCRIPT.replace('BEFORE', f['before']).replace('WITHOUT', f['without']).replace('FAULT', f['fault']))
    (tmp_path/'train.py').write_text(text)
    res = launched([*FASTDIST, '--log-dir', 'logs', tmp_path/'train.py'], 100, cwd=tmp_path)
    ended = time.time()
    assert res.returncode not in (0, None) and res.left == {}, res.stderr
    written = {o.name: o.read_text() for o in (tmp_path/'logs').iterdir()}
    stdout, stderr = (''.join(v for k, v in written.items() if o in k) for o in ('stdout', 'stderr'))
    assert 'got through' not in stdout and 'called' not in stdout
    for o in [f['says']] if isinstance(f['says'], str) else f['says']: assert o in stderr + res.stderr, (res.stderr, written)
    if f['who'] is not None: assert f'worker {f["who"]} ' in res.stderr.splitlines()[-1], res.stderr
    error = 'ValueError: no disk'  # once on the screen, and nothing but the launcher's own line after it
    if error in f['says']: assert res.stderr.count(error) == 1 and error in ''.join(res.stderr.splitlines(True)[-4:]), res.stderr
    at = re.search(r'fault at ([\d.]+)', stdout)
    seconds = ended - float(at[1]) if at else float('nan')
    shown = [o for o in res.stderr.splitlines() if o and 'Warning' not in o and 'warnings.warn' not in o]
    print(f'{fault}: all had ended {seconds:.1f} s after it. A user reads:\n' + '\n'.join(shown[:25]))
    assert not seconds > 60  # seconds, and not the time limits of collectives and of the start, which are minutes; how many is in what is printed


FRESH = """
    import ctypes, multiprocessing, sys, time, torch.distributed as dist
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
        multiprocessing.set_start_method(sys.argv[1], force=True)
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


@pytest.mark.parametrize('method', ['forkserver'])
def test_loader_processes_that_a_rank_has_not_forked(tmp_path, method):
    "They say where they have crashed, what they could not send, and where they are stuck; the rank waited for a batch that could not be sent"
    (tmp_path/'train.py').write_text(textwrap.dedent(FRESH))
    r = launched([*FASTDIST[:-1], '2', '--log-dir', 'logs', tmp_path/'train.py', method], 100, cwd=tmp_path, env={warm.SPAWNS: '1'})
    assert r.returncode not in (0, None) and r.left == {}, r.stderr
    said = (tmp_path/'logs'/'rank1.stderr.log').read_text() + r.stderr
    for o in ('Segmentation fault', 'in crash', 'cannot send a batch', 'TypeError: it stays here', 'rank 1 has kept the others waiting', 'its loader process', 'in later'):
        assert o in said, said


def reached(rank, n, how, url):
    "Seconds from an error in rank 1 until the others have raised it, and what they raised"
    import time, torch, torch.distributed as dist
    from fastdist.world import RemoteError, distributed_init, fail_together, world_store
    distributed_init(init_method=url, rank=rank, world_size=n)
    at, kv = None, world_store()
    for i in range(3):
        now = None
        try:
            with fail_together():
                group = dist.new_group(list(range(n))) if how == 'subgroup' else None
                dist.barrier()
                if group: time.sleep(1.5)  # in which the monitor has seen the new group
                if rank == 1:
                    kv.set(f'at{i}', time.monotonic())
                    raise ValueError('no disk')
                try:
                    if how == 'collective': dist.all_reduce(torch.ones(4))
                    if how == 'subgroup': dist.all_reduce(torch.ones(4), group=group)
                    if how == 'sleep': time.sleep(1000)
                    if how == 'busy':
                        while True: pass
                    if how == 'store': kv.wait('never')
                except RemoteError as e:
                    now = time.monotonic()
                    raise
        except RemoteError as e:
            ok = (e.rank, type(e.__cause__), 'no disk' in e.traceback, f'rank {rank} stopped because rank 1' in str(e)) == (1, ValueError, True, True)
            now = now or time.monotonic()  # it came before this rank was where it was to be
            at = max(at or 0, now - kv.get(f'at{i}')) if ok else 1e9
        except ValueError: at = 0
        distributed_init(init_method=url, rank=rank, world_size=n)  # all can go on together
        t = torch.tensor([rank+1.])
        dist.all_reduce(t)
        assert t.item() == n*(n+1)/2
    return at


@pytest.mark.parametrize('how', ['collective', 'subgroup', 'sleep', 'busy', 'store'])
def test_reaches_all(how):
    "Three times, after each of which the workers make a new process group"
    url = f'tcp://127.0.0.1:{free_port()}'
    res = started(lambda: reached(int(os.environ['I']), 3, how, url), [{'I': str(i)} for i in range(3)])
    print(f'{how}: seconds until the others had raised it: {res}')
    assert res[1] == 0 and all(o < 60 for o in res), res  # far below the group's time limit; 0.5 to 0.7 on a quiet machine


def late(rank, url):
    import time, torch.distributed as dist
    from fastdist.world import RemoteError, distributed_init, fail_together
    distributed_init(init_method=url, rank=rank, world_size=3)
    try:
        with fail_together(watchdog=5):
            dist.barrier()
            if rank == 1: time.sleep(1000)
            dist.barrier()
    except RemoteError as e: return e.rank, str(e)


def test_the_one_that_is_late_ends_too():
    "Nobody else would end it: srun waits for all"
    url = f'tcp://127.0.0.1:{free_port()}'
    for rank, text in started(lambda: late(int(os.environ['I']), url), [{'I': str(i)} for i in range(3)]):
        assert rank == 1 and 'rank 1 has kept the others waiting' in text and 'in late' in text


def stuck(rank, url):
    import time, torch, torch.distributed as dist
    from fastdist.world import RemoteError, distributed_init, fail_together
    distributed_init(init_method=url, rank=rank, world_size=3)
    try:
        with fail_together(watchdog=5):
            dist.barrier()
            if rank == int(os.environ['WHO']): os.kill(os.getpid(), signal.SIGSTOP)
            dist.all_reduce(torch.ones(3))
    except RemoteError as e: return str(e)


@pytest.mark.parametrize('who', [0, 2])
def test_stopped(who):
    "Rank 0 has the store in its process: it cannot be asked any more either"
    url = f'tcp://127.0.0.1:{free_port()}'
    procs, lines = start(lambda: stuck(int(os.environ['I']), url), [{'I': str(i), 'WHO': str(who)} for i in range(3)])
    try:
        for r in {0, 1, 2} - {who}:
            procs[r].join(80)
            assert procs[r].exitcode is not None, 'it waits on'
            try: said = pickle.loads(lines[r].recv_bytes())[1]
            except EOFError: said = None  # it could not react, and was ended
            if who == 0: assert said is None or 'has not answered' in said or 'has gone' in said
            else: assert f'rank {who} has kept the others waiting' in said and 'stopped' in said
        if who: assert procs[who].exitcode is None or procs[who].exitcode == -signal.SIGKILL
    finally:
        for p in procs:
            p.kill()
            p.join()


INTERRUPT = '''
    import os, sys, time, torch, torch.distributed as dist
    from fastdist.world import *
    setup_distrib()
    dist.barrier()
    WITH
        print('ready', flush=True)
        WHAT
    '''


@pytest.mark.parametrize('context,what', [('with fail_together():', 'if get_rank(): dist.all_reduce(torch.ones(2))\n        else: time.sleep(1000)'), ('if True:', 'time.sleep(1000)')],
                         ids=['context', 'plain'])
def test_ctrl_c(tmp_path, what, context):
    "The terminal sends it to all; they end once, and quietly"
    (tmp_path/'train.py').write_text(textwrap.dedent(INTERRUPT.replace('WITH', context).replace('WHAT', what)))
    with open(tmp_path/'out', 'wb') as out:
        env = {**os.environ, 'PYTHONUNBUFFERED': '1', 'PYTHONPATH': os.getcwd(), 'RES_OPTIONS': 'timeout:1 attempts:1'}
        p = subprocess.Popen(list(map(str, [*FASTDIST, '--log-dir', 'logs', tmp_path/'train.py'])), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=env, cwd=tmp_path)
        try:
            wait_for(lambda: sum('ready' in o.read_text() for o in (tmp_path/'logs').glob('*.stdout.log')) == 3, 'all workers are ready')
            begin = time.monotonic()
            os.killpg(p.pid, signal.SIGINT)
            rc = p.wait(120)
            seconds = time.monotonic() - begin
        finally:
            try: os.killpg(p.pid, signal.SIGKILL)
            except ProcessLookupError: pass
            p.wait()
    text = (tmp_path/'out').read_text()
    print(f'all had ended {seconds:.1f} s after Ctrl-C. A user reads:\n{text}')
    assert rc == 130 and 'Traceback' not in text and text.count('Ctrl-C') <= 1, text


def foreign(rank, path):
    import torch.distributed as dist
    from fastdist.world import RemoteError, fail_together, get_local_rank, get_local_world_size, rank0_first
    dist.init_process_group('gloo', init_method=f'file://{path}', rank=rank, world_size=2)
    res = [rank0_first(lambda: rank), get_local_rank(), get_local_world_size()]
    try:
        with fail_together():
            dist.barrier()
            if rank: raise ValueError('no disk')
            dist.barrier()
    except RemoteError as e: return res, e.rank, type(e.__cause__)
    except ValueError: return res


def test_a_group_that_somebody_else_has_made(tmp_path):
    "By torch's own functions, over one of its own stores, with nothing in the environment"
    assert started(lambda: foreign(int(os.environ['I']), tmp_path/'torchs'), [{'I': str(i)} for i in range(2)]) == [([0, 0, 2], 1, ValueError), [1, 1, 2]]


def killed(rank, who, url):
    import torch.distributed as dist
    from fastdist.world import RemoteError, distributed_init, fail_together
    distributed_init(init_method=url, rank=rank, world_size=3)
    try:
        with fail_together():
            dist.barrier()
            if rank == who: os.kill(os.getpid(), signal.SIGKILL)
            while True: dist.barrier()
    except RemoteError as e: return e.rank, str(e)


@pytest.mark.parametrize('who', [0, 1])
def test_killed_without_a_launcher(who):
    "Nobody tells the others; with rank 0 the store has gone, too"
    url = f'tcp://127.0.0.1:{free_port()}'
    res = started(lambda: killed(int(os.environ['I']), who, url), [{'I': str(i)} for i in range(3)], timeout=60)
    assert res[who] is None
    for r in {0, 1, 2} - {who}:
        assert f'rank {r} stopped because' in res[r][1], res[r]
        if who: assert res[r][0] == 1 and 'rank 1 (host' in res[r][1] and 'ended without a traceback' in res[r][1], res[r]
