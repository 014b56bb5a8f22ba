"P6: what `fastdist launch` adds to Accelerate's launcher"
import signal, subprocess, sys, textwrap, time
from pathlib import Path

import psutil, pytest
from harness import launched, processes, wait_for
from torch.distributed.elastic.utils.distributed import get_free_port

LAUNCH = [str(Path(sys.executable).with_name('fastdist')), 'launch']  # as a user types it


def script(folder, text, name='s.py'):
    (folder/name).write_text(textwrap.dedent(text))
    return name


SAYS = '''
    import os, sys, time
    rank = int(os.environ.get('RANK', 0))
    print(f'out of {rank}', flush=True)
    print(f'err of {rank}', file=sys.stderr, flush=True)
    '''


def test_logs(tmp_path):
    "Rank 0 is on the screen, in the stream that it wrote to; all are in files, which a second run does not overwrite"
    for i in range(2):
        res = launched([*LAUNCH, '-n', '3', '--log-dir', 'logs', script(tmp_path, SAYS)], 60, cwd=tmp_path)
        assert res.returncode == 0 and res.stdout == 'out of 0\n', res
        assert 'err of 0' in res.stderr and 'err of 1' not in res.stderr and 'logs in logs' in res.stderr
    names = [f'rank{r}{again}.{o}.log' for r in range(3) for again in ('', '.1') for o in ('stdout', 'stderr')]
    assert sorted(o.name for o in (tmp_path/'logs').iterdir()) == sorted(names)
    for r in range(3):
        for again in ('', '.1'):
            assert (tmp_path/'logs'/f'rank{r}{again}.stdout.log').read_text() == f'out of {r}\n'
            assert f'err of {r}\n' in (tmp_path/'logs'/f'rank{r}{again}.stderr.log').read_text()


def test_full_disk(tmp_path):
    "The screen goes on where a log takes no more, and says so once; rank 0 waited for ever, for a pipe that nobody read"
    file = script(tmp_path, """
        import os
        if os.environ.get('RANK', '0') == '0':
            for i in range(5000): print(f'{i:0100}')
        """)
    # files of 32 KB at most, and a screen that is none
    limited = ['bash', '-o', 'pipefail', '-c', '(ulimit -f 32; exec "$@") | cat', 'bash']
    res = launched([*limited, *LAUNCH, '-n', '2', '--log-dir', 'logs', file], 60, cwd=tmp_path)
    assert res.returncode == 0, (res.returncode, res.stderr, res.stdout[-300:])
    assert res.stdout == ''.join(f'{i:0100}\n' for i in range(5000)), (res.returncode, res.stderr, res.stdout[-300:])
    told = 'fastdist: logs/rank0.stdout.log takes no more (File too large): what comes now is on the screen only'
    assert [o for o in res.stderr.splitlines() if 'starting' not in o and 'logs in' not in o] == [told], res.stderr


def test_exit_status(tmp_path):
    for n in ('1', '2'): assert launched([*LAUNCH, '-n', n, script(tmp_path, 'raise SystemExit(7)')], 60, cwd=tmp_path).returncode == 7


def test_restarts(tmp_path):
    "All workers start again, and meet again; tools/restarts.py does so more often, and with all launchers"
    file = script(tmp_path, '''
        import os, sys
        from fastdist.world import *
        setup_distrib(timeout=60)
        count = int(os.environ['TORCHELASTIC_RESTART_COUNT'])
        if count < 3 and get_rank() == count: os.kill(os.getpid(), 9)
        print('in restart', count, all_gather_list(get_rank()), flush=True)
        ''')
    res = launched([*LAUNCH, '-n', '3', '--max-restarts', '4', '--log-dir', 'logs', file], 120, cwd=tmp_path)
    assert res.returncode == 0 and 'in restart 3 [0, 1, 2]' in res.stdout, res
    assert 'all workers are started again, 3 on 1 node (restart 1 of 4); logs in logs' in res.stderr
    assert 'in restart 3' in (tmp_path/'logs'/'rank2.3.stdout.log').read_text()


@pytest.mark.parametrize('sig,code,n', [(signal.SIGTERM, 143, 2), (signal.SIGINT, 130, 1)])
def test_stopped(tmp_path, sig, code, n):
    file = script(tmp_path, SAYS + 'time.sleep(1000)\n    ')
    p = subprocess.Popen([*LAUNCH, '-n', str(n), file], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert p.stdout.readline() == 'out of 0\n'
    workers = psutil.Process(p.pid).children()
    p.send_signal(sig)
    _, err = p.communicate(timeout=60)
    assert p.returncode == code and not any(o.is_running() for o in workers), err
    assert f'stopped by {sig.name}' in err.splitlines()[-1], err


def test_stopped_before_the_other_node_comes(tmp_path):
    "It waits in torch's C code then, where Python handles no signal"
    port = get_free_port()
    words = '--nnodes', '2', '--node-rank', '0', '--rdzv-endpoint', f'127.0.0.1:{port}', script(tmp_path, SAYS)
    p = subprocess.Popen([*LAUNCH, *words], stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    def listens(): return any(o.laddr.port == port for o in psutil.Process(p.pid).net_connections())
    wait_for(listens, 'the rendezvous', 60)
    time.sleep(1)
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=30)
    assert p.returncode == 130 and 'stopped by SIGINT' in err.splitlines()[-1], err


def test_module_of_this_folder(tmp_path):
    (tmp_path/'own').mkdir()
    script(tmp_path/'own', "import sys; print(__name__, __package__, sys.argv[1:], flush=True)", 'train.py')
    for n in '12':
        res = launched([*LAUNCH, '-n', n, '-m', 'own.train', '-n', '7'], 60, cwd=tmp_path)
        assert res.stdout == "__main__ own ['-n', '7']\n", res


def test_dry_run(tmp_path):
    "The plan, and what each worker would run, which can be pasted into a shell"
    res = launched([*LAUNCH, '-n', '2', '--dry-run', '--log-dir', 'logs', script(tmp_path, SAYS), 'with space'], 60, cwd=tmp_path)
    assert res.returncode == 0 and not (tmp_path/'logs').exists()
    plan, command = res.stdout.splitlines()
    assert plan.startswith('fastdist: starting 2 workers on ') and command.endswith("s.py 'with space'"), res
    res = launched(['sh', '-c', command], 60, cwd=tmp_path)
    assert res.returncode == 0 and res.stdout == 'out of 0\n', res


def test_config_file(tmp_path):
    "What `accelerate config` has written is meant"
    config = dict(compute_environment='LOCAL_MACHINE', distributed_type='MULTI_CPU', num_processes=2, num_machines=1, machine_rank=0,
                  mixed_precision='bf16', use_cpu='true')
    (tmp_path/'c.yaml').write_text(''.join(f'{k}: {v}\n' for k, v in config.items()))
    file = script(tmp_path, "import os; print(os.environ['WORLD_SIZE'], os.environ['ACCELERATE_MIXED_PRECISION'], flush=True)")
    res = launched([*LAUNCH, '--config_file', 'c.yaml', file], 60, cwd=tmp_path)
    assert res.stdout == '2 bf16\n', res


@pytest.mark.parametrize('args,says', [
    (['no_such.py'], "there is no file 'no_such.py'"), ([], ''), (['--nnodes', '2', 's.py'], 'Add --rdzv-endpoint HOST:29500'),
    (['-n', '2', '--use_deepspeed', 's.py'], "strategy='zero1'")], ids=['file', 'nothing', 'address', 'deepspeed'])
def test_wrong_arguments(tmp_path, args, says):
    "At once, in one line, and nothing is run"
    script(tmp_path, 'print("it runs")')
    res = launched([*LAUNCH, *args], 60, cwd=tmp_path, env={'TMPDIR': str(tmp_path)})
    if not args: assert res.returncode == 0 and 'usage: fastdist launch' in res.stdout and '--dry-run' in res.stdout
    else:
        assert res.returncode not in (0, None) and says in res.stderr.splitlines()[-1] and 'Traceback' not in res.stderr, res.stderr
        assert 'it runs' not in res.stdout and not list(tmp_path.glob('fastdist_*')), res


def test_one_of_several_machines(tmp_path):
    "A cluster that starts the same command on each machine has said so: this one would train alone"
    res = launched([*LAUNCH, '-n', '1', script(tmp_path, 'print("it runs")')], 60, dict(WORLD_SIZE='4', RANK='2'), tmp_path)
    assert res.returncode == 2 and 'RANK=2 in the environment' in res.stderr, res
    assert '--nnodes' in res.stderr and 'it runs' not in res.stdout, res


def test_killed_launcher(tmp_path):
    "No worker stays: one before the rendezvous, one in C with the interpreter's lock, nor what they have started"
    file = script(tmp_path, SAYS + """
    import ctypes, subprocess
    if rank == 1: ctypes.PyDLL(None).sleep(1000)
    subprocess.run(['sleep', '1000'])""")
    def kill(proc, mark):
        wait_for(lambda: sum('sleep 1000' in o for o in processes(mark).values()) and len(processes(mark)) > 3, 'the workers')
        proc.kill()
        wait_for(lambda: not set(processes(mark))-{proc.pid}, 'the end of all')
    res = launched([*LAUNCH, '-n', '2', file], 120, during=kill, cwd=tmp_path)
    assert res.returncode == -9 and res.left == {} and 'fastdist: the launcher was killed; ' in res.stderr, res
