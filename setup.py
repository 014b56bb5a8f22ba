"Feeds settings.ini and the version in fastdist/__init__.py to setuptools; nothing is stated here that stands there."
import re
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
cfg = ConfigParser()
cfg.read(here/'settings.ini', encoding='utf-8')
cfg = cfg['DEFAULT']
name = cfg['lib_name']
# read as text: importing the package would need torch, which the build environment does not have
init = (here/name/'__init__.py').read_text(encoding='utf-8')

setup(
    name=cfg['dist_name'],
    version=re.search(r'^__version__ = "(.+)"', init, re.M)[1],
    description=cfg['description'],
    long_description=(here/'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    keywords=cfg['keywords'].split(),
    author=cfg['author'],
    license_expression=cfg['license'],
    license_files=['LICENSE'],
    classifiers=cfg['classifiers'].strip().splitlines(),
    project_urls=dict(o.split(' = ') for o in cfg['project_urls'].strip().splitlines()),
    python_requires='>='+cfg['min_python'],
    install_requires=cfg['requirements'].split(),
    extras_require=dict(dev=cfg['dev_requirements'].split()),
    package_dir={'': '.'},  # an editable install is then a path, which type checkers and editors follow; they do not follow an import hook
    packages=find_packages(include=[name, f"{name}.*"]),
    include_package_data=False,
    package_data={name: ['py.typed'], '*': ['*.pyi']},
    entry_points=dict(
        console_scripts=cfg['console_scripts'].split(),
        nbdev=[f'{name}={name}._modidx:d']),  # lets nbdev turn `names` in notebooks into links
)
