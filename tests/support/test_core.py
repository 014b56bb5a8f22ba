"The core tier: each of its lines is a test that there is, each promise has some, and each planted fault has one that finds it"
import re

from conftest import TESTS, core
from harness import ROOT


def test_lines():
    for line in core():
        file, _, name = line.partition('::')
        assert re.search(rf'^def {name.partition("[")[0]}\(', (TESTS/file).read_text(), re.M), line
    assert re.findall(r'(?m)^# (P\d) ', (TESTS/'core.txt').read_text()) == [f'P{i}' for i in range(1, 9)]


def test_planted_faults(monkeypatch, request):
    "Each can be planted. In the core tier, and, where whole files are run, one of their cells: another name of a cell is not found"
    monkeypatch.syspath_prepend(ROOT/'tools')
    from planted_faults import FAULTS, place
    for fault in FAULTS:
        place(fault, ROOT)  # raises where the code has changed
        names = [o.removeprefix('tests/') for o in fault.tests]
        assert any(n == c or n.startswith(f'{c}[') for n in names for c in core()), fault.name
        if request.config.option.keyword or any('::' in o for o in request.config.args): continue
        cells = [o.nodeid for o in request.session.items]
        files = {o.partition('::')[0] for o in cells}
        for n in fault.tests: assert n.partition('::')[0] not in files or any(o == n or o.startswith(f'{n}[') for o in cells), n
