"`fastdist train`, and what it says at the end"
import re, sys

from harness import launched

TRAIN = [sys.executable, '-m', 'fastdist', 'train']
NO_GPU = {'CUDA_VISIBLE_DEVICES': ''}
LAST = r'(?m)^fastdist: (\w+_loss .*); (\d+) workers?, [\d.]+ s$'


def train(*words, cwd, timeout=150, env=None):
    res = launched([*TRAIN, *words], timeout, env={**NO_GPU, **(env or {})}, cwd=cwd)
    assert not res.left
    return res


def figures(res):
    "The last line of a run: figures by name, number of workers"
    assert res.returncode == 0, f'{res.stdout}\n{res.stderr}'
    (line, n), = re.findall(LAST, res.stdout.replace('\r', '\n'))
    return {k: float(v) for k, v in (o.rsplit(' ', 1) for o in line.split(', '))}, int(n)
