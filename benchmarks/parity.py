"""Hone's losses and gradients against TRL's on the same tensors, method by method, and what differs between them.

The tables of docs/dev/parity.md come before the JSON line. TRL has to be installed: it is in the extra `dev`.
"""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from benchmarks.form import Row, main, row


def agreement_rows() -> tuple[list[Row], list[str]]:
    """Loss and gradient of every case on both levels, and the lines of the table."""
    from tests.parity.cases import CASES, LEVELS, agreement, losses

    rows, lines = list[Row](), list[str]()
    for name, case in CASES.items():
        cells = list[str]()
        for level in LEVELS:
            most = case.tolerance[level]
            loss, gradient = agreement(case, level)
            ours, peer = losses(case, level)
            if case.loss:
                unit, goal = "loss", f"difference <= {most:g}"
                rows.append(row(f"{name}: {level}, loss", ours, peer=peer, unit=unit, goal=goal, ok=loss <= most))
            unit, goal, ok = "largest relative difference of the gradient", f"<= {most:g}", gradient <= most
            rows.append(row(f"{name}: {level}, gradient", gradient, unit=unit, goal=goal, ok=ok))
            cells += [f"{loss:.0e}" if case.loss else "other value", f"{gradient:.0e}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return rows, lines


def difference_rows() -> tuple[list[Row], list[str]]:
    """Every stated difference: the relation has to hold."""
    from tests.parity.differences import DIFFERENCES
    from tests.parity.house import distance

    rows, lines = list[Row](), list[str]()
    for name, find in DIFFERENCES.items():
        found = find()
        off = max(distance(found.stated, found.peer))
        unit, goal = "as stated in docs/dev/parity.md", "the relation holds to 2e-06"
        ours, peer = found.ours.loss, found.peer.loss
        rows.append(row(name, ours, peer=peer, unit=unit, goal=goal, ok=off <= 2e-6))
        lines.append(f"| {name} | {ours:.5f} | {peer:.5f} |")
    return rows, lines


def printed(title: Sequence[str], lines: Sequence[str]) -> None:
    """A table in Markdown."""
    print(f"| {' | '.join(title)} |\n|{'---|' * len(title)}", *lines, "", sep="\n")


def measure(quick: bool) -> list[Row]:
    """All cases; there is nothing to shorten, it takes seconds."""
    if find_spec("trl") is None:
        sys.exit("TRL is not installed: run `make setup`, or pip install -c constraints.txt trl")
    torch.set_num_threads(1)
    agreed, table = agreement_rows()
    title = ["method", "loss, log-probs", "gradient, log-probs", "loss, model", "gradient, model"]
    printed(title, table)
    differing, table = difference_rows()
    printed(["difference", "Hone", "TRL"], table)
    return agreed + differing


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
