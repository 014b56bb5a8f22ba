"What a worker asks the store at a start: as much with many workers as with two"
import threading
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


@pytest.mark.parametrize('n', [2, 256])
def test_start(n, monkeypatch):
    # a look of rank 0: how many have come, a reply to all new ones or have all come, has one ended (2 stores)
    res = start_of(n, monkeypatch)
    assert res[0][0] <= 3 and res[0][1] <= 6, res[0] # comes, and says so; who comes last says that all have, too
    for r in range(1, n): assert res[r][0] <= 5 and res[r][1] <= 3, (r, res[r]) # draws a number, too
