"P7: workers on several hosts find each other: under Slurm's `srun`, under torchrun, by tcp:// and by file://"
import json, re, sys, time

import pytest
from hosts import ADDRESSES

# Through srun and ssh, the stacks of a worker that is stuck can only come from itself. One write a line: those of several workers would mix
BEGIN = '''
import faulthandler, json, os, socket, sys, time
faulthandler.dump_traceback_later(250, exit=True)
import torch, torch.distributed as dist
from fastdist.world import *
from fastdist.world.ranks import *
def say(**kw): os.write(1, (json.dumps(kw) + '\\n').encode())
'''
PLACE = '''
t = torch.tensor([get_rank() + 1.])
dist.all_reduce(t)
say(rank=get_rank(), local_rank=get_local_rank(), node_rank=get_node_rank(), world_size=get_world_size(),
    local_world_size=get_local_world_size(), host=socket.gethostname(), sum=t.item())
'''
CPU = {'CUDA_VISIBLE_DEVICES': ''}
TIMEOUT = 280  # each process imports all by itself, and the machine may be busy
JOB = ['-N2', '-n4', '--ntasks-per-node=2']


@pytest.fixture
def script(tmp_path):
    "`script(text)`: the command that runs it, after the imports"
    def write(text):
        file = tmp_path/f'script{len(list(tmp_path.iterdir()))}.py'
        file.write_text(BEGIN + text)
        return [sys.executable, str(file)]
    return write


def said(*results):
    "What the workers said, by rank"
    for r in results:
        assert r.returncode == 0, f'{r.stdout}\n{r.stderr}'
        assert not r.left
    lines = [json.loads(o) for r in results for o in r.stdout.splitlines() if o.startswith('{')]
    return sorted(lines, key=lambda o: (o.get('step', ''), o['rank']))


def places(names):
    "What ranks 0, 1, 2 ... on the hosts `names` should say"
    return [dict(rank=i, local_rank=names[:i].count(n), node_rank=sorted(set(names)).index(n), world_size=len(names),
                 local_world_size=names.count(n), host=n, sum=sum(range(1, len(names) + 1))) for i, n in enumerate(names)]


def test_srun(slurm, script):
    "More tasks on one host than on the other, in turn"
    r = slurm.run(['srun', '-N2', '-n3', '-m', 'cyclic', *script('setup_distrib()' + PLACE)], CPU, TIMEOUT)
    assert said(r) == places(['n1', 'n2', 'n1'])


def test_steps_at_the_same_time(slurm, script, tmp_path):
    "Two worlds whose rank 0 is on the same host. The first to be ready waits for the other, so that both are there at once"
    cmd = ' '.join(script(f'''
setup_distrib()
t = torch.tensor([get_rank() + 1.])
dist.all_reduce(t)
open({str(tmp_path/"ready")!r} + os.environ['SLURM_STEP_ID'], 'w')
while not all(os.path.exists({str(tmp_path/"ready")!r} + o) for o in '01'): time.sleep(0.1)
dist.all_reduce(t)
say(rank=get_rank(), step=os.environ['SLURM_STEP_ID'], host=socket.gethostname(), sum=t.item())'''))
    r = slurm.batch(f'srun -N2 -n2 --exact {cmd} & srun -N2 -n2 --exact {cmd} && wait $!', *JOB, env=CPU, timeout=TIMEOUT)
    assert said(r) == [dict(rank=i, step=s, host=h, sum=6) for s in '01' for i, h in enumerate(['n1', 'n2'])]


def test_step_smaller_than_its_job(slurm, script):
    "On the job's second host alone, while much of what Slurm says is about the job: the list of hosts, the tasks per node"
    cmd = ' '.join(script('setup_distrib()' + PLACE))
    r = slurm.batch(f'srun -N1 -n2 -w n2 {cmd}', *JOB, env=CPU, timeout=TIMEOUT)
    assert said(r) == places(['n2', 'n2'])


def test_forgotten_srun(slurm, script):
    """Slurm gives a batch script SLURM_PROCID=0 and the job's SLURM_NTASKS. Submitted from an interactive `srun`, it has that one's
    SLURM_STEP_ID too"""
    r = slurm.batch(' '.join(script('setup_distrib()' + PLACE)), *JOB, within=['srun', '-n1'], env=CPU, timeout=TIMEOUT)
    assert r.returncode != 0, r.stdout
    assert re.search(r'Error: .*srun python', r.stderr), r.stderr
    assert '"rank"' not in r.stdout
    assert not r.left


def test_one_task_fails(slurm, script):
    "srun waits for the other tasks (unless told to kill them), so they have to end by themselves"
    cmd = script(f'''
setup_distrib()
dist.barrier()
if get_rank() == 1:
    say(rank=1, at=time.time())
    raise ValueError('no such thing')
time.sleep(100)
say(rank=get_rank())''')
    r = slurm.run(['srun', '-N2', '-n3', *cmd], CPU, TIMEOUT)
    seconds, failed = time.time(), [json.loads(o) for o in r.stdout.splitlines() if o.startswith('{')]
    assert r.returncode != 0
    assert [o['rank'] for o in failed] == [1], r.stdout  # the others have not gone on
    assert seconds - failed[0]['at'] < 60
    assert 'ValueError: no such thing' in r.stderr
    assert not r.left


def test_torchrun(hosts, script):
    cmd = [sys.executable, '-m', 'torch.distributed.run', '--nnodes=2', '--nproc-per-node=2', f'--master-addr={ADDRESSES[0]}',
           '--master-port=29511']
    cmds = [(i, [*cmd, f'--node-rank={i}', script('setup_distrib()' + PLACE)[-1]]) for i in range(2)]
    assert said(*hosts.run_all(cmds, CPU, TIMEOUT)) == places(['n1', 'n1', 'n2', 'n2'])


SECRET = '''
from pathlib import Path
from fastdist.world.secret import SignatureError
if sys.argv[1] == 'apart': os.environ['HOME'] += f"/{os.environ['GROUP_RANK']}"
setup_distrib()
try: found = all_gather_list(Path('a')) == [Path('a')]*4
except SignatureError as e: found = 'FASTDIST_SECRET' in str(e) and str(e).startswith(f'rank {get_rank()}:')
say(rank=get_rank(), found=found)
'''


@pytest.mark.parametrize('home', ['shared', 'apart'])
def test_secret(hosts, script, home, tmp_path):
    "Hosts have the one in the home that they share; where they share none, the error says what to do"
    cmd = [sys.executable, '-m', 'torch.distributed.run', '--nnodes=2', '--nproc-per-node=2', f'--master-addr={ADDRESSES[0]}',
           '--master-port=29513']
    cmds = [(i, [*cmd, f'--node-rank={i}', script(SECRET)[-1], home]) for i in range(2)]
    env = {**CPU, 'HOME': str(tmp_path), 'FASTDIST_SECRET': None, 'TMPDIR': str(tmp_path)}
    assert [o['found'] for o in said(*hosts.run_all(cmds, env, TIMEOUT))] == [True]*4
    assert len([o for o in tmp_path.rglob('secret')]) == (1 if home == 'shared' else 2)


@pytest.mark.parametrize('method', ['tcp', 'file'])
def test_init_method(hosts, script, method, tmp_path):
    "Nothing says which ranks share a host: they find out"
    url = {'tcp': f'tcp://{ADDRESSES[0]}:29512', 'file': f'file://{tmp_path}/store'}[method]
    cmd = script(f'distributed_init({url!r}, rank=int(sys.argv[1]), world_size=3)' + PLACE)
    assert said(*hosts.run_all([(host, [*cmd, rank]) for rank, host in enumerate((0, 1, 0))], CPU, TIMEOUT)) == places(['n1', 'n2', 'n1'])
