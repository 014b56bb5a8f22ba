"""Train with arguments of Hydra's, also several runs one after the other (`-m`), on as many workers as there are:

    fastdist launch -n 2 examples/hydra_train.py lr=0.02
    fastdist launch -n 2 examples/hydra_train.py -m lr=0.01,0.02
"""
import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from fastai.basics import *
from fastai.callback.schedule import *
from fastdist.all import *
from digits import get_dls, get_model

ConfigStore.instance().store('digits', dict(lr=0.01, epochs=3))

@hydra.main(version_base=None, config_name='digits')
def main(cfg):
    folder = rank0_read(lambda: HydraConfig.get().runtime.output_dir) # the name has the time, which is each worker's own
    set_seed(42)
    learn = Learner(get_dls(), get_model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, path=folder)
    with learn.distrib_ctx(split_batches=True):
        learn.fit_one_cycle(cfg.epochs, cfg.lr)
        learn.save('weights') # in models/ of rank 0's folder

if __name__ == '__main__': main()
