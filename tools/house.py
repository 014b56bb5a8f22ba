"""The house in figures: `python tools/house.py [FOLDER]` counts what makes it heavy, in this checkout or in another. `--names KIND` lists the places of one
kind: wide, long, bare (exported cells without an example right after), state, undocumented."""
import argparse, ast, json
from collections import Counter
from operator import itemgetter
from pathlib import Path
from check import imports, statements, ROOT

MUTABLE = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
MAKERS = 'dict list set deque defaultdict Counter OrderedDict WeakKeyDictionary WeakSet WeakValueDictionary SimpleNamespace local Lock RLock Event count'.split()

def modules(root): return sorted(f for f in (root/'fastdist').rglob('*.py') if f.name!='_modidx.py')

def notebooks(root): return sorted(f for f in (root/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in f.parts and 'tutorials' not in f.parts)

def cells(f):
    "(its exported cells, those over 60 lines, those without an example right after), as (notebook, first line) each"
    code = [''.join(c['source']) for c in json.loads(f.read_text(encoding='utf-8'))['cells'] if c['cell_type']=='code']
    exported = [i for i,s in enumerate(code) if s.startswith('#| export') and any(w in s for w in ('def ', 'class '))]
    def name(i): return f.name, next(o for o in code[i].splitlines()[1:] if 'def ' in o or 'class ' in o).strip()
    def shown(i): return i+1 < len(code) and not code[i+1].startswith(('#| export','#| hide\nimport nbdev'))
    return [name(i) for i in exported], [name(i) for i in exported if code[i].count("\n") > 60], [name(i) for i in exported if not shown(i)]

def state(f):
    "Names of a module that it changes as it runs: by `global`, or a container that some function writes to"
    tree = ast.parse(f.read_text(encoding='utf-8'))
    assigned = []
    for n in (o for o in tree.body if isinstance(o, (ast.Assign,ast.AnnAssign))):
        for t in n.targets if isinstance(n, ast.Assign) else [n.target]:
            several = isinstance(t, ast.Tuple) and isinstance(n.value, ast.Tuple)
            assigned += zip(t.elts, n.value.elts) if several else [(t, n.value)]
    makes = lambda v: isinstance(v, MUTABLE) or isinstance(v, ast.Call) and getattr(v.func, 'attr', getattr(v.func, 'id', '')) in MAKERS
    held = {t.id for t,v in assigned if isinstance(t, ast.Name) and makes(v)}
    res = {o for n in ast.walk(tree) if isinstance(n, ast.Global) for o in n.names}
    writers = 'append add pop clear update setdefault remove discard extend insert popitem appendleft set acquire'.split()
    for fn in (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef,ast.Lambda))):
        for n in ast.walk(fn):
            if isinstance(n, ast.Subscript) and isinstance(n.ctx, (ast.Store,ast.Del)) and isinstance(n.value, ast.Name): res.add(n.value.id) if n.value.id in held else None
            if isinstance(n, ast.Attribute) and n.attr in writers and isinstance(n.value, ast.Name) and n.value.id in held: res.add(n.value.id)
            if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and isinstance(n.value, ast.Name) and n.value.id in held: res.add(n.value.id)
            if isinstance(n, ast.With): res |= {i.context_expr.id for i in n.items if isinstance(i.context_expr, ast.Name) and i.context_expr.id in held}
    return sorted(res)

def undocumented(f):
    "Public functions and classes without a docstring"
    return [n.name for n in ast.parse(f.read_text(encoding='utf-8')).body
            if isinstance(n, (ast.FunctionDef,ast.ClassDef)) and not n.name.startswith('_') and not ast.get_docstring(n)]

def floors(below):
    "Modules on the longest way of imports down"
    seen = {}
    def depth(f, way=()):
        if f in way: return 0
        if f not in seen: seen[f] = 1+max((depth(o, (*way, f)) for o in below[f]), default=0)
        return seen[f]
    return max(map(depth, below))

def look(root):
    "What is counted: `dict` from a kind to its places"
    fs = [f for f in modules(root) if f.name not in ('__init__.py','all.py')]
    below = {f:[o for o in imports(root, f) if o in fs and o!=f] for f in fs}
    room = lambda f: f.parent.relative_to(root/'fastdist').as_posix()
    every = [cells(f) for f in notebooks(root)]
    lines = {f:f.read_text(encoding='utf-8').splitlines() for f in modules(root)}
    rel = lambda f: f.relative_to(root).as_posix()
    fullest = max(Counter(map(room, fs)).items(), key=itemgetter(1))[0]
    return dict(
        modules=[rel(f) for f in fs], fullest=[rel(f) for f in fs if room(f)==fullest], floors=range(floors(below)), arrows=sorted({(room(f), room(o)) for f in fs for o in below[f] if room(f)!=room(o)}),
        statements=range(statements(root)), lines=[o for f in lines for o in lines[f]], wide=[f'{rel(f)}:{i}' for f in lines for i,o in enumerate(lines[f], 1) if len(o) > 140],
        exported=[o for e in every for o in e[0]], long=[o for e in every for o in e[1]], bare=[o for e in every for o in e[2]],
        state=[f'{rel(f)}: {o}' for f in fs for o in state(f)], undocumented=[f'{rel(f)}: {o}' for f in fs for o in undocumented(f)])

TEXT = dict(modules="modules", fullest="modules in the fullest room", floors="modules on the longest way of imports", arrows="arrows between rooms", statements="statements", lines="lines", wide="lines over 140 columns",
            exported="exported cells with functions or classes", long="of these, over 60 lines", bare="of these, without an example right after",
            state="names of modules that change as they run", undocumented="public functions and classes without a docstring")

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('folder', nargs='?', type=Path, default=ROOT)
    p.add_argument('--names', choices=list(TEXT))
    a = p.parse_args()
    found = look(a.folder.resolve())
    if a.names: print(*found[a.names], sep='\n')
    else:
        for k,v in TEXT.items(): print(f'{len(found[k]):6}  {v}')

if __name__ == '__main__': main()
