"""Build the site: `python tools/site.py [FOLDER]`, by default into _docs/. Look at it with `python -m http.server -d _docs`.

Its pages are README.md, docs/, the tutorials with the outputs that they keep, CHANGELOG.md, CONTRIBUTING.md, the reference, and each file that one of
these links to. A fault is a line, and nothing is built where there is one: a link to nothing, a name in backquotes that nobody knows, a public name without its
docments or an example, too many words, a picture that is not up to date, and what else MkDocs warns of."""
import logging, os, posixpath, re, shutil, sys, tempfile
from base64 import b64decode
from pathlib import Path

os.environ.setdefault('CUDA_VISIBLE_DEVICES', '')
import yaml
from fastcore.nbio import join_out, read_nb
from mkdocs.commands.build import build as mkdocs_build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
import check, diagrams, names, readme, reference

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(r'(?ms)(^ *```.*?^ *```|<!--.*?-->)')
# Words of prose at most: of all pages for users together, and of those for whoever changes fastdist
WORDS = {'README.md and docs/': 7000, 'docs/how-it-works.md': 450, 'docs/extend.md': 250, 'CONTRIBUTING.md': 600}


def place(file):
    "Where a file of the tree stands on the site"
    for pattern, new in ((r'README\.md', 'index.md'), (r'docs/(.*)', r'\1'), (r'nbs/tutorials/(.*)\.ipynb', r'tutorials/\1.md'), (r'(.*\.(?:png|svg))', r'\1')):
        if re.fullmatch(pattern, file): return re.sub(pattern, new, file)
    return file.lower() if re.fullmatch(r'[A-Z]+\.md', file) else f'{file}.md'


def shown(o, name, files):
    "One output of a cell, as Markdown; a picture becomes a file"
    data = {k: join_out(v) for k, v in o.get('data', {}).items()}
    image = next((k for k in data if k.startswith('image/')), None)
    if image:
        file = f'{name}-{len(files)}.{image[6:9]}'
        files[file] = data[image].encode() if 'svg' in image else b64decode(data[image])
        return f'![Output of the cell]({posixpath.basename(file)})'
    if '<progress' in data.get('text/html', ''): return ''
    if 'text/html' not in data: return readme.output(o)
    text = re.sub(r'(?s)<style.*?</style>|border="1" class="dataframe"', '', data['text/html'])
    return re.sub(r'\n\s*\n', '\n', text).strip()


def notebook(file, files):
    "A notebook as Markdown, with the outputs that it keeps"
    blocks = []
    for c in read_nb(ROOT/file).cells:
        outputs, c['outputs'] = c.get('outputs', []), []
        source = readme.cell_md(c)
        blocks += source and source+[shown(o, place(file).removesuffix('.md'), files) for o in outputs]
    return '\n\n'.join(o for o in blocks if o)


def page(file, files):
    "A file of the tree as Markdown"
    path = ROOT/file
    if path.is_dir():
        inside = [o.name for o in sorted(path.iterdir()) if o.suffix in ('.py', '.toml', '.md')]
        return f'# {file}\n\n' + '\n'.join(f'- [{o}]({path.name}/{o})' for o in inside)
    if file.endswith('.ipynb'): return notebook(file, files)
    text = path.read_text(encoding='utf-8')
    if file.endswith('.md'): return text
    return f'# {file}\n\n' + readme.fence(text, {'.py': 'python', '.toml': 'toml'}.get(path.suffix, 'text'))


def link_names(text, to):
    "Let what stands in backquotes and is in the reference be a link to it; `to` is the way there"
    home = reference.listed()
    def link(m):
        name = re.sub(r'^(learn|Learner)\.', '', m[1]).partition('(')[0]
        command = re.match(r'fastdist ([a-z]+)\b', m[1])
        at = next((o for o in (name, f'Learner.{name}') if o in home and o not in reference.methods()), None)
        if command: return f'[{m[0]}]({to}/commands.md#fastdist-{command[1]})'
        return f'[{m[0]}]({to}/{home[at]}.md#{at})' if at else m[0]
    return '\n'.join(o if o.startswith('#') else re.sub(r'(?<![\[`])`([^`\n]+)`(?![\]`])', link, o) for o in text.split('\n'))


def rewrite(file, text, made, faults, found):
    """`text` of a page with links that hold on the site, of which the files `made` are. The files of the tree that it links to go into `found`,
    those that are not there into `faults`"""
    here = posixpath.dirname(place(file))
    def link(m):
        target, _, anchor = m[2].partition('#')
        if not target or re.match(r'\w+:', target) or posixpath.join(here, target) in made: return m[0]
        o = posixpath.normpath(posixpath.join(posixpath.dirname(file), target))
        if not (ROOT/o).exists(): faults.append(f'{file}: links to {m[2]}, which is not there')
        else: found.append(o)
        return m[1]+posixpath.relpath(place(o), here or '.')+('#'+anchor if anchor else '')+m[3]
    to = posixpath.relpath('reference', here or '.')
    return ''.join(o if i%2 else link_names(re.sub(r'(\]\(|src=")([^)"\s]+)([)"])', link, o), to) for i, o in enumerate(CODE.split(text)))


def words(text):
    "How many words of prose a page has, outside of its code"
    text = re.sub(r'\]\([^)]*\)', ']', CODE.sub('', text))
    return sum(bool(re.search(r'\w', o)) for o in text.split())


def sources():
    "The files of the tree that are pages"
    found = [o.relative_to(ROOT).as_posix() for pattern in ('docs/*.md', 'nbs/tutorials/*.ipynb') for o in sorted(ROOT.glob(pattern))]
    return ['README.md', *found, 'CONTRIBUTING.md', 'CHANGELOG.md']


def collect(faults):
    "{place on the site: Markdown, or bytes}"
    files, todo, counts = {'site.css': (ROOT/'tools/site.css').read_bytes()}, sources(), dict.fromkeys(WORDS, 0)
    for file in todo: # it grows
        if place(file) in files: continue
        if re.search(r'\.(png|svg)$', file): files[place(file)] = (ROOT/file).read_bytes(); continue
        text, found = page(file, files), []
        if file in sources():
            prose = '\n'.join(c.source for c in read_nb(ROOT/file).cells if c.cell_type == 'markdown') if file.endswith('.ipynb') else text
            if file != 'CHANGELOG.md': faults += names.faults(file, prose)
            counts[file if file in counts else 'README.md and docs/'] += words(text) if re.match('README|docs/|CONTRIBUTING', file) else 0
        files[place(file)] = rewrite(file, text, {*files}, faults, found)
        todo += [o for o in found if o not in todo]
    faults += [f'{k}: {n} words of prose, {WORDS[k]} at most' for k, n in counts.items() if n > WORDS[k]]
    faults += [f'docs/{nm}: is not what `python tools/diagrams.py` draws: run it' for nm, svg in diagrams.draw().items()
               if check.read(ROOT, f'docs/{nm}') != svg]
    pages, lacking = reference.pages()
    for name, text in pages.items(): files[f'reference/{name}'] = ''.join(
        o if i%2 else link_names(o, '.') for i, o in enumerate(CODE.split(text))).replace('(./', '(')
    faults += lacking
    return files, counts


def build(files, out, **config):
    "Let MkDocs build `files` into the folder `out`; the faults that it warns of"
    found = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda r: found.append(r.getMessage())
    logging.getLogger('mkdocs').addHandler(handler)
    with tempfile.TemporaryDirectory() as d:
        for name, text in files.items():
            (file := Path(d)/name).parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
        try: mkdocs_build(load_config(str(ROOT/'mkdocs.yml'), docs_dir=d, site_dir=str(out), strict=True, **config))
        except Abort as e: found = found or [str(e)]
        finally: logging.getLogger('mkdocs').removeHandler(handler)
    hosts = [f'{f.relative_to(out)}: asks another host for {url}' for f in Path(out).rglob('*.html')
             for url in re.findall(r'<(?:link|script|img|source)\b[^>]*?(?:href|src)="?(https?://[^">\s]*)', f.read_text(encoding='utf-8'))]
    return found + hosts


def nav(files):
    "That of mkdocs.yml, with the tutorials"
    text = (ROOT/'mkdocs.yml').read_text(encoding='utf-8')
    res = yaml.safe_load(text[text.index('\nnav:'):])['nav']
    for o in res:
        if 'Tutorials' in o: o['Tutorials'] = [f for f in files if re.fullmatch(r'tutorials/\w+\.md', f)]
    return res


def main(out=ROOT/'_docs'):
    faults = []
    files, counts = collect(faults)
    if not faults:
        shutil.rmtree(out, ignore_errors=True)
        faults = build(files, Path(out).resolve(), nav=nav(files))
    for o in faults: print(o)
    if faults: sys.exit(f'\n{len(faults)} faults')
    print(f"{sum(isinstance(o, str) for o in files.values())} pages in {out}; words of prose: {', '.join(f'{k} {n:,}' for k, n in counts.items())}")


if __name__ == '__main__': main(*sys.argv[1:])
