"examples/docnn: the data that it makes, and what `fastdist train` makes of it"
import importlib.util, os, re, sys

import pytest
from configs import figures, train
from harness import ROOT, launched

DOCNN = ROOT/'examples'/'docnn'


@pytest.fixture(scope='module')
def docstrings(tmp_path_factory):
    "Sentences of docstrings of three small libraries"
    folder = tmp_path_factory.mktemp('docnn')
    res = launched([sys.executable, DOCNN/'make_docstrings.py', 'data', '--libraries', 'accelerate', 'fastai', 'numpy', '--most', '250'], 100, cwd=folder)
    assert res.returncode == 0, res.stderr
    return folder


def rows(file): return [o.rpartition('\t')[::2] for o in file.read_text().rstrip('\n').split('\n')]


def module(name):
    spec = importlib.util.spec_from_file_location(name, DOCNN/f'{name}.py')
    m = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(m)
    return m


def test_docstrings(docstrings, tmp_path):
    "SST-2's layout; as many of each library; no sentence of dev.tsv in train.tsv; the same files again"
    head, *train_rows = rows(docstrings/'data'/'train.tsv')
    dev_head, *dev_rows = rows(docstrings/'data'/'dev.tsv')
    assert head == dev_head == ('sentence', 'label') and len(train_rows) == 600 and len(dev_rows) == 150
    words = [[' '.join(re.findall(r'\w+', s.lower())) for s, _ in o] for o in (train_rows, dev_rows)]
    assert len(set(words[0])) == 600 and len(set(words[1])) == 150 and not set(words[0]) & set(words[1])
    labels = [l for o in (train_rows, dev_rows) for _, l in o]
    assert {o: labels.count(o) for o in set(labels)} == {'accelerate': 250, 'fastai': 250, 'numpy': 250}
    module('make_docstrings').make(tmp_path, ('accelerate', 'fastai', 'numpy'), 250)
    assert all((tmp_path/o).read_text() == (docstrings/'data'/o).read_text() for o in ('train.tsv', 'dev.tsv'))


def test_docnn(docstrings):
    "PyText's tutorial: 2 workers learn what 1 does, and more than chance"
    words = [DOCNN/'demo.toml', 'learner_args.path=data', 'learner_args.p=0', 'epochs=4']  # dropout draws other numbers in each worker
    one, two = (figures(train(*words, f'distributed_world_size={n}', f'save=l{n}.pkl', cwd=docstrings, timeout=200)) for n in (1, 2))
    assert (one[1], two[1]) == (1, 2)
    assert two[0] == pytest.approx(one[0], abs=2e-3) and one[0]['accuracy'] > 0.55  # 1/3 is chance
    code = "from docnn import *; rows = read_tsv('data/dev.tsv'); print(sum(a == b for a, (_, b) in zip(classify(load_learner('l2.pkl'), [s for s, _ in rows]), rows)))"
    res = launched([sys.executable, '-W', 'ignore', '-c', code], 100, env={'PYTHONPATH': os.pathsep.join([str(DOCNN), str(ROOT)])}, cwd=docstrings)
    assert res.returncode == 0 and int(res.stdout) == round(150*two[0]['accuracy']), res.stderr


def test_docnn_files(docstrings, tmp_path):
    "A file without its header, as `sed 1d` leaves it; a line that is not like the others; the padding, which changes nothing"
    import torch
    docnn = module('docnn')
    for nm in ('train', 'dev'):
        lines = (docstrings/'data'/f'{nm}.tsv').read_text().splitlines(keepends=True)
        (tmp_path/f'{nm}_tiny.tsv').write_text(''.join(lines[1:101]))
    learn = docnn.learner(tmp_path, tiny=True, bs=7)
    assert [dl.n for dl in learn.dls.loaders] == [100, 100]
    assert docnn.read_tsv(tmp_path/'dev_tiny.tsv') == docnn.read_tsv(docstrings/'data'/'dev.tsv')[:100]
    (tmp_path/'dev_tiny.tsv').write_text('good\t1\nbad\n')
    with pytest.raises(ValueError, match=r"dev_tiny.tsv:2: 'bad' is not like sentence<TAB>label"): docnn.read_tsv(tmp_path/'dev_tiny.tsv')
    model = learn.model.eval()
    ds = learn.dls.train_ds
    xs, _ = docnn.pad_batch([ds[i] for i in range(20)] + [(torch.tensor([1]), torch.tensor(0)), (torch.tensor([], dtype=torch.long), torch.tensor(0))])
    assert len({int((x != 0).sum()) for x in xs}) > 5 and xs.shape[1] > 12
    with torch.no_grad():
        together = model(xs)
        for x, want in zip(xs, together): assert torch.allclose(model(x[:max(5, int((x != 0).sum()))][None])[0], want, atol=1e-6)
