"P7: what is typed or set wrongly ends as an error that names it. `python tools/mutations.py` has many more of these"
import sys

import pytest
from harness import ROOT

sys.path.insert(0, str(ROOT/'tools'))
import mutations


@pytest.mark.parametrize('kind', list(mutations.KINDS))
def test_mutations(kind):
    "A plan, or an error that names its subject: no traceback, and nothing is started"
    found = mutations.faults(kind, 30)
    assert not found, '\n'.join(f'{what}: {case.command} {case.env}\n{text[-500:]}' for case, what, text in found)
