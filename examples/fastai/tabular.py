"""Who earns more? A table of made-up people, as fastai's train_tabular.py has it for the census of adults.

    python examples/fastai/tabular.py
    fastdist launch -n 2 examples/fastai/tabular.py
"""
from fastai.tabular.all import *
from fastdist.all import *
from fastcore.script import *

def get_people(n=400, seed=0):
    rng = np.random.default_rng(seed)
    df = pd.DataFrame(dict(
        education=rng.choice(['school','college','university'], n), relationship=rng.choice(['single','married','widowed'], n),
        age=rng.integers(18, 80, n).astype(float), hours=rng.normal(38, 8, n)))
    score = (df.education=='university')*2 + (df.age-40)/20 + (df.hours-38)/8 + rng.normal(0, .5, n)
    df['salary'] = np.where(score > 1, '>=50k', '<50k')
    df.loc[rng.random(n) < .1, 'age'] = np.nan
    return df

@call_parse
def main(
    epochs:int=3,
    bs:int=32, # Batch size of each worker
    split_batches:bool=False, # Share each batch of `bs` between the workers?
):
    set_seed(42) # fastai's script has none; all workers have to hold back the same rows, and without it they say that they do not
    dls = TabularDataLoaders.from_df(get_people(), procs=[Categorify, FillMissing, Normalize], y_names='salary', bs=bs,
                                     cat_names=['education','relationship'], cont_names=['age','hours'])
    learn = tabular_learner(dls, layers=[32,16], metrics=[accuracy, RocAucBinary()])
    with learn.distrib_ctx(split_batches=split_batches): learn.fit_one_cycle(epochs, 1e-2)
    return learn
