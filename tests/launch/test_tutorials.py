"P6: the notebooks in nbs/tutorials/ run in a real kernel, as a user's would"
import shutil, sys

import nbformat
import pytest
from harness import ROOT, launched, warnings_in

TUTORIALS = ROOT/'nbs'/'tutorials'
EXECUTE = [sys.executable, '-c', 'from nbclient.cli import main; main()', '--inplace', '--kernel_name=python3', '--timeout=240']


@pytest.fixture(params=sorted(TUTORIALS.glob('*.ipynb')), ids=lambda p: p.stem)
def tutorial(request): return request.param


def test_runs(tutorial, tmp_path, default_port):
    file = shutil.copy(tutorial, tmp_path)
    # without the OMP_NUM_THREADS that the harness sets: a user's kernel has none, and forked workers depend on it
    r = launched([*EXECUTE, file], 270, env={'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': None}, cwd=tmp_path)
    assert r.returncode == 0, f'{r.stdout}\n{r.stderr}'
    assert not r.left
    cells = [c for c in nbformat.read(file, 4).cells if c.cell_type == 'code']
    assert [c.execution_count for c in cells] == list(range(1, len(cells)+1))
    assert not [o for c in cells for o in c.outputs if o.output_type == 'error']
    assert not [w for c in cells for o in c.outputs for w in warnings_in(o.get('text', ''))]
    launch, = [c for c in cells if c.source.startswith('notebook_launcher')]
    assert ''.join(o.get('text', '') for o in launch.outputs).count('valid_loss') == 1  # one table, in the cell
    fresh, = [c for c in cells if c.source.startswith('learn = launch_in_notebook')]
    shown = [o.data for o in fresh.outputs if o.output_type == 'display_data']
    assert sum('valid_loss' in str(o) for o in shown) == 1 and sum('image/png' in o for o in shown) == 1
    assert [p.name for p in tmp_path.iterdir()] == [tutorial.name]
