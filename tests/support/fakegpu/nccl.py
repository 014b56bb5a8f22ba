"The backend 'nccl': gloo, under nccl's rules"
import hashlib, json, os, pickle, queue, sys, threading, time
from types import SimpleNamespace

import torch, torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import device_mesh

from .cuda import on_cpu, real
from .waits import _where

sent = []  # (name of the collective, bytes, whose code, file, function), in the order in which they were called
delay = float(os.environ.get('FAKENCCL_DELAY', 0))  # seconds that a message is on its way
dtypes = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool}
groups = []  # torch holds only what is in C++
deaf = False  # links between GPUs: of a rank that is gone nobody is told, and what waits for it does so until it is aborted
noticed = False  # nccl's own watchdog has been told of an error: it sleeps, and what ends the group waits for it


class StrictNCCL(torch._C._distributed_c10d.Backend):
    "Takes tensors of one device alone, contiguous, of nccl's types; wants the same order in all ranks; an abort leaves nan in what is on its way"
    def __init__(self, opts, backend_options=None):
        super().__init__(opts.group_rank, opts.group_size)
        self.store, self.me, self.n, self.limit = opts.store, opts.group_rank, opts.group_size, opts.timeout
        self.gloo, self.device, self.calls, self.done, self.aborted, self.pending, self.together = None, None, 0, 0, False, [], None
        self.queue = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name='fake nccl').start()
        groups.append(self)

    def _run(self):
        while (job := self.queue.get()) is not None:
            try:
                self._make()
                if delay: time.sleep(delay)
                if job.what[0] not in ('send', 'recv'): self._check_order(job.what)
                job.work()
                self.done += 1
                if not self.aborted: job.future.set_result(job.result)
                self.pending.remove(job)  # which holds its tensors
                job = None
            except BaseException as e:
                if job is None or self.aborted or deaf: continue
                print(f'fake nccl, rank {self.me}: {job.what}: {e}', file=sys.stderr, flush=True)
                job.future.set_exception(e if isinstance(e, Exception) else RuntimeError(str(e)))
        self.gloo = self.store = None  # a thread of gloo's wakes up 100 times a second

    def _make(self):
        if self.gloo is None: self.gloo = dist.ProcessGroupGloo(dist.PrefixStore('fake nccl', self.store), self.me, self.n, self.limit)

    def _check_order(self, what):
        mine = torch.frombuffer(bytearray(hashlib.sha256(repr(what).encode()).digest()), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.n)]
        self.gloo.allgather([every], [mine]).wait()
        if any(not torch.equal(o, mine) for o in every): raise RuntimeError(
            f'nccl would hang, or be wrong: not all ranks are at the same collective; rank {self.me} is at {what}')

    def _check(self, name, t):
        if t.device.type != 'fakegpu': raise RuntimeError(f'No backend type associated with device type {t.device.type} ({name})')
        if t.dtype not in dtypes: raise RuntimeError(f'Input tensor data type is not supported for NCCL process group: {t.dtype} ({name})')
        if not t.is_contiguous() and not (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)):
            raise RuntimeError(f'Tensors must be contiguous ({name}, of shape {tuple(t.shape)}, strides {t.stride()})')
        if self.device is None: self.device = t.device.index
        if t.device.index != self.device: raise RuntimeError(
            f'ncclInvalidUsage: Duplicate GPU detected: {name} of a tensor on device {t.device.index}; this rank has sent from device {self.device}')

    def _call(self, name, ts, work, result, *same):
        "Queue `work`; `same` is what has to be the same in all ranks, by default number and type of the elements"
        for t in ts: self._check(name, t)
        self.calls += 1
        what = (name, self.calls, same or [(t.numel(), str(t.dtype)) for t in ts][:1])
        sent.append((name, sum(t.nbytes for t in ts), *_where()))
        future = torch.futures.Future()
        self.pending.append(job := SimpleNamespace(what=what, tensors=ts, work=work, future=future, result=result))
        if self.aborted: self._drop(job)
        else: self.queue.put(job)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def _drop(self, job):
        "A kernel that is ended has written anything"
        for t in job.tensors:
            if t.is_floating_point(): on_cpu(t).fill_(float('nan'))
        job.future.set_result(job.result)

    def abort(self):
        self.aborted = True
        for job in list(self.pending):
            if not job.future.done(): self._drop(job)

    def shutdown(self):
        self.queue.put(None)
        if noticed: time.sleep(300)

    # --- the collectives, on the same memory as tensors of the CPU

    def allreduce(self, ts, opts=None):
        op = getattr(opts, 'reduceOp', None) or dist.ReduceOp.SUM
        return self._call('allreduce', ts, lambda: [self._sum(on_cpu(t), op) for t in ts], ts)

    def _sum(self, t, op=dist.ReduceOp.SUM):
        "Reduce `t` in place"
        o, mean = dist.AllreduceOptions(), op == dist.ReduceOp.AVG
        o.reduceOp = dist.ReduceOp.SUM if mean else op
        up = t.view(torch.uint8) if t.dtype == torch.bool else t.float() if t.dtype in (torch.bfloat16, torch.float16) else t.contiguous()
        self.gloo.allreduce([up], o).wait()
        if mean: up /= self.n
        if up.data_ptr() != t.data_ptr(): t.copy_(up)

    def allreduce_coalesced(self, ts, opts=None): return self.allreduce(ts, opts)

    def broadcast(self, ts, opts=None):
        o = dist.BroadcastOptions()
        o.rootRank, o.rootTensor = opts.rootRank, 0
        def work():
            for t in map(on_cpu, ts):
                flat = t.contiguous().view(-1).view(torch.uint8)
                self.gloo.broadcast([flat], o).wait()
                if flat.data_ptr() != t.data_ptr(): t.copy_(flat.view(t.dtype).view(t.shape))
        return self._call('broadcast', ts, work, ts, *((t.numel(), str(t.dtype), opts.rootRank) for t in ts))

    def reduce(self, ts, opts=None):
        def work():
            for t in map(on_cpu, ts):
                res = t.clone()
                self._sum(res, opts.reduceOp)
                if self.me == opts.rootRank: t.copy_(res)
        return self._call('reduce', ts, work, ts, *((t.numel(), opts.rootRank) for t in ts))

    def _gather(self, t):
        "A list of what all ranks have, as tensors of the CPU"
        flat = on_cpu(t).contiguous().clone().view(-1)
        every = [torch.empty_like(flat) for _ in range(self.n)]
        if flat.numel(): self.gloo.allgather([[o.view(torch.uint8) for o in every]], [flat.view(torch.uint8)]).wait()
        return [o.view(t.shape) for o in every]

    def allgather(self, outs, ins, opts=None):
        def work():
            for o, x in zip(outs[0], self._gather(ins[0])): on_cpu(o).copy_(x)
        return self._call('allgather', [*ins, *outs[0]], work, outs[0])

    def all_gather_single(self, out, inp, opts=None):
        return self._call('all_gather_single', [inp, out], lambda: on_cpu(out).view(-1).copy_(torch.cat([o.view(-1) for o in self._gather(inp)])), [out])

    def all_gather_single_coalesced(self, outs, ins, opts=None): return [self.all_gather_single(o, i) for o, i in zip(outs, ins)][-1]

    def reduce_scatter_single(self, out, inp, opts=None):
        def work():
            every = on_cpu(inp).contiguous().clone().view(-1)
            self._sum(every, getattr(opts, 'reduceOp', None) or dist.ReduceOp.SUM)
            on_cpu(out).view(-1).copy_(every[self.me*out.numel():][:out.numel()])
        return self._call('reduce_scatter_single', [out, inp], work, [out])

    def reduce_scatter_single_coalesced(self, outs, ins, opts=None): return [self.reduce_scatter_single(o, i, opts) for o, i in zip(outs, ins)][-1]

    def scatter(self, outs, ins, opts=None):
        o = dist.ScatterOptions()
        o.rootRank = opts.rootRank
        def work(): self.gloo.scatter([on_cpu(t) for t in outs], [[on_cpu(t) for t in ins[0]]] if ins else [], o).wait()
        return self._call('scatter', [*outs, *(ins[0] if ins else [])], work, outs, (outs[0].numel(), opts.rootRank))

    def gather(self, outs, ins, opts=None):
        def work():
            every = self._gather(ins[0])
            for o, x in zip(outs[0] if outs else [], every): on_cpu(o).copy_(x)
        return self._call('gather', [*ins, *(outs[0] if outs else [])], work, outs[0] if outs else [], (ins[0].numel(), opts.rootRank))

    def send(self, ts, to, tag=0): return self._call('send', ts, lambda: self.gloo.send([on_cpu(t) for t in ts], to, tag).wait(), ts)
    def recv(self, ts, of, tag=0): return self._call('recv', ts, lambda: self.gloo.recv([on_cpu(t) for t in ts], of, tag).wait(), ts)

    def barrier(self, opts=None): return self._call('barrier', [], lambda: None, [])

    # earlier names
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced

    def getBackendName(self): return 'nccl'
    def _get_sequence_number_for_group(self): return self.calls
    def _set_sequence_number_for_group(self): pass
    def set_timeout(self, limit): self.limit = limit
    _set_default_timeout = set_timeout
    supports_splitting = supports_coalescing = False


def _status(*args, **kwargs):
    "What the flight recorder says of the groups"
    return dict(pg_status={str(i): dict(last_enqueued_collective=str(o.calls), last_completed_collective=str(o.done)) for i, o in enumerate(groups)},
                entries=[dict(profiling_name=f'nccl:{o.what[0]}', collective_seq_id=o.what[1]) for g in groups for o in g.pending])


def _split_group(parent_pg=None, split_ranks=None, timeout=None, group_desc=None, **kwargs):
    "The part that this rank is in: nccl splits one communicator, the parts here are new groups"
    made = [(ranks, dist.new_group(ranks, timeout=timeout, group_desc=group_desc)) for ranks in split_ranks]
    return next((g for ranks, g in made if dist.get_rank() in ranks), dist.GroupMember.NON_GROUP_MEMBER)


def install():
    "Let torch.distributed take it for nccl, and 'cuda' in the name of a backend for the device"
    dist.Backend._plugins['NCCL'] = dist.Backend._BackendPlugin(StrictNCCL, True)
    dist.is_nccl_available = lambda: True
    torch._C._distributed_c10d._dump_nccl_trace_json = lambda *args, **kwargs: json.dumps(_status()).encode()
    torch._C._distributed_c10d._dump_nccl_trace = lambda *args, **kwargs: pickle.dumps(_status())
    config = c10d.BackendConfig
    backends, text = config.get_device_backend_map, config.__repr__
    config.get_device_backend_map = lambda self: {real(k).type if k == 'cuda' else k: v for k, v in backends(self).items()}
    config.__repr__ = lambda self: text(self) + ''.join(f',fakegpu:{v}' for k, v in backends(self).items() if k == 'cuda')
    device_mesh.split_group = _split_group
    init = c10d.init_process_group
    def init_process_group(*args, device_id=None, **kwargs): return init(*args, device_id=real(device_id), **kwargs)
    dist.init_process_group = c10d.init_process_group = init_process_group
