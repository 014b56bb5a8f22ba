"""Shared by all tests: warm processes, the worlds, the core tier, and what is said at the end of what could not run."""
import fcntl, os, re, signal
from pathlib import Path

import fastai.basics, hypothesis, pytest

os.environ.setdefault('OMP_NUM_THREADS', '1')  # one core for each of xdist's processes
# torch asks for the name of each address that it connects to: a name server that does not answer costs 5 s otherwise, in this process as
# well, which holds the stores of the worlds
os.environ.setdefault('RES_OPTIONS', 'timeout:1 attempts:1')
import fakegpu, real_gpus, warm
from harness import Worlds
from hosts import Hosts, Slurm, why_no_hosts, why_no_slurm

TESTS = Path(__file__).parent
GPUS = real_gpus.hide()
if GPUS: os.environ.setdefault(warm.COLD, '1')  # imports start threads of the driver's, which a fork loses
# a shell's background job has them ignored, and so would all that the tests start, also what they interrupt
for s, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(s) == signal.SIG_IGN: signal.signal(s, handler)
# fastai's loaders have as many processes as there are cores, which took half of the suite's time: here as many as a test gives them
fastai.basics.defaults.cpus = 0
warm.install(all_kinds=True)
hypothesis.settings.register_profile('suite', deadline=None, database=None)  # no time of one example counts, and no file of an earlier run
hypothesis.settings.load_profile('suite')


@pytest.fixture(scope='session')
def worlds():
    "`worlds(n)`: the world of n workers that all tests of the session share; it starts at its first call"
    w = Worlds()
    yield w
    w.stop()


@pytest.fixture(scope='session')
def gpu_worlds():
    "The same of workers that have GPUs: those of this machine, or else pretended ones"
    if not GPUS and (why := fakegpu.why_not()): pytest.skip(f'the branches for GPUs: {why}')
    w = Worlds(real_gpus.shown() if GPUS else {'FASTDIST_TEST_GPUS': str(fakegpu.build()), 'FAKEGPU_COUNT': '4'})
    yield w
    w.stop()


@pytest.fixture(scope='session')
def fake_gpu_worlds(request):
    "Those with pretended GPUs, for tests that ask these what has happened"
    if GPUS: pytest.skip('asks the pretended GPU what has happened: there is a real one')
    return request.getfixturevalue('gpu_worlds')


@pytest.fixture(scope='session')
def real_gpu_worlds(request):
    if not GPUS: pytest.skip('needs a GPU')
    return request.getfixturevalue('gpu_worlds')


@pytest.fixture(autouse=True)
def no_group_left(request, worlds):
    yield
    for o in (worlds, *((request.node.funcargs or {}).get(o) for o in ('gpu_worlds', 'fake_gpu_worlds', 'real_gpu_worlds'))):
        if o is not None: o.end_groups()


@pytest.fixture(scope='session')
def world2(worlds): return worlds(2)


@pytest.fixture(scope='session')
def world3(worlds): return worlds(3)


@pytest.fixture
def default_port(tmp_path_factory):
    "Port 29500, where Accelerate's `notebook_launcher` listens unless it is told otherwise: one test at a time has it"
    base = tmp_path_factory.getbasetemp()
    with open((base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base)/'port-29500', 'w') as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True)
def cold_processes(request, monkeypatch):
    "A test marked `cold` starts Python as a user does, imports and all"
    if request.node.get_closest_marker('cold'): monkeypatch.setenv(warm.COLD, '1')


@pytest.fixture
def hosts():
    "Two hosts, on this machine"
    if why := why_no_hosts(): pytest.skip(why)
    with Hosts() as h: yield h


@pytest.fixture(scope='session')
def slurm():
    "Real Slurm, with two nodes"
    if why := why_no_slurm(): pytest.skip(why)
    with Slurm() as s: yield s


def core():
    "The tests of the core tier: files, functions or single cells, as tests/core.txt has them"
    return [o.split('  #')[0].strip() for o in (TESTS/'core.txt').read_text().splitlines() if o and not o.startswith('#')]


def pytest_configure(config):
    config.addinivalue_line('markers', 'core: the first tier, which touches every promise in a few minutes; listed in tests/core.txt')
    config.addinivalue_line('markers', 'cold: the processes of this test import everything by themselves')
    config.addinivalue_line('markers', 'sizes: runs with 2 and with 3 workers, which others do in turn')


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    "Two more than cores, for there are always tests that wait; not so many that processes are started for nothing"
    return min(len(os.sched_getaffinity(0)) + 2, 6)


TOGETHER = 'test_slurm.py', 'test_kubernetes.py', 'test_hosts.py', 'test_gpus.py', 'test_units.py', 'test_strategy_words.py'


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests that share a Slurm, a kernel, the seed of notebooks, pretended GPUs, a world of four or what compiles (each worker imports it,
    for some 4 CPU-seconds) run in one process, and begin, for they take longest; all others one by one. (xdist's own `loadgroup` has no
    effect under pytest 9.)"""
    from xdist.scheduler import LoadScopeScheduling
    class ByFileOrTest(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition('::')[0]
            if file.startswith('tests/contract/'):
                by_three = re.search(r'[\[-]3[-\]]|examples.*2-seg|messages|goes_on|one_fails|numbers', nodeid)
                return 'contract-3' if by_three else 'contract-2'
            if '-notebook]' in nodeid or file.endswith(('test_launch_notebook.py', 'test_tutorials.py')): return 'notebooks'
            return file if file.endswith(TOGETHER) else nodeid

        def remove_node(self, node):
            "A test that was ended by its limit, and its process with it, has failed: xdist would give it to the next process, for ever"
            work = self.assigned_work[node]
            crashed = next((o for unit in work.values() for o, done in unit.items() if not done), None)
            for unit in work.values(): unit.update({crashed: True} if crashed in unit else {})
            self.assigned_work[node] = {k: unit for k, unit in work.items() if not all(unit.values())}
            super().remove_node(node)
            return crashed
    return ByFileOrTest(config, log)


def in_turn(items):
    """The cells of grids that have 2 and 3 workers, and the functions that have nothing but these: one runs with 2, another with 3. What is
    trained is one thing, among how many it is shared out another, so each is met, and each size by each file, in half of the time. Cells
    of the core tier all run, and so do both sizes of a function that is marked `sizes`, for which how many there are is the very thing"""
    kept, order = [], {}
    for item in items:
        params = dict(item.callspec.params) if hasattr(item, 'callspec') else {}
        size = params.pop('world', None)
        if size not in (2, 3) or item.get_closest_marker('core') or item.get_closest_marker('sizes'):
            kept.append(item)
            continue
        cells = order.setdefault((item.path, item.originalname if params else None), {})
        k = cells.setdefault(repr(sorted(params.items())) if params else item.originalname, len(cells))
        turn = bin(k).count('1') % 2  # not k % 2: each of 4 values would meet one size only
        if size == (2 + turn if params else 3 - turn): kept.append(item)
    return kept


# what takes half a minute and more, or waits for most of its time: one that began as the last would keep a core idle
LONG = ('test_as_they_stand', 'test_killed_at_random_moments', 'test_tutorials.py', 'test_two_hosts.py', 'test_kubernetes.py',
        'test_elastic.py', 'test_exact_or_an_error', 'test_either_order')


def pytest_collection_modifyitems(config, items):
    wanted = core()
    for item in items:
        name = Path(item.path).relative_to(TESTS).as_posix() + item.nodeid.partition('.py')[2]
        if any(name == o or name.startswith((f'{o}[', f'{o}::')) for o in wanted): item.add_marker('core')
    if config.option.keyword or any('::' in o for o in config.args): return  # what is asked for by its name runs
    kept = in_turn(items)
    config.hook.pytest_deselected(items=[o for o in items if o not in set(kept)])
    items[:] = sorted(kept, key=lambda o: not any(name in o.nodeid for name in LONG))


def pytest_terminal_summary(terminalreporter):
    "What was not covered, and what to install: `-ra` says so too, among much else"
    why = {}
    for r in terminalreporter.stats.get('skipped', []): why.setdefault(r.longrepr[2].removeprefix('Skipped: '), []).append(r.nodeid)
    for reason, names in why.items():
        files = ', '.join(sorted({o.partition('::')[0] for o in names}))
        terminalreporter.write_line(f'NOT COVERED: {len(names)} test(s) of {files}: {reason}')
