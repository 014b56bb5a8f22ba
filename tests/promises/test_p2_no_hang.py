"P2: what goes wrong in one worker ends the job at once, with that worker's traceback, and leaves nothing running"
import sys, textwrap

import pytest
from harness import SUPPORT, launched

FASTDIST = [sys.executable, '-m', 'fastdist', 'launch']
TORCHRUN = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node']
FAULTS = dict(
    callback='''
class Fault(Callback):
    def before_batch(self):
        if get_rank()==1 and self.epoch==1 and self.training: raise ValueError('the first to fail')
learn.add_cb(Fault())''',
    # takes its time to leave, so that the others, which it has failed, end before it
    leaves_last='''
import atexit
atexit.register(time.sleep, 3*(get_rank()==1))
class Fault(Callback):
    def before_batch(self):
        if get_rank()==1 and self.epoch==1: raise ValueError('the first to fail')
learn.add_cb(Fault())''',
    argument='''
real = learn.distrib_ctx
learn.distrib_ctx = lambda **kwargs: real(**kwargs, **({'sync_bm':1} if get_rank()==1 else {}))''',
    left='''
class Fault(Callback):
    def before_batch(self):
        if get_rank()==1 and self.epoch==1:
            print('the first to fail', file=sys.stderr, flush=True)
            sys.exit(3)
learn.add_cb(Fault())''')


def script(tmp_path, fault):
    text = '''
        import os, sys, time
        sys.path.insert(0, TESTS)
        from learners import *
        from fastdist.all import *
        learn = quiet(learner(n=22, bs=5, n_val=22, bn=True))
        FAULT
        print('begin', get_rank(), flush=True)
        with learn.distrib_ctx(split_batches=True): learn.fit(100000)
        '''
    text = textwrap.dedent(text).replace('FAULT', FAULTS[fault]).replace('TESTS', repr(str(SUPPORT)))
    (tmp_path/'train.py').write_text(text)
    return str(tmp_path/'train.py')


@pytest.mark.parametrize('fault', list(FAULTS))
def test_ends_at_once(tmp_path, fault):
    "With `fastdist launch`, three workers; 100000 epochs would take longer than the limit"
    res = launched([*FASTDIST, '-n', '3', script(tmp_path, fault)], timeout=120, cwd=tmp_path)
    assert res.returncode not in (0, None) and res.left == {}
    assert ('sync_bm=1' if fault == 'argument' else 'first, and ended the job') in res.stderr
    assert 'worker 1 ' in res.stderr.splitlines()[-1], res.stderr[-2000:]


def test_under_torchrun(tmp_path):
    res = launched([*TORCHRUN, '2', script(tmp_path, 'callback')], timeout=120, cwd=tmp_path)
    assert res.returncode not in (0, None) and res.left == {}
    assert 'ValueError' in res.stderr and 'the first to fail' in res.stderr
