"What the launcher was told of mixed precision, beside what the learner says"
import re

import pytest, torch
from fastai.basics import Callback
from learners import learner, quiet, weights, diff


def launched(word, strategy=None, **ctx):
    "By case: the weights after fits in a context that the launcher was told `word` for, or the error, and what is left of it"
    import os
    import fastdist.all
    from strategies import Bf16OnCpu, Scaled, SGD, accuracy, ctx_of, partial, splitter
    kwargs = dict(split_batches=True) if strategy is None else ctx_of(strategy, **ctx)
    def model():
        torch.manual_seed(3)
        return Scaled(False)
    def trained(own=(), given=(), told=word):
        learn, seen = quiet(learner(n=20, bs=5, n_val=17, opt=partial(SGD, mom=0.9), lr=0.05, model=model, splitter=splitter, dtype=torch.float32, cbs=[o() for o in own], metrics=accuracy)), set()
        class Look(Callback):
            def after_pred(self): seen.add((self.training, str(torch.get_autocast_dtype('cpu')) if torch.is_autocast_enabled('cpu') else 'none'))
        cbs, attrs = list(learn.cbs), {*vars(learn)}
        if told: os.environ['ACCELERATE_MIXED_PRECISION'] = told
        try:
            with learn.distrib_ctx(**kwargs):
                learn.fit(1, cbs=[Look(), *(o() for o in given)])
                learn.validate()
        except ValueError as e: return str(e)
        finally:
            os.environ.pop('ACCELERATE_MIXED_PRECISION', None)
            assert list(learn.cbs) == cbs and not {o for o in {*vars(learn)}-attrs if 'precision' in o} and not torch.is_autocast_enabled('cpu') and getattr(learn, 'scaler', None) is None
        return weights(learn), seen
    own = lambda: Bf16OnCpu('bf16')
    return dict(told=trained(), want=trained([own], told=None), both=trained([own]), in_fit=trained(given=[own]))


@pytest.mark.parametrize('n,strategy', [(1, None), (2, 'ddp'), (3, 'fsdp')])
def test_launched_with_bf16(worlds, n, strategy):
    "accelerate launch --mixed_precision bf16 trains as a learner with fastai's MixedPrecision, in training and in validation, unless there is one"
    for found in [launched('bf16')] if n == 1 else worlds(n)(launched, 'bf16', strategy):
        want, cast = found['want']
        assert cast == {(True, 'torch.bfloat16'), (False, 'torch.bfloat16')}
        for nm in ('told', 'both', 'in_fit'): assert diff(want, found[nm][0]) == 0 and found[nm][1] == cast, nm


def test_launched_with_what_cannot_be(world2):
    for word, text in (('fp16', r"rank \d: mixed_precision='fp16' is not accepted: \(of the launcher\) a CPU trains in bf16 .*--mixed_precision bf16"),
                       ('fp8', r"rank \d: mixed_precision='fp8' is not accepted: \(of the launcher\) fastai trains in fp16 or bf16")):
        for found in [launched(word), *world2(launched, word, 'ddp')]: assert isinstance(found['told'], str) and re.search(text, found['told'])
