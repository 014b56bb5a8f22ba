"What tools/site.py finds: a link to nothing, a name that nobody knows, a public name without its comments or an example"
import sys

import pytest
from harness import ROOT


@pytest.fixture
def site(monkeypatch):
    monkeypatch.syspath_prepend(ROOT/'tools')
    import importlib.util
    spec = importlib.util.spec_from_file_location('fastdist_site', ROOT/'tools'/'site.py') # `site` is a module of Python's
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    yield module
    for o in ('diagrams', 'names', 'readme', 'reference', 'check'): sys.modules.pop(o, None)


def test_faults_are_found(site, tmp_path, monkeypatch):
    faults, found = [], []
    text = site.rewrite('docs/a.md', '[limits](nowhere.md), [start](../README.md#start), `learn.distrib_ctx()`\n\n```python\nf = x[0](nowhere.md)\n```\n', {}, faults, found)
    assert faults == ['docs/a.md: links to nowhere.md, which is not there'] and found == ['README.md']
    assert '(index.md#start)' in text and '[`learn.distrib_ctx()`](reference/learner.md#Learner.distrib_ctx)' in text

    good = '`learn.distrib_plan`, `split_batches=True`, `fastdist launch --tee 3`, `torch.nn.Linear(1, 1)`, `DistMonitor(trace=(1, 2))`, `FASTDIST_RESUME`\n'
    assert site.names.faults('docs/a.md', good) == []
    bad = 'As\n`learn.distributed_plan`, `split_batch=True`, `fastdist lunch`, `fastdist launch --teee`, `FASTDIST_RESUMES`\n'
    assert [o.split(': ')[2] for o in site.names.faults('docs/a.md', bad)] == ['distributed_plan', 'split_batch', 'lunch', '--teee', 'FASTDIST_RESUMES']

    faults.clear()
    monkeypatch.setattr(site.reference, 'find', lambda name: undocumented)
    monkeypatch.setattr(site.reference, 'notebook', lambda obj: 'nbs/00_lazy.ipynb')
    site.reference.documented('undocumented', faults)
    assert faults == ['nbs/00_lazy.ipynb: parameter b of undocumented has no comment that says what it is', 'nbs/00_lazy.ipynb: undocumented has no docstring']

    pages = {'index.md': '# A page\n\n[b](#b), [c](c.md)\n', 'site.css': b''}
    faults = site.build(pages, tmp_path/'out', nav=['index.md'])
    assert len(faults) == 2 and "'c.md'" in faults[0] and '#b' in faults[1]


def undocumented(a, # One
                 b): return a+b
