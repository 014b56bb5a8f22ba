"P5, of what is inside: copies of a learner whose optimizer is shared out. (contract/test_no_trace.py has the rest.)"
import pytest
from learners import *


def copied(strategy):
    "What copies and pickles say where each worker has a part of the optimizer; `export` puts it together"
    import fastdist.all, pickle
    from copy import deepcopy
    from fastdist.world import get_rank
    learn, said = quiet(learner(n=10, bs=4, opt=Adam)), []
    with learn.distrib_ctx(strategy=strategy):
        quiet(deepcopy(learn))  # there is nothing yet of which each has a part
        learn.fit(1)
        for f in deepcopy, pickle.dumps:
            try: f(learn)
            except RuntimeError as e: said.append(str(e))
        learn.export('copied.pkl')
    return said, deepcopy(learn).opt is not None

def test_no_copies_of_a_part(world2):
    for said, whole in world2(copied, 'zero1'): assert len(said) == 2 and all('has its optimizer in shards: call learn.export' in o for o in said) and whole, said


def copied_at_once():
    import fastdist.all, pickle
    from copy import deepcopy
    learn, said = quiet(learner(n=10, bs=4, opt=Adam)), []
    with learn.distrib_ctx(strategy='zero2'):
        for f in deepcopy, pickle.dumps:
            try: f(learn)
            except RuntimeError as e: said.append(str(e))
    return said


def test_no_copies_of_shards(world2):
    for said in world2(copied_at_once): assert len(said) == 2 and all('has its parameters in shards: call learn.export' in o for o in said), said
