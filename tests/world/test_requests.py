"What a worker asks the store at a start, after a failure and in waiting, and reads of others: as much with a thousand workers as with two"
import json, threading
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest


class Counted:
    "One worker's connection to a store: counts what is asked"
    def __init__(self, store, asked): self.store, self.asked = store, asked

    def clone(self): return self

    def __getattr__(self, nm):
        f = getattr(self.store, nm)
        if not callable(f): return f
        def ask(*args):
            self.asked[nm] += 1
            return f(*args)
        return ask


@contextmanager
def counted(module, asked, monkeypatch):
    "Count requests within a look of `wait_until`'s apart from others: (outside, most of one look)"
    real, most = module.wait_until, Counter()

    def wait_until(done, *args, **kwargs):
        me = threading.get_ident()
        def look():
            before = asked[me].total()
            res = done()
            here = asked[me].total()-before
            asked[me]['looks'] -= here
            most[me] = max(most[me], here)
            return res
        return real(look, *args, **kwargs)

    with monkeypatch.context() as m:
        m.setattr(module, 'wait_until', wait_until)
        yield most


class Prefixed:
    "torch's `PrefixStore` of a store that counts"
    def __init__(self, prefix, store): self.prefix, self.store = prefix, store

    def _keys(self, o): return [f'{self.prefix}/{k}' for k in o] if isinstance(o, (list, tuple)) else f'{self.prefix}/{o}'

    def __getattr__(self, nm): return lambda keys, *args: getattr(self.store, nm)(self._keys(keys), *args)


def start_of(n, monkeypatch):
    "By rank, (requests outside of looks, most requests of one look), of a start of `n` workers"
    import torch.distributed as dist
    from fastdist.world import rendezvous
    raw, asked, res, errors = dist.HashStore(), {}, {}, []
    monkeypatch.setattr(rendezvous.dist, 'PrefixStore', Prefixed)

    def come(rank, most):
        me = threading.get_ident()
        asked[me] = Counter()
        s = SimpleNamespace(rank=rank, world_size=n, local_rank=rank, local_world_size=n, node_rank=0, launcher='torchrun')
        try: rendezvous.meet(Counted(raw, asked[me]), s, 120)
        except BaseException as e: errors.append(e)
        res[rank] = asked[me].total(), most[me]

    with counted(rendezvous, asked, monkeypatch) as most:
        ts = [threading.Thread(target=come, args=(r, most)) for r in range(n)]
        for t in ts: t.start()
        for t in ts: t.join()
    assert not errors, errors
    return res


@pytest.mark.parametrize('n', [2, 8, 256])
def test_start(n, monkeypatch):
    # a look of rank 0: how many have come, a reply to all new ones or have all come, has one ended (2 stores)
    res = start_of(n, monkeypatch)
    assert res[0][0] <= 3 and res[0][1] <= 6, res[0] # comes, and says so; who comes last says that all have, too
    for r in range(1, n): assert res[r][0] <= 5 and res[r][1] <= 3, (r, res[r]) # draws a number, too


def monitor_of(n, monkeypatch, tmp_path):
    "The `Monitor` of the first of `n` workers that all have a heartbeat, the others' in the store: (it, Counter of what it asks)"
    import torch.distributed as dist
    from dataclasses import asdict
    from fastdist.fault import connections, supervisor, watchdog
    from fastdist.fault.watchdog import Beat
    from fastdist.world.ranks import host_name
    monkeypatch.setenv('TORCHELASTIC_ERROR_FILE', str(tmp_path/'error.json'))
    asked, store = Counter(), dist.HashStore()
    for o in (supervisor, watchdog): monkeypatch.setattr(o, 'get_world_size', lambda: n)
    monkeypatch.setattr(supervisor, 'dist', SimpleNamespace(**{**vars(dist), 'is_initialized': lambda: True, 'PrefixStore': lambda prefix, o: o}))
    monkeypatch.setattr(supervisor, 'shared_store', lambda nm: Counted(store, asked))
    monkeypatch.setattr(watchdog, '_sequence_numbers', dict)
    links = [('10.0.0.1:1', f'10.0.0.2:{r}') for r in range(1, n)]
    monkeypatch.setattr(connections.Connections, '_own', lambda self: dict.fromkeys(links, -1))
    for r in range(n): store.set(f'beat/{r}', json.dumps(asdict(Beat(1, r, host_name()+'x', 7))))
    for r in range(1, n): store.set(f'link/10.0.0.2:{r}>10.0.0.1:1', f'{r}')
    store.add('fail/0/0/here', n-1)
    return supervisor.Monitor(), asked


def failure_of(n, monkeypatch, tmp_path):
    "Requests of one of `n` workers, by what it does, where one of them fails, which has other workers wait"
    from fastdist.fault.same_call import _further
    from fastdist.world.errors import Failure
    m, asked = monitor_of(n, monkeypatch, tmp_path)
    res = {}

    def count(what, f):
        before = asked.total()
        f()
        res[what] = asked.total()-before
    count('others', m.beats.others)
    count('fails', lambda: m.fail(ValueError('no disk')))
    assert m.broken is None
    count('gone', lambda: m.beats.gone(0, lost=True))
    count('further', lambda: _further(m, range(n)))
    m.write('broken', Failure(1, 'n1', text='later', by=1))
    m.limits, m.raised, m.due = [None], True, 0.  # nothing is to be raised in this process
    count('heard', lambda: m._look(1))
    assert m.broken.text == 'later'
    return res


def test_failure(monkeypatch, tmp_path):
    few, more, many = [failure_of(n, monkeypatch, tmp_path) for n in (3, 8, 256)]
    assert few == more == many and max(few.values()) <= 12, (few, more, many)


def looks_of(n, watches, monkeypatch, tmp_path):
    "Requests of a monitor in each of 10 looks, where nothing happens"
    m, asked = monitor_of(n, monkeypatch, tmp_path)
    m.limits, seen = [600.] if watches else [], []
    m._look(0)  # the connections
    for i in range(1, 11):
        before = asked.total()
        m._look(i)
        seen.append(asked.total()-before)
    return seen


def test_looks(monkeypatch, tmp_path):
    few, more, many = [looks_of(n, True, monkeypatch, tmp_path) for n in (3, 8, 256)]
    assert few == more == many and max(few) <= 6 and sum(few) <= 28, (few, more, many)  # is there a failure, of two kinds, and a heartbeat, the neighbours, the watchdog's in between
    assert max(looks_of(3, False, monkeypatch, tmp_path)) == 3  # a heartbeat


def test_records():
    import torch.distributed as dist
    from fastdist.world.store import Records
    for n in (2, 64, 1024):
        asked, o = Counter(), Records(dist.HashStore())
        for r in range(n): o.set(f'beat/{r}', r)
        o.store = Counted(o.store, asked)
        assert o.get_all([f'beat/{r}' for r in range(n)]) == list(range(n)) and asked.total() == 2


def objects_in(strategy):
    "Calls in which each worker reads what every other one has sent, by part of a context with a fit in it"
    from fastdist.comm import collectives as call
    from learners import accuracy, learner, quiet
    from strategies import ctx_of
    import fastdist.all
    seen, real = Counter(), call._exchange

    def exchange(frame, n, group):
        seen[part, frame.splitlines()[0].decode()] += n > 1
        return real(frame, n, group)
    learn, part = quiet(learner(n=24, n_val=10, metrics=accuracy)), 'enter'
    call._exchange = exchange
    try:
        with learn.distrib_ctx(**(ctx_of(strategy) if strategy != 'auto' else dict(strategy='auto'))):
            part = 'fit'
            learn.fit(2)
            part = 'validate'
            learn.validate()
            part = 'leave'
    finally: call._exchange = real
    return dict(seen)


@pytest.mark.parametrize('strategy', ['ddp', 'zero2', 'fsdp', 'auto'])
def test_nobody_reads_what_all_have_sent(worlds, strategy):
    "Nothing of a context, a fit, an epoch or a validation needs an object of each worker in each worker"
    for r, seen in enumerate(worlds(2)(objects_in, strategy)): assert seen == {}, (r, seen)


def looks_in(n, seconds, monkeypatch):
    "How often a worker of `n` that waits looks, in the first seconds and in as many later ones"
    from fastdist.world import store
    now, looks = [0.], []
    monkeypatch.setattr(store, 'time', SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0]+s)))
    def done():
        looks.append(now[0])
        return now[0] > 2*seconds
    store.wait_until(done, n=n)
    return sum(o <= seconds for o in looks), sum(o > seconds for o in looks)


def test_waiting(monkeypatch):
    "A store can reply to some 30,000 requests a second: all that wait for rank 0 together ask it 4,000 times at most, beside their first looks"
    few, many = looks_in(2, 60, monkeypatch), looks_in(1000, 60, monkeypatch)
    assert few == many and few[1] == 60*4+1
    for n in (4000, 16_384): assert looks_in(n, 60, monkeypatch)[1]*n <= 60*4000*1.1


def waits():
    "Where workers wait for rank 0 or for each other: how many they say they are"
    from fastdist.comm import rank0
    from fastdist.fault import same_call
    from fastdist.world import get_rank, setup_distrib
    import time
    setup_distrib()
    seen, real = [], rank0.wait_until

    def wait(*args, **kwargs):
        seen.append(kwargs.get('n'))
        return real(*args, **kwargs)
    rank0.wait_until = same_call.wait_until = wait
    try:
        rank0.rank0_first(len, 'ab')
        same_call.after_rank0()
        same_call.all_at('it')
    finally: rank0.wait_until = same_call.wait_until = real
    return seen


def test_who_waits_says_how_many(worlds): assert worlds(2)(waits) == [[2], [2, 2, 2]]
