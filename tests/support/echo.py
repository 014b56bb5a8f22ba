"""A process group of one process: what the other workers have is what this one has. So a fit as one of a thousand workers runs here, with
numbers that are right for workers who all have the same samples; and counts what it sends."""
import os, threading
from collections import Counter

import torch, torch.distributed as dist
from torch.distributed import ReduceOp

sent = []  # (name of the collective, bytes that this worker hands over)


class Echo(torch._C._distributed_c10d.Backend):
    def __init__(self, opts, backend_options=None):
        super().__init__(opts.group_rank, opts.group_size)
        self.me, self.n, self.calls = opts.group_rank, opts.group_size, 0

    def _done(self, name, ts, result):
        self.calls += 1
        sent.append((name, sum(t.nbytes for t in ts)))
        future = torch.futures.Future()
        future.set_result(result)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def _add(self, t, opts):
        if getattr(opts, 'reduceOp', ReduceOp.SUM) == ReduceOp.SUM: t *= self.n

    def allreduce(self, ts, opts=None):
        for t in ts: self._add(t, opts)
        return self._done('allreduce', ts, ts)

    def broadcast(self, ts, opts=None): return self._done('broadcast', ts, ts)

    def reduce(self, ts, opts=None):
        for t in ts: self._add(t, opts)
        return self._done('reduce', ts, ts)

    def allgather(self, outs, ins, opts=None):
        for o in outs[0]: o.copy_(ins[0])
        return self._done('allgather', ins, outs)

    def all_gather_single(self, out, inp, opts=None):
        out.view(self.n, -1).copy_(inp.clone().view(1, -1))
        return self._done('all_gather_single', [inp], out)

    def reduce_scatter_single(self, out, inp, opts=None):
        out.view(-1).copy_(inp.view(self.n, -1)[self.me].clone())
        self._add(out, opts)
        return self._done('reduce_scatter_single', [inp], out)

    def all_gather_single_coalesced(self, outs, ins, opts=None): return [self.all_gather_single(o, i) for o, i in zip(outs, ins)][-1]
    def reduce_scatter_single_coalesced(self, outs, ins, opts=None):
        return [self.reduce_scatter_single(o, i, opts) for o, i in zip(outs, ins)][-1]

    def gather(self, outs, ins, opts=None):
        for o in outs[0] if outs else []: o.copy_(ins[0])
        return self._done('gather', ins, outs)

    def scatter(self, outs, ins, opts=None):
        if ins: outs[0].copy_(ins[0][self.me])
        return self._done('scatter', outs, outs)

    def barrier(self, opts=None): return self._done('barrier', [], None)

    # earlier names
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced

    def getBackendName(self): return 'echo'
    def _get_sequence_number_for_group(self): return self.calls
    def _set_sequence_number_for_group(self): pass


class Asked(dist.Store):
    "A store that counts what the main thread asks it"
    def __init__(self):
        super().__init__()
        self.real, self.count = dist.HashStore(), Counter()

    def _ask(self, nm, *args):
        if threading.current_thread() is threading.main_thread(): self.count[nm] += 1
        return getattr(self.real, nm)(*args)


for _nm in 'set get add compare_set check wait delete_key num_keys append multi_get multi_set set_timeout'.split():
    setattr(Asked, _nm, lambda self, *args, _nm=_nm: self._ask(_nm, *args))


def join(rank, size, store):
    "Be worker `rank` of `size`, all on this machine"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), GROUP_RANK='0',
                      ACCELERATE_USE_CPU='true')
    dist.Backend.register_backend('echo', Echo, extended_api=True, devices=['cpu'])
    dist.init_process_group('echo', store=store, rank=rank, world_size=size)
