"""Two hosts for tests, on this machine (Linux, as root).

`Hosts()` has two hosts, n1 and n2: `run(0, cmd)` runs a command on the first as `harness.launched` does, `run_all` one on each at once.
`Slurm()` has Slurm's daemons on them: `run(['srun', ...])`, `batch(script, *options)`. `Pods(data)` runs commands as in containers of
Kubernetes'. All are context managers, and leave nothing behind.

A host is a set of namespaces: its own name, network, /etc/hosts and processes. So a worker of n2 that looks for the store on 127.0.0.1, or
on n2, finds nothing, as it would on a real cluster. A host lives as long as its first process, which reads from us: it ends even if we are
killed.
"""
import os, secrets, shlex, shutil, subprocess, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import warm
from harness import ROOT, SUPPORT, Launched, _env, _kill_all, _tail, launched

NAMES, ADDRESSES = ('n1', 'n2'), ('10.77.0.1', '10.77.0.2')
_UNSHARE = ['unshare', '--net', '--uts', '--mount', '--pid', '--fork', '--mount-proc']
_SETUP = ('mount --bind "$1" /etc/hosts && hostname "$2" && ip link set lo up && ip addr add "$3/24" dev eth0 && ip link set eth0 up'
          ' && { [ -z "$4" ] || mount --bind "$4" "$5"; }')


def why_no_hosts():
    "Why `Hosts` cannot run here; `None` where it can"
    if os.geteuid(): return 'two hosts on one machine need root'
    if missing := [o for o in ('unshare', 'nsenter', 'ip', 'mount', 'hostname', 'chroot') if not shutil.which(o)]:
        return f"not installed: {', '.join(missing)}"
    cmd = [*_UNSHARE, 'ip', 'link', 'add', 'eth0', 'type', 'veth', 'peer', 'name', 'eth1']
    if (r := subprocess.run(cmd, capture_output=True, text=True)).returncode: return f'namespaces are forbidden here: {r.stderr.strip()}'


def why_no_slurm():
    "Why `Slurm` cannot run here; `None` where it can"
    missing = [o for o in ('munged', 'slurmctld', 'slurmd', 'srun', 'sbatch', 'scancel', 'sinfo') if not shutil.which(o)]
    return f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)" if missing else why_no_hosts()


class Hosts:
    def __enter__(self):
        self.mark, self.dir, self.holders = secrets.token_hex(8), Path(tempfile.mkdtemp(prefix='fastdist')), []
        try: self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self):
        for _ in NAMES:
            # not `exec cat`: the first process of a host has to reap the orphans, which a waiting shell does. Slurm waits for them
            self.holders.append(subprocess.Popen([*_UNSHARE, 'sh', '-c', 'echo ready; cat; exit'],
                                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                                 env=_env(self.mark), start_new_session=True))
            if self.holders[-1].stdout.readline() != b'ready\n': raise RuntimeError(f'no namespaces: {why_no_hosts()}')
        a, b = (str(h.pid) for h in self.holders)
        # made where it belongs: no name of it is ever seen outside
        subprocess.run(['ip', 'link', 'add', 'eth0', 'netns', a, 'type', 'veth', 'peer', 'name', 'eth0', 'netns', b], check=True)
        (self.dir/'hosts').write_text('127.0.0.1 localhost\n' + ''.join(f'{a} {n}\n' for a, n in zip(ADDRESSES, NAMES)))
        bin = self.warm_python()
        for i, (name, address) in enumerate(zip(NAMES, ADDRESSES)):
            subprocess.run(self.inside(i, ['sh', '-c', _SETUP, 'sh', self.dir/'hosts', name, address, *bin]), check=True)

    def warm_python(self):
        """Python on these hosts is warm, as elsewhere in tests: (a folder, that in whose place it is), or two empty texts without a
        virtual environment"""
        if sys.prefix == sys.base_prefix: return '', ''
        own, path = Path(sys.executable).parent, str(self.dir/'door')
        shutil.copytree(own, self.dir/'bin', symlinks=True)
        real = os.path.realpath(sys.executable)
        head = f'#!{real} -IS\nREAL, PYTHON, DOOR = {real!r}, {sys.executable!r}, {path!r}\n'
        for o in list((self.dir/'bin').glob('python*')):
            if os.path.realpath(o) == real or o.is_symlink():
                o.unlink()
                o.write_text(head + (SUPPORT/'client.py').read_text())
                o.chmod(0o755)
        code = f'import sys; sys.path.insert(0, {str(SUPPORT)!r}); import warm; warm.door({path!r})'
        self.holders.append(subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             env=_env(self.mark, {warm.COLD: None}),
                                             start_new_session=True))
        if self.holders[-1].stdout.readline() != b'ready\n': raise RuntimeError('no door for warm processes')
        return str(self.dir/'bin'), str(own)

    def inside(self, host, cmd, cwd='/'):
        "The command that runs `cmd` on `host`; it is `env` that goes to the folder, for entering a mount namespace leads to its root"
        pid = self.holders[host].pid
        return ['nsenter', '-t', str(pid), '--net', '--uts', '--mount', f'--pid=/proc/{pid}/ns/pid_for_children',
                'env', '-C', str(cwd), *map(str, cmd)]

    def run(self, host, cmd, env=None, timeout=60, cwd=None):
        "Run `cmd` on host 0 or 1 to its end: a `harness.Launched`. In a folder of these hosts, unless `cwd` is another"
        return launched(self.inside(host, cmd, cwd or self.dir), timeout, env)

    def run_all(self, cmds, env=None, timeout=60, cwd=None):
        "The results of `(host, cmd)` or `(host, cmd, env)` in `cmds`, which run at the same time"
        with ThreadPoolExecutor(len(cmds)) as pool:
            jobs = [pool.submit(self.run, host, cmd, {**(env or {}), **(own[0] if own else {})}, timeout, cwd) for host, cmd, *own in cmds]
            return [o.result() for o in jobs]

    def cut(self, host):
        "Pull the cable out of `host`; at both ends there is silence then, and no error"
        subprocess.run(self.inside(host, ['ip', 'link', 'set', 'eth0', 'down']), check=True)

    def __exit__(self, *_):
        for h in self.holders:  # all processes of a host end with the first of them, its network with the last
            h.stdin.close()
            try: h.wait(5)
            except subprocess.TimeoutExpired: pass  # it was stopped before it became `cat`
        _kill_all(self.mark)
        for h in self.holders:
            h.wait()
            if h.stdout: h.stdout.close()
        shutil.rmtree(self.dir, ignore_errors=True)


# The root of a pod: the folders of this machine that Python and fastdist need, and an empty one for each volume
_POD = """
set -e
root=$1 hosts=$2 data=$3; shift 3
mount -t tmpfs image "$root"
mkdir "$root/tmp" "$root/data"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
for o in "$@"; do
    mkdir -p "$root$(dirname "$o")"
    if [ -L "$o" ]; then cp -P "$o" "$root$o"; continue; fi
    if [ -d "$o" ]; then mkdir -p "$root$o"; else touch "$root$o"; fi
    mount --rbind "$o" "$root$o"
    mount -o remount,bind,ro "$root$o"
done
mount --bind "$hosts" "$root/etc/hosts"
mount --bind "$data" "$root/data"
mount -t tmpfs -o size=64m,mode=1777 shm "$root/dev/shm"
mount -o remount,bind,ro "$root"
"""


class Pods(Hosts):
    """Two hosts on which a command finds what a container of Kubernetes' has: a root file system that is read-only, a user without a name
    and a home, an empty /tmp, 64 MB of /dev/shm, and as /data the folder `data`, which both share"""
    def __init__(self, data): self.data = data

    def start(self):
        super().start()
        door, image = str(self.dir/'door'), ['/usr', '/bin', '/sbin', '/lib', '/lib64', '/etc', '/proc', '/sys', '/dev']
        for o in map(str, (sys.base_prefix, sys.prefix, ROOT, *sys.path, door)):
            if os.path.exists(o) and not any(f'{o}/'.startswith(f'{i}/') for i in image): image.append(o)
        for path in filter(os.path.exists, (self.data, door)): os.chmod(path, 0o777)
        (self.dir/'root').mkdir()
        for i in range(2):
            (self.dir/f'hosts{i}').touch()
            setup = ['sh', '-c', _POD, 'sh', self.dir/'root', self.dir/f'hosts{i}', self.data, *filter(os.path.exists, image)]
            subprocess.run(self.inside(i, setup), check=True)

    def name(self, names, service, addresses=ADDRESSES):
        "Give the pods their names, which the other finds by the headless `service`, and addresses"
        domain, loop = f'{service}.default.svc.cluster.local', '127.0.0.1 localhost'
        dns = [f'{a} {n}.{domain} {n}.{service}' for a, n in zip(addresses, names)]
        for i in range(2):
            (self.dir/f'hosts{i}').write_text('\n'.join([loop, f'{addresses[i]} {names[i]}.{domain} {names[i]}', *dns, '']))
            change = 'hostname "$1" && ip addr flush dev eth0 scope global && ip addr add "$2/24" dev eth0'
            subprocess.run(self.inside(i, ['sh', '-c', change, 'sh', names[i], addresses[i]]), check=True)

    def in_container(self, cmd): return ['chroot', '--userspec=12345:0', '--groups=', self.dir/'root', *cmd]

    def run(self, host, cmd, env=None, timeout=60, cwd='/data'):
        "Run the command of a container; it is `env` that goes to the folder, for `chroot` leads to the root"
        env = {'HOME': None, 'USER': None, 'LOGNAME': None, 'TMPDIR': None, **(env or {})}
        return super().run(host, self.in_container(['env', '-C', cwd or '/data', *cmd]), env, timeout, '/')

    def delete(self, host):
        "Kill all that runs in the pod, but for what is root's"
        subprocess.run(self.inside(host, self.in_container(['kill', '-KILL', '-1'])))


# A job that was put back into the queue waits as long as the old one's credential holds (cred_expire), and then for the next look of the
# scheduler
_CONF = """
ClusterName=fastdist
SlurmctldHost=n1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge.sock,cred_expire=5
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool-%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=1
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1
NodeName=n1,n2 CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES
PartitionName=urgent Nodes=ALL PriorityTier=9
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""


class Slurm(Hosts):
    "`cpus` is what each host says it has: more than there are, for workers that mostly wait"
    def __init__(self, cpus=8): self.cpus = cpus

    def start(self, timeout=30):
        super().start()
        self.env = {'SLURM_CONF': str(self.dir/'slurm.conf')}
        (self.dir/'slurm.conf').write_text(_CONF.format(dir=self.dir, cpus=self.cpus))
        (self.dir/'state').mkdir()
        (self.dir/'munge.key').write_bytes(secrets.token_bytes(128))
        (self.dir/'munge.key').chmod(0o600)
        files = {'key-file': 'key', 'log-file': 'log', 'pid-file': 'pid', 'seed-file': 'seed', 'socket': 'sock'}
        self.daemon(0, 'munged', '--foreground', '--force', *(f'--{k}={self.dir}/munge.{v}' for k, v in files.items()))
        end = time.monotonic() + timeout
        while not (self.dir/'munge.sock').exists() and time.monotonic() < end: time.sleep(0.05)
        self.daemon(0, 'slurmctld', '-D')
        for i, name in enumerate(NAMES): self.daemon(i, 'slurmd', '-D', '-N', name)
        sinfo = self.inside(0, ['sinfo', '--noheader', '--format=%T %D'])
        while (r := subprocess.run(sinfo, env=_env(self.mark, self.env), capture_output=True, text=True)).stdout.split() != ['idle', '2']:
            if time.monotonic() > end:
                logs = '\n'.join(f'--- {f.name}\n{_tail(f.read_text(errors="replace"), 15)}' for f in sorted(self.dir.glob('*.log')))
                raise RuntimeError(f'Slurm did not start in {timeout} s: {r.stdout}{r.stderr}\n{logs}')
            time.sleep(0.1)

    def daemon(self, host, *cmd):
        with open(self.dir/f'{cmd[0]}-{NAMES[host]}.log', 'wb') as log:
            self.holders.append(subprocess.Popen(self.inside(host, cmd), stdin=subprocess.PIPE, stdout=log, stderr=log,
                                                 env=_env(self.mark, self.env), start_new_session=True))

    def run(self, cmd, env=None, timeout=60, cwd=None):
        "Run `cmd` on n1, which is the login node as well: a `harness.Launched`. Jobs that it leaves are cancelled"
        try: return launched(self.inside(0, cmd, cwd or self.dir), timeout, {**self.env, **(env or {})})
        finally: subprocess.run(self.inside(0, ['scancel', '--user=root']), env=_env(self.mark, self.env), timeout=20)

    def batch(self, script, *options, within=(), env=None, timeout=60):
        """Submit `script`, from `within` another command if given, and wait for its end: a `harness.Launched` with its exit code and what
        it printed"""
        out, err, code, file = (self.dir/f'batch.{o}' for o in ('out', 'err', 'code', 'sh'))
        for f in (out, err, code): f.write_text('')
        file.write_text(f'#!/bin/sh\n(\n{script}\n)\necho $? >{code}\n')
        submit = shlex.join([*within, 'sbatch', f'--output={out}', f'--error={err}', *options, str(file)])
        # `sbatch --wait` looks after 2 s, and then every 10
        r = self.run(['sh', '-c', f'{submit} && while [ ! -s {code} ]; do sleep 0.1; done; exit $(cat {code})'], env, timeout)
        return Launched(r.returncode, out.read_text(), r.stderr + err.read_text(), r.seconds, r.left)
