"""Seconds from starting 2 workers to the end of their first collective, for each way of starting, and how much of it is Python's imports.

    python benchmarks/start.py

Medians of 3 rounds, in which the ways take turns. Real Slurm, and two hosts (network namespaces), are tried where they can be had (root, and Debian's
packages slurm-wlm, munge, iproute2)."""
import os, re, statistics, subprocess, sys, tempfile, time
from contextlib import ExitStack
from pathlib import Path

from shared import ROOT, environment
from harness import free_port
from hosts import ADDRESSES, Hosts, Slurm, why_no_hosts, why_no_slurm

SCRIPT = '''
import os, sys, time
import torch, torch.distributed as dist
from fastdist.world import *
begin = time.time()
def main(**kwargs):
    if not dist.is_initialized(): distributed_init(**kwargs)
    if dist.is_initialized(): dist.all_reduce(torch.ones(3))
    os.write(1, f'at {time.time()} {time.time()-begin}\\n'.encode())
if __name__ == '__main__':
    if sys.argv[1:2] == ['call_main']: call_main(main, n=2)
    elif len(sys.argv) > 1: main(init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
    else: main()
'''


def ways(script, folder):
    "Commands, by way: each is a list of (command, environment)"
    py, torchrun = [sys.executable, script], [sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node']
    slurm = lambda r: dict(SLURM_JOB_ID=str(os.getpid()), SLURM_PROCID=str(r), SLURM_LOCALID=str(r), SLURM_NTASKS='2', SLURM_NTASKS_PER_NODE='2', SLURM_JOB_NODELIST='localhost')
    p = str(free_port())
    env = lambda r: dict(RANK=str(r), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=p)
    return {
        'python (one process)': [(py, {})],
        'fastdist launch -n 2': [([sys.executable, '-m', 'fastdist', 'launch', '-n', '2', script], {})],
        'torchrun': [([*torchrun, '2', '--standalone', script], {})],
        'accelerate launch --multi_gpu': [([sys.executable, '-m', 'accelerate.commands.launch', '--multi_gpu', '--num_processes', '2', '--main_process_port', '0', '--num_machines', '1',
                                            '--mixed_precision', 'no', '--dynamo_backend', 'no', script], {'ACCELERATE_USE_CPU': 'true'})],
        'RANK, WORLD_SIZE, MASTER_*': [(py, env(r)) for r in range(2)],
        'tcp://': [([*py, f'tcp://127.0.0.1:{int(p)+1}', str(r)], {}) for r in range(2)],
        'file://': [([*py, f'file://{folder}/meet', str(r)], {}) for r in range(2)],
        "srun's environment": [(py, slurm(r)) for r in range(2)],
        'call_main(main, n=2)': [([*py, 'call_main'], {})]}


def said(texts):
    found = [list(map(float, m)) for t in texts for m in re.findall(r'at ([\d.]+) ([\d.e-]+)', t)]
    assert found, texts
    return found


def timed(cmds):
    env = environment(RES_OPTIONS='timeout:1 attempts:1')
    begin = time.time()
    procs = [subprocess.Popen(list(map(str, c)), env={**env, **e}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for c, e in cmds]
    found = said([p.communicate(timeout=120)[0] for p in procs])
    return max(o[0] for o in found)-begin, max(o[1] for o in found)


def elsewhere(script, folder, stack):
    "Functions for real Slurm and two hosts, which are up already, until `stack` ends"
    cpu = {'PYTHONPATH': str(ROOT), 'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': '1'}
    def timed_on(run):
        def f():
            begin = time.time()
            res = run()
            found = said([o.stdout for o in res])
            return max(o[0] for o in found)-begin, max(o[1] for o in found)
        return f
    res = {}
    if why := why_no_slurm(): print('no real Slurm:', why)
    else:
        s = stack.enter_context(Slurm())
        res['srun -N2 -n2 (real Slurm, two nodes)'] = timed_on(lambda: [s.run(['srun', '-N2', '-n2', sys.executable, script], cpu, 120)])
    if why := why_no_hosts(): print('no two hosts:', why)
    else:
        h = stack.enter_context(Hosts())
        run = [sys.executable, '-m', 'torch.distributed.run', '--nnodes=2', '--nproc-per-node=1', f'--master-addr={ADDRESSES[0]}', '--master-port=29511']
        res['torchrun on two hosts'] = timed_on(lambda: h.run_all([(i, [*run, f'--node-rank={i}', script]) for i in range(2)], cpu, 120))
        res['tcp:// on two hosts'] = timed_on(lambda: h.run_all([(i, [sys.executable, script, f'tcp://{ADDRESSES[0]}:29512', str(i)]) for i in range(2)], cpu, 120))
        res['file:// on two hosts'] = timed_on(lambda: h.run_all([(i, [sys.executable, script, f'file://{folder}/meet2', str(i)]) for i in range(2)], cpu, 120))
    return res


if __name__ == '__main__':
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        script, times = f'{folder}/script.py', {}
        Path(script).write_text(SCRIPT)
        more = elsewhere(script, folder, stack)
        for _ in range(3):
            for nm, cmds in ways(script, folder).items(): times.setdefault(nm, []).append(timed(cmds))
            for nm, f in more.items(): times.setdefault(nm, []).append(f())
    print('| way of starting | seconds to the first collective | of them after the imports |\n|---|---|---|')
    for nm, o in times.items(): print(f'| {nm} | {statistics.median(a for a, _ in o):.1f} | {statistics.median(b for _, b in o):.2f} |')
