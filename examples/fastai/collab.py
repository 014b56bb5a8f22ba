"""Who likes what? Ratings of made-up users and films, as fastai's tutorial of collaborative filtering has them for MovieLens.

    python examples/fastai/collab.py
    fastdist launch -n 2 examples/fastai/collab.py --use-nn
"""
from fastai.collab import *
from fastai.tabular.all import *
from fastdist.all import *
from fastcore.script import *

def get_ratings(n=500, n_users=30, n_films=20, seed=0):
    rng = np.random.default_rng(seed)
    users,films = rng.normal(size=(n_users,2)),rng.normal(size=(n_films,2))
    u,f = rng.integers(n_users, size=n),rng.integers(n_films, size=n)
    return pd.DataFrame(dict(user=u, title=[f'Film {o}' for o in f], rating=(2.5+(users[u]*films[f]).sum(1)).clip(.5, 5)))

@call_parse
def main(
    epochs:int=3,
    bs:int=32, # Batch size of each worker
    use_nn:bool=False, # A neural network, rather than a product of factors?
    split_batches:bool=False, # Share each batch of `bs` between the workers?
):
    set_seed(42)
    dls = CollabDataLoaders.from_df(get_ratings(), item_name='title', bs=bs)
    learn = collab_learner(dls, n_factors=8, use_nn=use_nn, layers=[16] if use_nn else None, y_range=(0,5.5), metrics=rmse)
    with learn.distrib_ctx(split_batches=split_batches): learn.fit_one_cycle(epochs, 5e-3, wd=0.1)
    return learn
