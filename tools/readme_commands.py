"""The commands README.md promises: its ```sh blocks, which .ci/run runs as they stand, in their order.

What does not run everywhere (a cluster, a GPU) stands in a ```console or ```text block. Needs nothing but Python:
the first command is what installs the rest. `python3 tools/readme_commands.py` prints each block, ended by a NUL byte.
"""
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

def commands(root=ROOT):
    "The text of each ```sh block of README.md"
    return re.findall(r'(?ms)^```sh\n(.*?)\n```$', (Path(root)/'README.md').read_text(encoding='utf-8'))

if __name__ == '__main__': print(*commands(), sep='\0', end='\0')
