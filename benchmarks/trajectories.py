"""Are the trajectories of every algorithm what they were, to the bit? `--store` writes hashes, a plain run compares.

    python -m benchmarks.trajectories [--quick] [--device cuda] [--store] [--out FILE]

A trajectory is the weights after the first steps of the real loop on the real sampler, and every number logged
on the way.
A refactoring may change none of them on one machine. Hashes of another processor or version of torch are another's.
"""

import argparse
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.form import machine, print_result, row

ROOT = Path(__file__).resolve().parent.parent
for folder in ("tests", "tests/equal"):  # where the tests keep the cases and the ways to compute them
    sys.path.insert(0, str(ROOT / folder))

import tiny  # noqa: E402  # pyright: ignore[reportMissingImports]
import ways  # noqa: E402  # pyright: ignore[reportMissingImports]
from test_trajectories import BELOW, FEW, WAYS  # noqa: E402  # pyright: ignore[reportMissingImports]
from ways import CASES, Way  # noqa: E402  # pyright: ignore[reportMissingImports]

AS_IT_IS: dict[str, Any] = {"backends": None}  # the decoder chooses its backend itself
PLAIN = {"plain": Way(), "plain, single precision": Way(dtype=torch.float32)}
DEFAULT = {
    "default backend": Way(dtype=torch.float32, layout="shared", **AS_IT_IS),
    "default backend, three rows a micro-batch": Way(dtype=torch.float32, layout="shared", micro_rows=3, **AS_IT_IS),
}
ON_A_GPU = {
    "default backend, bfloat16": Way(dtype=torch.bfloat16, layout="shared", **AS_IT_IS),
    "default backend, float32": Way(dtype=torch.float32, layout="shared", **AS_IT_IS),
    "plain, float32": Way(dtype=torch.float32),
}
FAILED = "failed: "  # in the place of a hash; it equals nothing, not even the same failure before


def digest(found: ways.Trajectory) -> str:
    """One hash of all weights and all metrics."""
    h = hashlib.sha256()
    for weight in found.weights:
        h.update(str((weight.dtype, tuple(weight.shape))).encode())
        h.update(weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    for metrics in found.metrics:
        h.update(json.dumps({k: float(v).hex() for k, v in sorted(metrics.items())}).encode())
    return h.hexdigest()[:16]


def plan(*, quick: bool, device: str) -> list[tuple[str, str, Way]]:
    """(case, name of the way, way) of everything that is hashed."""
    if device != "cpu":
        return [(case, name, way) for case in CASES for name, way in ON_A_GPU.items()]
    every = PLAIN | DEFAULT if quick else PLAIN | DEFAULT | WAYS
    found = [(case, name, way) for case in CASES for name, way in every.items()]
    return found if quick else found + [(case, name, way) for case in FEW for name, way in BELOW.items()]


def on_device(device: str) -> None:
    """The cases' decoders, critics, scorers and teachers are made on this device, as wide as its kernels want."""
    narrow, policy_for, scorer = tiny.decoder, tiny.policy_for, tiny.Scorer

    def decoder(seed: int = 0, *, width: int = 32, **rest: Any) -> Any:
        return narrow(seed, width=max(width, 64), **rest).to(device)

    def policy(*args: Any, **rest: Any) -> Any:
        made = policy_for(*args, **rest).to(device)
        reference: Any = getattr(made.reference, "policy", made.reference)  # a teacher's, or the reference itself
        if reference is not None:
            reference.to(device)
        return made

    def scored(*args: Any, **rest: Any) -> Any:
        return scorer(*args, **rest).to(device)

    tiny.decoder, tiny.policy_for, tiny.Scorer = decoder, policy, scored


def hashes(*, quick: bool, device: str) -> dict[str, str]:
    """`case | way` -> hash."""
    if device != "cpu":
        on_device(device)
    work, found = plan(quick=quick, device=device), dict[str, str]()
    for number, (case, name, way) in enumerate(work, 1):
        try:
            found[f"{case} | {name}"] = digest(ways.trajectory(CASES[case], replace(way)))
        except Exception as error:  # the others are still worth their time
            found[f"{case} | {name}"] = f"{FAILED}{type(error).__name__}: {error}"[:200]
        if number % 25 == 0 or number == len(work):
            print(f"{number} of {len(work)} trajectories", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="every algorithm, on the plain and the default backend only"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--store", action="store_true", help="write the hashes, of the code as it is")
    parser.add_argument("--out", type=Path, help="the file of hashes")
    args = parser.parse_args()
    path = args.out or ROOT / f"benchmarks/results/trajectories_{'cpu' if args.device == 'cpu' else 'gpu'}.json"
    torch.set_num_threads(1)
    found = hashes(quick=args.quick, device=args.device)
    if args.store:
        path.write_text(json.dumps({"machine": machine(), "hashes": found}, indent=1) + "\n")
    known = json.loads(path.read_text())["hashes"]
    other = [name for name, value in found.items() if known.get(name) != value or value.startswith(FAILED)]
    for name in other:
        print(f"{name}: {known.get(name)} before, {found[name]} now", file=sys.stderr)
    sys.exit(
        print_result([row("trajectories that differ", len(other), unit="", goal="0", ok=not other, peer=len(found))])
    )


if __name__ == "__main__":
    main()
