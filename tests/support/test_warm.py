"Python that forks from a process with everything imported is like any other: a test by it means something only if these pass"
import json, os, secrets, signal, subprocess, sys
from pathlib import Path

import psutil, pytest
import warm
from harness import launched

# What runs, after the interpreter's name; what it prints has to be the same in both ways
PROGRAMS = dict(
    code=['-c', 'import sys; print(sys.argv, __name__, sys.path[0], sys.stdin.read())', 'a', '-b'],
    module=['-m', 'folder.t', '--n', '2'],
    error=['-c', 'def f(): 1/0\nf()'],
    exit_status=['-c', 'raise SystemExit(7)'],
    interrupt=['-c', 'raise KeyboardInterrupt'],
    hook=['-c', 'import sys; sys.excepthook = lambda t, e, tb: print("seen", t, e, tb.tb_frame.f_code.co_name)\nraise ValueError(3)'],
    spawns=['spawns.py'])


@pytest.fixture
def folder(tmp_path):
    (tmp_path/'folder').mkdir()
    (tmp_path/'folder'/'t.py').write_text('import sys, os; print(sys.argv[1:], __name__, __package__, os.path.relpath(sys.path[0] or "."))')
    (tmp_path/'spawns.py').write_text('''
import multiprocessing as m
def f(x): return 2*x
if __name__ == '__main__':
    with m.get_context('spawn').Pool(1) as p: print(p.map(f, [1, 2]))
''')
    return tmp_path


@pytest.mark.parametrize('name', list(PROGRAMS))
def test_same_as_cold(folder, name):
    cold, hot = (launched([sys.executable, *PROGRAMS[name]], 60, env={warm.COLD: way}, cwd=folder) for way in ('1', None))
    assert (hot.returncode, hot.stdout, hot.stderr, hot.left) == (cold.returncode, cold.stdout, cold.stderr, cold.left)
    assert hot.returncode or hot.stdout


def test_it_is_warm(tmp_path):
    "Otherwise the tests would only be slow"
    (tmp_path/'command').write_text(f'#!{sys.executable}\nimport sys; sys.exit("torch" in sys.modules)')
    (tmp_path/'command').chmod(0o755)
    code = [sys.executable, '-c', 'import sys; sys.exit("torch" in sys.modules)']
    for cmd in code, [sys.executable, tmp_path/'command'], [tmp_path/'command']: assert subprocess.run(cmd).returncode == 1
    assert subprocess.run(code, env={**os.environ, warm.COLD: '1'}).returncode == 0


SHOW = '''
import json, os, sys
said = dict(pid=os.getpid(), parent=os.getppid(), sid=os.getsid(0), group=os.getpgrp(), env=dict(os.environ), cwd=os.getcwd())
print(json.dumps(said), flush=True)
sys.stdin.read()
'''


@pytest.mark.parametrize('session', [False, True])
def test_a_process_of_its_own(tmp_path, session):
    "What the system says of it, and what it says itself"
    mark = secrets.token_hex(8)
    p = subprocess.Popen([sys.executable, '-c', SHOW, 'an argument'], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path,
                         env={'A': 'b', 'MARK': mark}, start_new_session=session)
    said = json.loads(p.stdout.readline())
    assert said == dict(pid=p.pid, parent=os.getpid(), sid=p.pid if session else os.getsid(0), group=p.pid if session else os.getpgrp(),
                        env={'A': 'b', 'MARK': mark}, cwd=str(tmp_path))
    assert f'MARK={mark}'.encode() in Path(f'/proc/{p.pid}/environ').read_bytes().split(b'\0')
    assert Path(f'/proc/{p.pid}/cmdline').read_bytes().rstrip(b'\0').split(b'\0')[1:] == [b'-c', SHOW.encode(), b'an argument']
    assert p.pid in [o.pid for o in psutil.Process().children()] and psutil.Process(p.pid).children() == []
    assert p.poll() is None
    p.send_signal(signal.SIGKILL)
    assert p.wait(60) == -9
