"""Train on the workers of a Ray cluster, or on two of this machine. Ray starts all of them again when one is lost, and the fit goes on.

    python examples/ray_train.py FOLDER      # which all machines of the cluster share
"""
import sys, ray.train
from numbers import Number
from ray.train.torch import TorchTrainer
from fastai.basics import *
from fastai.callback.schedule import *
from fastdist.all import *
from digits import get_dls, get_model

class RayReport(Callback):
    "Gives Ray the numbers and the weights of each epoch that has been trained: fastai calls `after_epoch` for evaluations as well"
    order,trained = 60,False # after `Recorder`
    def after_train(self): self.trained = True
    def after_epoch(self):
        if not self.trained: return
        self.trained = False
        rec,file = self.learn.recorder,self.learn.save('weights') # in all workers, as they may be in shards
        numbers = {k:float(v) for k,v in zip(rec.metric_names, rec.log) if isinstance(v, Number)}
        ray.train.report(numbers, checkpoint=ray.train.Checkpoint.from_directory(file.parent) if is_master() else None)

def train(config):
    "What each worker runs; Ray has made the process group, and the context finds it"
    set_seed(42)
    learn = Learner(get_dls(), get_model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, path=config['folder'])
    with learn.distrib_ctx(split_batches=True, resume=f"{config['folder']}/ckpt"):
        learn.fit_one_cycle(config['epochs'], 0.01, cbs=[RayReport(), *config['cbs']])

def main(folder, epochs=3, workers=2, cbs=()):
    folder = str(Path(folder).absolute())
    trainer = TorchTrainer(train, train_loop_config=dict(folder=folder, epochs=epochs, cbs=cbs),
                           scaling_config=ray.train.ScalingConfig(num_workers=workers),
                           run_config=ray.train.RunConfig(name='fastdist', storage_path=folder,
                                                          failure_config=ray.train.FailureConfig(max_failures=1)))
    return trainer.fit()

if __name__ == '__main__':
    result = main(sys.argv[1])
    print(result.metrics, result.checkpoint)
