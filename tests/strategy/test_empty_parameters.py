"Parameters without elements, as tabular models without continuous columns have them"
import pandas as pd
import pytest
from fastai.callback.training import GradientClip
from learners import *


def frame(n=22):
    g = np.random.RandomState(3)
    return pd.DataFrame(dict(b=g.choice(list('xyz'), n), user=g.randint(0, 5, n), title=g.randint(0, 5, n), rating=g.rand(n)*5, y=g.randint(0, 2, n)))


def tabular():
    from fastai.tabular.all import Categorify, CategoryBlock, TabularDataLoaders, tabular_learner
    dls = TabularDataLoaders.from_df(frame(), procs=[Categorify], cat_names=['b'], cont_names=[], y_names='y', y_block=CategoryBlock(), bs=5, valid_idx=range(17, 22), num_workers=0)
    return tabular_learner(dls, layers=[4])


def collab():
    from fastai.collab import CollabDataLoaders, collab_learner
    dls = CollabDataLoaders.from_df(frame(), user_name='user', item_name='title', rating_name='rating', bs=5, seed=1, num_workers=0)
    return collab_learner(dls, use_nn=True, layers=[4], y_range=(0, 5.5))


class Spare(nn.Linear):
    "A parameter of the model itself, which no forward uses"
    def __init__(self):
        super().__init__(4, 3, dtype=torch.float64)
        self.spare = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))


class Used(Spare):
    "It has a gradient, and so has a number"
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    def forward(self, x): return super().forward(x)*self.scale + self.spare.sum(0)


def clipped(): return learner(n=21, model=Used, cbs=[GradientClip(0.05), GradientAccumulation(10)])


def trained_on(what, strategy=None):
    warnings.simplefilter('ignore')
    set_seed(3)
    learn = quiet(dict(tabular=tabular, collab=collab, spare=lambda: learner(n=7, model=Spare), clipped=clipped)[what]())
    with contextlib.nullcontext() if strategy is None else learn.distrib_ctx(split_batches=True, strategy=strategy): learn.fit(2, 0.01)
    return weights(learn), list(learn.recorder.values[-1])


# each model under two: what a strategy does about such a parameter does not depend on the model
@pytest.mark.parametrize('what,strategy', [('tabular', 'ddp'), ('spare', 'ddp'), ('spare', 'fsdp'), ('tabular', 'zero2'), ('collab', 'zero1'), ('collab', 'fsdp'),
                                           ('clipped', 'zero2'), ('clipped', 'fsdp')])
def test_no_elements(world2, what, strategy):
    import fastdist.all
    want, values = trained_on(what)
    assert any(v.numel() == 0 for v in want.values())
    for got, values1 in world2(trained_on, what, strategy): assert diff(want, got) < 1e-5 and diff(values, values1) < 1e-5
