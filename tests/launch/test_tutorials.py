"P6: the notebooks in nbs/tutorials/ run in a real kernel, as a user's would, and are kept with what they show"
import base64, os, re, shutil, sys

import nbformat
import pytest
from harness import ROOT, launched, warnings_in

TUTORIALS = ROOT/'nbs'/'tutorials'
EXECUTE = [sys.executable, '-c', 'import sys, tutorials; tutorials.execute(sys.argv[1])']
SHOWN = {  # in the cell that begins so, each of these is in one output
    'notebook': {'learn = launch_in_notebook': ('valid_loss', 'image/png'), 'def fails': ('this is rank 1',),
                 'def train_and_save': ('valid_loss',)},
    'vision': {'learn = launch_in_notebook': ('valid_loss', 'image/png'), 'with learn.no_bar(): interp': ('image/png',),
               'def losses': ('two workers',)},
    'sharded': {'torch.set_num_threads': ('zero2',), 'ddp,ddp_memory': ('valid_loss',), 'fsdp,fsdp_memory': ('valid_loss',),
                'held': ('image/png',)},
    'resume': {'whole': ('valid_loss',), 'try: launch_in_notebook': ('rank 1 of 2', 'killed'),
               'resumed': ('valid_loss', 'Going on from step-00000040'), 'def losses': ('image/png',)}}


@pytest.fixture(params=sorted(TUTORIALS.glob('*.ipynb')), ids=lambda p: p.stem)
def tutorial(request): return request.param


def code_cells(file): return [c for c in nbformat.read(file, 4).cells if c.cell_type == 'code']
def pictures(cell): return [o.data['image/png'] for o in cell.outputs if 'image/png' in o.get('data', {})]


@pytest.mark.cold  # a kernel that has imported matplotlib before it is one shows no pictures
def test_runs(tutorial, tmp_path, default_port):
    file = shutil.copy(tutorial, tmp_path)
    # a user's kernel has none of what the tests set: forked workers depend on the threads, and pictures on the backend
    env = {'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': None, 'MPLBACKEND': None, 'PYTHONPATH': f'{ROOT}:{ROOT/"tools"}'}
    r = launched([*EXECUTE, file], 540, env=env, cwd=tmp_path)
    assert r.returncode == 0, f'{r.stdout}\n{r.stderr}'
    assert not r.left
    cells = code_cells(file)
    assert [c.execution_count for c in cells] == list(range(1, len(cells)+1))
    assert not [o for c in cells for o in c.outputs if o.output_type == 'error']
    assert not [w for c in cells for o in c.outputs for w in warnings_in(o.get('text', ''))]
    for start, texts in SHOWN[tutorial.stem].items():
        cell, = [c for c in cells if c.source.startswith(start)]
        assert [sum(t in str(o) for o in cell.outputs) for t in texts] == [1]*len(texts), f'{start}: {cell.outputs}'
    # what is kept is of these cells
    assert [len(pictures(c)) for c in cells] == [len(pictures(c)) for c in code_cells(tutorial)]
    assert [p.name for p in tmp_path.iterdir()] == [tutorial.name]


def test_kept(tutorial):
    "Its outputs are in the file, with no path or name of a machine, and the picture at its top is the last one that it draws"
    cells = code_cells(tutorial)
    text = ''.join(str(o.get('text', o.get('data', {}).get('text/plain', ''))) for c in cells for o in c.outputs)
    assert 'epoch' in text and not [w for w in warnings_in(text)]
    assert not re.findall(rf'/(?:home|root|work|usr|opt|var)/\S+|/tmp/(?!fastdist_k3x1|ipykernel_1/)\S+|\b{os.uname().nodename}\b', text)
    picture = tutorial.with_suffix('.png')
    assert picture.exists() == (f'({picture.name})' in tutorial.read_text())
    if picture.exists(): assert picture.read_bytes() == base64.b64decode([p for c in cells for p in pictures(c)][-1])
