"""What the pages say can be done: every command, setting, target, path and snippet in them is tried."""

import ast
from pathlib import Path

import pytest
from each import each
from tree import MODULES, name_of, parsed

from benchmarks.claims import CHECKS, command_lines, pages

WRONG = """
```
hone run nothing train.stesp=3    # a recipe and a setting that do not exist
hone chat MODEL --temprature 0
hone algos nothing
hone run grpo optim.lr=1          # no setting 'optim.lr'
make nothing
```

`hone frobnicate`, `train.nothing`, `save.keep=two`, `python -m benchmarks.nothing`, `hone[nothing]`,
`HONE_NOTHING`, `algo.nothing=1`, `python -m benchmarks.sampler --nothing`, `model/nothing.py`,
[nothing](nothing.md), src/hone/nothing.py

| setting | default | |
|---|---|---|
| `save.keep` | 17 | |

```python
from hone.algo import nothing
hone.nothing()
```

```python
def broken(:
```
"""
FOUND = {
    "commands that the command line takes": 4,
    "settings that exist": 4,
    "settings that are refused as the page says": 1,
    "defaults of settings": 1,
    "targets of make": 1,
    "benchmarks and their options": 2,
    "extras of the package": 1,
    "environment variables that are read": 1,
    "files by name": 1,
    "snippets of Python": 3,
    "links and paths": 2,
}


@each("name", CHECKS)
def test_the_pages_have_only(name: str):
    wrong = [f"{page.name}: {why}" for page in pages() for why in CHECKS[name](page)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", CHECKS)
def test_a_wrong_page_is_found_wrong(name: str, tmp_path: Path):
    page = tmp_path / "wrong.md"
    page.write_text(WRONG.replace("HONE_NOTHING", "HONE_" + "NOTHING_AT_ALL"))
    assert len(list(CHECKS[name](page))) == FOUND[name]


def test_no_error_sends_its_reader_to_a_page_that_is_not_installed():
    wrong = [
        f"{name_of(path)}: {text}"
        for path in MODULES
        for call in ast.walk(parsed(path))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "HoneError"
        if "docs/" in (text := ast.unparse(call))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_pages_have_commands_to_try():
    assert sum(len(command_lines(page)) for page in pages()) > 50
