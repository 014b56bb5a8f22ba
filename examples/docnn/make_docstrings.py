"""Write train.tsv and dev.tsv in SST-2's layout from text that is on this machine: of which library is this the first sentence of a docstring?

    python examples/docnn/make_docstrings.py docstrings
    python examples/docnn/make_docstrings.py docstrings --libraries numpy pandas torch --most 2000

Libraries are read, not imported. The same versions of them give the same files.
"""
import ast, hashlib, re, warnings
from argparse import ArgumentParser
from importlib.machinery import PathFinder
from pathlib import Path

def first_sentence(doc):
    text = ' '.join(doc.split('\n\n')[0].split())
    return re.split(r'(?<=[.!?])\s', text, maxsplit=1)[0]

def words(sentence): return re.findall(r'\w+', sentence.lower())

def sentences(library):
    "First sentences of docstrings, 4 to 40 words long, each once; tests and what others have written are left out"
    spec = PathFinder.find_spec(library)
    if spec is None or not spec.submodule_search_locations: raise SystemExit(f"there is no library {library} here: give others with --libraries")
    root,found = Path(spec.origin).parent,{}
    for f in sorted(root.rglob('*.py')):
        if {'tests','test','testing','_vendor','externals'} & set(f.relative_to(root).parts): continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('ignore') # of escapes that are wrong
                tree = ast.parse(f.read_bytes())
        except SyntaxError: continue # a template
        for o in ast.walk(tree):
            if not isinstance(o, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or not (doc := ast.get_docstring(o)): continue
            s = first_sentence(doc)
            if 4 <= len(words(s)) <= 40: found.setdefault(' '.join(words(s)), s)
    return found

def number(key):
    "A number that a sentence always has, so that what is drawn does not depend on the order of files"
    return int(hashlib.sha256(key.encode()).hexdigest(), 16)

def make(folder, libraries=('matplotlib','numpy','pandas'), most=1500, held_out=0.2):
    "Write the files, as many sentences of each library; none that two libraries have, and none of train.tsv in dev.tsv"
    found = {o:sentences(o) for o in libraries}
    shared = {k for o in libraries for k in found[o] if sum(k in f for f in found.values()) > 1}
    drawn = {o:sorted(set(found[o])-shared, key=number) for o in libraries}
    n = min(most, *map(len, drawn.values()))
    rows = sorted(((k,found[o][k],o) for o in libraries for k in drawn[o][:n]), key=lambda r: number(r[0]+'order'))
    n_dev = int(held_out*len(rows))
    Path(folder).mkdir(parents=True, exist_ok=True)
    for nm,part in ('dev',rows[:n_dev]),('train',rows[n_dev:]):
        (Path(folder)/f'{nm}.tsv').write_text('sentence\tlabel\n' + ''.join(f'{s}\t{o}\n' for _,s,o in part), encoding='utf-8')
    return len(rows)-n_dev,n_dev

if __name__ == '__main__':
    p = ArgumentParser(description="Sentences of docstrings, and the library that each is of")
    p.add_argument('folder', help="where to write train.tsv and dev.tsv")
    p.add_argument('--libraries', nargs='+', default=['matplotlib','numpy','pandas'])
    p.add_argument('--most', type=int, default=1500, help="sentences of each library, at most")
    args = p.parse_args()
    n,n_dev = make(args.folder, args.libraries, args.most)
    print(f"{args.folder}: {n} sentences to train on, {n_dev} held out, of {', '.join(args.libraries)}")
