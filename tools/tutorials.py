"""Run the notebooks of nbs/tutorials/ and keep what they show: `python tools/tutorials.py [name ...]`

One whose text shows NAME.png gets the last picture that it draws, as this file."""
import base64, os, re, shutil, sys, tempfile, time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = ROOT/'nbs'/'tutorials'
# what fastai's import and a kernel without ipywidgets warn of would be kept, with its path
QUIET = 'ignore::FutureWarning:torch.jit._script,ignore:IProgress not found'


def execute(file):
    "Run a notebook in a kernel of its own, in its folder, as Jupyter does, and write what it shows into it"
    os.environ['PYTHONWARNINGS'] = QUIET
    nb = nbformat.read(file, 4)
    try: NotebookClient(nb, timeout=600, kernel_name='python3', resources={'metadata': {'path': str(Path(file).parent)}}).execute()
    finally: nbformat.write(nb, file)
    tidy(nb)
    nbformat.write(nb, file)


def tidy(nb):
    "Texts that came in pieces are one, as a screen shows it in the end, with no path of this machine"
    for c in code_cells(nb):
        outputs, c.outputs = c.outputs, []
        for o in outputs:
            if 'text' in o and c.outputs and c.outputs[-1].get('name') == o.name: c.outputs[-1].text += o.text
            else: c.outputs.append(o)
        for o in c.outputs:
            if 'text' in o: o.text = shown(o.text)


def code_cells(nb): return [c for c in nb.cells if c.cell_type == 'code']
def pictures(cell): return [base64.b64decode(o.data['image/png']) for o in cell.outputs if 'image/png' in o.get('data', {})]


def shown(text):
    "Without empty lines and progress bars: a carriage return begins the line anew, over what was there"
    lines = [o.split('\r')[-1].rstrip() for o in re.sub(r'\r+\n', '\n', text).split('\n')]
    text = '\n'.join(o for o in lines if not re.fullmatch(r'(█|Epoch \d+/\d+ :)?', o))
    return re.sub(r'/tmp/ipykernel_\d+/\d+', '/tmp/ipykernel_1/1', re.sub(r'/tmp/fastdist_\w+', '/tmp/fastdist_k3x1', text))


def main(names):
    from nbdev.clean import nbdev_clean
    for name in names or sorted(o.stem for o in TUTORIALS.glob('*.ipynb')):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            execute(file := shutil.copy(TUTORIALS/f'{name}.ipynb', folder))
            shutil.copy(file, TUTORIALS)
        nbdev_clean(str(TUTORIALS/f'{name}.ipynb'))
        nb, picture = nbformat.read(TUTORIALS/f'{name}.ipynb', 4), f'{name}.png'
        if any(picture in c.source for c in nb.cells): (TUTORIALS/picture).write_bytes([p for c in code_cells(nb) for p in pictures(c)][-1])
        print(f'{name}: {time.perf_counter()-start:.0f} s', flush=True)


if __name__ == '__main__': main(sys.argv[1:])
