"""The Python of the pages in docs/ that show no command runs as it stands there, on two workers; docs/launch.md and docs/resume.md have
what `python tools/screens.py` runs"""
import sys

from harness import ROOT, launched, warnings_in

# What the pages take for granted: a learner, and what a loop of one's own has
SCRIPT = '''
import re, sys
from fastai.basics import *
from fastdist.all import *
x = torch.linspace(-1, 1, 64)[:, None]
ds = list(zip(x, 3*x+1))
dls = DataLoaders.from_dsets(ds[:48], ds[48:], bs=8, num_workers=0)
learn = Learner(dls, nn.Sequential(nn.Linear(1, 4), nn.Sequential(nn.Linear(4, 1))), loss_func=MSELossFlat())
given = dict(globals(), download=lambda url: url, url='here', batches=[(x[:8], 3*x[:8]+1)],
             model=learn.model, loss_func=learn.loss_func, opt=torch.optim.SGD(learn.model.parameters(), lr=.1))
for page in sys.argv[1:]:
    names = dict(given)
    for code in re.findall('(?s)```python\\n(.*?)```', Path(page).read_text()):
        with learn.no_bar(), learn.no_logging(): exec(code, names)
        print('ran', Path(page).stem, get_world_size(), flush=True)
'''


def test_pages_run(tmp_path):
    (tmp_path/'s.py').write_text(SCRIPT)
    pages = dict(strategies=4, metrics=2, world=1, extend=3)
    r = launched([sys.executable, '-m', 'fastdist', 'launch', '-n', '2', 's.py', *(ROOT/'docs'/f'{o}.md' for o in pages)], 200,
                 cwd=tmp_path)
    assert r.returncode == 0 and not warnings_in(r.stderr), r.stderr
    assert [o for o in r.stdout.splitlines() if o.startswith('ran')] == [f'ran {o} 2' for o, n in pages.items() for _ in range(n)]
