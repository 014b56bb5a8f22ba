"`fastdist slurm` on a real Slurm with two nodes, in the ways in which jobs begin and end there"
import json, os, re, shlex, sys, textwrap

import pytest
from harness import ROOT, launched

SLURM = [sys.executable, '-m', 'fastdist', 'slurm']
CPU = {'CUDA_VISIBLE_DEVICES': ''}
TIMEOUT = 280
# Submit, run what is given for the job $JOB meanwhile, wait until Slurm has done with it, and say how it ended
FOLLOW = '''
said=$({submit}) || exit $?
echo "$said"
JOB=$(echo "$said" | grep -o 'submitted job [0-9]*' | cut -d' ' -f3)
until_log() {{ for i in $(seq 1800); do grep -qs -- "$1" {logs}/*-$JOB.out && return; sleep 0.1; done; echo "never: $1"; exit 1; }}
{then}
for i in $(seq 1500); do [ -z "$(squeue --noheader --jobs=$JOB 2>/dev/null)" ] && break; sleep 0.1; done
scontrol --oneliner show job $JOB
'''


class Job:
    def __init__(self, r, folder):
        assert r.returncode == 0, f'{r.stdout}\n{r.stderr}'
        self.said, self.left = r.stdout + r.stderr, r.left
        self.id = re.search('submitted job ([0-9]+)', r.stdout)[1]
        self.state, self.exit, self.restarts = (re.search(rf'\b{o}=(\S+)', r.stdout)[1] for o in ('JobState', 'ExitCode', 'Restarts'))
        [file] = folder.glob(f'*/*-{self.id}.out')
        self.log = file.read_text(errors='replace')


def follow(slurm, folder, *args, then='', logs='logs', env=None):
    "The end of a job that `fastdist slurm --submit` has submitted"
    text = FOLLOW.format(submit=shlex.join(map(str, [*SLURM, '--submit', *args])), then=then, logs=shlex.quote(logs))
    return Job(slurm.run(['bash', '-c', text], {**CPU, **(env or {})}, TIMEOUT, folder), folder)


def write(folder, text, name='train.py'): (folder/name).write_text(textwrap.dedent(text))


@pytest.mark.cold
def test_what_is_hard_to_pass_on(slurm, tmp_path):
    "Spaces and quotes in arguments, folders and options of Slurm's; a module; a set-up; a job that is to have no environment"
    folder = tmp_path/"my 'own' folder"
    (folder/'pkg').mkdir(parents=True)
    write(folder, '''
        import json, os, sys
        names = 'RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'OMP_NUM_THREADS', 'MINE', 'SLURM_CPUS_PER_TASK', 'SLURM_NODEID'
        os.write(1, ('said ' + json.dumps([sys.argv[1:], os.getcwd(), {o: os.environ.get(o) for o in names}]) + '\\n').encode())
        ''', 'pkg/show.py')
    hard = ["it's", 'a "b" c', '$HOME `date` \\', 'two\nlines\n#SBATCH --nodes=9', '', '*', '--nodes', '3']
    setup = f"cd . && alias x=y; export PATH={os.path.dirname(sys.executable)}:$PATH PYTHONPATH={ROOT} MINE='a  b'"
    job = follow(slurm, folder, '--nodes', 2, '--workers', 1, '--cpus-per-task', 3, '--time', '0:10:00', '--job-name', 'my job',
                 '--logs', 'the logs', '--export=NONE', '--comment=two', '--env-setup', setup,
                 '--launch=--tee 3', '-m', 'pkg.show', *hard, logs='the logs', env={'OMP_NUM_THREADS': ''})
    assert (job.state, job.exit) == ('COMPLETED', '0:0') and 'Comment=two ' in job.said, job.log
    lines = [json.loads(o.partition('said ')[2]) for o in job.log.splitlines() if 'said [' in o]
    said = {d['RANK']: (argv, cwd, d) for argv, cwd, d in lines}
    assert '0' in said, job.log
    for rank, (argv, cwd, d) in said.items():
        assert (argv, cwd) == (hard, str(folder)), job.log
        assert d == dict(RANK=rank, WORLD_SIZE='2', LOCAL_WORLD_SIZE='1', OMP_NUM_THREADS='3', MINE='a  b', SLURM_CPUS_PER_TASK='3',
                         SLURM_NODEID=rank)


FAIL = '''
    import time
    from fastdist.world import *
    setup_distrib(timeout=100)
    import torch, torch.distributed as dist
    dist.barrier()
    if get_rank() == 2: raise ValueError('no such thing')
    dist.all_reduce(torch.ones(1))
    time.sleep(1000)
    '''


def test_a_worker_fails(slurm, tmp_path):
    "A worker of the second node, whose output is not on the screen"
    write(tmp_path, FAIL)
    job = follow(slurm, tmp_path, '--nodes', 2, '--workers', 2, '--time', 10, 'train.py')
    assert (job.state, job.exit) == ('FAILED', '1:0') and not job.left, job.log
    assert 'ValueError: no such thing' in job.log and "if get_rank() == 2: raise ValueError('no such thing')" in job.log


# as in docs/checkpoints.md; the first run pauses, so that its time ends before it does
SAVES = '''
    import time
    from fastai.basics import *
    from fastdist.all import *

    class Pause(Callback):
        def after_batch(self):
            if is_master() and self.iter == 3: print('trains', flush=True)
            if 'SLURM_RESTART_COUNT' not in os.environ: time.sleep(0.5)

    torch.manual_seed(0)
    x = torch.randn(400, 3)
    items = list(zip(x, x.sum(1, keepdim=True)))
    dls = DataLoaders.from_dsets(items, items, bs=8, num_workers=1)
    learn = Learner(dls, nn.Linear(3, 1), loss_func=MSELossFlat(), cbs=Pause())
    with learn.no_bar(), learn.distrib_ctx(): learn.fit(10, 1e-3)
    if is_master(): print('done', flush=True)
    '''


def test_time_limit(slurm, tmp_path):
    "Slurm warns, the workers save and stop, the job goes back into the queue, and the second run goes on"
    write(tmp_path, SAVES)
    # An end in one to two minutes: Slurm may warn a minute early, and does. The second run has as much time as the first was to have
    then = '''until_log trains
minutes=$(squeue --noheader --jobs=$JOB --format=%M | cut -d: -f1)
scontrol update JobId=$JOB TimeLimit=$((minutes + 2))
until_log "back into the queue"
scontrol update JobId=$JOB TimeLimit=10'''
    job = follow(slurm, tmp_path, '--nodes', 2, '--workers', 1, '--time', 10, '--requeue', 1, '--warn', 40, 'train.py', then=then)
    assert (job.state, job.exit, job.restarts) == ('COMPLETED', '0:0', '1') and not job.left, job.log
    found = [o for o in re.findall('trains|time limit comes near|saved|back into the queue|run 2|Going on|done', job.log)]
    assert list(dict.fromkeys(found)) == ['trains', 'time limit comes near', 'saved', 'back into the queue', 'run 2', 'Going on',
                                          'done'], job.log
    assert found.count('time limit comes near') == 1


@pytest.mark.parametrize('args,says', [
    (['train.py', '--gpus', '2'], 'Give --gpus 8 for 8 GPUs, or --workers 4 for 4 workers on the CPU, before the script'),
    (['--gpus', '2', '--mail-user', 'ada', 'train.py'], "there is no file 'ada': it is the script"),
    (['--gpus', '2', '--launch=--mixed_precison bf16', 'train.py'], 'unrecognized arguments: --mixed_precison'),
    (['--gpus', '2', '--submit', 'train.py'], 'there is no `sbatch` on this machine')])
def test_wrong(tmp_path, args, says):
    "Where there is no Slurm: the message, and nothing is written"
    write(tmp_path, '')
    (tmp_path/'bin').mkdir()
    r = launched([*SLURM, *args], 30, {'PATH': str(tmp_path/'bin')}, tmp_path)
    assert r.returncode not in (0, None) and says in r.stderr and 'Traceback' not in r.stderr, r.stderr
    assert not list(tmp_path.glob('*.sbatch'))
