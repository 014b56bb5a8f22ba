"""What `learn.distrib_plan` predicts beside what is measured, of each strategy: memory, bytes sent, the time of a step.

    python benchmarks/plan.py [--workers 2 3] [--only ddp zero1 zero2 fsdp] [--millions 3] [--bs 16]

Blocks of linear layers in float32, fastai's Adam, over gloo on this machine. Measured are, of the worker that has most: bytes of parameters (but for
those that 'zero2' has gathered, which are added), gradients and optimizer state; what it hands over to collectives in a step, as a ring would send it; what its
sockets have sent, by the kernel's count (gloo makes a reduce-scatter of an all-reduce, so that gradients travel twice as far with 'zero2' and 'fsdp'); and the median
of the steps' times. The link of the plan is what an all-reduce of 16 MB has got before. Ends with 1 if bytes differ by more than 0.1 %."""
import os, socket, stat, statistics, struct, time, warnings

warnings.filterwarnings('ignore')
import torch, torch.distributed as dist
from fastai.basics import *
from shared import parser, spawned, steps_only
import counting, fastdist.all
from fastdist.comm.collectives import local
from fastdist.monitor.plan import bytes_sent
from fastdist.strategy.base import state_tensors
from fastdist.strategy.select import memory_of

STEPS = 8


class Block(nn.Sequential):
    def __init__(self, d): super().__init__(nn.Linear(d, 4*d), nn.ReLU(), nn.Linear(4*d, d))


def model(millions):
    torch.manual_seed(0)
    d = int((millions*1e6/8/8)**.5)
    return nn.Sequential(nn.Linear(10, d), *[Block(d) for _ in range(8)], nn.Linear(d, 10))


def on_the_wire():
    "Bytes that the sockets of this process have sent so far, by TCP_INFO"
    total = 0
    for fd in map(int, os.listdir('/proc/self/fd')):
        try: is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
        except OSError: continue  # that of the list itself
        if not is_socket: continue
        with socket.socket(fileno=os.dup(fd)) as s:
            if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                total += struct.unpack_from('Q', s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 200)[0]
    return total


class Measures(Callback):
    order, run_valid = 2000, False
    def __init__(self): self.times, self.sent, self.wire = [], [], []
    def before_train(self): self.began, self.count, self.before = time.perf_counter(), len(counting.sent), on_the_wire()
    def after_step(self):
        ps = [*self.learn.model.parameters()]
        self.held = sum(local(t).nbytes for t in (*ps, *(p.grad for p in ps), *state_tensors(self.opt)))
    def after_batch(self):
        self.times.append(time.perf_counter()-self.began)
        self.sent.append(sum(b for _, b in counting.sent[self.count:]))
        self.wire.append(on_the_wire()-self.before)
        self.before_train()


def link():
    "Bytes that each worker sends in a second, of a large all-reduce"
    t, seconds, n = torch.ones(4*2**20), [], dist.get_world_size()
    for _ in range(5):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(t)
        seconds.append(time.perf_counter()-begin)
    return 2*(n-1)/n*t.nbytes/statistics.median(seconds)


def worker(rank, world, file, a, res):
    torch.set_num_threads(1)
    counting.join(init_method=f'file://{file}', world_size=world, rank=rank)
    speed = link()
    g = torch.Generator().manual_seed(0)
    xs, ys = torch.randn(STEPS*a.bs*world, 10, generator=g), torch.randint(0, 10, (STEPS*a.bs*world,), generator=g)
    for nm in a.only:
        dls = DataLoaders(*[TfmdDL(list(zip(xs, ys)), bs=a.bs, num_workers=0) for _ in range(2)])
        cb = Measures()
        learn = steps_only(Learner(dls, model(a.millions), CrossEntropyLossFlat(), opt_func=Adam, cbs=cb))
        learn.remove_cb(cb)
        plan = learn.distrib_plan(world, speed, nm)
        learn.add_cb(cb)
        with learn.distrib_ctx(strategy=nm): learn.fit(1)
        every = [None]*world
        dist.all_gather_object(every, [cb.held, *(statistics.median(o[2:]) for o in (cb.sent, cb.wire, cb.times))])
        if rank == 0: res.put((nm, speed, plan.step[nm], [max(o) for o in zip(*every)]))
        del learn, cb, dls
    dist.destroy_process_group()


def main():
    p = parser(__doc__)
    p.add_argument('--workers', type=int, nargs='+', default=[2, 3])
    p.add_argument('--only', nargs='+', default=['ddp', 'zero1', 'zero2', 'fsdp'])
    p.add_argument('--millions', type=float, default=3)
    p.add_argument('--bs', type=int, default=16)
    a, off = p.parse_args(), []
    m = model(a.millions)
    print(f'{sum(p.numel() for p in m.parameters())/1e6:.1f} M parameters, batches of {a.bs}\n\n| strategy | workers | held, MB | measured | sent, MB | measured | on the wire | '
          'a step, ms | measured | link, GB/s |\n|---|---|---|---|---|---|---|---|---|---|')
    for n in a.workers:
        for nm, speed, step, (held, sent, wire, seconds) in spawned(worker, n, len(a.only), a):
            plan = memory_of(nm, m, n)
            del plan['messages']
            if nm == 'zero2': held += sum(p.nbytes for p in m.parameters())
            want, sends = sum(plan.values()), sum(bytes_sent(nm, m, n, n))
            print(f'| {nm} | {n} | {want/1e6:.2f} | {held/1e6:.2f} | {sends/1e6:.2f} | {sent/1e6:.2f} | {wire/1e6:.2f} | {step:.0f} | {seconds*1e3:.0f} | {speed/1e9:.2f} |', flush=True)
            off += [f'{nm}, {n} workers' for x, y in ((held, want), (sent, sends)) if abs(x/y-1) > .001]
    if off: raise SystemExit('\nother bytes than predicted: '+'; '.join(off))


if __name__ == '__main__': main()
