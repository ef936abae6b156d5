"""An algorithm written out in words, so that a table can say what each one is."""

from collections.abc import Callable
from functools import partial
from typing import Any

from hone.algo import Algorithm


def word(x: Any) -> str:
    """f(a=1) for a partial, f for a function, the thing itself for the rest."""
    if isinstance(x, partial):
        settings = ", ".join(f"{k}={word(v)}" for k, v in x.keywords.items())
        return f"{x.func.__name__}({settings})"
    if isinstance(x, tuple):
        return " then ".join(map(word, x))
    return x.__name__ if isinstance(x, Callable) else f"{x:g}" if isinstance(x, float) else str(x)


def written(algo: Algorithm) -> dict[str, str]:
    """Every field that is not the default of a plain offline method."""
    flags = [name for name in ("online", "on_policy", "refill", "whiten") if getattr(algo, name)]
    fields = {
        "loss": " + ".join(f"{c:g} {word(term)}" for c, term in algo.loss),
        "credit": "" if algo.credit is None else word(algo.credit),
        "weigh": word(algo.weigh).replace("token_mean", ""),
        "select": word(algo.select).replace("everything", ""),
        "needs": " ".join(sorted(algo.needs)),
        "wants": " ".join(sorted(algo.wants)),
        "watch": ", ".join(f"{name}: {word(term)}" for name, term in algo.watch),
        "control": ", ".join(f"{c.column} from {c.start:g}: {word(c.update)} {c.reads}".strip() for c in algo.control),
        "flags": " ".join(flags),
        "group": str(algo.group) if algo.group > 1 else "",
        "unit": str(algo.unit) if algo.unit > 1 else "",
        "teacher": "" if algo.teacher is None else repr(algo.teacher),
        "region": "" if algo.trust_region is None else repr(algo.trust_region),
    }
    return {name: text for name, text in fields.items() if text}
