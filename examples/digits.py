"""Train a small convolutional network on scikit-learn's handwritten digits. The same file runs on one worker and on many:

    python examples/digits.py
    fastdist launch -n 2 examples/digits.py
    accelerate launch --multi_gpu --num_processes 2 examples/digits.py
    torchrun --nproc-per-node 2 examples/digits.py
"""
import time
from fastai.basics import *
from fastai.callback.progress import *
from fastai.callback.schedule import *
from fastdist.all import *
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

def get_dls():
    digits = load_digits()
    items = [(tensor(x)[None].float()/16, tensor(y)) for x,y in zip(digits.images, digits.target)]
    train,valid = train_test_split(items, test_size=450, stratify=digits.target, random_state=0)
    return DataLoaders.from_dsets(train, valid, bs=64, num_workers=0) # the images are in memory

def get_model():
    return nn.Sequential(ConvLayer(1, 32), ConvLayer(32, 64, stride=2), ConvLayer(64, 64), # each with a batch norm
                         nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(64, 10))

def main(epochs=6):
    set_seed(42)
    dls = get_dls()
    learn = Learner(dls, get_model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    # With split_batches the workers share out each batch of 64, so their number changes the speed and nothing else.
    # Without it each of them takes 64 samples a step: fewer steps with larger batches, which may want another learning rate.
    with learn.distrib_ctx(split_batches=True):
        start = time.perf_counter()
        learn.fit_one_cycle(epochs, 0.01)
        speed = epochs*dls.train.n/(time.perf_counter()-start)
        with learn.no_bar(): loss,acc = learn.validate()
    if is_master(): print(f"accuracy {acc:.4f} on {dls.valid.n} held-out digits, {get_world_size()} workers, {speed:.0f} samples/s")

if __name__ == '__main__': main()
