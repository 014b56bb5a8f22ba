import pytest

from harness import World


@pytest.fixture(scope='session')
def worlds():
    "`worlds(n)`: the world of n workers that all tests of the session share; it starts at its first call"
    made = {}
    yield lambda n: made.setdefault(n, World(n))
    for w in made.values(): w.stop()


@pytest.fixture(scope='session')
def world2(worlds): return worlds(2)


@pytest.fixture(scope='session')
def world3(worlds): return worlds(3)
