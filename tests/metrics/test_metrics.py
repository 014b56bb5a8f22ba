"Workers whose metrics are not the same"
from learners import *


def top_1(pred, targ): return (pred.argmax(1) == targ).double().mean()


def other_metrics():
    "What each worker raises where rank 1 has a metric more; and that a fit begins after it, where they have the same"
    import fastdist.all
    from fastdist.world import get_rank
    learn, text = quiet(learner(n=8, n_val=13, metrics=accuracy)), None
    with learn.distrib_ctx(watchdog=30):
        if get_rank() == 1: learn.metrics = L(AvgMetric(accuracy), AvgMetric(top_1))
        try: learn.validate()
        except Exception as e: text = f'{type(e).__name__}: {e}'
        learn.metrics = L(AvgMetric(accuracy))
        learn.fit(1)
    return text


def test_workers_apart(world3):
    for text in world3(other_metrics): assert text.startswith('OutOfStep: ') and 'rank 1 at the metrics (' in text and 'AvgLoss AvgMetric AvgMetric' in text, text
