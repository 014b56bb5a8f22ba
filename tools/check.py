"Fails when two files that should agree do not: notebooks and modules, notebook and README, metadata. One line per fault."
import ast, json, os, re, shutil, subprocess, sys, tempfile
from configparser import ConfigParser
from contextlib import contextmanager
from importlib.metadata import PathDistribution
from pathlib import Path
from zipfile import ZipFile
from packaging.requirements import Requirement
import readme, readme_commands

ROOT = Path(__file__).resolve().parent.parent
by_hand = '__init__.py', 'all.py'  # the modules that no notebook makes
# Floor by floor: a room imports from those before it, and a file from those of its room with lower numbers
ROOMS = '''world comm fault data model strategy metrics callbacks monitor
           checkpoint trainer launch launch/checkpoint launch/notebook'''.split()

def read(root, name):
    "Text of a file, '' if it is missing"
    f = root/name
    return f.read_text(encoding='utf-8') if f.exists() else ''

def settings(root):
    cfg = ConfigParser()
    cfg.read(root/'settings.ini', encoding='utf-8')
    return cfg['DEFAULT']

def version(root):
    m = re.search(r'^__version__ = "(.+)"', read(root, 'fastdist/__init__.py'), re.M)
    if not m: raise ValueError('fastdist/__init__.py: has no line like `__version__ = "0.0.1"`: add it, setup.py and nbdev read it as text')
    return m[1]

@contextmanager
def copy(root, *names):
    "A temporary directory with a copy of these files and directories, so that no check writes to the tree"
    with tempfile.TemporaryDirectory() as d:
        for n in names:
            if (root/n).is_dir(): shutil.copytree(root/n, Path(d)/n, ignore=shutil.ignore_patterns('__pycache__', '.ipynb_checkpoints'))
            elif (root/n).exists(): shutil.copy(root/n, Path(d)/n)
        yield Path(d)

def run_py(code, cwd):
    "Run a line of Python in its own process, in a copy of the tree"
    env = {k:v for k,v in os.environ.items() if k != 'IN_TEST'}  # under IN_TEST nbdev-export does nothing
    r = subprocess.run([sys.executable, '-c', code], cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if r.returncode: raise ValueError(f'`{code}` failed: {r.stderr.strip().splitlines()[-1]}')

def check_modules(root):
    "Every module is what its notebook exports, and every notebook's export is there"
    with copy(root, 'pyproject.toml', 'nbs', 'fastdist') as tmp:
        for f in (tmp/'fastdist').rglob('*.py'):
            if f.name not in by_hand: f.unlink()
        run_py('from nbdev.doclinks import nbdev_export as f; f()', tmp)
        names = sorted({f.relative_to(r).as_posix() for r in (root,tmp) for f in (r/'fastdist').rglob('*.py')})
        return [f'{n} is not what the notebooks export: put the change in the notebook, then run `nbdev-export`' if (tmp/n).exists() else
                f'{n} is made by no notebook: delete it, or add it to by_hand in tools/check.py'
                for n in names if read(root, n) != read(tmp, n)]

def imports(root, file):
    "The files of the package that a module of it imports, at any depth of its code"
    package = ['fastdist', *file.relative_to(root/'fastdist').parent.parts]
    for n in ast.walk(ast.parse(file.read_text(encoding='utf-8'))):
        if isinstance(n, ast.Import): names = [o.name for o in n.names]
        elif isinstance(n, ast.ImportFrom):
            base = '.'.join([*(package[:len(package)+1-n.level] if n.level else []), *([n.module] if n.module else [])])
            names = [base, *(f'{base}.{o.name}' for o in n.names)]
        else: continue
        yield from {f for o in names if (f := root/(o.replace('.', '/') + '.py')).exists() and o.startswith('fastdist.')}

# Statements of the package at most, without the room monitor/, which has its own. It only goes down, until it is 8,000: a new feature finds its room by what goes
BUDGET = 10204
MONITOR = 599

def statements(root, folder='fastdist'):
    "How many statements (nodes of `ast.stmt`) a folder of the package has"
    files = [f for f in (root/folder).rglob('*.py') if f.name!='_modidx.py']
    return sum(isinstance(o, ast.stmt) for f in files for o in ast.walk(ast.parse(f.read_text(encoding='utf-8'))))

def check_budget(root):
    "The package has no more statements than its budget, and the budget none to spare"
    monitor = statements(root, 'fastdist/monitor')
    n = statements(root)-monitor
    if monitor > MONITOR: return [f'fastdist/monitor has {monitor} statements, {monitor-MONITOR} more than MONITOR in tools/check.py']
    if n > BUDGET: return [f'fastdist/ has {n} statements, {n-BUDGET} more than BUDGET in tools/check.py: take out what is no longer needed, whole']
    return [f'fastdist/ has {n} statements: lower BUDGET in tools/check.py, {BUDGET} now, to that'] if n < BUDGET else []

def check_rooms(root):
    "Imports run down only: to rooms before the own one, and to files before the own one"
    place, res = {}, []
    for f in (root/'fastdist').rglob('*.py'):
        m = re.search(r'File to edit: [./]*nbs/(?:(.+)/)?(\d+)_\w+\.ipynb', f.read_text(encoding='utf-8'))
        if not m or f.name == '__main__.py': continue
        if m[1] and m[1] not in ROOMS: res.append(f'nbs/{m[1]}: is no room of tools/check.py: add it to ROOMS, on its floor')
        else: place[f] = ROOMS.index(m[1]) if m[1] else -1, int(m[2])
    return res + [f'{f.relative_to(root)} imports {o.relative_to(root)}, which is not below it: move what they share down'
                  for f in sorted(place) for o in imports(root, f) if o in place and not place[o] < place[f]]

def check_clean(root):
    "Every notebook can be read, and nbdev-clean would change none"
    names = sorted(f.relative_to(root).as_posix() for f in (root/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in f.parts)
    res = []
    for n in names:
        try: json.loads(read(root, n))
        except ValueError as e: res.append(f'{n} is not a notebook (a merge left half-way?): {e}')
    if res: return res
    with copy(root, 'pyproject.toml', 'nbs') as tmp:
        run_py('from nbdev.clean import nbdev_clean as f; f()', tmp)
        return [f'{n} is not clean: run `nbdev-clean`' for n in names if read(root, n) != read(tmp, n)]

def check_readme(root):
    "README.md is nbs/index.ipynb, and the commands it shows are those that .ci/run needs"
    if readme.diff(root): return ['README.md differs from nbs/index.ipynb: run `python tools/readme.py` (with `--check` it shows how)']
    cmds = '\n'.join(readme_commands.commands(root))
    return [f'README.md: no ```sh block runs `{o}`, which .ci/run relies on: add it to a ```sh block in nbs/index.ipynb'
            for o in ('fastdist launch', 'nbdev-test', 'pytest') if o not in cmds]

def check_links(root):
    "Every file of the tree that a page names or links to is there"
    return [f'{page}: names {o}, which is not there: say where it is now'
            for page in ('README.md', 'CHANGELOG.md', 'CONTRIBUTING.md', *(f.relative_to(root).as_posix() for f in sorted((root/'docs').glob('*.md'))))
            for o in sorted(set(re.findall(r'(?:nbs|docs|tests|tools|examples|benchmarks)/[\w./-]+\.(?:ipynb|py|md|toml)', read(root, page))))
            if not (root/o).exists() and 'ROOM' not in o]

def check_version(root):
    "The version stands in fastdist/__init__.py and nowhere else"
    return [f'{n}: has a version of its own ({m[0].strip()!r}): delete it, the version lives in fastdist/__init__.py'
            for n in ('settings.ini', 'pyproject.toml', 'setup.py') for m in re.finditer(r'(?m)\bversion\s*[=:]\s*["\']?\d.*', read(root, n))]

def check_metadata(root):
    "The built package says what settings.ini says"
    if re.search(r'(?m)^\[project', read(root, 'pyproject.toml')):
        return ['pyproject.toml: has a [project] table: move what it says to settings.ini']
    if not (root/'LICENSE').exists(): return ['LICENSE: is missing, and the package must carry it: put it back']
    with copy(root, 'pyproject.toml', 'setup.py', 'settings.ini', 'README.md', 'LICENSE', 'fastdist') as tmp:
        run_py('from setuptools import build_meta as b; b.prepare_metadata_for_build_wheel(".")', tmp)
        meta = PathDistribution(next(tmp.glob('*.dist-info'))).metadata
        run_py('from setuptools import build_meta as b; b.build_editable(".")', tmp)
        with ZipFile(next(tmp.glob('*.whl'))) as z: path, = (z.read(o).decode() for o in z.namelist() if o.endswith('.pth'))
    cfg = settings(root)
    want = {'Name':cfg['dist_name'], 'Version':version(root), 'Summary':cfg['description'], 'Author':cfg['author'],
            'Keywords':cfg['keywords'].replace(' ', ','), 'License-Expression':cfg['license'], 'Requires-Python':f">={cfg['min_python']}"}
    want['Project-URL'] = cfg['project_urls'].strip().replace(' = ', ', ')
    hook = ['setup.py: an editable install is an import hook, which type checkers do not follow: set package_dir'] if 'import' in path else []
    res = hook + [f'setup.py: the built package has {k} {meta[k]!r}, not {v!r}: take it from settings.ini' for k,v in want.items() if meta[k] != v]
    stated = cfg['requirements'].split() + [f'{o}; extra == "dev"' for o in cfg['dev_requirements'].split()]
    stated,built = ({str(Requirement(o)) for o in l} for l in (stated, meta.get_all('Requires-Dist') or []))
    return (res + [f'setup.py: {o!r} is in settings.ini but not in the built package: take it from there' for o in sorted(stated - built)]
                + [f'setup.py: {o!r} is in the built package but not in settings.ini: state it there' for o in sorted(built - stated)])

def check_python(root):
    "The Python version the README asks for is the one settings.ini asks for"
    want,found = settings(root)['min_python'], re.findall(r'Python (\d+\.\d+)\+', read(root, 'README.md'))
    if not found: return [f'README.md: says nowhere "Python {want}+": add it to nbs/index.ipynb']
    return [f'README.md: says "Python {o}+", min_python in settings.ini is {want}: make them agree' for o in found if o != want]

def check_changelog(root):
    "The newest heading names the version"
    m = re.search(r'(?m)^## .*', read(root, 'CHANGELOG.md'))
    if m and re.search(rf'(?<![\w.]){re.escape(version(root))}(?![\w.])', m[0]): return []
    return [f'CHANGELOG.md: the newest heading is {m[0] if m else None!r}, the version is {version(root)}: add a heading that names it']

checks = check_clean, check_modules, check_budget, check_rooms, check_readme, check_links, check_version, check_metadata, check_python, check_changelog

def main():
    faults = []
    for c in checks:
        try: res = c(ROOT)
        except Exception as e: res = [f'{c.__name__} could not look: {type(e).__name__}: {e}']
        print(f'{"FAULT" if res else "ok":5}  {c.__name__[6:]:10}{c.__doc__}')
        faults += res
    if faults: raise SystemExit('\n' + '\n'.join(faults))

if __name__ == '__main__': main()
