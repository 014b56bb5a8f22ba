"examples/docnn: the data that it makes, and what `fastdist train` makes of it"
import importlib.util, os, sys

import pytest
from configs import figures, train
from harness import ROOT, launched

DOCNN = ROOT/'examples'/'docnn'


@pytest.fixture(scope='module')
def docstrings(tmp_path_factory):
    "Sentences of docstrings of three small libraries"
    folder = tmp_path_factory.mktemp('docnn')
    res = launched([sys.executable, DOCNN/'make_docstrings.py', 'data', '--libraries', 'accelerate', 'fastai', 'numpy', '--most', '250'],
                   100, cwd=folder)
    assert res.returncode == 0, res.stderr
    return folder


def module(name):
    spec = importlib.util.spec_from_file_location(name, DOCNN/f'{name}.py')
    m = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(m)
    return m


def test_docnn(docstrings):
    "PyText's tutorial: 2 workers learn what 1 does, and more than chance"
    words = [DOCNN/'demo.toml', 'learner_args.path=data', 'learner_args.p=0', 'epochs=4']  # dropout draws other numbers in each worker
    one, two = (figures(train(*words, f'distributed_world_size={n}', f'save=l{n}.pkl', cwd=docstrings, timeout=200)) for n in (1, 2))
    assert (one[1], two[1]) == (1, 2)
    assert two[0] == pytest.approx(one[0], abs=2e-3) and one[0]['accuracy'] > 0.55  # 1/3 is chance
    code = '''
from docnn import *
rows = read_tsv('data/dev.tsv')
print(sum(a == b for a, (_, b) in zip(classify(load_learner('l2.pkl'), [s for s, _ in rows]), rows)))'''
    res = launched([sys.executable, '-W', 'ignore', '-c', code], 100, env={'PYTHONPATH': os.pathsep.join([str(DOCNN), str(ROOT)])},
                   cwd=docstrings)
    assert res.returncode == 0 and int(res.stdout) == round(150*two[0]['accuracy']), res.stderr
