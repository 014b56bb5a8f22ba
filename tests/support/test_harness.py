"The harness itself: a test of fastdist means something only if these pass"
import os, sys, time

import pytest
from harness import World, WorkerError, launched, processes

OFFSET = 10


@pytest.fixture(scope='module')
def world2():
    "A world of their own: what these tests do to it is not for others"
    w = World(2)
    yield w
    w.stop()


def rank(): return int(os.environ['RANK'])
def add(x, by=0): return x + rank() + by + OFFSET
def identity(): return rank(), int(os.environ['WORLD_SIZE']), os.getpid()


def boom(who):
    print(f'about to fail on {rank()}')
    if rank() == who: raise ValueError(f'boom on {rank()}')
    return 'fine'


def die(who, code=7):
    if rank() == who: os._exit(code)
    time.sleep(60)


def test_results_by_rank(world2):
    assert world2(add, 1, by=2) == [13, 14]
    ids = world2(identity)
    assert [i[:2] for i in ids] == [(0, 2), (1, 2)] and ids[0][2] != ids[1][2]
    assert world2(identity) == ids  # the same processes: nothing is started again


def test_exception_on_one_rank(world2):
    before = world2(identity)
    with pytest.raises(WorkerError) as e: world2(boom, 1)
    text = str(e.value)
    assert 'rank 1 of 2' in text and 'ValueError: boom on 1' in text and 'in boom' in text and 'about to fail on 1' in text
    assert 'boom on 0' not in text and set(e.value.problems) == {1}
    with pytest.raises(WorkerError, match='pickle'): world2(lambda: __import__('threading').Lock())  # a result that cannot travel
    assert world2(identity) == before


def test_dying_rank(world2):
    world2(identity)
    mark, begin = world2.mark, time.monotonic()
    with pytest.raises(WorkerError, match=r'exitcode *: 7') as e: world2(die, 1)
    assert 1 in e.value.problems and 'died' in e.value.problems[1]
    assert time.monotonic() - begin < 100 and processes(mark) == {}
    assert world2(add, 0) == [10, 11]


def test_launched_finds_what_is_left():
    sleeper = 'import subprocess, sys; print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)'
    r = launched([sys.executable, '-c', sleeper], 60, grace=0.5)
    assert list(r.left) == [int(r.stdout)] and 'sleep 600' in r.left[int(r.stdout)]
    assert 'sleep 600' not in processes('-', int(r.stdout)).values()  # and has killed it
    brief = 'import subprocess; subprocess.Popen(["sleep", "0.5"])'
    assert launched([sys.executable, '-c', brief], 60).left == {}
