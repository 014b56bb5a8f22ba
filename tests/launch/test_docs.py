"""The Python of the pages in docs/ runs as it stands there: on two workers, or in a notebook's kernel. Files (`<!-- file: NAME -->`) and
```console blocks are what `python tools/screens.py` runs"""
import re, sys

import nbformat
from harness import ROOT, launched, warnings_in

# What the pages take for granted: a learner, and what a loop of one's own has
SCRIPT = '''
import re, sys
from fastai.basics import *
from fastai.callback.schedule import *
from fastdist.all import *
x = torch.linspace(-1, 1, 64)[:, None]
ds = list(zip(x, 3*x+1))
dls = DataLoaders.from_dsets(ds[:48], ds[48:], bs=8, num_workers=0)
learn = Learner(dls, nn.Sequential(nn.Linear(1, 4), nn.Sequential(nn.Linear(4, 1))), loss_func=MSELossFlat())
given = dict(globals(), download=lambda url: url, url='here', batches=[(x[:8], 3*x[:8]+1)],
             model=learn.model, loss_func=learn.loss_func, opt=torch.optim.SGD(learn.model.parameters(), lr=.1))
for page in sys.argv[1:]:
    names = dict(given)
    for code in re.findall('(?s)(?<!-->\\n)```python\\n(.*?)```', Path(page).read_text()):
        with learn.no_bar(), learn.no_logging(): exec(code, names)
        print('ran', Path(page).stem, get_world_size(), flush=True)
'''


def test_pages_run(tmp_path):
    (tmp_path/'s.py').write_text(SCRIPT)
    pages = {'many-workers': 3, 'large-models': 5, 'limits': 1, 'checkpoints': 1, 'monitor': 2, 'troubleshooting': 1, 'coming-from': 1, 'extend': 3}
    r = launched([sys.executable, '-m', 'fastdist', 'launch', '-n', '2', 's.py', *(ROOT/'docs'/f'{o}.md' for o in pages)], 200,
                 cwd=tmp_path)
    assert r.returncode == 0 and not warnings_in(r.stderr), r.stderr
    assert [o for o in r.stdout.splitlines() if o.startswith('ran')] == [f'ran {o} 2' for o, n in pages.items() for _ in range(n)]


def test_notebook_page_runs(tmp_path, default_port):
    codes = re.findall('(?s)```python\n(.*?)```', (ROOT/'docs'/'notebooks.md').read_text())
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(o) for o in codes]), tmp_path/'page.ipynb')
    # without the OMP_NUM_THREADS that the harness sets: a user's kernel has none
    r = launched([sys.executable, '-c', 'from nbclient.cli import main; main()', '--inplace', '--kernel_name=python3', '--timeout=240',
                  'page.ipynb'], 270, env={'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': None}, cwd=tmp_path)
    assert r.returncode == 0 and not r.left, r.stderr
    outputs = [o for c in nbformat.read(tmp_path/'page.ipynb', 4).cells for o in c.outputs]
    assert not [w for o in outputs for w in warnings_in(o.get('text', ''))]
    assert (tmp_path/'models'/'linear.pth').exists()
