"""One test for many cases. A parametrisation makes a test of each case, and every worker pays for collecting it."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Test = Callable[..., None]


def each(
    names: str | Sequence[str], values: Iterable[Any], *, ids: Callable[[Any], object] | None = None
) -> Callable[[Test], Test]:
    """Calls the test with each of the values, as pytest.mark.parametrize would; a failure names its case."""
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cases = list(values)
    assert cases, "a test without a case proves nothing"
    assert not any(isinstance(case, type(pytest.param())) for case in cases), "a mark is for a test of its own"

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def loop(*args: Any, **fixtures: Any) -> None:
            skipped: BaseException | None = None
            ran = 0
            for case in cases:
                given = dict(zip(keys, case, strict=True)) if len(keys) > 1 else {keys[0]: case}
                try:
                    test(*args, **fixtures, **given)
                    ran += 1
                except pytest.skip.Exception as skip:
                    skipped = skip
                except BaseException as error:
                    error.add_note(f"the case: {_label(case, ids)}")
                    raise
            if skipped is not None and not ran:
                raise skipped

        left = [p for p in inspect.signature(test).parameters.values() if p.name not in keys]
        loop.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
        return loop

    return decorate


def _label(case: Any, ids: Callable[[Any], object] | None) -> str:
    return str(ids(case)) if ids else ascii(case)[:400]
