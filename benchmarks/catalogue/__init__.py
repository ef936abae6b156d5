"""The catalogue of seeded faults."""

from dataclasses import replace

from benchmarks.catalogue.algorithms import ALGORITHMS
from benchmarks.catalogue.batching import BATCHING
from benchmarks.catalogue.fault import Edit, Fault, Sight
from benchmarks.catalogue.learner import LEARNER
from benchmarks.catalogue.passes import PASSES
from benchmarks.catalogue.pipeline import DATA, MODEL, RESUME, REWARD
from benchmarks.catalogue.sampler import SAMPLER
from benchmarks.catalogue.seen import SEEN
from benchmarks.catalogue.trust import TRUST
from benchmarks.catalogue.user import USER

_OURS = (*ALGORITHMS, *LEARNER, *DATA, *MODEL, *PASSES, *SAMPLER, *BATCHING, *REWARD, *TRUST, *RESUME)
assert {f.name for f in _OURS} >= SEEN.keys(), SEEN.keys() - {f.name for f in _OURS}

FAULTS: tuple[Fault, ...] = (*(replace(f, sight=SEEN.get(f.name)) for f in _OURS), *USER)

__all__ = ["FAULTS", "Edit", "Fault", "Sight"]
