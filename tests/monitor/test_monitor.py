"`DistMonitor` measures what each worker does, changes nothing of the fit, and names the fault that was made"
import contextlib, io, json, os, re, time

import fakegpu, pytest
from forked import started
from learners import *


class Slow(Callback):
    "Takes its time after the forward of a training batch, in rank 1"
    def after_pred(self):
        if self.training and os.environ.get('RANK') == '1': time.sleep(0.1)


class SlowItems(Items):
    "Takes its time to read"
    ranks = '0', '1', '2'
    def __getitem__(self, i):
        if os.environ.get('RANK') in self.ranks: time.sleep(0.02)
        return super().__getitem__(i)


class SlowItemsOfOne(SlowItems): ranks = '1'


class SlowLink(Callback):
    "Gradients take their time to travel"
    order = 10**6
    def after_backward(self): time.sleep(0.1)


FAULTS = dict(
    none={},
    data=dict(data=SlowItems),
    straggler=dict(cbs=Slow()),
    slow_reader=dict(data=SlowItemsOfOne, bn=True),
    communication=dict(cbs=SlowLink()),
    validation=dict(n_val=800, val_bs=4))


def fitted(fault='none', monitored=True, strategy='ddp', n=48):
    "(weights, losses), the monitor's records and its sentence, the columns of the table and what was printed"
    import fastdist.all
    from fastdist.monitor import DistMonitor
    kwargs = dict(dict(n_val=6), **FAULTS[fault])
    data, monitor = kwargs.pop('data', Items), DistMonitor(log='monitor.jsonl')
    learn = learner(n=n, bs=12, path=f'{fault}{strategy}', **kwargs)
    learn.remove_cb(ProgressCallback)
    learn.dls.train.dataset.__class__ = data
    with contextlib.redirect_stdout(io.StringIO()) as said, learn.distrib_ctx(split_batches=True, strategy=strategy):
        learn.fit(2, cbs=[monitor] if monitored else None)
    assert not [o for o in learn.cbs if type(o).__module__.startswith('fastdist')]
    weights = [p.tolist() for p in learn.model.parameters()], [float(o) for o in learn.recorder.losses]
    return weights, monitor.records, monitor.advice, learn.recorder.metric_names, said.getvalue()


@pytest.mark.parametrize('strategy', ['ddp', 'zero1', 'fsdp'])
def test_what_is_measured(worlds, strategy, n=3):
    "Every worker knows the times of all; weights are those of a fit without it"
    res = worlds(n)(fitted, strategy=strategy)
    assert [o[0] for o in worlds(n)(fitted, strategy=strategy, monitored=False)] == [o[0] for o in res]
    for _, records, _, names, _ in res:
        assert records == res[0][1] and list(names[-3:]) == ['samples/s', 'slowest', 'time']
        for epoch, r in enumerate(records):
            assert r['epoch'] == epoch and [w['rank'] for w in r['workers']] == [*range(n)] and sum(w['samples'] for w in r['workers']) == 48
            for w in r['workers']:
                assert 0 < sum(w['seconds'].values()) <= w['train'] and w['seconds']['communication'] > 0 and w['peak_memory'] > 2**20
                assert w['steps'] == (3 if epoch == 0 else 4) and w['flops'] == 3*2*4*(4*8+8*3)  # 4 of the 12 samples; the first step of the fit is not timed
    assert '3 workers share 12 samples a step, strategy' in res[0][4] and not res[1][4]


SENTENCES = dict(data=r'workers wait \d\d% of each step for data: num_workers is 0', straggler=r'rank 1 on \S+ takes [\d.]+ times as long .* most of all in forward', slow_reader=r'rank 1 on \S+ takes [\d.]+ times as long .* most of all in data',
                 communication=r'communication takes \d\d% of each step', validation=r'validation takes \d\d% of the fit')


@pytest.mark.parametrize('fault,n', [*((o, 2) for o in SENTENCES if o != 'slow_reader'), ('slow_reader', 3)])
def test_what_limits_a_fit(worlds, fault, n):
    "For a slow reader the others wait in their forwards, as batch norm is of all"
    res = worlds(n)(fitted, fault)
    for _, records, advice, _, _ in res: assert re.match(SENTENCES[fault], advice), (fault, advice, records[-1])
    assert res[0][4].endswith(f'{advice[0].upper()}{advice[1:]}.\n') and not res[1][4]


def test_one_process(tmp_path):
    "What one GPU does is what several are held against"
    os.chdir(tmp_path)
    _, records, _, names, said = fitted()
    assert [json.loads(o) for o in (tmp_path/'noneddp'/'monitor.jsonl').read_text().splitlines()] == records and len(records[0]['workers']) == 1
    assert 'slowest' in names and records[0]['slowest']['times_median'] == 1 and 'samples a step' not in said


def test_no_trace(tmp_path):
    "It goes with the context, and what is exported in there has none; evaluations, `lr_find` and errors leave what was measured, and nothing else"
    import fastdist.all
    from fastai.callback.schedule import lr_find
    from fastdist.monitor import DistMonitor
    learn = quiet(learner(path=tmp_path, loss=CrossEntropyLossFlat()))
    with learn.distrib_ctx(monitor=True):
        learn.fit(1)
        learn.export('model.pkl')
    assert 'slowest' in learn.recorder.metric_names
    def left(o): return [type(c).__name__ for c in o.cbs]
    assert left(learn) == left(load_learner(tmp_path/'model.pkl')) == ['TrainEvalCallback', 'Recorder', 'CastToTensor']

    def fails(module, *args): raise KeyboardInterrupt
    class Validates(Callback):
        def after_epoch(self):
            if not self.learn.lock.locked(): self.learn.validate()  # fastai calls it for an evaluation, too
    monitor = DistMonitor()
    learn.add_cb(monitor)
    learn.fit(2, cbs=Validates())
    for f in learn.validate, learn.get_preds, lambda: learn.lr_find(num_it=20, show_plot=False): f()
    assert [r['epoch'] for r in monitor.records] == [0, 1] and monitor.records[0]['workers'][0]['flops'] > 0
    learn.export('own.pkl')
    h = learn.model[0].register_forward_hook(fails)
    with pytest.raises(KeyboardInterrupt): learn.fit(1)
    h.remove()
    learn.remove_cb(monitor)
    assert left(learn) == ['TrainEvalCallback', 'Recorder', 'CastToTensor'] and not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert 'forward' not in vars(learn.model) and not learn.model._forward_hooks


def test_a_first_batch_that_is_cancelled():
    import fastdist.all
    from fastai.callback.core import CancelBatchException
    from fastdist.monitor import DistMonitor
    class Skips(Callback):
        def before_batch(self):
            if self.training and self.iter == 0: raise CancelBatchException
    monitor = DistMonitor()
    learn = quiet(learner(cbs=monitor))
    for _ in range(2): learn.fit(1, cbs=Skips())
    assert monitor.records[0]['workers'][0]['steps'] == 3 and monitor.records[0]['workers'][0]['flops'] > 0


def test_a_first_batch_that_fails():
    "Of a monitor that stays: whatever the model has in place of its forward, nothing counts on"
    import fastdist.all
    from fastdist.monitor import DistMonitor
    class Fails(Callback):
        def after_pred(self): raise KeyError('injected')
    learn = quiet(learner(cbs=DistMonitor()))
    with pytest.raises(KeyError), learn.distrib_ctx(microbatch=2): learn.fit(1, cbs=Fails())
    assert 'forward' not in vars(learn.model)
    learn.fit(1)
    assert learn.dist_monitor.records[0]['workers'][0]['flops'] > 0 and 'forward' not in vars(learn.model)


def messages():
    "Of a fit of one of SIZE workers, the others of which are pretended: with a monitor, and without"
    import echo, fastdist.all
    from fastdist.monitor import DistMonitor
    size, res = int(os.environ['SIZE']), []
    echo.join(0, size, torch.distributed.HashStore())
    for cbs in None, DistMonitor():
        learn = quiet(learner(n=4*size, n_val=size, bs=size, val_bs=1))
        with learn.distrib_ctx(split_batches=True):
            begin = len(echo.sent)
            learn.fit(3, cbs=cbs)
            res.append([n for _, n in echo.sent[begin:]])
    return res


def test_messages():
    "One an epoch, and one of names as the fit begins, of two workers and of 1,024"
    if why := fakegpu.no_backend(): pytest.skip(why)
    for size, (without, with_it) in zip((2, 1024), started(messages, [{'SIZE': '2'}, {'SIZE': '1024'}], timeout=200)):
        assert len(with_it)-len(without) == 3+1, (size, without, with_it)
        assert sum(with_it)-sum(without) <= size*(3*15*8+512), (size, without, with_it)


def on_gpu(monitor, n):
    "Where the host waits in a fit of 2 epochs, by (what, whose code, file, function)"
    import fastdist.all
    from fakegpu import HostSyncs
    learn = quiet(learner(n=n, n_val=6, bs=6, dtype=torch.float32, loss=CrossEntropyLossFlat()))
    with learn.distrib_ctx(split_batches=True, monitor=monitor), HostSyncs() as waits: learn.fit(2)
    return dict(waits.found), len(learn.recorder.metric_names)


def test_on_gpus(fake_gpu_worlds):
    "The host waits once an epoch more, for the last step, and reads what all have measured; not in a step"
    for n in 12, 60:
        (without, columns), (with_it, more) = [fake_gpu_worlds(2)(on_gpu, o, n)[0] for o in (False, True)]
        added = {k: v-without.get(k, 0) for k, v in with_it.items() if v != without.get(k, 0)}
        assert more == columns+2 and sum(added.values()) <= 3*2 and all('monitor/' in k[2] for k in added), (n, added)
