"Every way in which users start workers"
import json, multiprocessing, os, random, socket, textwrap

import pytest, warm
from forked import started
from harness import free_port, launched, wait_for
from launches import LAUNCHERS, PYTHON

SCRIPT = r'''
    import json, os, torch, torch.distributed as dist
    from fastdist.world import *
    print(infer_init_method(), flush=True)
    setup_distrib(timeout=200); setup_distrib()
    text = json.dumps([get_rank(), get_world_size(), get_local_rank(), get_local_world_size(), get_node_rank(), str(get_device()),
                       get_backend(), get_launcher(), all_reduce(torch.tensor(get_rank()+1.)).item()])
    os.write(1, f'said {text}\n'.encode()) # at once: workers share the line
    '''


def said(text): return sorted(json.loads(line.partition('said')[2]) for line in text.splitlines() if 'said [' in line)


# two of them with processes that import all by themselves, which is some 7 CPU-seconds for each
@pytest.mark.parametrize('how', [pytest.param(o, marks=[pytest.mark.cold] if o in ('fastdist', 'accelerate') else []) for o in LAUNCHERS])
def test_launchers(tmp_path, how):
    (tmp_path/'s.py').write_text(textwrap.dedent(SCRIPT))
    cmd = [*LAUNCHERS[how](2), *(['--tee', '3'] if how == 'fastdist' else []), tmp_path/'s.py']
    res = launched(cmd, 120, env={'ACCELERATE_USE_CPU': 'true'}, cwd=tmp_path)
    assert res.returncode == 0 and res.left == {}, res.stderr
    who = dict(fastdist='accelerate', python='none').get(how, how)
    if how == 'python': assert said(res.stdout) == [[0, 1, 0, 1, 0, 'cpu', 'gloo', 'none', 1.]]
    else: assert said(res.stdout) == [[r, 2, r, 2, 0, 'cpu', 'gloo', who, 3.] for r in range(2)]
    assert ('one device' if how == 'python' else f'{who} has set RANK=') in res.stdout
    assert 'Warning' not in res.stderr.replace('FutureWarning: `torch.jit.script`', ''), res.stderr  # a warning-free exit


def me(**kwargs):
    from fastdist.world import (all_gather_list, distributed_init, get_launcher, get_local_rank, get_local_world_size, get_node_rank,
                                get_rank, get_world_size, infer_init_method,
                                teardown_distrib)
    reason = str(infer_init_method(**{k: v for k, v in kwargs.items() if k not in ('timeout', 'backend')}))
    rank = distributed_init(**kwargs)
    assert rank == distributed_init(**kwargs)
    res = [rank, get_world_size(), get_local_rank(), get_local_world_size(), get_node_rank(), get_launcher(), all_gather_list(get_rank())]
    teardown_distrib(); teardown_distrib()
    return res, reason


def by_hand(rank, url, world_size, again=False, timeout=200):
    res = me(init_method=url, rank=rank, world_size=world_size, timeout=timeout)
    if again: assert me(init_method=url, rank=rank, world_size=world_size, timeout=timeout) == res
    left = [k for k in os.environ if k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_PORT', 'FASTDIST_LAUNCHER')]
    return res, left


def each(n, fn, *args, envs=None, timeout=90):
    "`fn(rank, *args)` in n processes"
    return started(lambda: fn(int(os.environ['I']), *args), [{'I': str(i), **(envs[i] if envs else {})} for i in range(n)], timeout=timeout)


@pytest.mark.parametrize('again,n', [(False, 2), (True, 3)])
def test_tcp(again, n):
    url = f'tcp://127.0.0.1:{free_port()}'
    for r, o in enumerate(each(n, by_hand, url, n, again)):
        assert o == (([r, n, r, n, 0, 'none', list(range(n))], f'init_method={url!r} was given, for rank {r} of {n}'), [])


def test_tcp_in_the_url():
    url = f'tcp://127.0.0.1:{free_port()}'
    res = each(2, lambda r: me(init_method=f'{url}?rank={r}&world_size=2'))
    assert [o[0][:2] for o in res] == [[0, 2], [1, 2]]


def killed(rank, url):
    "While it waits for a worker that does not come"
    import signal, threading
    threading.Timer(3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    by_hand(rank, url, 3)


def listening(rank, url, n):
    import psutil
    from fastdist.world import distributed_init
    distributed_init(url, rank=rank, world_size=n)
    return sorted({c.laddr.ip for c in psutil.Process().net_connections('inet') if c.status == 'LISTEN'})


def test_file(tmp_path):
    "A file that a run has left which was killed does not hang the next; and where all are on one machine nobody else reaches a port"
    path = tmp_path/'meet'
    url = f'file://{path}'
    assert each(2, killed, url) == [None]*2 and path.exists()
    for _ in range(2):
        for r, o in enumerate(each(3, by_hand, url, 3)): assert o[0][0] == [r, 3, r, 3, 0, 'none', [0, 1, 2]] and o[1] == [], o
        assert not list(tmp_path.iterdir())
    assert each(3, listening, url, 3) == [['127.0.0.1']]*3


def free_job(step=0):
    "The number of a Slurm job whose port (see `slurm_port`) is free: other tests run at the same time"
    while True:
        job = random.SystemRandom().randrange(10**6)
        with socket.socket() as s:
            try: s.bind(('', 10000 + (job*101 + step*7) % 20000))
            except OSError: continue
        return str(job)


def slurm(n, per_node=None, **more):
    per_node, job = per_node or n, free_job(int(more.get('SLURM_STEP_ID', 0)))
    return [dict(SLURM_JOB_ID=job, SLURM_PROCID=str(r), SLURM_LOCALID=str(r % per_node), SLURM_NODEID=str(r//per_node), SLURM_NTASKS=str(n),
                 SLURM_NNODES=str(n//per_node),
                 SLURM_JOB_NODELIST='localhost', **more) for r in range(n)]


@pytest.mark.parametrize('kind', ['step', 'one per node', 'address'])
def test_slurm(kind):
    "srun's environment, of a step that is smaller than its job; real Slurm is tried in test_hosts"
    more = dict(step=dict(SLURM_STEP_ID='17', SLURM_STEP_NUM_TASKS='4', SLURM_STEP_NUM_NODES='1', SLURM_STEP_NODELIST='localhost'),
                address=dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port())))
    n, per_node = (2, 1) if kind == 'one per node' else (4, 2)
    envs = slurm(n, per_node, **more.get(kind, {}))
    if kind == 'step': envs = [dict(e, SLURM_NNODES='4', SLURM_LOCALID=str(r), SLURM_NODEID='0') for r, e in enumerate(envs)]
    if kind == 'address': envs = [dict(e, SLURM_JOB_NODELIST='far[1-2]') for e in envs]
    for r, (o, reason) in enumerate(started(lambda: me(), envs)):
        # without a word of Slurm's, as many on each node, by their hosts: here all on one
        where = [0, 1, r] if kind == 'one per node' else [r, 4, 0]
        assert o == [r, n, *where, 'slurm', list(range(n))] and f'task {r} of {n}' in reason, (o, reason)
        assert kind != 'address' or more['address']['MASTER_PORT'] in reason


OMPI, MV2, JSM = [tuple(f'{o}_{k}' for k in ('RANK', 'SIZE', 'LOCAL_RANK', 'LOCAL_SIZE')) for o in ('OMPI_COMM_WORLD', 'MV2_COMM_WORLD', 'JSM_NAMESPACE')]
PMI, SUBMITIT = ('PMI_RANK', 'PMI_SIZE', 'MPI_LOCALRANKID', 'MPI_LOCALNRANKS'), ('SUBMITIT_LOCAL_GLOBALID', 'SUBMITIT_LOCAL_NTASKS', 'SUBMITIT_LOCAL_LOCALID')


@pytest.mark.parametrize('names,told', [(OMPI, False), (OMPI, True), (MV2, False), (JSM, False), (PMI, False), (SUBMITIT, False)],
                         ids=['OpenMPI', 'OpenMPI with an address', 'MVAPICH', 'jsrun', 'MPICH', 'submitit'])
def test_tasks_of_mpi_and_submitit(names, told):
    "On one machine they meet by themselves; else where MASTER_ADDR says"
    address = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port())) if told else {}
    res = started(lambda: me(), [dict(zip(names, (str(r), '2', str(r), '2')), **address) for r in range(2)])
    for r, (o, reason) in enumerate(res):
        assert o == [r, 2, r, 2, 0, 'submitit' if names is SUBMITIT else 'mpi', [0, 1]], o
        assert f'started this as rank {r} of 2' in reason and address.get('MASTER_PORT', 'tcp://127.0.0.1:') in reason, reason


@pytest.mark.parametrize('env,says', [
    (dict(RANK='1'), 'RANK=1 is set but WORLD_SIZE is not'), (dict(RANK='0', WORLD_SIZE='two'), "WORLD_SIZE='two'"),
    (dict(OMPI_COMM_WORLD_SIZE='2', OMPI_COMM_WORLD_RANK='1', OMPI_COMM_WORLD_LOCAL_SIZE='1'), 'nobody has told them where to meet'),
    (dict(PET_NNODES='2', PET_NPROC_PER_NODE='1'), 'PET_NNODES=2 is for torchrun'),
    (dict(SLURM_JOB_ID='1', SLURM_NTASKS='4', SLURM_PROCID='0', SLURM_LOCALID='0', ENVIRONMENT='BATCH'), 'srun python')],
                         ids=['alone', 'no number', 'MPI', 'torchrun', 'no srun'])
def test_wrong_variables(env, says):
    "None of them trains alone, or waits for anybody; tools/mutations.py has more"
    name, text, _ = started(lambda: me(), [env])[0]
    assert name == 'ValueError' and says in text, text


def test_fewer_than_were_asked_for(tmp_path):
    "Accelerate starts one worker where it was asked for two, and says nothing"
    (tmp_path/'s.py').write_text(textwrap.dedent(SCRIPT))
    for n in 2, 1:
        cmd = ['--cpu' if o == '--multi_gpu' else o for o in LAUNCHERS['accelerate'](n)]
        res = launched([*cmd, tmp_path/'s.py'], 120, cwd=tmp_path)
        assert (res.returncode == 0) == (n == 1) and ('type `fastdist launch -n N s.py`' in res.stderr) == (n == 2), res.stderr[-2000:]


def test_one_does_not_come():
    (name, text, _), (name1, text1, _) = each(2, by_hand, f'tcp://127.0.0.1:{free_port()}', 3, False, 6)
    assert name == 'TimeoutError' and 'rank 0 waited 6 s for 3 workers, and ranks [2] have not come' in text
    # rank 0 may have gone first
    assert 'rank 1 waited' in text1 and ('ranks [2] have not come' in text1 if name1 == 'TimeoutError' else 'rank 0' in text1)


def goes_before_the_group(rank):
    "Rank 1 ends between what all have called and the process group that the others make then"
    import time
    from fastdist.world import distributed_init, rank0_first
    rank0_first(int)
    if rank == 1: return
    begin = time.monotonic()
    try: distributed_init(timeout=60)
    except Exception as e: return type(e).__name__, str(e), time.monotonic()-begin


def test_one_goes_before_the_group():
    "The others learn that, where no launcher ends them; they waited in gloo, for half an hour"
    port = str(free_port())
    res = each(3, goes_before_the_group,
               envs=[dict(RANK=f'{r}', WORLD_SIZE='3', LOCAL_RANK=f'{r}', LOCAL_WORLD_SIZE='3', MASTER_ADDR='127.0.0.1',
                          MASTER_PORT=port) for r in range(3)])
    for name, text, secs in (res[0], res[2]):
        assert name == 'RemoteError' and 'rank 1 (host' in text and 'does not take part any more' in text and secs < 20, res


def test_where_they_do_not_meet(tmp_path):
    "Nobody listens, or a program that says nothing; no rank 0 has come to the file; the port is taken"
    with socket.create_server(('127.0.0.1', 0)) as s:
        silent = f'tcp://127.0.0.1:{s.getsockname()[1]}'
        for rank, url, kind, says in ((1, f'tcp://127.0.0.1:{free_port()}', 'ConnectionError', 'rank 1 found nobody at 127.0.0.1:'),
                                      (1, silent, 'ConnectionError', 'what listens there has not replied for 2 s'),
                                      (0, silent, 'ConnectionError', 'could not open port'),
                                      (1, f'file://{tmp_path}/x', 'TimeoutError',
                                       'rank 1 waited 2 s for 2 workers, and ranks [0] have not come')):
            name, text, _ = started(lambda: by_hand(rank, url, 2, timeout=2), [{}])[0]
            assert name == kind and says in text, (name, text)


def test_the_same_rank_twice():
    url = f'tcp://127.0.0.1:{free_port()}'
    # of three, so that those who have come do not start, and end, before the other one is there
    res = started(lambda: by_hand(int(os.environ['R']), url, 3, timeout=15), [dict(R=r) for r in '011'])
    assert 'two workers say that they are rank 1 of 3' in str(res)


def test_a_script_that_its_loader_processes_run_again(tmp_path):
    "Without a guard, where they are not forked: they would be the same ranks a second time"
    (tmp_path/'train.py').write_text(textwrap.dedent('''
        import multiprocessing
        from fastai.basics import *
        from fastdist.all import *
        multiprocessing.set_start_method('spawn', force=True)
        dls = DataLoaders.from_dsets(*[[(torch.ones(1), torch.ones(1))]*8]*2, bs=2, num_workers=1)
        with Learner(dls, nn.Linear(1, 1), loss_func=MSELossFlat()).distrib_ctx() as learn: learn.fit(1)
        '''))
    r = launched([*LAUNCHERS['fastdist'](2), '--tee', '3', tmp_path/'train.py'], 100, cwd=tmp_path, env={warm.SPAWNS: '1'})
    assert r.returncode not in (0, None) and r.left == {} and 'the script runs once more' in r.stderr, r.stderr


MAIN = r'''
    import json, multiprocessing, os, torch, torch.distributed as dist
    from fastdist.world import *

    def main(x, y=0):
        total = all_reduce(torch.tensor(get_rank()+1)).item()
        text = json.dumps([get_rank(), get_world_size(), get_local_rank(), x+y, total, multiprocessing.get_start_method()])
        os.write(1, f'said {text}\n'.encode())

    if __name__ == '__main__': call_main(main, 1, N, y=2)
    '''


@pytest.mark.parametrize('n', [None, 3])
def test_call_main(tmp_path, n):
    "The workers start loader processes as the script would, by forking: spawned ones import all again, each for itself"
    (tmp_path/'s.py').write_text(textwrap.dedent(MAIN).replace(' N,', f' n={n},' if n else ''))
    res = launched([PYTHON, tmp_path/'s.py'], 120, cwd=tmp_path)
    assert res.returncode == 0 and res.left == {}, res.stderr
    n = n or 1
    assert said(res.stdout) == [[r, n, r, 3, n*(n+1)//2, multiprocessing.get_start_method()] for r in range(n)]


def test_call_main_without_a_guard(tmp_path):
    (tmp_path/'s.py').write_text('from fastdist.world import *\ncall_main(get_rank, n=2)\n')
    res = launched([PYTHON, tmp_path/'s.py'], 60, cwd=tmp_path)
    assert res.returncode == 1 and res.left == {} and "has to stand under `if __name__=='__main__':`" in res.stderr, res.stderr


def test_call_main_passes_signals_on(tmp_path):
    "SIGTERM reaches the workers, which may save; the status is theirs"
    (tmp_path/'s.py').write_text(textwrap.dedent("""
        import os, signal, time
        from fastdist.world import *
        def main():
            signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'saved\\n'), os._exit(143)))
            open(f'ready{get_rank()}', 'w').close()
            time.sleep(60)
        if __name__ == '__main__': call_main(main, n=2)
        """))
    def end(proc, mark):
        wait_for(lambda: all((tmp_path/f'ready{r}').exists() for r in range(2)), 'the workers', 60)
        proc.terminate()
    res = launched([PYTHON, 's.py'], 60, cwd=tmp_path, during=end)
    assert res.stdout.count('saved') == 2 and res.returncode == 143 and res.left == {}, res


def in_a_group(file):
    "All ways to begin, in a group that the script has made by itself; and an error of rank 1's in it"
    import torch.distributed as dist
    from fastai.basics import set_seed
    from fastai.test_utils import synth_learner
    import fastdist.all
    from fastdist.world import RemoteError, call_main, distributed_init, fail_together, get_local_rank, get_rank, setup_distrib
    from fastdist.world import get_local_world_size
    rank, before = int(os.environ['MY_RANK']), dict(os.environ)
    dist.init_process_group('gloo', init_method=f'file://{file}', rank=rank, world_size=2)
    setup_distrib()
    res = [distributed_init(), distributed_init(world_size=2, rank=rank), call_main(get_rank), call_main(get_rank, n=2), get_rank(),
           get_local_rank()]
    errors = []
    for f in lambda: distributed_init(world_size=3, rank=rank), lambda: call_main(get_rank, n=3):
        try: f()
        except ValueError as e: errors.append(str(e))
    set_seed(1)
    learn = synth_learner(n_trn=3, n_val=3)
    with learn.no_logging(), learn.distrib_ctx(split_batches=True): learn.fit(2)
    res += [dist.is_initialized(), get_local_world_size(), {k: v for k, v in os.environ.items() if before.get(k) != v}]
    try:
        with fail_together():
            if rank: raise ValueError('no disk')
            dist.barrier()
    except RemoteError as e: errors.append(e.type)
    except ValueError as e: errors.append(type(e).__name__)
    return res, errors, list(learn.recorder.values[-1])


def test_a_group_that_somebody_else_has_made(tmp_path):
    "It is used as it is, whatever the environment says: `accelerate.debug_launcher` sets WORLD_SIZE and no RANK"
    from fastai.basics import set_seed
    from fastai.test_utils import synth_learner
    set_seed(1)
    learn = synth_learner(n_trn=3, n_val=3)
    with learn.no_logging(): learn.fit(2)
    env = dict(WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT='29500', ACCELERATE_USE_CPU='yes')
    for r, o in enumerate(started(in_a_group, [dict(env, MY_RANK=str(r)) for r in range(2)], tmp_path/'store')):
        res, errors, values = o
        assert res == [*[r]*6, True, 2, {}] and values == pytest.approx(list(learn.recorder.values[-1]), rel=1e-5), o
        assert 'cannot be rank' in errors[0] and 'n=3 workers cannot be started' in errors[1] and errors[2] == 'ValueError', errors


def downloads(rank, folder, per_node):
    import time
    from pathlib import Path
    import torch.distributed as dist
    from fastdist.world import rank0_first, rank0_read, get_world_size
    calls = []
    def get(name):
        calls.append((Path(folder)/name).exists())
        time.sleep(0.3)
        (Path(folder)/name).write_text('x')
        return rank
    res = [rank0_first(get, 'a'), rank0_first(get, 'b', per_node=per_node), get_world_size(), dist.is_initialized(), rank0_read(get, 'c'), calls]
    def fail(): raise ValueError('no disk')
    for f in rank0_first, rank0_read:
        try: f(fail)
        except Exception as e: res.append((type(e).__name__, getattr(e, 'type', None), 'no disk' in str(e)))
    return res


@pytest.mark.parametrize('per_node', [False, True])
def test_rank0_first_without_a_group(tmp_path, per_node):
    "It makes none: the workers wait through the store"
    envs = slurm(4, 2)
    res = started(lambda: downloads(int(os.environ['SLURM_PROCID']), tmp_path, per_node), envs)
    for r, o in enumerate(res):
        err = ('ValueError', None, True) if r == 0 else ('RemoteError', 'ValueError', True)
        first = r == 0, r % 2 == 0 if per_node else r == 0
        assert o[:5] == [r, r, 4, False, 0] and o[6:] == [err, err], o
        assert o[5][0] == (r > 0) and len(o[5]) == 2 + (r == 0) and (first[1] or o[5][1]), o


def test_agents_that_count_differently():
    "A node that comes later, or again, counts restarts from 0; what an earlier start of as many workers has written is still there"
    from torch.distributed import TCPStore
    agent = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    env = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(agent.port), TORCHELASTIC_USE_AGENT_STORE='True', TORCHELASTIC_RUN_ID='1',
               WORLD_SIZE='2', LOCAL_WORLD_SIZE='1',
               LOCAL_RANK='0')
    for counts in ('00', '00', '10'):
        res = started(lambda: me(timeout=20)[0][-1],
                      [dict(env, RANK=str(r), GROUP_RANK=str(r), TORCHELASTIC_RESTART_COUNT=n) for r, n in enumerate(counts)])
        assert res == [[0, 1]]*2, (counts, res)
