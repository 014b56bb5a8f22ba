"""A script of plain PyTorch's that has moved to fastai: its loaders, model, loss and optimizer stay, its loops are `fit`.

    python examples/fastai/from_pytorch.py
    fastdist launch -n 2 examples/fastai/from_pytorch.py
"""
from fastai.basics import *
from fastai.callback.all import *
from fastdist.all import *
from fastcore.script import *
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.MaxPool2d(2), nn.Dropout2d(0.25),
                         nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10), nn.LogSoftmax(dim=1))

def get_loaders(bs, n):
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.images[:n,None]/16, dtype=torch.float), torch.tensor(digits.target[:n]))
    train,test = random_split(data, [0.8,0.2]) # draws: the same in all workers, after a seed
    return DataLoader(train, batch_size=bs, shuffle=True),DataLoader(test, batch_size=2*bs, shuffle=True)

@call_parse
def main(
    epochs:int=2,
    lr:float=1e-2, # Learning rate
    bs:int=64, # Batch size of each worker
    n:int=1797, # Use this many digits
    split_batches:bool=False, # Share each batch of `bs` between the workers?
):
    set_seed(42)
    dls = DataLoaders(*get_loaders(bs, n))
    learn = Learner(dls, Net(), loss_func=F.nll_loss, opt_func=partial(OptimWrapper, opt=torch.optim.AdamW), metrics=accuracy)
    with learn.distrib_ctx(split_batches=split_batches): learn.fit_one_cycle(epochs, lr)
    return learn
