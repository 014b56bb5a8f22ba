"A number of nodes that changes, `--nnodes 1:2`: those that are there go on from the checkpoint, with the global batches, and so the weights, of one process"
import os, signal, sys

import pytest
from harness import free_port, launched, processes, wait_for
from test_stop import alone, found, write

WAITS = '''print('step', step, 'of', get_world_size(), flush=True)
        n = get_world_size()
        Path(f'step{step}of{n}').touch()
        # alone: until the launcher asks for an end, as there is a second node; together: until that is gone
        while not Path('gone').exists() and (n == 1 and step > 3 and not self.learn.resume.local_request or n == 2 and step > 8): time.sleep(0.02)'''
CONF = 'last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=10'


def test_a_node_comes_and_is_lost(tmp_path, alone):
    "1 worker, which fails once; 2 when a second node comes, whose launcher has counted no restart; and 1 again when that node is gone with its launcher"
    file = write(tmp_path, '(0, 2, lambda: os.kill(os.getpid(), signal.SIGKILL))')
    file.write_text(file.read_text().replace("print('step', step, flush=True)", WAITS))
    first = [sys.executable, *'-m fastdist launch --cpu --nproc-per-node 1 --rdzv-endpoint'.split(), f'127.0.0.1:{free_port()}', '--rdzv_conf', CONF, '--nnodes', '1:2', '--max-restarts', '4', file]
    second = [*first[:-1], '--node-rank', '1', file]
    env = dict(TORCH_CPP_LOG_LEVEL='ERROR')

    def lost(other, mark):
        wait_for((tmp_path/'step9of2').exists, 'two workers train', 200)
        for p in processes(mark, other.pid): os.kill(p, signal.SIGKILL)
        (tmp_path/'gone').touch()

    def two(proc, mark):
        wait_for((tmp_path/'step4of1').exists, 'one worker trains', 200)
        launched(second, 250, env=env, cwd=tmp_path, during=lost)
    res = launched(first, 300, env=env, cwd=tmp_path, during=two)
    assert res.returncode == 0 and 'SIGTERM: saved to' in res.stderr, res.stderr
    assert found(res)[0] == 1 and found(res)[1:] == pytest.approx(alone, abs=1e-12), res.stdout
    said = [o for o in res.stderr.splitlines() if 'started again' in o]
    for o, names in zip(said, ['restart 1 of 4', '2 nodes', 'restart 2 of 4'], strict=True): assert names in o, said
