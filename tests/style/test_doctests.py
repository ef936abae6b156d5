"""Every example in a docstring runs."""

import doctest
import importlib

from each import each
from tree import MODULES, name_of

EXAMPLES = [name_of(path) for path in MODULES if ">>>" in path.read_text(encoding="utf-8")]


@each("module", EXAMPLES)
def test_docstring_examples_run(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
