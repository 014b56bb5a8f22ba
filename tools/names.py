"""Names in backquotes: each identifier has to be one of fastdist's, or of a library that readers know. What is neither is most often a name that has changed."""
import ast, builtins, io, keyword, re, sys
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType

from fastai.callback.core import Callback
from fastcore.basics import camel2snake

ROOT = Path(__file__).resolve().parent.parent
OPTION = re.compile(r'(?<![\w-])--?[a-zA-Z][\w-]*')
LIBRARIES = '''torch torch.nn torch.nn.functional torch.optim torch.optim.swa_utils torch.cuda torch.distributed torch.distributed.fsdp torch.distributed.optim
    torch.distributed.tensor torch.distributed.checkpoint torch.distributed.algorithms torch.nn.parallel torch.nn.utils torch.utils.data torch.utils.checkpoint torch.profiler
    torch.amp torch.func torch.multiprocessing fastai.vision.all fastai.vision.gan fastai.text.all fastai.tabular.all fastai.collab fastai.distributed
    fastai.callback.all fastai.callback.wandb fastai.callback.tensorboard fastcore.all accelerate accelerate.utils os sys time signal pathlib datetime random
    numpy numpy.random pandas subprocess multiprocessing contextlib nbdev'''.split()
PRINTED = re.compile(r'''/|\\|<|[\w*]\.(py|pyi|md|ipynb|toml|ini|jsonl?|sh|ya?ml|png|log|txt|pth|gz|html|cfg|pt)\b'''
                     r'|[a-z]+ [a-z]+ [a-z]+')
# Programs: what stands after them in backquotes is theirs
PROGRAMS = '''accelerate apt-get bash cat cd curl docker export flock git grep helm hostname ip jsrun jupyter kill kubectl ls mkdir mkdocs mpiexec mpirun nvidia-smi pip
    pytest python python3 ray rm sacct salloc sbatch scancel scontrol scp sinfo squeue srun ssh sudo tail torchrun ulimit unset
    nbdev-export nbdev-test nbdev-clean nbdev-update nbdev-bump-version'''.split()
# Words and options of what is not installed here, and names that a page makes up
WORDS = '''OSS ShardedDataParallel ShardedGradScaler checkpoint_wrapper auto_wrap enable_wrap fairscale fairseq pytext lightning Trainer Fabric deepspeed submitit LocalExecutor
    hydra dask TorchTrainer FailureConfig max_failures TrainJob PyTorchJob mpi gloo nccl env tcp http localhost torchmetrics
    fsGroup train_and_save Requeued on_workers --shm-size valid int8 sh console ckpt download host1 n1 num_batches_tracked emptyDir medium Memory views FAULT NOTE RUN ProfilerStep
    TorchDistributedTrial     CometCallback NeptuneCallback AzureMLCallback
    --exclusive --requeue --no-requeue --signal -p -N'''.split()


def py_files():
    "The package, and what CONTRIBUTING.md names of tools and tests"
    files = [f for o in ('fastdist', 'tools', 'tests/support') for f in sorted((ROOT/o).rglob('*.py')) if f.name != '_modidx.py']
    return [*files, ROOT/'tests/conftest.py']


def names_in(text):
    "What a module defines: functions, classes, parameters, attributes, and words that it takes or returns as texts"
    for n in ast.walk(ast.parse(text)):
        if isinstance(n, (ast.FunctionDef, ast.ClassDef)): yield from (n.name, camel2snake(n.name)) # the latter as fastai calls a callback
        elif isinstance(n, ast.arg): yield n.arg
        elif isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store): yield n.attr
        elif isinstance(n, ast.keyword) and n.arg: yield n.arg
        elif isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value.isidentifier(): yield n.value
        if isinstance(n, (ast.ClassDef, ast.Module)):
            for o in n.body:
                names = [t for t in ast.walk(o) if isinstance(t, ast.Name)] if isinstance(o, (ast.Assign, ast.AnnAssign)) else []
                yield from (t.id for t in names if isinstance(t.ctx, ast.Store))


@cache
def known():
    "All identifiers that may stand in backquotes"
    res = {*dir(builtins), *keyword.kwlist, *sys.stdlib_module_names, *WORDS, *PROGRAMS}
    for f in py_files():
        text = f.read_text(encoding='utf-8')
        res.update(f.relative_to(ROOT).with_suffix('').parts, (o for o in names_in(text) if o[0] != '_'), re.findall(r'\b[A-Z][A-Z\d]+_[A-Z\d_]+\b', text))
    for m in map(import_module, LIBRARIES):
        res.update(dir(m))
        for c in vars(m).values():
            if not isinstance(c, (type, FunctionType)): continue
            if isinstance(c, type): res.update(dir(c))
            if isinstance(c, type) and issubclass(c, Callback): res.add(camel2snake(c.__name__)) # as fastai calls it on a learner
            code = getattr(c.__init__ if isinstance(c, type) else c, '__code__', None)
            if code: res.update(code.co_varnames[:code.co_argcount+code.co_kwonlyargcount])
    return res.union(*(o.split('.') for o in sys.modules))


@cache
def options():
    "The options of our commands, and of `accelerate launch` and torchrun, which `fastdist launch` takes as well"
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser
    from fastdist.__main__ import commands, main
    text = ' '.join(o for p in (launch_command_parser(), get_args_parser()) for a in p._actions for o in a.option_strings)
    for nm in commands:
        with redirect_stdout(out := io.StringIO()), suppress(SystemExit): main([nm, '--help'])
        text += out.getvalue()
    return {o.replace('_', '-') for o in OPTION.findall(text)}.union(WORDS)


def wrong(span):
    "The identifiers and options in a text in backquotes that nobody knows"
    words = span.split()
    while words and re.fullmatch(r'\$|[A-Z_]+=\S*', words[0]): words = words[1:]
    if not words or words[0] in PROGRAMS or words[0][0] == '#': return []
    found = OPTION.findall(' '.join(words)) if words[0] == 'fastdist' or words[0][0] == '-' else []
    bad = [o for o in found if o[-1] != '_' and o.replace('_', '-') not in options()]
    if words[0] == 'fastdist' and len(words) > 1:
        from fastdist.__main__ import commands
        return bad + [o for o in words[1:2] if o.isalpha() and o.islower() and o not in commands]
    # an option; a path or a file; what a program prints
    if words[0][0] == '-' or PRINTED.search(span): return bad
    code = re.sub(r"""(["']).*?\1|[\w-]+\.\.\.\w*""", '', span)
    return [o for o in re.findall(r'(?<!\w)[A-Za-z]\w+', code) if o not in known() and not re.search(rf'\b{o} = ', code)]


def spans(text):
    "(line, text in backquotes) of a page in Markdown, outside of its code blocks"
    fenced = re.sub(r'(?ms)^ *(`{3,}).*?^ *\1 *$|<!--.*?-->', lambda m: '\n'*m[0].count('\n'), text)
    return [(fenced.count('\n', 0, m.start())+1, m[2]) for m in re.finditer(r'(?s)(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)', fenced)]


def faults(page, text):
    "A line for each"
    # the first column of these tables has the names of other libraries
    if page.endswith('coming-from.md'): text = re.sub(r'(?m)^\|[^|\n]*\|', '|', text)
    return [f'{page}:{line}: `{span}`: {", ".join(dict.fromkeys(bad))}: no name of fastdist, nor one that tools/names.py knows'
            for line, span in spans(text) if (bad := wrong(span.strip()))]
