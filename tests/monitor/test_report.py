"What `DistMonitor` has recorded, seen afterwards: `fastdist report`, TensorBoard, W&B, and a trace of some steps"
import contextlib, gzip, html.parser, io, json, warnings

import pytest
from learners import *


def fitted(folder, n=24, bs=12, epochs=2, log='monitor.jsonl', trace=None, cbs=None, distrib=True):
    "What a fit prints, and the weights after it"
    import fastdist.all
    from fastdist.monitor import DistMonitor
    learn = quiet(learner(n=n, n_val=6, bs=bs, path=folder))
    with contextlib.redirect_stdout(io.StringIO()) as said, learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext():
        learn.fit(epochs, cbs=[DistMonitor(log=log, trace=trace), *L(cbs)])
    return said.getvalue(), [p.tolist() for p in learn.model.parameters()]


def reported(*args):
    "What `fastdist report` says, or its error"
    from fastdist.__main__ import main
    with contextlib.redirect_stdout(io.StringIO()) as said:
        with pytest.raises(SystemExit) as e: main(['report', *map(str, args)])
    return e.value.code or said.getvalue()


class Page(html.parser.HTMLParser):
    "Texts of a page, and what it loads"
    def __init__(self, text):
        super().__init__()
        self.texts, self.loads = [], []
        self.feed(text)
    def handle_starttag(self, tag, attrs):
        if tag in ('script', 'link', 'img', 'iframe', 'object'): self.loads.append(tag)
        self.loads += [v for k, v in attrs if k in ('src', 'href', 'xlink:href') and not v.startswith('#')]
    def handle_data(self, data): self.texts.append(data.strip())


def test_report(worlds, tmp_path):
    "Fits of 1, 2 and 3 workers, two of which have added to the same log"
    from fastdist.monitor.report import read_logs, summary
    fitted(tmp_path, distrib=False)
    worlds(2)(fitted, tmp_path)
    worlds(3)(fitted, tmp_path, log='more/of <3>.jsonl')
    records = [json.loads(line) for f in ('monitor.jsonl', 'more/of <3>.jsonl') for line in (tmp_path/f).read_text().splitlines()]
    assert [len(r['workers']) for r in records] == [1, 1, 2, 2, 3, 3] and len({r['run'] for r in records}) == 3
    assert [r['strategy'] for r in records[::2]] == [None, 'ddp', 'ddp']

    d, rates = summary(read_logs(tmp_path)), [(a['samples_per_second']+b['samples_per_second'])/2 for a, b in zip(records[::2], records[1::2])]
    assert d.workers.tolist() == [1, 2, 3] and d.epochs.tolist() == [2, 2, 2] and d['samples/s'].tolist() == rates
    assert d.scaling.tolist() == pytest.approx([r/n/rates[0] for n, r in enumerate(rates, 1)])

    assert 'page.html' in reported(tmp_path, '-o', tmp_path/'page.html')
    text = (tmp_path/'page.html').read_text()
    page = Page(text)
    assert not page.loads and 'url(http' not in text and '@import' not in text
    for rate in rates: assert f'{rate:,.0f}' in page.texts
    for o in ('0 on', '2 on'): assert any(t.startswith(o) for t in page.texts)
    assert text.count('<svg') == 1+3*3 and any('of <3>.jsonl' in o for o in page.texts)
    assert text.count('<h2>') == 3 == sum(text.count(o) for o in ('</h2><p>Nothing stands out.', '</h2><p>Workers wait', '</h2><p>Rank', '</h2><p>Communication', '</h2><p>Validation'))


def test_what_cannot_be_read(tmp_path):
    assert 'no log of DistMonitor in' in reported(tmp_path) and 'No such file' in reported(tmp_path/'no.jsonl')
    fitted(tmp_path, distrib=False)
    log = tmp_path/'monitor.jsonl'
    lines = log.read_text().splitlines()
    for damaged in lines[1][:100], '{"loss": 3}', '7':
        log.write_text(f'{lines[0]}\n{damaged}\n')
        assert f'{log}, line 2 is no record of DistMonitor' in reported(tmp_path)
    log.write_text(json.dumps({**json.loads(lines[0]), 'schema': 2}))
    assert 'of a newer fastdist' in reported(log)
    assert not (tmp_path/'report.html').exists()


def test_loggers_have_the_same_numbers(worlds, tmp_path):
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    def logged():
        warnings.simplefilter('ignore')
        from fastai.callback.tensorboard import TensorBoardCallback
        fitted(tmp_path, cbs=TensorBoardCallback(log_dir=f'{tmp_path}/tb', trace_model=False, log_preds=False))
    worlds(2)(logged)
    seen = EventAccumulator(str(tmp_path/'tb')).Reload()
    records = [json.loads(line) for line in (tmp_path/'monitor.jsonl').read_text().splitlines()]
    assert [o.value for o in seen.Scalars('samples/s')] == pytest.approx([r['samples_per_second'] for r in records])
    assert [o.value for o in seen.Scalars('slowest')] == pytest.approx([r['slowest']['times_median'] for r in records])


def test_trace(worlds, tmp_path):
    "Of 2 workers: the steps that were named, of both, at the same time, in one file; weights are those of a fit without it"
    (said, weights), (nothing, _) = worlds(2)(fitted, tmp_path, n=96, trace=(3, 6))
    file, = tmp_path.glob('trace-*')
    assert f'Steps 3 to 5, of 2 of 2 workers, are in {file}' in said and not nothing
    assert worlds(2)(fitted, tmp_path, n=96)[0][1] == weights
    events = json.loads(gzip.open(file).read())['traceEvents']
    assert {o['pid'] for o in events} == {0, 1}
    names = {o['pid']: o['args']['name'] for o in events if o['name'] == 'process_name'}
    assert [names[r].startswith(f'rank {r} on ') for r in (0, 1)] == [True]*2
    steps = [[o for o in events if o['name'].startswith('ProfilerStep') and o['pid'] == r] for r in (0, 1)]
    for o in steps: assert [s['name'] for s in o] == [f'ProfilerStep#{i}' for i in (3, 4, 5)]
    # no worker can be a step ahead, as each waits for the gradients of the other
    for a, b in zip(*steps): assert a['ts'] < b['ts']+b['dur'] and b['ts'] < a['ts']+a['dur']
    arrows = [(o['ph'], o['id']) for o in events if o['ph'] in 'sf']
    assert len({*arrows}) == len(arrows) > 0
    assert sum(o['name'] == 'aten::linear' for o in events) == 2*3*2


class Fails(Callback):
    def after_loss(self):
        if self.training and self.train_iter == 4: raise ZeroDivisionError


def failed(folder, kept):
    "A fit that fails while it is recorded, with a monitor that is the learner's (kept), or the fit's; then what a user records"
    import torch.profiler, fastdist.all
    from fastdist.monitor import DistMonitor
    learn, distrib, monitor = quiet(learner(n=48, bs=8, path=folder)), 'RANK' in os.environ, DistMonitor(trace=(2, 9))
    if kept: learn.add_cb(monitor)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        with pytest.raises(Exception), learn.distrib_ctx() if distrib else contextlib.nullcontext(): learn.fit(2, cbs=[Fails(), *([] if kept else [monitor])])
        if kept and not distrib: learn.fit(1)  # outside of a context nobody hears of the error
    with torch.profiler.profile() as p: torch.ones(2).sum()
    return said.getvalue(), [o.key for o in p.key_averages() if o.key == 'aten::sum']


def test_a_trace_that_ends_early(worlds, tmp_path):
    "Nothing runs on, and nothing is written"
    for said, recorded in (failed(tmp_path/'1', False), failed(tmp_path/'2', True), worlds(2)(failed, tmp_path/'3', True)[0]):
        assert 'There is no trace: the fit ended before its step 8 did' in said and recorded == ['aten::sum']
    said, _ = fitted(tmp_path, trace=(3, 99), distrib=False)
    assert 'There is no trace: the fit ended before its step 98 did' in said and not [*tmp_path.rglob('trace*')]


class Ends(Callback):
    def after_batch(self):
        from fastai.callback.core import CancelFitException
        if self.training and self.iter == 4: raise CancelFitException


def test_a_trace_that_is_not_merged(tmp_path):
    "The fit ends after the steps, and before its epoch: rank 0 says where they are"
    said, _ = fitted(tmp_path, n=96, trace=(1, 3), cbs=Ends(), distrib=False)
    folder, = tmp_path.glob('trace-*')
    assert f'What each has recorded is in {folder}' in said and [*folder.glob('*.json')]


def test_a_trace_of_a_later_epoch(tmp_path):
    "What fetches predictions takes the monitor out for a moment"
    from fastai.callback.core import FetchPredsCallback
    said, _ = fitted(tmp_path, trace=(2, 4), cbs=FetchPredsCallback(), distrib=False)
    assert 'Steps 2 to 3, of 1 of 1 workers' in said and len([*tmp_path.glob('trace*')]) == 1 and 'no trace' not in said


@pytest.mark.parametrize('trace', [10, (10, 5), (0, 5), (1.5, 3), True, 'all'])
def test_steps_that_cannot_be_traced(trace):
    from fastdist.monitor import DistMonitor
    with pytest.raises(ValueError, match=r'which steps\? trace=\(10, 15\)'): DistMonitor(trace=trace)
