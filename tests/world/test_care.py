"What a start takes care of, where Python, torch or Accelerate would leave something wrong"
import os, subprocess, sys, textwrap

import pytest
from harness import launched
from launches import LAUNCHERS, PYTHON


def in_a_new_process(code):
    "A fork of this one might stop for ever: it has threads"
    head = 'import gc, os, sys, threading, time, torch, torch.distributed as dist\nfrom fastdist.world import *\n'
    return subprocess.run([sys.executable, '-W', 'ignore', '-c', head+textwrap.dedent(code)], capture_output=True, text=True, timeout=120)


def test_a_store_that_is_left_as_garbage():
    "A forked process has not the thread of its server, for which its end would wait; nor those of OpenMP"
    res = in_a_new_process("""
        gc.disable()
        left = [dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)]
        left.append(left)
        del left # a cycle holds it
        pid = os.fork()
        if pid==0:
            for i in range(20): threading.Thread(target=time.sleep, args=(60,), daemon=True).start() # where that of the server was
            gc.collect()
            os._exit(40+torch.get_num_threads())
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])==41
        """)
    assert res.returncode == 0, res.stderr


def test_a_pause_before_a_fork():
    "gloo's thread has Python's locks for a moment after each collective: a process forked meanwhile hangs"
    res = in_a_new_process("""
        slept, time.sleep = [], lambda secs: slept.append(secs)
        def fork():
            pid = os.fork()
            if pid==0: os._exit(0)
            os.waitpid(pid, 0)
        fork()
        assert not slept
        dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
        fork()
        print(slept and slept[0] >= 0.01)
        """)
    assert res.stdout == 'True\n', res


def threads():
    "How many threads torch has after several starts"
    import torch
    from fastdist.world import setup_distrib, teardown_distrib
    was, given = torch.get_num_threads(), os.environ.pop('OMP_NUM_THREADS', None)  # with it Accelerate lets them be
    torch.set_num_threads(3)
    for _ in range(3):
        teardown_distrib()
        setup_distrib()
    n = torch.get_num_threads()
    torch.set_num_threads(was)
    if given is not None: os.environ['OMP_NUM_THREADS'] = given
    return n


def test_threads(world2):
    "As many as the launcher or the script has set: Accelerate sets others"
    assert world2(threads) == [3, 3]


@pytest.mark.parametrize('how', ['fastdist', 'call_main'])
def test_items_of_a_set(tmp_path, how):
    "All workers have them in the same order: what a script lists of them is the same, such as the classes of a data set"
    (tmp_path/'s.py').write_text(textwrap.dedent('''
        import sys
        from fastdist.world import *
        def main():
            setup_distrib()
            if len({*all_gather_list(tuple({*'some names of classes'.split(), 'x', 'y', 'z'}))}) == 1 and is_master(): print('same')
        if __name__ == '__main__': main() if 'launched' in sys.argv else call_main(main, n=2)
        '''))
    cmd = [*LAUNCHERS['fastdist'](2), tmp_path/'s.py', 'launched'] if how == 'fastdist' else [PYTHON, tmp_path/'s.py']
    res = launched(cmd, 120, env={'ACCELERATE_USE_CPU': 'true', 'PYTHONHASHSEED': None}, cwd=tmp_path)
    assert res.returncode == 0 and 'same' in res.stdout, res.stderr
