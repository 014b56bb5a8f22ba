"Errors are data: fields of `RemoteError`, and a JSON record where torch's launcher looks for it"
import json, os, sys

from forked import started
from harness import free_port, launched


def fails(rank, url, how):
    import sys, time, torch, torch.distributed as dist
    from fastdist.world import RemoteError, distributed_init, fail_together
    distributed_init(init_method=url, rank=rank, world_size=3)
    def step():
        if rank == 1 and how == 'raises': raise FileNotFoundError(2, 'no disk', 'a.txt')
        if rank == 1: time.sleep(1000)
        dist.all_reduce(torch.ones(3))
    try:
        with fail_together(watchdog=5): step()
    except RemoteError as e: return vars(e), type(e.__cause__), getattr(e.__cause__, 'filename', None)
    except FileNotFoundError: return


def run(tmp_path, how):
    url = f'tcp://127.0.0.1:{free_port()}'
    files = [tmp_path/f'{i}.json' for i in range(3)]
    res = started(lambda: fails(int(os.environ['I']), url, how), [{'I': str(i), 'TORCHELASTIC_ERROR_FILE': str(f)} for i, f in enumerate(files)])
    return res, [json.loads(f.read_text()) if f.exists() else None for f in files]


def test_of_an_exception(tmp_path):
    res, records = run(tmp_path, 'raises')
    assert res[1] is None
    for r in 0, 2:
        e, cause, filename = res[r]
        assert (e['rank'], e['by'], e['kind'], e['module'], e['type'], e['function']) == (1, 1, 'error', 'builtins', 'FileNotFoundError', 'step')
        assert e['text'] == "[Errno 2] no disk: 'a.txt'" and e['file'] == __file__ and 'raise FileNotFoundError' in e['traceback']
        assert (cause, filename) == (FileNotFoundError, 'a.txt')
    for r, o in enumerate(records):
        assert set(o) == {'message', 'fastdist'} and o['fastdist']['rank'] == 1 and o['fastdist']['line'] == res[0][0]['line']
        assert o['message']['message'].startswith('FileNotFoundError: ' if r == 1 else f'RemoteError: rank {r} stopped because rank 1')
    assert {o['rank'] for o in records[1]['fastdist']['others']} <= {0, 2}


def test_of_what_cannot_be_sent(tmp_path):
    "Also before there is a process group: torch's launcher shows what the record has"
    (tmp_path/'s.py').write_text('from fastdist.world import rank0_read\ndef new(): return lambda: 0\nrank0_read(new)\n')
    res = launched([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', tmp_path/'s.py'], 120,
                   env={'ACCELERATE_USE_CPU': 'true'}, cwd=tmp_path)
    assert res.returncode not in (0, None) and res.left == {}
    assert 'PicklingError: rank 0: function cannot be pickled, so it cannot be sent' in res.stderr.partition('Root Cause')[2], res.stderr


def test_of_a_rank_that_is_stuck(tmp_path):
    res, records = run(tmp_path, 'sleeps')
    for r, (e, *_) in enumerate(res):
        assert (e['rank'], e['kind'], e['file'], e['function']) == (1, 'stalled', __file__, 'step')
        assert {o['rank']: o['call'] for o in e['others']} == {0: 'all_reduce', 2: 'all_reduce'}
        assert all([__file__, 'step'] in [[f[0], f[2]] for f in o['stack']] for o in e['others'])
        assert records[r]['fastdist']['others'] == e['others']


LOOKED_AT = """
import ctypes, os, threading, time
from fastdist.fault.stacks import stack_of
def look():
    while True:
        stack_of(main)
        time.sleep(1e-4)
def closes(i): f = open('/dev/null', 'rb', buffering=0)  # which lets other threads run as it goes, when the innermost frame is one of C's
@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def enters(_): pass
libc = ctypes.CDLL(None)
def begin():
    threads = (ctypes.c_ulong*8)()
    while True:
        for i in range(8): libc.pthread_create(ctypes.byref(threads, 8*i), None, enters, None)
        for t in threads: libc.pthread_join(ctypes.c_ulong(t), None)
main = threading.get_ident()
for f in (look, begin, begin, begin): threading.Thread(target=f, daemon=True).start()
for _ in range(20):
    list(map(closes, range(200)))
    time.sleep(.1)
os._exit(0)
"""


def test_looking_at_a_rank_does_not_end_it():
    "As `faulthandler` does while threads of C enter Python (3.11), or where the innermost frame is one of C's (3.13.0)"
    res = launched([sys.executable, '-c', LOOKED_AT], 60)
    assert res.returncode == 0, res.stderr
