"P6: a notebook, in a real kernel, trains on many workers with `launch_in_notebook`, whatever has run in it before"
import os, re, secrets, signal, sys
from types import SimpleNamespace

import pytest
from harness import SUPPORT, _env, _kill_all, launched, processes, wait_for
from jupyter_client import KernelManager


class Kernel:
    "A real kernel; `run` gives what a cell has shown"
    def __init__(self, folder):
        self.mark = secrets.token_hex(8)
        env = {**_env(self.mark), 'CUDA_VISIBLE_DEVICES': '', 'PYTHONWARNINGS': 'ignore'}
        del env['OMP_NUM_THREADS']  # a user's kernel has none
        self.km = KernelManager(kernel_name='python3')
        self.km.start_kernel(env=env, cwd=str(folder))
        self.kc = self.km.client()
        self.kc.start_channels()
        self.kc.wait_for_ready(timeout=60)

    def run(self, code, timeout=200, during=None):
        "`during` is called with each message, as it comes"
        msgs = []

        def hook(m):
            msgs.append((m['msg_type'], m['content']))
            if during: during(*msgs[-1])
        reply = self.kc.execute_interactive(code, timeout=timeout, output_hook=hook)['content']
        text = ''.join(c['text'] for t, c in msgs if t == 'stream')
        error = next((c for t, c in msgs if t == 'error'), None)
        return SimpleNamespace(status=reply['status'], msgs=msgs, text=text, error=error, types=[t for t, _ in msgs],
                               shown=error and re.sub(r'\x1b\[[0-9;]*m', '', '\n'.join(error['traceback'])))

    def workers(self): return {p: c for p, c in processes(self.mark).items() if 'notebook.worker' in c}

    def stop(self):
        self.kc.stop_channels()
        self.km.shutdown_kernel(now=True)
        _kill_all(self.mark)


@pytest.fixture(scope='module')
def kernel(tmp_path_factory):
    k = Kernel(tmp_path_factory.mktemp('nb'))
    r = k.run(SETUP)
    assert r.status == 'ok', r.shown
    yield k
    k.stop()


# Before the first launch the kernel has run a backward with two of torch's threads, and has a thread of its own
SETUP = f"import sys; sys.path.append({str(SUPPORT)!r})" + """
from fastai.basics import *
from fastai.callback.progress import *
from fastdist.all import *
from learners import Double, Items, diff, weights
import signal, subprocess, matplotlib.pyplot as plt

torch.set_num_threads(2)
a = torch.randn(300, 300, requires_grad=True)
(a@a).sum().backward()
stop = threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()

class Net(nn.Module): # all of it is defined in cells
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), act(), nn.Linear(8, 3))
    def forward(self, x): return self.layers(x)
act = nn.ReLU
def my_loss(pred, targ): return Double()(pred, targ)
class MyError(Exception): pass
set_seed(5)

def get_learner():
    dls = DataLoaders(TfmdDL(Items(23), bs=6, shuffle=True), TfmdDL(Items(11, seed=1), bs=4))
    return Learner(dls, Net().double(), loss_func=my_loss, opt_func=SGD, lr=0.1, path='.')

def train(epochs, in_notebook=False):
    learn = get_learner()
    with learn.distrib_ctx(split_batches=True, in_notebook=in_notebook): learn.fit(epochs)
    return learn

def train_and_show(epochs=2):
    print('I am', get_rank(), 'of', get_world_size(), os.environ['OMP_NUM_THREADS'])
    subprocess.run(['echo', 'a program in', str(get_rank())])
    learn = train(epochs)
    learn.recorder.plot_loss()
    print(len(learn.dls.train), learn.export('export.pkl')) # pickle finds what cells have defined
    display({'a': 1})
    return learn
"""


def test_trains(kernel):
    "One process, and 2, 1 and 3 workers: what they print and draw is in the cell, and the learner that comes back is one as any other"
    r = kernel.run("ref = get_learner()\nref.fit(2)\nref2 = weights(ref)")
    assert r.status == 'ok', r.shown
    r = kernel.run("set_seed(5)\nlearn = launch_in_notebook(train_and_show, n=2)")
    assert r.status == 'ok', r.shown
    cores = len(os.sched_getaffinity(0))
    program = 'a program in 0\n'  # comes by another way than what Python prints, maybe in the middle of that
    assert program in r.text and f'I am 0 of 2 {max(1, cores//2)}\n' in r.text.replace(program, ''), r.text
    assert 'I am 1' not in r.text and 'a program in 1' not in r.text, r.text
    # the bar: shown once, and changed many times; then the table, the plot and the text
    ids = [c['transient'].get('display_id') for t, c in r.msgs if t == 'display_data']
    updates = [c for t, c in r.msgs if t == 'update_display_data']
    assert len(updates) > 10 and all(c['transient']['display_id'] in ids for c in updates)
    assert any('valid_loss' in c['data'].get('text/html', c['data'].get('text/markdown', '')) for c in updates), updates[-1]
    assert sum('image/png' in c['data'] for t, c in r.msgs if t == 'display_data') == 1
    assert any(c['data'].get('text/plain') == "{'a': 1}" for t, c in r.msgs if t == 'display_data')
    r = kernel.run("""
assert type(learn.model) is Net and learn.loss_func is my_loss
assert diff(weights(learn), ref2) < 1e-7, diff(weights(learn), ref2)
assert diff([float(o) for o in learn.recorder.losses], [float(o) for o in ref.recorder.losses]) < 1e-5
with learn.no_bar(): learn.fit(1)
assert load_learner('export.pkl').model.layers[0].weight.shape==(8,4)
for n in (1, 3):
    set_seed(5)
    o = launch_in_notebook(train, 2, in_notebook=True, n=n)
    assert diff(weights(o), ref2) < 1e-7, (n, diff(weights(o), ref2))
print('all the same')
""")
    assert r.status == 'ok', r.shown
    assert 'all the same' in r.text
    assert not kernel.workers()


def test_error(kernel):
    "The cell shows the traceback of the worker that failed, with the text of the cell, and nothing else"
    r = kernel.run("""
def fails(hidden):
    learn = get_learner()
    class Cb(Callback):
        def after_batch(self):
            print('seen in the log')
            if get_rank()==1: raise MyError('no more') # here
    with learn.distrib_ctx(split_batches=True), learn.no_bar(): learn.fit(2, cbs=Cb())
""")
    r = kernel.run("try: launch_in_notebook(fails, 1, n=2)\nexcept RemoteError as e: err = e; raise")
    assert r.error['ename'] == 'RemoteError'
    assert 'rank 1 of 2 failed:' in r.shown and "raise MyError('no more') # here" in r.shown, r.shown
    assert r.shown.count('MyError: ') == 1 and r.shown.count('\tno more') == 1, r.shown
    assert 'notebook.py' not in r.shown and 'elastic' not in r.shown and len(r.shown.splitlines()) < 20, r.shown
    log = re.search(r'printed is in (\S+)\)', r.shown)[1]
    assert 'seen in the log' in open(f'{log}/rank1.out.log').read()
    r = kernel.run("assert (err.rank, err.type)==(1, 'MyError'), err.type")
    assert r.status == 'ok', r.shown
    assert not kernel.workers()
    r = kernel.run("def dies(): os.kill(os.getpid(), signal.SIGKILL)\nlaunch_in_notebook(dies)")
    assert 'rank 0 of 1 was killed by signal 9' in r.shown, r.shown
    r = kernel.run("import time\ndef leaves(): os._exit(0) if get_rank() else time.sleep(100)\nlaunch_in_notebook(leaves, n=2)", timeout=60)
    assert re.search(r'rank 1 of 2 ended before the function returned \(os._exit\?\)\n\(What the workers have printed is in ',
                     r.shown), r.shown


def test_what_cannot_be_sent(kernel):
    r = kernel.run("file = open('some.log', 'w')\ndef train_log(): print('a', file=file)\nlaunch_in_notebook(train_log, n=2)")
    assert r.error['ename'] == 'TypeError'
    assert 'Cannot pickle files' in r.error['evalue'] and 'notebook_launcher' in r.error['evalue']
    r = kernel.run("""
def keeps():
    learn = train(1)
    learn.gen = (o for o in range(3))
    return learn
launch_in_notebook(keeps, n=1)
""")
    assert "cannot pickle 'generator' object" in r.error['evalue'], r.shown
    load = re.search(r'load_state_dict.(torch.load.*?pth.*?[)])', r.error['evalue'])[1]
    assert kernel.run(f'Net().load_state_dict({load})').status == 'ok'


def test_what_a_cell_can(kernel):
    "Magics and commands of the shell; prints that come too fast are joined, and none is lost"
    r = kernel.run("""
def like_a_cell():
    for i in range(10000): print('line', i)
    %time print('timed')
    !echo from the shell
    return 6*7
print(launch_in_notebook(like_a_cell, n=1))
""")
    assert r.status == 'ok', r.shown
    lines = r.text.splitlines()
    assert [o for o in lines if o.startswith('line ')] == [f'line {i}' for i in range(10000)]
    assert 'from the shell' in lines and any('Wall time' in o for o in lines) and lines[-1] == '42', lines[10000:]
    assert r.types.count('stream') < 100, len(r.types)


def test_interrupt(kernel):
    "The kernel's interrupt ends all workers, and their loader processes"
    kernel.run("""
def forever():
    learn = get_learner()
    learn.dls.train.num_workers = learn.dls.train.fake_l.num_workers = 1
    class Say(Callback):
        def after_batch(self):
            if self.training and self.iter==1 and self.epoch==1: print('under way')
    with learn.distrib_ctx(split_batches=True), learn.no_bar(): learn.fit(100000, cbs=Say())
""")
    seen = []

    def interrupt(t, c):
        if t == 'stream' and 'under way' in c['text'] and not seen:
            seen.append(len(kernel.workers()))
            kernel.km.interrupt_kernel()
    r = kernel.run("launch_in_notebook(forever, n=2)", during=interrupt)
    assert r.error['ename'] == 'KeyboardInterrupt' and seen[0] >= 2, (r.error, seen)
    assert r.error['traceback'] == ['KeyboardInterrupt: the workers have been ended']
    wait_for(lambda: not kernel.workers(), 'the workers have ended')
    assert 'RemoteError' not in r.text, r.text


def test_kept_workers(kernel, tmp_path):
    "The next call has the same processes and none of what the last has left; others where they would not do: an edited module, a failure"
    (tmp_path/'mine.py').write_text('answer = 1')
    r = kernel.run(f"sys.path.insert(0, {str(tmp_path)!r})" + """
import mine
def who():
    import mine
    assert not torch.distributed.is_initialized()
    return os.getpid(), mine.answer, act, torch.rand(1).item(), weights(train(1))
def call(n=2, keep=True):
    set_seed(5)
    return launch_in_notebook(who, n=n, keep=keep)
a = call()
act = nn.Tanh # what cells define anew is new
b, c = call(), call()
assert a[0]==b[0]==c[0] and (a[2], b[2])==(nn.ReLU, nn.Tanh), (a, b)
assert b[3]==c[3] and diff(b[4], c[4])==0
""")
    assert r.status == 'ok', r.shown
    assert r.text.count('fastdist: starting 2 workers') == 1 and len(kernel.workers()) == 2, r.text
    (tmp_path/'mine.py').write_text('answer = 22')
    r = kernel.run("""
import importlib
importlib.reload(mine)
d = call()
assert d[0]!=c[0] and d[1]==22 and diff(d[4], c[4])==0, d
try: launch_in_notebook(lambda: 1/0, n=2, keep=True)
except RemoteError as err: print(err.text)
e = call()
assert e[0]!=d[0]
act = nn.ReLU
end_workers()
""")
    assert r.status == 'ok' and 'division by zero' in r.text, r.shown or r.text
    assert not kernel.workers()


def test_kernel_dies(tmp_path):
    k = Kernel(tmp_path)
    try:
        k.run("import time\nfrom fastdist.all import *\ndef sleeps():\n    print('asleep')\n    time.sleep(600)")
        msg = k.kc.execute("launch_in_notebook(sleeps, n=2)")
        while True:
            m = k.kc.get_iopub_msg(timeout=60)
            if m['msg_type'] == 'stream' and 'asleep' in m['content']['text'] and m['parent_header']['msg_id'] == msg: break
        assert len(k.workers()) == 2
        os.kill(k.km.provisioner.process.pid, signal.SIGKILL)
        wait_for(lambda: not k.workers(), 'the workers have ended')
    finally: k.stop()


SCRIPT = """
from fastdist.all import *

class Thing:
    def __init__(self, x): self.x = x

def work(x):
    print('rank', get_rank(), flush=True)
    if x > 5: raise ValueError(f'{x} is too large')
    return Thing(x+get_world_size())

thing = launch_in_notebook(work, x=3, n=2)
assert isinstance(thing, Thing)
print(thing.x)
launch_in_notebook(work, 6)
"""


def test_script(tmp_path):
    "A script of its own may do the same, without an `if __name__=='__main__'`"
    (tmp_path/'script.py').write_text(SCRIPT)
    r = launched([sys.executable, 'script.py'], 200, env={'CUDA_VISIBLE_DEVICES': ''}, cwd=tmp_path)
    assert r.stdout == 'rank 0\n5\nrank 0\n', r.stdout + r.stderr
    assert r.returncode == 1 and 'ValueError: 6 is too large' in r.stderr and "if x > 5: raise" in r.stderr
    assert not r.left


def test_forks(kernel, default_port):
    "Accelerate's `notebook_launcher` with 3 workers and with 1, after torch's threads were used"
    r = kernel.run("""
from accelerate import notebook_launcher
set_seed(5)
with (one := get_learner()).no_bar(): one.fit(1)

def fork_train():
    set_seed(5) # a fork's `random` begins anew
    learn = get_learner()
    with learn.distrib_ctx(split_batches=True, in_notebook=True): learn.fit(1)
    assert not torch.distributed.is_initialized()
    learn.save('forked')
    global kept
    kept = learn, get_world_size()
    print('trained')
    if os.environ.get('RANK')=='2': display('of rank 2')
""")
    assert r.status == 'ok', r.shown
    r = kernel.run("notebook_launcher(fork_train, num_processes=3)")
    assert r.status == 'ok', r.shown
    assert r.text.count('trained') == 3 and 'fork' not in r.text, r.text
    assert any('of rank 2' in c['data']['text/plain'] for t, c in r.msgs if t == 'display_data')
    assert r.text.count('valid_loss') + sum('valid_loss' in str(c['data']) for t, c in r.msgs if t == 'display_data') <= 1
    r = kernel.run("assert diff(weights(one), weights(get_learner().load('forked'))) < 1e-7\nassert 'kept' not in globals()")
    assert r.status == 'ok', r.shown
    r = kernel.run("notebook_launcher(fork_train, num_processes=1)\nassert diff(weights(kept[0]), weights(one)) < 1e-7 and kept[1]==1")
    assert r.status == 'ok', r.shown
