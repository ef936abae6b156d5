"""hone sandbox doctor: what this machine can hold a program with."""

import argparse
import json

from hone.commands.command import Command
from hone.errors import HoneError


def _options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    doctor = actions.add_parser("doctor", help="say what programs are held by here, and try it", allow_abbrev=False)
    doctor.add_argument(
        "--backend", default="auto", metavar="NAME", help="auto, native, bubblewrap, nsjail, gvisor or a URL"
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object")
    doctor.add_argument("--strict", action="store_true", help="fail where a protection is replaced by a weaker one")


def _run(arguments: argparse.Namespace) -> None:
    from dataclasses import asdict

    from hone.reward.sandbox_doctor import examine

    found = examine(arguments.backend)
    if arguments.json:
        print(json.dumps({**asdict(found), "holds": found.holds}))
    else:
        for p in found.protections:
            print(
                f"{'replaced' if p.replaced else 'ok':<9} {p.name}: {p.how}"
                + (f"; better: {p.remedy}" * bool(p.remedy))
            )
        for t in found.tried:
            control = "reached without the sandbox" if t.outside else "not reached without it either: proves nothing"
            print(f"{'REACHED' if t.inside else 'ok':<9} {t.name}: {'' if t.inside else 'not '}reached, {control}")
        print(f"{'':<9} a small program takes {found.milliseconds:.1f} ms")
    replaced = [p.name for p in found.protections if p.replaced]
    if not found.holds:
        raise HoneError("the sandbox does not hold on this machine: report it, and run no programs here")
    if arguments.strict and replaced:
        raise HoneError(f"replaced by something weaker: {', '.join(replaced)}: do what is named above as better")


COMMANDS = (Command(name="sandbox", help="what can hold a program on this machine", options=_options, run=_run),)
