"Write README.md from nbs/index.ipynb. `python tools/readme.py --check` writes nothing and fails with a diff when they differ."
import difflib, re, sys
from pathlib import Path
from fastcore.ansi import strip_ansi
from fastcore.nbio import join_out, read_nb

ROOT = Path(__file__).resolve().parent.parent
note = '<!-- Made from nbs/index.ipynb by tools/readme.py. Edit the notebook, not this file. -->'

def fence(src, lang=''):
    "`src` as a code block; the fence is longer than any inside it"
    f = '```'
    while f in src: f += '`'
    return f'{f}{lang}\n{src.strip()}\n{f}'

def output(o):
    "One output of a cell as markdown, '' if it has nothing for a reader"
    if o.output_type == 'stream': return '' if o.name == 'stderr' else fence(strip_ansi(join_out(o.text)))
    if o.output_type == 'error': return fence(strip_ansi('\n'.join(o.traceback)))
    data = {k: join_out(v) for k,v in o.data.items()}
    if 'text/markdown' in data: return data['text/markdown'].strip()
    plain = data.get('text/plain', '')
    # fastai's tables have only html; their plain text is the name of an object
    if 'text/html' in data and plain.startswith('<'): return re.sub(r'(?s)<style.*?</style>', '', data['text/html']).strip()
    if any(k.startswith('image/') for k in data):
        raise SystemExit('nbs/index.ipynb: an output is an image, which README.md cannot hold. Clear it, mark the cell `#| hide`, or '
                         'link to an image file from a markdown cell.')
    return fence(plain)

def cell_md(c):
    "The markdown blocks of one cell"
    if 'hide' in c.directives or c.cell_type == 'raw': return []
    c.remove_directives()
    src = c.source.strip()
    if c.cell_type == 'markdown': return [src]
    shell = re.match(r'%%(sh|bash)\s*\n', src)
    code = fence(src[shell.end():], 'sh') if shell else fence(src, 'python')
    return [code if src else ''] + [output(o) for o in c.get('outputs', [])]

def render(root=ROOT):
    "What README.md should hold"
    cells = read_nb(Path(root)/'nbs/index.ipynb').cells
    return '\n\n'.join([note] + [b for c in cells for b in cell_md(c) if b]) + '\n'

def diff(root=ROOT):
    "Lines of difference between README.md and what it should hold, none if they are the same"
    f = Path(root)/'README.md'
    old = f.read_text(encoding='utf-8') if f.exists() else ''
    return list(difflib.unified_diff(old.splitlines(True), render(root).splitlines(True), 'README.md', 'nbs/index.ipynb'))

def main():
    if sys.argv[1:] == []: (ROOT/'README.md').write_text(render(), encoding='utf-8')
    elif sys.argv[1:] == ['--check']:
        if d := diff(): raise SystemExit(''.join(d) + '\nREADME.md differs from nbs/index.ipynb: run `python tools/readme.py`')
    else: raise SystemExit(f'tools/readme.py: unknown arguments {sys.argv[1:]}; use none, or --check')

if __name__ == '__main__': main()
