"Ray Train: a worker is killed, Ray starts all again, and the fit ends with the weights of one that nobody disturbed"
import json, os, sys, textwrap
from importlib.util import find_spec

import pytest
from harness import ROOT, launched

pytestmark = pytest.mark.skipif(find_spec('ray') is None, reason="Ray is not installed: pip install 'ray[train]'")

TWICE = '''
    import json, os, signal, sys, torch
    from pathlib import Path
    from fastai.callback.core import Callback
    import ray_train

    class Kill(Callback):
        def __init__(self, mark): self.mark = mark
        def after_batch(self):
            from fastdist.all import get_rank
            if get_rank() != 1 or self.epoch != 1 or self.iter != 9 or os.path.exists(self.mark): return
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    found = [ray_train.main('whole'), ray_train.main('killed', cbs=[Kill(os.path.abspath('mark'))])]
    weights = [torch.load(Path(o.checkpoint.path)/'weights.pth', weights_only=False)['model'] for o in found]
    same = all(torch.equal(a, b) for a, b in zip(*[w.values() for w in weights]))
    print('found', json.dumps([same, os.path.exists('mark'), *[o.metrics for o in found]]))
    '''


@pytest.mark.cold
def test_a_killed_worker(tmp_path):
    (tmp_path/'twice.py').write_text(textwrap.dedent(TWICE))
    path = os.pathsep.join(filter(None, [str(ROOT/'examples'), os.environ.get('PYTHONPATH')]))
    res = launched([sys.executable, '-W', 'ignore', 'twice.py'], 500, env=dict(PYTHONPATH=path), cwd=tmp_path)
    assert res.returncode == 0, res.stderr[-3000:]
    same, killed, a, b = json.loads(next(o for o in res.stdout.splitlines() if o.startswith('found'))[6:])
    assert same and killed and a == b and a['epoch'] == 2 and a['accuracy'] > .9, (a, b)
