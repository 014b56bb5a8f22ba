"""Run the commands that docs/launch.md shows, and put what they print in it: `python tools/screens.py [part of a command]`.

A block marked `<!-- file: NAME -->` is written into the folder where they run, beside examples/. A block ```console begins with `$ ` and a command."""
import os, re, shutil, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT/'docs'/'launch.md'


def screen(command, folder):
    "What a person sees: a progress bar as it is at its end, frames of libraries left out, no path of this machine"
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'PATH': f'{Path(sys.executable).parent}:{os.environ["PATH"]}', 'COLUMNS': '100'}
    out = subprocess.run(command, shell=True, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600).stdout.decode()
    # a carriage return begins the line anew, over what was there
    lines = [o.rstrip().split('\r')[-1].rstrip() for o in out.split('\n')]
    text = '\n'.join(o for o in lines if o and o != '█' and 'socket.cpp' not in o)
    libraries = rf'(?:  File "(?:{sys.prefix}|{ROOT}/fastdist)/[^\n]*\n(?:    [^\n]*\n)*)+'
    text = re.sub(libraries, '  ...\n', text)
    for old, new in ((str(folder), '/home/ada/work'), (str(ROOT), '/home/ada/fastdist'), (sys.executable, 'python'), (sys.prefix, '/home/ada/venv'), (os.uname().release, '6.1.0')): text = text.replace(old, new)
    text = re.sub(rf'\b{os.uname().nodename}\b', 'n1', text)
    return re.sub(r'/tmp/fastdist_\w+', '/tmp/fastdist_k3x1', text)


if __name__ == '__main__':
    text, part = PAGE.read_text(), (sys.argv[1:] or [''])[0]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT/'examples', Path(folder)/'examples')
        for name, code in re.findall(r'<!-- file: (\S+) -->\n```\w*\n(.*?)```', text, re.S): (Path(folder)/name).write_text(code)
        def renewed(m):
            if part not in m[1]: return m[0]
            print('$', m[1], flush=True)
            return f'```console\n$ {m[1]}\n{screen(m[1], folder)}\n```'
        PAGE.write_text(re.sub(r'```console\n\$ ([^\n]*)\n.*?```', renewed, text, flags=re.S))
