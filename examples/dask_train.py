"""Train on worker processes of a Dask cluster, each of which is one rank. Here it is one of this machine.

    python examples/dask_train.py
"""
import random, dask.sizeof
from urllib.parse import urlparse
from dask.distributed import Client, LocalCluster
from torch.distributed.elastic.utils.distributed import get_free_port
from fastai.basics import *
from fastai.callback.schedule import *
from fastdist.all import *
from fastdist.world import distributed_init
from digits import get_dls, get_model

def on_workers(client, n, train, *args):
    "The results of `train(*args)` in `n` of Dask's worker processes, by rank"
    client.wait_for_workers(n)
    workers = list(client.nthreads())[:n]
    port = client.submit(get_free_port, workers=workers[:1], pure=False).result()
    def run(rank):
        # in a thread of its own Dask draws which parts of a message to measure: not from the stream that the order of an epoch goes by
        dask.sizeof.random = random.Random()
        distributed_init(f'tcp://{urlparse(workers[0]).hostname}:{port}', rank=rank, world_size=n)
        try: return train(*args)
        finally: teardown_distrib() # Dask's processes live on
    return client.gather([client.submit(run, i, workers=[o], pure=False) for i,o in enumerate(workers)])

def train(epochs):
    set_seed(42)
    learn = Learner(get_dls(), get_model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    with learn.distrib_ctx(split_batches=True): learn.fit_one_cycle(epochs, 0.01)
    return learn.recorder.values[-1]

if __name__ == '__main__':
    with LocalCluster(n_workers=2, threads_per_worker=1) as cluster, Client(cluster) as client: print(on_workers(client, 2, train, 3))
