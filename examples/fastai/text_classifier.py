"""Praise or complaint? Made-up reviews and an AWD-LSTM, as fastai's train_imdbclassifier.py has it for films.

    python examples/fastai/text_classifier.py
    fastdist launch -n 2 examples/fastai/text_classifier.py
"""
from fastai.text.all import *
from fastdist.all import *
from fastcore.script import *

def get_reviews(n=120, seed=0):
    rng,words = np.random.default_rng(seed),'the film was and it had an actor whose story they told us'.split()
    said = dict(good='great lovely moving brilliant'.split(), bad='dull awful clumsy boring'.split())
    def review(kind): return ' '.join(rng.permutation([*rng.choice(words, rng.integers(4, 20)), *rng.choice(said[kind], 2)]))
    return pd.DataFrame([(review(o),o) for o in rng.choice(['good','bad'], n)], columns=['text','label'])

@call_parse
def main(
    lr:float=1e-2, # Learning rate
    bs:int=16, # Batch size of each worker
    epochs:int=1, # After one in which all but the head is frozen
    drop_mult:float=0.5, # Of fastai's dropouts
    split_batches:bool=False, # Share each batch of `bs` between the workers?
):
    set_seed(42)
    dls = TextDataLoaders.from_df(get_reviews(), text_col='text', label_col='label', bs=bs, seed=42)
    config = merge(awd_lstm_clas_config, dict(emb_sz=16, n_hid=24, n_layers=2))
    learn = text_classifier_learner(dls, AWD_LSTM, config=config, pretrained=False, drop_mult=drop_mult, metrics=accuracy)
    with learn.distrib_ctx(split_batches=split_batches): learn.fine_tune(epochs, lr)
    return learn
