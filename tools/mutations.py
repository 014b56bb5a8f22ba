"""What a user types or sets, changed at random: each ends as a plan (a dry run), or as an error that names its subject; never as a traceback,
and nothing is started. `python tools/mutations.py [-n 500] [--seed 0] [--kind KIND] [--show]` prints what breaks that; tests run a slice of it.

All runs in this process, in a folder of its own: the commands are called as functions, and an audit hook sees what they would start."""
import contextlib, io, os, random, re, shlex, sys, tempfile, traceback, warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

# Values that no option, key or variable expects, or that a shell, TOML or Slurm would take apart
NASTY = ['', ' ', '0', '-1', '1', '3', '1e3', '1.5', '99999999999999999999', 'nan', 'inf', 'two', '\uff11', '1_0', '0x10', ' 2', '2 ', '2,2', 'a\nb', '2\n', '\t', '\udcff',
         "it's", '"', "'", '`id`', '$(id)', '$HOME', '%s', '%j', '{}', '../x', '/', '.', 'ü', '🙂', '-', '--', '---', '-x', '=', ':', ':0', ':70000', ':x', '[', ']', '[::1]', '::1',
         '[::1]:29500', 'host:', 'host:0', 'host:70000', 'a b', 'a;b', '#', 'true', 'None', 'tcp://[', 'tcp://x:y', 'file://', 'env://', '2(x', '2(x3)', '2(x0)', 'n[1-', '1'*400]
VARIABLES = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_RESTART_COUNT', 'TORCHELASTIC_USE_AGENT_STORE',
             'FASTDIST_LAUNCHER', 'ACCELERATE_USE_CPU', 'ACCELERATE_MIXED_PRECISION', 'ACCELERATE_DYNAMO_BACKEND', 'OMP_NUM_THREADS')
SLURM = ('SLURM_JOB_ID', 'SLURM_STEP_ID', 'SLURM_PROCID', 'SLURM_LOCALID', 'SLURM_NODEID', 'SLURM_NTASKS', 'SLURM_NPROCS', 'SLURM_NTASKS_PER_NODE', 'SLURM_TASKS_PER_NODE',
         'SLURM_STEP_NUM_TASKS', 'SLURM_STEP_NUM_NODES', 'SLURM_STEP_TASKS_PER_NODE', 'SLURM_STEP_NODELIST', 'SLURM_JOB_NODELIST', 'SLURM_JOB_NUM_NODES', 'SLURM_NNODES',
         'SLURM_JOB_CPUS_PER_NODE', 'SLURM_GTIDS', 'SLURM_DISTRIBUTION', 'SLURMD_NODENAME', 'MASTER_PORT', 'MASTER_ADDR')
PREFIXES = ('SLURM', 'ENVIRONMENT', 'RANK', 'WORLD_SIZE', 'LOCAL_', 'GROUP_', 'MASTER_', 'TORCHELASTIC', 'ACCELERATE', 'FASTDIST', 'PET_', 'OMP_')

LAUNCH = ['-n 2 s.py a b', '--nproc-per-node 2 --log-dir logs s.py', '--nnodes 2 --rdzv-endpoint n1:29500 --node-rank 1 -n 4 s.py', '-n 2 --max-restarts 2 --tee 3 -m own.train x',
          '--cpu --mixed_precision no -n 3 s.py', '--nnodes 2 --rdzv-endpoint [::1]:29500 --node_rank 0 s.py', '--num_processes 2 --main_process_port 0 --dynamo_backend no s.py',
          '--config_file a.yaml s.py', '--num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 29501 s.py']
CHECK = ['-n 2', '--timeout 60 --shared . -n 2', '--nnodes 2 --rdzv-endpoint n1:29500 --node-rank 1 --nproc-per-node 2', '--cpu', '--config_file a.yaml']
TRAIN = ['c.toml', 'c.toml epochs=3 learner_args.n=7', 'c.toml distributed_world_size=2 use_cuda_if_available=false', 'c.toml seed=3 save=x.pkl precision=fp32']
JOBS = ['--nodes 4 --gpus 8 --time 12:00:00 s.py --epochs 5', '--workers 2 --logs logs --job-name night s.py', '--nodes 2 --gpus a100:2 --cpus-per-gpu 3 --mem 64G --requeue 3 --time 2-12 s.py',
        's.py --workers 2 --partition p --account a -- x y', '--workers 2 --max-restarts 2 --warn 60 --sbatch=--qos=low --launch=--tee=3 -m own.train',
        "--workers 1 --env-setup 'module load python' --venv venv s.py"]
CONFIG = '''learner = "mine:get"
distributed_world_size = 2
use_cuda_if_available = false
precision = "fp32"
strategy = "ddp"
split_batches = true
fit = "fit_one_cycle"
epochs = 2
learning_rate = 1e-3
seed = 7
save = "out.pkl"

[learner_args]
n = 23
bs = 5
'''
FILES = {'s.py': 'raise SystemExit("the script was run")\n', 'own/__init__.py': '', 'own/train.py': 'raise SystemExit("the module was run")\n',
         'mine.py': 'def get(n=1, bs=2, path=None): raise SystemExit("the learner was made")\n', 'quits.py': 'import sys\nsys.exit(0)\ndef get(): pass\n',
         'a.yaml': 'compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\nnum_machines: 1\nuse_cpu: true\n', 'venv/bin/python': '', 'venv/bin/activate': ''}

TORCHRUN = dict(RANK='1', WORLD_SIZE='4', LOCAL_RANK='1', LOCAL_WORLD_SIZE='2', GROUP_RANK='0', MASTER_ADDR='127.0.0.1', MASTER_PORT='29500', TORCHELASTIC_RESTART_COUNT='0',
                TORCHELASTIC_USE_AGENT_STORE='True', TORCHELASTIC_RUN_ID='x')
ENVS = [{}, TORCHRUN, dict(TORCHRUN, ACCELERATE_MIXED_PRECISION='no', ACCELERATE_USE_CPU='true'), dict(RANK='0', WORLD_SIZE='2', MASTER_ADDR='n1', MASTER_PORT='29500'),
        dict(MASTER_ADDR='127.0.0.1', MASTER_PORT='29500', ACCELERATE_USE_CPU='1')]
TASK = dict(SLURM_JOB_ID='12', SLURM_STEP_ID='0', SLURM_PROCID='3', SLURM_LOCALID='1', SLURM_NODEID='1', SLURM_NTASKS='4', SLURM_STEP_NUM_TASKS='4', SLURM_STEP_NUM_NODES='2',
            SLURM_NPROCS='4', SLURM_TASKS_PER_NODE='2(x2)', SLURM_STEP_TASKS_PER_NODE='2(x2)', SLURM_STEP_NODELIST='n[1-2]', SLURM_JOB_NODELIST='n[1-2]', SLURM_JOB_NUM_NODES='2',
            SLURM_GTIDS='2,3', SLURMD_NODENAME='n2')
NODE = dict(TASK, SLURM_PROCID='1', SLURM_LOCALID='0', SLURM_NTASKS='2', SLURM_STEP_NUM_TASKS='2', SLURM_NPROCS='2', SLURM_TASKS_PER_NODE='1(x2)', SLURM_STEP_TASKS_PER_NODE='1(x2)', SLURM_GTIDS='1')
BATCH = dict(SLURM_JOB_ID='12', SLURM_PROCID='0', SLURM_LOCALID='0', SLURM_NODEID='0', SLURM_NTASKS='2', SLURM_JOB_NUM_NODES='2', SLURM_NNODES='2', SLURM_JOB_NODELIST='n[1-2]',
             SLURM_JOB_CPUS_PER_NODE='4(x2)', SLURM_TASKS_PER_NODE='1(x2)', SLURMD_NODENAME='n1', ENVIRONMENT='BATCH')


@dataclass
class Case:
    "One run: a command line, the environment, and what may stand in the message of an error"
    command: list
    names: set
    env: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)
    folder: str = ''  # below the folder of the run
    verify: object = None  # Function of the plan and the folder: what is wrong with it
    wrong: bool = False  # No plan can come of it


class Started(BaseException): "A process was to be started, or a port opened"

_watching = False
_events = {'subprocess.Popen', 'os.exec', 'os.fork', 'os.forkpty', 'os.posix_spawn', 'os.system', 'os.spawn', 'socket.bind', 'socket.connect'}

def _hook(event, args):
    if not _watching or event not in _events: return
    if event == 'socket.connect' and args[1] and args[0].type == 2: return  # a datagram socket: it sends nothing
    # Accelerate looks for a free port of this machine, and closes it at once
    if event == 'socket.bind' and args[1] == ('', 0) or event == 'socket.connect' and args[1] and args[1][0] == 'localhost': return
    raise Started(f'{event} {args[:2]}')

_hooked = []


def worker_plan(_):
    "What a worker finds out from its environment"
    from fastdist.world.ranks import from_env
    from fastdist.world.rendezvous import infer_init_method
    print(from_env(), infer_init_method())
    return 0


def command(name):
    if name == 'worker': return worker_plan
    from importlib import import_module
    from fastdist.__main__ import commands
    return import_module(f'fastdist.{commands[name][0]}').main


def run(case, folder):
    "(outcome, text): 'plan', 'error' or a fault, in words, and what was printed"
    global _watching
    if not _hooked:
        import accelerate.commands.launch, fastdist.launch.cli, fastdist.world  # importing torch looks for libraries with a process
        _hooked.append(sys.addaudithook(_hook))
    main, old_env, old_dir, old_path, out = command(case.command[0]), dict(os.environ), os.getcwd(), list(sys.path), io.StringIO()
    for k in list(os.environ):
        if k.startswith(PREFIXES): del os.environ[k]
    os.environ.update(case.env, PATH=str(Path(sys.executable).parent))  # none of Slurm's commands
    here = Path(folder)/case.folder
    for f, text in {**(FILES if case.folder else {}), **case.files}.items():
        (here/f).parent.mkdir(parents=True, exist_ok=True)
        (here/f).write_bytes(text.encode('utf-8', 'surrogateescape'))
    os.chdir(here)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), warnings.catch_warnings():
            warnings.simplefilter('ignore')
            _watching, status = True, 0
            try: status = main(case.command[1:])
            except SystemExit as e: status = e.code
            finally: _watching = False
    except Started as e: return f'it would have started {e}', out.getvalue()
    except Exception as e:
        if case.command[0] != 'worker' or not isinstance(e, ValueError): return f'a traceback: {type(e).__name__}: {e}', out.getvalue()+traceback.format_exc()
        status = str(e)
    finally:
        os.chdir(old_dir)
        os.environ.clear()
        os.environ.update(old_env)
        sys.path[:] = old_path
        for m in ('mine', 'quits'): sys.modules.pop(m, None)
    text = out.getvalue() + (status if isinstance(status, str) else '')
    if not status:
        if case.wrong: return 'a plan, with a value that cannot be right', text
        wrong = case.verify(text, str(here.resolve())) if case.verify else None
        return wrong or 'plan', text
    named = [o for o in case.names if o and o in text or repr(o) in text or o and repr(o)[1:-1] in text]
    return 'error' if named else f'an error that names none of {sorted(case.names)}', text


def _bent(rng, word):
    "A word with a fault"
    kind = rng.randrange(6)
    if kind < 3 or len(word) < 2: return rng.choice(NASTY)
    i = rng.randrange(len(word))
    if kind == 3: return word[:i]
    if kind == 4: return word[:i] + rng.choice('=:-_ "\'[x0\n') + word[i:]
    return word.upper() if rng.random() < 0.5 else word[:i] + word[i+1:]


def _option(word): return word.partition('=')[0].lstrip('-') if word.startswith('-') else word


def _mutated(rng, words):
    "(words, those that a message may name): one word is dropped, doubled, moved, added or bent"
    i, kind, res = rng.randrange(len(words)), rng.randrange(8), list(words)
    if kind == 0: del res[i]
    elif kind == 1: res.insert(i, words[i])
    elif kind == 2 and len(words) > 1:
        j = min(i, len(words)-2)
        res[j:j+2] = res[j+1], res[j]
    elif kind == 3: res.insert(i, rng.choice(NASTY))
    else: res[i] = _bent(rng, words[i])
    near = {*words[max(0, i-2):i+3], *res[max(0, i-2):i+3]}
    return res, {o for w in near for o in (w, _option(w))}


def of_command_line(rng):
    "Words of a command"
    name, bases, first = rng.choice([('launch', LAUNCH, ['--dry-run']), ('check', CHECK, ['--dry-run']), ('train', TRAIN, ['--dry-run']), ('slurm', JOBS, ['-o', '-'])])
    base = rng.choice(bases)
    words, names = _mutated(rng, shlex.split(base))
    if rng.random() < 0.2: words, names = (lambda w, n: (w, n | names))(*_mutated(rng, words or ['s.py']))
    return Case([name, *first, *words], names | {'script', 'config'}, files={'c.toml': CONFIG})


def of_config(rng):
    "The file of `fastdist train`, or a word after it"
    lines, words, names = CONFIG.split('\n'), [], {'c.toml:'}
    i, kind = rng.randrange(len(lines)), rng.randrange(9)
    key, eq, value = lines[i].partition(' = ')
    if kind == 0: del lines[i]
    elif kind == 1: lines.insert(i, lines[i])
    elif kind == 2: lines[i:] = [lines[i][:rng.randrange(len(lines[i])+1)]]
    elif kind == 3 and lines[i]:
        k = rng.randrange(len(lines[i]))
        lines[i] = lines[i][:k] + rng.choice('[]"\'=.#\\\n\x00\x7f') + lines[i][k:]
    elif kind == 4 and eq: lines[i] = f'{_bent(rng, key)} = {value}'
    elif kind == 5 and eq:
        words = [f'{key}={_bent(rng, value)}'] if rng.random() < 0.7 else _mutated(rng, [f'{key}={value}'])[0]
        names |= {f'argument {o}' for o in words} | {key, *words}
    elif kind == 6: lines[0] = f'learner = "{rng.choice(["quits:get", "nowhere:get", "mine:none", "os:system", "sys:exit", "json.tool:main", "mine", ":get", "mine:", "quits.x:get", "..:x"])}"'
    elif eq: lines[i] = f'{key} = ' + (_quoted(rng.choice(NASTY)) if rng.random() < 0.5 else rng.choice(['[]', '{}', '[1, "a"]', 'nan', '-inf', '1979-05-27', 'true', '0', '-7', '1e400', '"x" "y"', '1'*30]))
    return Case(['train', '--dry-run', 'c.toml', *words], names, files={'c.toml': '\n'.join(lines)})


def _quoted(text): return '"' + ''.join(c if c.isprintable() and c not in '"\\' and not '\ud800' <= c <= '\udfff' else f'\\u{ord(c) if ord(c) < 0xd800 else 0xe9:04x}' for c in text) + '"'


def _set(rng, env, names):
    "(environment, the name of the variable that is changed)"
    k = rng.choice([*env, *env, *names])
    if k in env and rng.random() < 0.2: return {o: v for o, v in env.items() if o != k}, k
    return dict(env, **{k: rng.choice([o for o in NASTY if '\0' not in o])}), k


NUMBERS = {'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'MASTER_PORT', 'SLURM_JOB_ID', 'SLURM_PROCID', 'SLURM_LOCALID', 'SLURM_NODEID', 'SLURM_STEP_NUM_TASKS'}

def _in(base, env, k, names, rng):
    "A run in `env`, which has another value for `k` than `base`"
    asked, v = rng.choice(ASKED), env.get(k, '0')
    try: number = int(v) >= 0
    except ValueError: number = False
    return Case(asked, names, env, {'c.toml': CONFIG}, wrong=asked == ['worker'] and k in base and k in NUMBERS and not number and ('RANK' in base or 'SLURM_STEP_ID' in base))


ASKED = [['worker'], ['worker'], ['launch', '--dry-run', '-n', '2', 's.py'], ['launch', '--dry-run', '--cpu', 's.py'], ['check', '--dry-run'], ['train', '--dry-run', 'c.toml']]

def of_environment(rng):
    "What launchers and users set"
    base = rng.choice(ENVS)
    env, k = _set(rng, base, VARIABLES)
    # a launcher tells of workers that an earlier one has left in the environment, whatever else is there
    return _in(base, env, k, {k, '`unset '} | ({'accelerate launch'} if 'MASTER_PORT' in env else set()), rng)


def of_slurm(rng):
    "What Slurm sets"
    base = rng.choice([TASK, NODE, BATCH])
    env, k = _set(rng, base, SLURM)
    # two tasks of a node have no business with a launcher, nor has the script of a job with a single worker: both are told so anyhow
    return _in(base, env, k, {k, 'srun', '-n 2'}, rng)


def _wrong_job(text, given, folder):
    "What is wrong with a job's text, of which the words `given` are expected in the lines for Slurm"
    lines = text.split('\n')
    head = [o for o in lines[1:] if not o.startswith('# ')]
    head = head[:next(i for i, o in enumerate(head) if not o.startswith('#SBATCH'))]
    if lines[0] != '#!/bin/bash' or not head: return 'a job without its first lines'
    found = {}
    for o in head:
        try: words = shlex.split(o[len('#SBATCH '):])
        except ValueError: words = []
        if len(words) != 1 or not words[0].startswith('-'): return f'a line for Slurm that is not one option: {o}'
        k, _, found[k] = words[0].partition('=')
    if found.get('--chdir') != folder: return f'--chdir is {found.get("--chdir")!r}, and not {folder!r}'
    return next((f'{k} is {found.get(k)!r}, and not {v!r}' for k, v in given.items() if found.get(k) != v), None)


def of_names(rng):
    "Names and folders of a job, and the folder in which it is written"
    nasty = [o for o in NASTY if o and '\0' not in o] + ['night run', 'a\nb', 'a\n#SBATCH --nodes=9', "x'; rm -rf y; '", '%x', '\\', 'a\rb', '*']
    options = {k: rng.choice(nasty) for k in rng.sample(['--job-name', '--logs', '--partition', '--account', '--launch', '--sbatch', '--env-setup', '--venv', '-o', '--mem', '--time'], rng.randrange(3))}
    folder, file = 'job', 's.py'
    files = {}
    if rng.random() < 0.4: folder = 'job/' + rng.choice([o for o in nasty if '/' not in o and o != '.' and len(o) < 99])
    if rng.random() < 0.3: file = rng.choice([o for o in nasty if '/' not in o and o != '.' and len(o) < 99]) + '.py'
    if options.get('--venv', '').strip('/.') and '/' not in options['--venv'] and len(options['--venv']) < 99: files = {f'{options["--venv"]}/bin/python': ''}
    names = {'current folder', file, *options, *options.values(), *(['script', '--job-name'] if file != 's.py' else [])}
    words = [f'{k}={v}' if k != '-o' else f'-o{v}' for k, v in options.items()]
    out = ['-o-'] if '-o' not in options else []
    arg = [rng.choice(nasty)] if rng.random() < 0.3 else []
    want = {k: options[k] for k in ('--job-name', '--partition', '--account') if k in options}
    def verify(text, here): return None if '-o' in options else _wrong_job(text, want, here)
    return Case(['slurm', '--workers', '2', *out, *words, file, *arg], names | set(arg), folder=folder, files={file: '', **files}, verify=verify)


KINDS = {'command line': of_command_line, 'config': of_config, 'environment': of_environment, 'Slurm variables': of_slurm, 'names': of_names}


def faults(kind, n, seed=0, show=None):
    "(case, outcome, text) of what is wrong among `n` mutations; `show` is called with each"
    rng, res = random.Random(f'{kind} {seed}'), []
    for i in range(n):
        case = KINDS[kind](rng)
        with tempfile.TemporaryDirectory(prefix='mutations') as d:
            for f, text in FILES.items():
                (Path(d)/f).parent.mkdir(parents=True, exist_ok=True)
                (Path(d)/f).write_text(text)
            outcome, text = run(case, d)
        if show: show(case, outcome, text)
        if outcome not in ('plan', 'error'): res.append((case, outcome, text))
    return res


def main():
    import argparse
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('-n', type=int, default=500)
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--kind', choices=list(KINDS))
    p.add_argument('--show', action='store_true', help="print each case, and what came of it")
    a, total = p.parse_args(), 0
    def show(case, outcome, text):
        if a.show: print(f'{outcome}: {case.command} {case.names} {case.env or ""}\n    {text.strip().splitlines()[-1:] }')
    for kind in [a.kind] if a.kind else KINDS:
        counts = {}
        def count(case, outcome, text):
            counts[outcome] = counts.get(outcome, 0)+1
            show(case, outcome, text)
        found = faults(kind, a.n, a.seed, count)
        total += len(found)
        for case, outcome, text in found:
            print(f'--- {kind}: {outcome}\n{case.command}\n{ {k: v for k, v in case.env.items()} or ""} {case.files.get("c.toml", "") if kind=="config" else ""}\n{text.strip()[-300:]}')
        print(f'{kind}: {a.n} mutations, {counts.get("plan", 0)} plans, {counts.get("error", 0)} errors that name their subject, {len(found)} faults', flush=True)
    return total > 0


if __name__ == '__main__': sys.exit(main())
