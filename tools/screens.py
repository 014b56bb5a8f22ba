"""Run the commands that the pages show, and put what they print there: `python tools/screens.py [a page's name, or part of a command]`.

A block ```console has a line `$ COMMAND` for each, and what it prints below; a block of commands alone is left as it is. Those of a page run in a folder of its own,
in their order, beside examples/ and what the page marks by `<!-- file: NAME -->`. README.md is made from nbs/index.ipynb, which is the page here."""
import json, os, re, shutil, subprocess, sys, tempfile
from pathlib import Path

import readme

ROOT = readme.ROOT


def screen(command, folder):
    "What a person sees: a progress bar as it is at its end, frames of libraries left out, no path of this machine"
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'PATH': f'{Path(sys.executable).parent}:{os.environ["PATH"]}', 'COLUMNS': '100',
           'PYTHONWARNINGS': 'ignore::FutureWarning'}
    out = subprocess.run(command, shell=True, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600).stdout.decode()
    # a carriage return begins the line anew, over what was there
    lines = [o.rstrip().split('\r')[-1].rstrip() for o in out.split('\n')]
    text = '\n'.join(o for o in lines if o and o != '█' and 'socket.cpp' not in o)
    text = re.sub(r'[^\s"]+(?=/lib/python[\d.]+/site-packages/)', '/home/ada/venv', text)
    text = re.sub(rf'(?:  File "(?:/home/ada/venv|{ROOT}/fastdist)/[^\n]*\n(?:    [^\n]*\n)*)+', '  ...\n', text)
    for old, new in ((str(folder), '/home/ada/work'), (str(ROOT), '/home/ada/fastdist'), (sys.executable, 'python'), (os.uname().release, '6.1.0')): text = text.replace(old, new)
    text = re.sub(rf'\b{os.uname().nodename}\b', 'n1', text)
    return re.sub(r'/tmp/fastdist_\w+', '/tmp/fastdist_k3x1', text)


def renewed(name, text, part):
    "The text of the page, with what its commands print now: all of them where `part` is its `name`, or else those that have it in them"
    def block(m):
        commands = re.findall(r'(?m)^\$ (.*)', m[1])
        if len(commands) == len(m[1].splitlines()) or not (part == name or any(part in o for o in commands)): return m[0]
        print(name, *commands, sep='\n  $ ', flush=True)
        return '\n'.join(['```console', *(o for c in commands for o in (f'$ {c}', screen(c, folder)) if o), '```'])
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT/'examples', Path(folder)/'examples')
        for file, code in re.findall(r'<!-- file: (\S+) -->\n```\w*\n(.*?)```', text, re.S): (Path(folder)/file).write_text(code)
        return re.sub(r'```console\n(.*?)\n```', block, text, flags=re.S)


if __name__ == '__main__':
    part, index = (sys.argv[1:] or [''])[0], ROOT/'nbs'/'index.ipynb'
    for page in sorted((ROOT/'docs').glob('*.md')): page.write_text(renewed(page.stem, page.read_text(), part))
    nb = json.loads(index.read_text())
    cells = [o for o in nb['cells'] if o['cell_type'] == 'markdown']
    texts = renewed('README', '\0'.join(''.join(o['source']) for o in cells), part).split('\0')
    for c, text in zip(cells, texts): c['source'] = text.splitlines(True)
    index.write_text(json.dumps(nb, ensure_ascii=False, indent=1)+'\n')
    (ROOT/'README.md').write_text(readme.render())
