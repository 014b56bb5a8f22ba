"Whatever is killed, and when: the same command again ends with the weights, the recorder and the order of samples of the run that was never killed"
import random
import pytest
from kills import killed
from test_resume import *


class StepsOnDisk(Callback):
    "A byte for each step of rank 0"
    order = 1
    def __init__(self, file): self.file = file
    def after_step(self):
        from fastdist.world import get_rank
        if get_rank() == 0:
            with open(self.file, 'ab') as f: f.write(b'.')


def fit(folder, epochs):
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    learn = made(folder)
    learn.add_cb(StepsOnDisk(f'{folder}/steps'))
    with learn.distrib_ctx(split_batches=True): learn.fit_one_cycle(epochs, 1e-2, cbs=Resume(folder/'ckpt', every=2))
    return found(learn)


def compared(tmp_path, kills, seed):
    "The difference to a run that was not killed, and when it was killed"
    epochs = max(8, kills)  # so that the fit does not end before
    want, none = killed(fit, tmp_path/'whole', 0, seed, epochs)
    res, told = killed(fit, tmp_path/'killed', kills, seed, epochs)
    assert not none and len(want['losses']) == 6*epochs
    return differ(want, res), told


def test_killed_at_random_moments(tmp_path):
    bad, told = compared(tmp_path, 5, 11)
    assert not bad and len(told) == 5, (bad.keys(), told)
    assert any(b for _, b in told), told  # it has gone on from some checkpoint
