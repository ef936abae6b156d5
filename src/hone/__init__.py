"""Hone trains language models, and its numbers can be checked.

Names are imported when they are first used, so that `import hone` and `hone --help` do not wait for torch.
"""

from importlib import import_module

TYPE_CHECKING = False  # as typing has it, whose import takes longer than all of this
if TYPE_CHECKING:
    from typing import Any

    from hone import algo
    from hone.config.overrides import Choice
    from hone.config.recipe import (
        CriticSpec,
        LoraSpec,
        ModelSpec,
        OptimSpec,
        ProcessSpec,
        ReadSpec,
        Recipe,
        SampleSpec,
        SaveSpec,
        TrainSpec,
    )
    from hone.errors import HoneError
    from hone.inference.evaluate import evaluate
    from hone.launch.train import resume, run
    from hone.log.limits import LimitSpec
    from hone.types import Outcome, Task

    __version__: str

__all__ = [
    "Choice",
    "CriticSpec",
    "HoneError",
    "LimitSpec",
    "LoraSpec",
    "ModelSpec",
    "OptimSpec",
    "Outcome",
    "ProcessSpec",
    "ReadSpec",
    "Recipe",
    "SampleSpec",
    "SaveSpec",
    "Task",
    "TrainSpec",
    "algo",
    "evaluate",
    "resume",
    "run",
]

_HOME = {
    "Choice": "config.overrides",
    "HoneError": "errors",
    "LimitSpec": "log.limits",
    "Outcome": "types",
    "Task": "types",
    "evaluate": "inference.evaluate",
    "resume": "launch.train",
    "run": "launch.train",
}


def __getattr__(name: str) -> "Any":
    """Imports a public name from the module that defines it (PEP 562)."""
    if name == "__version__":
        return import_module("importlib.metadata").version("hone")
    if name == "algo":
        return import_module("hone.algo")
    if name not in __all__:
        raise AttributeError(f"module 'hone' has no attribute {name!r}")
    return getattr(import_module(f"hone.{_HOME.get(name, 'config.recipe')}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
