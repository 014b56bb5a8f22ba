"""What a training step costs on GPUs, beside the same loop written by hand with fastai's optimizer and loader, and beside fastai alone.

    torchrun --nproc-per-node 2 benchmarks/gpus.py [--rounds 7] [--models tiny resnet18]

Where there are fewer GPUs than processes these share them, over nccl's sockets: then only ratios say something. All ways take turns in the same processes, in another order each round. With one process there is no DistributedDataParallel, and `distrib_ctx` has nothing to do.
Medians of the milliseconds of a step, by the clock (the GPU's work ends within) and of this process's CPU, with quartiles of the ratio to by hand."""
import os, random, statistics, time
from contextlib import nullcontext

import torch, torch.distributed as dist
from fastai.basics import Adam, Callback, CrossEntropyLossFlat, DataLoaders, Learner, TfmdDL, nn
from fastai.callback.fp16 import MixedPrecision
from shared import parser, spread, steps_only
import fastdist.all
from fastdist.world import setup_distrib, get_world_size, get_rank
from torch.nn.parallel import DistributedDataParallel
from real_gpus import share

STEPS = 30


def parts(name):
    "(model, features, targets, samples of a worker's batch, in half precision?)"
    torch.manual_seed(0)
    if name == 'tiny': model, x, bs = nn.Sequential(*[o for _ in range(6) for o in (nn.Linear(192, 192), nn.ReLU())], nn.Linear(192, 10)), torch.randn(256, 192), 64
    else:
        import torchvision
        model, x, bs = getattr(torchvision.models, name)(num_classes=10), torch.randn(256, 3, 96, 96), 64
    n = bs*STEPS*get_world_size()
    items = [(x[i%256], torch.tensor(i%10)) for i in range(n)]
    return model.cuda(), items, bs, name != 'tiny'


def by_hand(name):
    model, items, bs, half = parts(name)
    dl = TfmdDL(items[get_rank()::get_world_size()], bs=bs, num_workers=0, device=torch.device('cuda', torch.cuda.current_device()), pin_memory=True)
    opt, loss_func = Adam(model.parameters(), lr=1e-3), CrossEntropyLossFlat()
    if dist.is_initialized(): model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    model.train()
    def epoch():
        torch.cuda.synchronize()
        begin = time.perf_counter(), time.process_time()
        for x, y in dl:
            with torch.autocast('cuda', torch.bfloat16, enabled=half): loss = loss_func(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter()-begin[0], time.process_time()-begin[1]
    return epoch


class Times(Callback):
    order = 3000
    def before_train(self):
        torch.cuda.synchronize()
        self.begin = time.perf_counter(), time.process_time()
    def after_train(self):
        torch.cuda.synchronize()
        self.took = time.perf_counter()-self.begin[0], time.process_time()-self.begin[1]


def fastai(name, **ctx):
    model, items, bs, half = parts(name)
    dls = DataLoaders(*[TfmdDL(items, bs=bs*(1 if ctx else get_world_size()), num_workers=0, device=torch.device('cuda', torch.cuda.current_device()), pin_memory=True)
                        for _ in range(2)])
    learn = steps_only(Learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=Adam, lr=1e-3, cbs=[Times()]))
    if half: learn.add_cb(MixedPrecision(amp_mode='bf16'))
    def epoch():
        with learn.distrib_ctx(**ctx) if ctx else nullcontext(): learn.fit(1)
        return learn.times.took
    return epoch


WAYS = {'by hand': by_hand, 'fastai alone': fastai, **{f'fastdist, {o}': lambda name, o=o: fastai(name, strategy=o, sync_bn=False) for o in ('ddp', 'zero1', 'zero2', 'fsdp')}}


def main():
    p = parser(__doc__)
    p.add_argument('--rounds', type=int, default=7)
    p.add_argument('--models', nargs='+', default=['tiny', 'resnet18'])
    a = p.parse_args()
    share(int(os.environ.get('WORLD_SIZE', 1)))
    setup_distrib()
    n = get_world_size()
    names = [o for o in WAYS if o != 'fastai alone' or n == 1]
    if n == 1: names = [o for o in names if o.split(', ')[-1] in ('by hand', 'fastai alone', 'ddp')]
    for model in a.models:
        ways = {o: WAYS[o](model) for o in names}
        res = {o: [] for o in names}
        for w in ways.values(): w()
        for i in range(a.rounds):
            for o in random.Random(i).sample(names, len(names)): res[o].append(ways[o]())
        if get_rank(): continue
        print(f'\n{model}, {n} worker(s), {torch.cuda.get_device_name()}, {a.rounds} rounds of {STEPS} steps\n\n| | ms a step | CPU ms a step | by hand / this | quartiles |\n|---|---|---|---|---|')
        for name, rs in res.items():
            ms = [statistics.median(o)/STEPS*1e3 for o in zip(*rs)]
            print(f"| {name} | {ms[0]:.2f} | {ms[1]:.2f} | {spread([h[0]/r[0] for h, r in zip(res['by hand'], rs)])} |", flush=True)


if __name__ == '__main__': main()
