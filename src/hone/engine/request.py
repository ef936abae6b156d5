"""What goes into the engine and what comes out. Neither is changed once it is made; frozen dataclasses would take twice
as long to make, and a thousand requests begin and end at once."""

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hone.engine.params import SampleParams
from hone.types import Stop


@dataclass(slots=True, kw_only=True)
class Request:
    """One completion to write. Its tokens depend on (params.seed, noise, prompt), not on what else is in the batch."""

    id: int  # unique among those in the engine
    prompt: tuple[int, ...]
    params: SampleParams
    adapter: str | None = None
    stream: bool = False  # report tokens as they come, not only the end
    every: int = 1  # so many of a stream's tokens at a time
    noise: int | None = None  # with the seed, names the stream of random numbers; None: the id
    keep: bool = False  # a later prompt may begin with prompt and completion: keep both in memory while there is room


@dataclass(slots=True, eq=False)
class Tops:
    """At each of T places the k most probable tokens. A thousand places with 20 each are too many Python objects."""

    token: NDArray[np.int64]  # [T, k]
    raw: NDArray[np.float64]  # [T, k]

    def __len__(self) -> int:
        return len(self.token)

    def __getitem__(self, i: int) -> list[tuple[int, float]]:
        return list(zip(self.token[i].tolist(), self.raw[i].tolist(), strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tops):
            return NotImplemented
        return np.array_equal(self.token, other.token) and np.array_equal(self.raw, other.raw)

    def __add__(self, other: "Tops") -> "Tops":
        return Tops(np.concatenate([self.token, other.token]), np.concatenate([self.raw, other.raw]))


NO_TOPS = Tops(np.empty((0, 0), dtype=np.int64), np.empty((0, 0)))


@dataclass(slots=True, kw_only=True)
class News:
    """Tokens a request wrote since the last news of it; `stop` says why it ended, None while it goes on.

    Without `stream` there is one News a request, with everything. A request with stop strings reports a token only
    once no stop string can begin in it; tokens after the one that completed the stop string are never reported.
    Numbers are in arrays: as Python objects they would take longer to make than a step of a small model.
    """

    id: int
    tokens: "array[int]"
    logp: "array[float]"  # under the distribution drawn from
    raw: "array[float]"  # under softmax(logits)
    top: Tops = field(default_factory=lambda: NO_TOPS)  # per token the params.top_logprobs most probable (token, raw)
    support_size: "array[int]" = field(default_factory=lambda: array("i"))  # as in types.Rollout, if asked for
    support: "array[int]" = field(default_factory=lambda: array("i"))
    stop: Stop | None = None
    text: str = ""  # set at the end when stop strings were given: the completion before the stop string
