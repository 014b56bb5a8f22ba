"Compiles device.cpp, once for each version of it and of torch"
import hashlib, os, shutil, subprocess, tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name('device.cpp')


def no_backend():
    "Why torch takes no process group backend that is written in Python; nothing if it does"
    import torch
    try: torch._C._distributed_c10d.Backend(0, 1)
    except TypeError: return f'torch {torch.__version__} takes no process group backend that is written in Python'


def why_not():
    "Why there can be no such device here; nothing if there can"
    import torch
    if shutil.which('g++') is None: return 'no C++ compiler: apt-get install g++'
    if torch.cuda.is_available(): return 'there is a GPU, which the pretended one would hide'
    return no_backend()


def build():
    "The path of the library; some 11 seconds of one core where it is not there yet"
    import torch
    home = Path(torch.__file__).parent
    key = hashlib.sha256(f'{torch.__version__} {home}'.encode() + SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(os.environ.get('XDG_CACHE_HOME') or Path.home()/'.cache')/'fastdist_tests'
    try: folder.mkdir(parents=True, exist_ok=True)
    except OSError: folder = Path(tempfile.mkdtemp(prefix='fastdist'))
    library = folder/f'fakegpu-{key}.so'
    if library.exists(): return library
    with tempfile.NamedTemporaryFile(dir=folder, prefix=library.name, delete=False) as f: pass
    paths = [f'-isystem{home}/include', f'-isystem{home}/include/torch/csrc/api/include', f'-L{home}/lib']
    # not optimized: it runs for seconds only, and most of what it calls is torch's
    cmd = ['g++', '-std=c++20', '-O0', '-g0', '-w', '-fPIC', '-shared', *paths, str(SOURCE), '-o', f.name, '-lc10', '-ltorch_cpu', '-ltorch']
    try:
        done = subprocess.run(cmd, capture_output=True, text=True)
        if done.returncode: raise RuntimeError(f'{SOURCE} does not compile:\n{done.stderr[-4000:]}')
        os.replace(f.name, library)  # at once: others may be looking for it
    finally: Path(f.name).unlink(missing_ok=True)
    return library
