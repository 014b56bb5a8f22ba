"""What does saving cost? Seconds that a step is held up by a checkpoint, seconds until it is whole, and seconds to resume, beside `learn.save` and Accelerate's `save_state`;
and the time of a step with a `Resume` that never saves, beside none.

    python benchmarks/resume.py [--gb 1] [--rounds 5] [--folder DIR]

One process on the CPU, a model of which weights and Adam's state are so many GB together. The ways take turns in each round; medians. Lightning is measured where it is installed."""
import gc, importlib.util, os, shutil, statistics, tempfile, time
from pathlib import Path

os.environ.update(ACCELERATE_USE_CPU='true', CUDA_VISIBLE_DEVICES='')
import torch
from shared import parser
from fastai.basics import *
from fastdist.all import *
from fastdist.checkpoint.resume import Resume


def learner(gb, n=4):
    "Weights and Adam's two averages have `gb` GB together; a step is short"
    rows = max(1, int(gb*1e9/4/3/1024/8))
    model = nn.Sequential(*[nn.Embedding(rows, 1024, sparse=False) for _ in range(8)])
    class Few(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model
        def forward(self, x): return sum(o.weight[:2].sum() for o in self.layers) * x.mean()
    ds = [(torch.ones(1), torch.ones(1))]*n
    return Learner(DataLoaders.from_dsets(ds, ds[:1], bs=1, num_workers=0), Few(), loss_func=lambda p, y: p.mean(), lr=1e-9)


class Times(Callback):
    "Seconds from the beginning of each batch to the beginning of the next"
    order = -100
    def before_fit(self): self.at = []
    def before_batch(self):
        if self.training: self.at.append(time.perf_counter())
    def before_validate(self): self.at.append(time.perf_counter())
    def steps(self): return [b-a for a, b in zip(self.at, self.at[1:])]


def fit(learn, *cbs):
    t = Times()
    with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=[t, *cbs])
    return t.steps()


class SaveAt(Callback):
    "Save in the third batch, by a function"
    order = 3000
    def __init__(self, f): self.f = f
    def after_batch(self):
        if self.training and self.iter == 2: self.f()


class AskAt(Callback):
    order = 1999
    def __init__(self, resume, now): store_attr()
    def after_batch(self):
        if self.training and self.iter == 2: self.resume.save_now() if self.now else self.resume.request()


def timed(f):
    begin = time.perf_counter()
    f()
    return time.perf_counter()-begin


def held(learn, *cbs):
    "Seconds that the third step takes longer than the second"
    s = fit(learn, *cbs)
    return s[2]-s[1]


def round_(gb, d):
    "Seconds by (way, what)"
    learn, res = learner(gb), {}
    fit(learn)  # the optimizer's state is there
    for way, now in (('Resume, waited for', True), ('Resume, beside', False)):
        r = Resume(d/way, every=10**9)
        res[way, 'a step is held up'] = held(learn, r, AskAt(r, now))
    shutil.rmtree(d/'Resume, waited for')
    res['learn.save', 'a step is held up'] = held(learn, SaveAt(lambda: learn.save(d/'plain')))
    res['learn.save', 'to load'] = timed(lambda: learn.load(d/'plain'))
    from accelerate import Accelerator
    acc = Accelerator(cpu=True)
    model, opt = acc.prepare(learn.model, torch.optim.Adam(learn.model.parameters(), lr=1e-9))
    sum(p.sum() for p in model.parameters()).backward()
    opt.step()
    res['Accelerate', 'a step is held up'] = timed(lambda: acc.save_state(d/'acc'))
    res['Accelerate', 'to load'] = timed(lambda: acc.load_state(d/'acc'))
    acc.free_memory()
    del model, opt
    gc.collect()
    (d/'Resume, beside').rename(d/'moved')  # the folder of another learner of this process is refused
    res['Resume, beside', 'to load'] = timed(lambda: fit(learner(gb), Resume(d/'moved', every=10**9))) - timed(lambda: learner(gb))
    for o in d.iterdir(): shutil.rmtree(o) if o.is_dir() else o.unlink()
    return res


def lightning_round(gb, d):
    "The same of Lightning's `save_checkpoint`, and of a `fit` that begins with the file and has nothing left to train"
    import lightning
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = learner(gb).model
        def training_step(self, batch, i): return self.model(batch[0])
        def configure_optimizers(self): return torch.optim.Adam(self.parameters(), lr=1e-9)
    class SaveAt(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, i):
            if i == 2: self.seconds = timed(lambda: trainer.save_checkpoint(d/'lightning.ckpt'))
    dl, save = torch.utils.data.DataLoader([(torch.ones(1), torch.ones(1))]*3), SaveAt()
    def train(*cbs, **kwargs):
        trainer = lightning.Trainer(accelerator='cpu', max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                                    enable_model_summary=False, callbacks=list(cbs))
        trainer.fit(Module(), dl, **kwargs)
    train(save)
    made = timed(Module)
    res = {('Lightning', 'a step is held up'): save.seconds, ('Lightning', 'to load'): timed(lambda: train(ckpt_path=d/'lightning.ckpt'))-made}
    (d/'lightning.ckpt').unlink()
    return res


def tax(d, n=400):
    "Seconds of a short step, (without, with a `Resume` that never saves)"
    learn = learner(0.001, n)
    fit(learn)
    return [statistics.median(fit(learn, *cbs)) for cbs in ([], [Resume(d/'tax', every=10**9)])]


def main():
    p = parser(__doc__)
    p.add_argument('--gb', type=float, default=1.)
    p.add_argument('--rounds', type=int, default=5)
    p.add_argument('--folder', help="where to write; by default a temporary one")
    a = p.parse_args()
    peer = importlib.util.find_spec('lightning') is not None
    taxes, found = [], []
    for _ in range(a.rounds):
        with tempfile.TemporaryDirectory(dir=a.folder) as d: taxes.append(tax(Path(d)))
        with tempfile.TemporaryDirectory(dir=a.folder) as d: found.append(round_(a.gb, Path(d)) | (lightning_round(a.gb, Path(d)) if peer else {}))
    print(f'{a.gb:g} GB of weights and state, {a.rounds} rounds, medians')
    for way, what in found[0]: print(f'{way:20} {what:20} {statistics.median(o[way, what] for o in found):7.2f} s')
    print(f'a step with Resume that never saves: {statistics.median(b/a for a, b in taxes):.3f} of one without ({statistics.median(a for a, b in taxes)*1e3:.2f} ms)')
    if not peer: print('Lightning is not installed here')


if __name__ == '__main__': main()
