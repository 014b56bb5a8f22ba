"""The pages of the reference, in Markdown: each public name with its signature, its parameters, its docstring, and its example in nbs/reference.ipynb.
What is missing is a fault."""
import inspect, io, json, os, re, textwrap, warnings
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin

from fastai.learner import Learner
from fastcore.docments import DocmentTbl, docments, docstring

ROOT = Path(__file__).resolve().parent.parent

# By page: its title, one sentence, and its names. Every name of these modules' `__all__`, and each method that fastdist adds to `Learner`, stands here once
MODULES = 'fastdist.all', 'fastdist.world', 'fastdist.strategy'
PAGES = {
    'learner': ('Train a Learner', "The context in which a `Learner` trains on many workers, and what it adds to fastai's own methods.",
        'Learner.distrib_ctx Learner.to_distributed Learner.detach_distributed DistributedTrainer '
        'Learner.parallel_ctx Learner.to_parallel Learner.detach_parallel ParallelTrainer'),
    'data-and-losses': ('Data and losses', "Which samples a worker gets, and how the losses of all workers become one.", 'DistributedDL GlobalBatchLoss'),
    'large-models': ('Large models', "What fits into memory, and by which strategy. A strategy of your own is a subclass of `Strategy`.",
        'Learner.distrib_plan Learner.find_batch_size Strategy Strategy.setup Strategy.set_opt Strategy.begin_batch Strategy.forward '
        'Strategy.before_backward Strategy.begin_backward Strategy.end_backward Strategy.check_used Strategy.average Strategy.after_batch '
        'Strategy.sync_params Strategy.end_fit Strategy.close Replica Zero1 FullyShard'),
    'checkpoints-and-speed': ('Checkpoints and speed', "Callbacks that save a fit, and that measure it.", 'Resume Resume.request DistMonitor DistMonitor.plot'),
    'workers': ('Start, end and fail', "How workers start, find each other, and end together.",
        'launch_in_notebook end_workers call_main setup_distrib teardown_distrib distributed_init init_group infer_init_method Start '
        'fail_together RemoteError OutOfStep'),
    'communication': ('Ranks and communication', "Who this worker is, and what it can send to the others: for scripts and for loops of your own.",
        'get_rank get_world_size is_master get_local_rank get_local_world_size get_node_rank get_device get_backend get_launcher get_default_group '
        'use_cpu check_rank rank0_first rank0_only rank0_read print_in_order all_reduce all_reduce_dict all_gather_list broadcast_object '
        'world_store KeyValueStore KeyValueStore.set KeyValueStore.get KeyValueStore.add KeyValueStore.wait current_world World')}


@cache
def listed():
    "By name: its page"
    return {name: page for page, (_, _, names) in PAGES.items() for name in names.split()}


def public():
    "The names that have to be in the reference; a method of fastai's that fastdist replaces need not"
    methods = [f'Learner.{nm}' for nm, f in vars(Learner).items() if nm[0] != '_' and getattr(f, '__module__', '').startswith('fastdist.')
               and not docstring(f).startswith("fastai's")]
    return {nm for o in MODULES for nm in import_module(o).__all__}.union(methods)


def find(name):
    "The function or class of a name of the reference"
    owner, _, attr = name.rpartition('.')
    if owner: return getattr(Learner if owner == 'Learner' else find(owner), attr)
    return next(getattr(m, name) for o in MODULES if name in (m := import_module(o)).__all__)


def notebook(obj):
    "The notebook that defines it, as a path"
    text = Path(inspect.getfile(inspect.unwrap(obj))).read_text(encoding='utf-8')
    return re.search(r'File to edit: [./]*(nbs/\S+\.ipynb)', text)[1]


class Shown:
    "What a default looks like in a signature: of a function, a class or a module, its name"
    def __init__(self, o): self.o = o
    def __repr__(self): return getattr(self.o, '__name__', None) or repr(self.o)


def signature(name, obj):
    "A call of it, with the defaults; in lines of their own where it is long"
    if isinstance(obj, type) and '__init__' in vars(obj): obj = obj.__init__ # a `__new__` may take anything
    pars = [p.replace(annotation=p.empty, default=p.default if p.default is p.empty else Shown(p.default))
            for p in inspect.signature(obj).parameters.values() if p.name != 'self']
    text = str(inspect.Signature(pars))
    if len(name+text) <= 76: return name+text
    return f'{name}(\n' + textwrap.fill(text[1:-1], 76, initial_indent='    ', subsequent_indent='    ', break_long_words=False, break_on_hyphens=False) + ')'


def type_name(t):
    "A type in words, none where it is only that of the default `None`"
    if t in (type(None), inspect.Parameter.empty): return inspect.Parameter.empty
    if get_origin(t) is Literal: return 'str' # the comment names the words
    if get_origin(t) in (Union, UnionType): return ' or '.join(str(type_name(o)) for o in get_args(t) if o is not type(None))
    return getattr(t, '__name__', t)


def table(params):
    "Parameters as a table: types, defaults and comments"
    res = DocmentTbl(lambda: 0)
    res.dm, res.params, res.returns = {k: {**v, 'anno': type_name(v.anno)} for k, v in params.items()}, [*params], False
    return str(res)


@cache
def examples():
    "By name, without its owner: the code under the heading of nbs/reference.ipynb that has it"
    cells = json.loads((ROOT/'nbs'/'reference.ipynb').read_text(encoding='utf-8'))['cells']
    heads = [re.findall(r'`(\w+)`', c['source'][0]) if c['source'][0].startswith('## ') else [] for c in cells]
    return {nm: ''.join(c['source']) for names, c in zip(heads, cells[1:]) for nm in names}


def sentence(text): return text if text[-1:] in '.!?' else f'{text}.'


def documented(name, faults):
    "(its object, signature, docstring, parameters); what they lack is added to `faults`"
    obj = find(name)
    try: shown, params = signature(name.rpartition('.')[2] if name in methods() else name.replace('Learner.', 'learn.'), obj), docments(obj, full=True)
    except ValueError: shown, params = name, {} # an exception without an `__init__`
    kept = {}
    for k, p in params.items():
        if k in ('self', 'return') or not p.docment and p.kind in (p.kind.VAR_POSITIONAL, p.kind.VAR_KEYWORD): continue
        kept[k] = p
        if not p.docment: faults.append(f'{notebook(obj)}: parameter {k} of {name} has no comment that says what it is')
    text = inspect.cleandoc(docstring(obj)).partition('\n\nParameters\n---')[0]
    if not text: faults.append(f'{notebook(obj)}: {name} has no docstring')
    return obj, shown, sentence(text), kept


def methods(): return {o for o in listed() if '.' in o and not o.startswith('Learner.')}


def entry(name, faults):
    "The Markdown of one name, with its methods if it is a class"
    obj, shown, text, params = documented(name, faults)
    res = [f'## `{name}` {{ #{name} }}', f'```python\n{shown}\n```', text]
    if params: res.append(table(params))
    rows = [documented(o, faults) for o in listed() if o.startswith(f'{name}.') and o in methods()]
    lines = [f'| `{call}` | ' + ' '.join([' '.join(text.split()), *(sentence(f'*{k}*: {p.docment}') for k, p in pars.items())]) + ' |'
             for _, call, text, pars in rows]
    if rows: res.append('\n'.join(['| **Methods** | |', '| --- | --- |', *lines]))
    if code := examples().get(name.rpartition('.')[2]): res.append(f'Example:\n\n```python\n{code}\n```')
    else: faults.append(f'nbs/reference.ipynb: {name} has no example, under a heading that names it')
    return '\n\n'.join(res)


def commands():
    "The page of the commands: what `--help` prints"
    from fastdist.__main__ import commands, main, usage
    os.environ['COLUMNS'] = '90'
    def printed(*args):
        with redirect_stdout(out := io.StringIO()), suppress(SystemExit): main(list(args))
        return out.getvalue().strip()
    res = ['# Commands', 'What `fastdist COMMAND --help` prints.', f'```text\n{usage}\n```']
    for nm in commands: res += [f'## `fastdist {nm}` {{ #fastdist-{nm} }}', f'```text\n{printed(nm, "--help")}\n```']
    return '\n\n'.join(res) + '\n'


def pages():
    "({file name: Markdown}, faults)"
    faults = [f'{o}: is public, and on no page of PAGES in tools/reference.py' for o in sorted(public()-{*listed()})]
    faults += [f'nbs/reference.ipynb: {o} is no name of the reference' for o in {*examples()}-{o.rpartition('.')[2] for o in listed()}]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        res = {f'{page}.md': '\n\n'.join([f'# {title}', intro, *(entry(o, faults) for o in names.split() if o not in methods())]) + '\n'
               for page, (title, intro, names) in PAGES.items()}
        return {**res, 'commands.md': commands()}, faults
