"Predictions that are written to files, or that rank 0 makes alone. (contract/test_numbers.py has them beside one process, by each option.)"
import pytest
from learners import *


def alone_in_a_fit():
    "A callback's, beside one of all"
    from fastdist.world import get_rank
    import fastdist.all
    class Shows(Callback):
        def after_epoch(self):
            if get_rank() == 0: self.learn.get_preds(dl=self.learn.dls.valid.new(dataset=[self.learn.dls.valid_ds[0]], n=1), inner=True)
            self.n = len(self.learn.get_preds(inner=True)[0])
    learn, cb = quiet(learner(n=22, n_val=13, bs=4)), Shows()
    with learn.distrib_ctx(split_batches=True): learn.fit(2, cbs=cb)
    return cb.n, weights(learn)


def test_rank_0_predicts_one_sample_in_a_fit(world3):
    first, *others = world3(alone_in_a_fit)
    learn = quiet(learner(n=22, n_val=13, bs=4))
    learn.fit(2)
    assert first[0] == 13 and diff(first[1], weights(learn)) < 2e-7
    for o in others: assert o[0] == 13 and diff(first[1], o[1]) == 0


def written(n_val, folder):
    import fastdist.all
    learn, paths, real = quiet(learner(n=11, n_val=n_val, bs=3)), [], torch.save
    def save(o, f, **kwargs):
        paths.append(str(f))
        real(o, f, **kwargs)
    torch.save = save
    try:
        with learn.distrib_ctx(split_batches=True): learn.get_preds(save_preds=folder)
    finally: torch.save = real
    return paths, sorted(f.name for f in folder.iterdir())


@pytest.mark.parametrize('n_val', [3, 13])
def test_no_file_is_written_by_two(world2, n_val, tmp_path):
    "A single batch is evaluated by all: nobody reads what another one is writing again"
    (tmp_path/'p').mkdir()
    res = world2(written, n_val, tmp_path/'p')
    paths, n = [o for ps, _ in res for o in ps], -(-n_val//3)
    assert len(paths) == len(set(paths)) == (n if n > 1 else 2)
    assert [names for _, names in res] == [sorted(map(str, range(n)))]*2 and [o.name for o in tmp_path.iterdir()] == ['p']
