"""Hone trains language models, and its numbers can be checked.

`load` gives a model to sample from and to score with. `run` trains by a `Recipe`, `resume` goes on with a run, and
`evaluate` scores a model on problems. `algo` holds the algorithms, `rewards` the verifiers.

Names are imported when they are first used, so that `import hone` and `hone --help` do not wait for torch.
"""

from importlib import import_module

TYPE_CHECKING = False  # as typing has it, whose import takes longer than all of this
if TYPE_CHECKING:
    from typing import Any

    from hone import algo
    from hone import reward as rewards
    from hone.config.overrides import Choice
    from hone.config.recipe import (
        CriticSpec,
        LoraSpec,
        ModelSpec,
        OptimSpec,
        PartsSpec,
        ProcessSpec,
        ReadSpec,
        Recipe,
        SampleSpec,
        SaveSpec,
        TrainSpec,
    )
    from hone.errors import HoneError
    from hone.inference.evaluate import evaluate
    from hone.inference.model import Model, Sample, load
    from hone.log.limits import LimitSpec
    from hone.start import resume, run
    from hone.types import Outcome, Task

    __version__: str

__all__ = [
    "Choice",
    "CriticSpec",
    "HoneError",
    "LimitSpec",
    "LoraSpec",
    "Model",
    "ModelSpec",
    "OptimSpec",
    "Outcome",
    "PartsSpec",
    "ProcessSpec",
    "ReadSpec",
    "Recipe",
    "Sample",
    "SampleSpec",
    "SaveSpec",
    "Task",
    "TrainSpec",
    "algo",
    "evaluate",
    "load",
    "resume",
    "rewards",
    "run",
]

_HOME = {
    "Choice": "config.overrides",
    "HoneError": "errors",
    "LimitSpec": "log.limits",
    "Model": "inference.model",
    "Outcome": "types",
    "Sample": "inference.model",
    "Task": "types",
    "evaluate": "inference.evaluate",
    "load": "inference.model",
    "resume": "start",
    "run": "start",
}

_PACKAGES = {"algo": "hone.algo", "rewards": "hone.reward"}


def __getattr__(name: str) -> "Any":
    """Imports a public name from the module that defines it (PEP 562)."""
    if name == "__version__":
        return import_module("importlib.metadata").version("hone")
    if name in _PACKAGES:
        return import_module(_PACKAGES[name])
    if name not in __all__:
        raise AttributeError(f"module 'hone' has no attribute {name!r}")
    return getattr(import_module(f"hone.{_HOME.get(name, 'config.recipe')}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
