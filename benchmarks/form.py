"""The form every benchmark has in common: rows with a goal, and the machine they were measured on."""

import argparse
import json
import platform
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import torch

from hone.demo.summary import machine
from hone.errors import HoneError

Row = dict[str, Any]


def row(name: str, ours: float, *, unit: str, goal: str, ok: bool, peer: float | None = None) -> Row:
    """One line of the result; ratio is ours against the peer, where there is one."""
    ratio = ours / peer if peer else None
    return {"name": name, "ours": ours, "peer": peer, "ratio": ratio, "unit": unit, "goal": goal, "ok": ok}


def note(name: str, ours: float, *, unit: str, peer: float | None = None) -> Row:
    """A number to know, without a goal."""
    return {**row(name, ours, unit=unit, goal="", ok=True, peer=peer), "goal": None}


def say(*words: object) -> None:
    """Progress goes to stderr: the last line of stdout is the result."""
    print(*words, file=sys.stderr, flush=True)


def versions() -> dict[str, str]:
    """Of the peers that took part, and the GPU if there is one."""
    found = {name: str(sys.modules[name].__version__) for name in ("transformers", "trl") if name in sys.modules}
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def main(measure: Callable[..., Iterable[Row]], description: str, *, counts: Mapping[str, str] | None = None) -> int:
    """Measure and print; the exit code tells whether every goal was met. counts: more options, numbers, with help."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a shorter measurement, within two minutes on 2 cores")
    for name, text in (counts or {}).items():
        parser.add_argument(f"--{name}", type=int, default=0, metavar="N", help=text)
    given = vars(parser.parse_args())
    rows, whole = _measured(measure(given.pop("quick"), **given))
    code = print_result(rows)
    return code if whole else 1


def print_result(rows: list[Row]) -> int:
    """Name the goals that were missed on stderr, print the result; the exit code tells whether every goal was met."""
    about = {**machine(), **versions(), "system": platform.platform(), "date": datetime.now(UTC).date().isoformat()}
    for missed in (r for r in rows if not r["ok"]):
        say(f"missed: {missed['name']}: {missed['ours']:.4g} {missed['unit']}, goal {missed['goal']}")
    print(json.dumps({"rows": rows, "machine": about}))
    return 0 if all(r["ok"] for r in rows) else 1


def _measured(rows: Iterable[Row]) -> tuple[list[Row], bool]:
    """The rows, and whether they are all: a time limit's SIGTERM, or a side that failed, ends the measurement, not what
    it has found."""
    found = list[Row]()

    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGTERM, end)
    try:
        for each in rows:
            found.append(each)
    except TimeoutError:
        say(f"ended by SIGTERM after {len(found)} rows")
        return found, False
    except HoneError as error:
        say(error)
        return found, False
    except Exception:  # whatever a library raises: the rows before took minutes
        say(traceback.format_exc())
        return found, False
    finally:
        signal.signal(signal.SIGTERM, before)
    return found, True
