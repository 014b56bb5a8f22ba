"""Train on two workers by submitit, on this machine; with `submitit.AutoExecutor('logs')` on a Slurm cluster. Before its time limit the job
saves and goes back into the queue, and then goes on.

    cd examples && python submitit_train.py FOLDER
"""
import signal, sys, submitit
from fastai.basics import *
from fastai.callback.schedule import *
from fastdist.all import *
from digits import get_dls, get_model

class Requeued:
    "`train(resume)` as a job of submitit's. Its signal before the time limit asks all workers to save, and only then the job is requeued"
    def __init__(self, train, folder): store_attr()
    def __call__(self):
        resume,requeue = Resume(self.folder),signal.getsignal(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, lambda *_: resume.request(stop=True))
        try: return self.train(resume)
        except SystemExit: # all workers have saved, and end together
            requeue(signal.SIGUSR2, None)
            raise
    def checkpoint(self): return submitit.helpers.DelayedSubmission(self)

def train(resume):
    "What each worker runs"
    set_seed(42)
    learn = Learner(get_dls(), get_model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    with learn.distrib_ctx(split_batches=True): learn.fit_one_cycle(3, 0.01, cbs=resume)
    return learn.recorder.values[-1]

if __name__ == '__main__':
    executor = submitit.LocalExecutor('logs')
    executor.update_parameters(tasks_per_node=2, timeout_min=60, signal_delay_s=120)
    print(executor.submit(Requeued(train, sys.argv[1])).results())
