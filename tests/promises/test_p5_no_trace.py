"P5, of what is inside: copies of a learner of which each worker has a part. (contract/test_no_trace.py has the rest.)"
from learners import *


def copied(strategy):
    "What copies and pickles say, by number of epochs before them; `export` puts the parts together"
    import fastdist.all, pickle
    from copy import deepcopy
    learn, said = quiet(learner(n=10, bs=4, opt=Adam)), []
    with learn.distrib_ctx(strategy=strategy):
        for i in range(2):
            for f in (deepcopy, pickle.dumps)[:i+1]:
                try: f(learn)
                except RuntimeError as e: said.append((i, str(e)))
            learn.fit(1)
        learn.export('copied.pkl')
    return said, deepcopy(learn).opt is not None


def test_no_copies_of_a_part(world2):
    "Of zero1's optimizer there is a part from the first step on, of zero2's parameters from the beginning"
    for strategy, what, when in ('zero1', 'optimizer', [1, 1]), ('zero2', 'parameters', [0, 1, 1]):
        for said, whole in world2(copied, strategy):
            assert [i for i, _ in said] == when and all(f'has its {what} in shards: call learn.export' in o for _,
                                                        o in said) and whole, said
