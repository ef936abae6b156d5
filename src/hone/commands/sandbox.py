"""hone sandbox doctor, serve: how well this machine can isolate a program, and a service that runs programs."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from hone.commands.command import Command, add_actions, add_command, check_port, run_action
from hone.errors import HoneError

if TYPE_CHECKING:
    from hone.reward.sandbox.limits import SandboxLimits


def _options(parser: argparse.ArgumentParser) -> None:
    actions = add_actions(parser)
    doctor = add_command(
        actions,
        "doctor",
        "say what programs are held by here, and try it",
        notes="Exit code 2 where the sandbox does not hold.",
        examples=("hone sandbox doctor --strict",),
    )
    doctor.add_argument(
        "--backend",
        default="native",
        metavar="NAME",
        help="native, or the URL of a service (default: native)",
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object")
    doctor.set_defaults(action=_doctor)
    doctor.add_argument("--strict", action="store_true", help="fail where a protection is replaced by a weaker one")
    serve = add_command(
        actions,
        "serve",
        "run programs for other machines",
        notes="Clients must know the secret that the environment holds as HONE_SANDBOX_TOKEN.",
        examples=("HONE_SANDBOX_TOKEN=SECRET hone sandbox serve --port 8030",),
    )
    serve.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, this machine only")
    serve.add_argument("--port", type=int, default=8030, metavar="N", help="default: 8030")
    serve.add_argument("--slots", type=int, default=0, metavar="N", help="programs at once (default: one a core)")
    text = "a limit of every program, e.g. memory=268435456; may be repeated; clients must ask for the same"
    serve.add_argument("--limit", action="append", default=[], metavar="NAME=N", help=text)
    serve.set_defaults(action=_serve)


def _doctor(arguments: argparse.Namespace) -> None:
    from dataclasses import asdict

    from hone.reward.sandbox.doctor import examine

    report = examine(arguments.backend)
    if arguments.json:
        print(json.dumps({**asdict(report), "holds": report.holds}))
    else:
        for p in report.protections:
            print(
                f"{'replaced' if p.replaced else 'ok':<9} {p.name}: {p.how}"
                + (f"; better: {p.remedy}" * bool(p.remedy))
            )
        for t in report.tried:
            control = "reached without the sandbox" if t.outside else "not reached without it either: proves nothing"
            print(f"{'REACHED' if t.inside else 'ok':<9} {t.name}: {'' if t.inside else 'not '}reached, {control}")
        print(f"{'':<9} a small program takes {report.milliseconds:.1f} ms")
    replaced = [p.name for p in report.protections if p.replaced]
    if not report.holds:
        raise HoneError("the sandbox does not hold on this machine: report it, and run no programs here")
    if arguments.strict and replaced:
        raise HoneError(f"replaced by something weaker: {', '.join(replaced)}: do what is named above as better")


def _serve(arguments: argparse.Namespace) -> None:
    import os
    import sys

    from hone.reward.sandbox.limits import BackendOptions, interpreter
    from hone.reward.sandbox.native import NativeSandbox
    from hone.reward.sandbox.remote import TOKEN, SandboxService

    token = os.environ.get(TOKEN, "")
    if len(token) < 16:
        raise HoneError(f"a service needs a secret of 16 characters or more: put it into the environment as {TOKEN}")
    if arguments.slots < 0:
        raise HoneError(f"--slots is {arguments.slots}: set it to 1 or more, or 0 for one a core")
    check_port(arguments.port)
    limits, slots = _limits(arguments.limit), arguments.slots or os.cpu_count() or 1
    pool = NativeSandbox(BackendOptions(limits=limits, slots=slots, python=interpreter(), packages=()))
    try:
        with SandboxService(pool, limits, host=arguments.host, port=arguments.port, token=token) as server:
            print(f"programs are run at http://{arguments.host}:{server.server_port}/run", file=sys.stderr, flush=True)
            server.serve_forever()
    finally:
        pool.close()


def _limits(given: list[str]) -> "SandboxLimits":
    """The service's limits, changed by those that are given by name."""
    from dataclasses import fields

    from hone.reward.sandbox.limits import SandboxLimits

    kinds = {f.name: float if f.name in ("seconds", "cores") else int for f in fields(SandboxLimits)}
    chosen: dict[str, Any] = {"seconds": 60.0, "output": 4 << 20}
    for text in given:
        name, _, value = text.partition("=")
        try:
            chosen[name] = kinds[name](value)
        except (KeyError, ValueError):
            raise HoneError(f"no limit {text!r}: give NAME=N with one of {', '.join(kinds)}") from None
    return SandboxLimits(**chosen)


COMMANDS = (Command(name="sandbox", help="what can hold a program on this machine", options=_options, run=run_action),)
