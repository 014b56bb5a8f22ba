"""Train on scikit-learn's handwritten digits with a strategy given on the command line, and show what each worker has of it.

    python examples/sharded.py fsdp
    fastdist launch -n 2 examples/sharded.py zero2
    accelerate launch --multi_gpu --num_processes 2 examples/sharded.py fsdp
    torchrun --nproc-per-node 2 examples/sharded.py fsdp --checkpoint
"""
from argparse import ArgumentParser
from fastai.basics import *
from fastai.callback.progress import *
from fastai.callback.schedule import *
from fastdist.all import *
from torch.distributed.tensor import DTensor
from digits import get_dls

def get_model():
    return nn.Sequential(ConvLayer(1, 32), ConvLayer(32, 64, stride=2), Flatten(), # 8 x 8 pixels, then 4 x 4
                         nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()), nn.Linear(512, 10))

def nbytes(ts): return sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in ts)

class Held(Callback):
    "Bytes that this worker has, at a step: of parameters, gradients and optimizer state"
    def before_step(self):
        self.params = nbytes(self.model.parameters())
        self.grads = nbytes(p.grad for p in self.model.parameters() if p.grad is not None)
    def after_step(self):
        # numbers, such as Adam's count of steps, are not counted
        self.state = nbytes(o for s in self.opt.state.values() for o in s.values() if isinstance(o, Tensor))

def main(strategy='ddp', checkpoint=False, epochs=4):
    set_seed(42)
    learn = Learner(get_dls(), get_model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    held = Held()
    with learn.distrib_ctx(split_batches=True, strategy=strategy, activation_checkpointing=checkpoint):
        learn.fit_one_cycle(epochs, 0.003, cbs=held)
        with learn.no_bar(): loss,acc = learn.validate()
    # the context has given the learner back as it was: a plain model with whole weights, in every worker
    total = nbytes(learn.model.parameters())
    if is_master(): print(f"{strategy}: accuracy {acc:.4f}, {get_world_size()} workers; of a model of {total} bytes each has "
                          f"{held.params} of parameters, {held.grads} of gradients, {held.state} of optimizer state")

if __name__ == '__main__':
    p = ArgumentParser(description="Digits, with a strategy")
    p.add_argument('strategy', nargs='?', default='ddp', help="ddp, zero1, zero2, fsdp, hsdp or auto")
    p.add_argument('--checkpoint', action='store_true', help="compute activations again in the backward pass")
    p.add_argument('--epochs', type=int, default=4)
    args = p.parse_args()
    main(args.strategy, args.checkpoint, args.epochs)
