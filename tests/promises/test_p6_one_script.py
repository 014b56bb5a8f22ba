"P6: the scripts in examples/ run unchanged under every launcher, and leave nothing running"
import re, sys

import pytest
from harness import ROOT, launched, warnings_in

EXAMPLES = ROOT/'examples'
PYTHON = [sys.executable]
FASTDIST = [sys.executable, '-m', 'fastdist', 'launch', '-n']
ACCELERATE = [sys.executable, '-m', 'accelerate.commands.launch', '--multi_gpu', '--main_process_port', '0', '--num_processes']
TORCHRUN = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node']


def run(cmd, cwd, env=None, timeout=200):
    "What `cmd` prints, as a terminal would leave it: of lines that are written over, the last state"
    r = launched(cmd, timeout, env={'CUDA_VISIBLE_DEVICES': '', **(env or {})}, cwd=cwd)  # two workers, also where there is one GPU
    assert r.returncode == 0, f'{r.stdout}\n{r.stderr}'
    assert not r.left and not warnings_in(r.stderr), r.stderr
    return '\n'.join(line.rstrip('\r').rpartition('\r')[2] for line in r.stdout.split('\n'))


@pytest.mark.parametrize('cmd,n,env', [
    pytest.param(PYTHON, 1, {}, id='python'),
    pytest.param([*FASTDIST, '2'], 2, {}, id='fastdist-2'),
    pytest.param([*ACCELERATE, '2'], 2, {}, id='accelerate-2'),
    pytest.param([*TORCHRUN, '2'], 2, {}, id='torchrun-2')])
def test_digits(cmd, n, env, tmp_path):
    out = run([*cmd, EXAMPLES/'digits.py'], tmp_path, env)
    (acc, n_valid, workers, speed), = re.findall(r'(?m)^accuracy (\d\.\d{4}) on (\d+) held-out digits, (\d+) workers, (\d+) samples/s$', out)
    assert float(acc) >= 0.97
    assert (int(n_valid), int(workers)) == (450, n)
    assert int(speed) > 0
    assert len(re.findall(r'epoch +train_loss +valid_loss +accuracy', out)) == 1, out
    rows = re.findall(r'(?m)^(\d+) +\d+\.\d+ +\d+\.\d+ +(\d+\.\d+)', out)
    assert [i for i, _ in rows] == list('012345'), out
    assert float(rows[-1][1]) == pytest.approx(float(acc), abs=1e-4)  # the table's last row and `validate` agree
    assert not list(tmp_path.iterdir())


def sharded(cmd, *args, cwd):
    "What examples/sharded.py says: strategy, accuracy, workers, and bytes of the model and of what each worker has of it"
    out = run([*cmd, EXAMPLES/'sharded.py', *args], cwd)
    (word, acc, *ns), = re.findall(r'(?m)^(\w+): accuracy (\d\.\d{4}), (\d+) workers; of a model of (\d+) bytes each has '
                                   r'(\d+) of parameters, (\d+) of gradients, (\d+) of optimizer state$', out)
    assert not list(cwd.iterdir())
    return word, float(acc), *map(int, ns)


# of 'zero1' and 'zero2' strategy/test_strategies says which parts a worker has; here it is what a user sees of 'fsdp', and of three workers. An epoch is
# enough: that several give the numbers of one process is seen there
def test_sharded(tmp_path):
    word, acc, workers, total, *held = sharded(PYTHON, 'fsdp', '--epochs', '1', cwd=tmp_path)
    assert (word, workers) == ('fsdp', 1) and acc >= 0.8 and held == [total, total, 2*total]
    got, acc3, workers, total3, *held = sharded([*FASTDIST, '3'], 'fsdp', '--checkpoint', '--epochs', '1', cwd=tmp_path)
    assert (got, workers, total3) == (word, 3, total)
    assert acc3 == pytest.approx(acc, abs=0.005)  # a sample or two of 450: it is float32
    # rank 0 has as many rows as any worker, of layers whose rows three workers cannot share out evenly, and Adam remembers two numbers for each
    for n, k in zip(held, (1, 1, 2)): assert k*total/3 <= n <= 1.01*k*total/3, (n, k)


@pytest.fixture(scope='module')
def pets(tmp_path_factory):
    "Noise, under the names of cats and dogs"
    import numpy as np
    from PIL import Image
    folder, rng = tmp_path_factory.mktemp('pets'), np.random.default_rng(0)
    for i in range(24):
        name = f"{('Abyssinian', 'beagle')[i%2]}_{i//2+1}.jpg"
        Image.fromarray(rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(folder/name)
    return folder


def test_pets(pets, tmp_path):
    out = run([*FASTDIST, '2', EXAMPLES/'pets.py', '--path', pets, '--arch', 'resnet18', '--no-pretrained', '--size', '32', '--bs', '4'], tmp_path)
    # fine_tune trains twice: first the head alone, then all of it
    assert len(re.findall(r'epoch +train_loss +valid_loss +error_rate', out)) == 2, out
    rows = re.findall(r'(?m)^0 +\d+\.\d+ +\d+\.\d+ +(\d+\.\d+)', out)
    assert len(rows) == 2, out
    assert all(float(o)*4 == pytest.approx(round(float(o)*4)) for o in rows)  # of the 4 images held back, each is counted once
