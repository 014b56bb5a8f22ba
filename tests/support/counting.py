"A process group over gloo that notes what each collective sends, as a ring would: DDP's messages too, which C++ sends"
import torch, torch.distributed as dist
from torch._C._distributed_c10d import Backend

sent = []  # (name of the collective, bytes that this worker sends)


class Counting(Backend):
    def __init__(self, opts, backend_options=None):
        super().__init__(opts.group_rank, opts.group_size)
        self.gloo = dist.ProcessGroupGloo(opts.store, opts.group_rank, opts.group_size, opts.timeout)

    def getBackendName(self): return 'counting'
    def _get_sequence_number_for_group(self): return self.gloo._get_sequence_number_for_group()
    def _set_sequence_number_for_group(self): self.gloo._set_sequence_number_for_group()


def _counted(nm, handed, factor):
    def f(self, *args):
        sent.append((nm, factor(self.size())*sum(t.nbytes for t in handed(*args))))
        return getattr(self.gloo, nm)(*args)
    setattr(Counting, nm, f)


# what a collective is called, before torch 2.13 and after; the tensors that a worker hands over; and how often a ring sends each byte of them
_calls = {
    ('allreduce',): (lambda ts, *_: ts, lambda n: 2*(n-1)/n),
    ('allgather', 'all_gather_single_coalesced', 'allgather_into_tensor_coalesced'): (lambda outs, ins, *_: ins, lambda n: n-1),
    ('all_gather_single', '_allgather_base'): (lambda out, inp, *_: [inp], lambda n: n-1),
    ('reduce_scatter_single', '_reduce_scatter_base'): (lambda out, inp, *_: [inp], lambda n: (n-1)/n),
    ('broadcast', 'reduce', 'gather', 'scatter', 'barrier'): (lambda *_: [], lambda n: 0)}  # in no step
for _nms, _how in _calls.items():
    for _nm in _nms:
        if hasattr(dist.ProcessGroupGloo, _nm): _counted(_nm, *_how)


def join(**kwargs):
    "As `init_process_group`"
    if not hasattr(dist.Backend, 'COUNTING'): dist.Backend.register_backend('counting', Counting, extended_api=True, devices=['cpu'])
    dist.init_process_group('counting', **kwargs)
