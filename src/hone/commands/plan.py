"""hone plan scaling: the model and the tokens for a budget, and a scaling law fitted to runs."""

import argparse
import json
from typing import Any

from hone.commands.command import Command, add_actions, add_command, run_action
from hone.errors import HoneError


def _options(parser: argparse.ArgumentParser) -> None:
    scaling = add_command(
        add_actions(parser),
        "scaling",
        "compute-optimal parameters and tokens, or a fit over runs",
        examples=("hone plan scaling --flops 1e21", "hone plan scaling --gpu-hours 8 --peak 989e12 --law hoffmann"),
    )
    scaling.add_argument("--flops", type=float, metavar="C", help="budget in floating-point operations")
    scaling.add_argument("--params", type=float, metavar="N", help="parameters of the model")
    scaling.add_argument("--tokens", type=float, metavar="D", help="training tokens")
    scaling.add_argument("--gpu-hours", type=float, metavar="H", help="budget in hours of one device, with --peak")
    scaling.add_argument(
        "--peak", type=float, metavar="FLOPS", help="a second, of one device (989e12: H100, bf16 dense)"
    )
    scaling.add_argument(
        "--mfu", type=float, default=0.4, metavar="SHARE", help="share of the peak that is reached (default: 0.4)"
    )
    scaling.add_argument("--law", default="both", metavar="NAME", help="besiroglu, hoffmann or both (default: both)")
    scaling.add_argument("--layers", type=int, metavar="N", help="with --width and --context: count attention too")
    scaling.add_argument("--width", type=int, metavar="N", help="heads x head size")
    scaling.add_argument("--context", type=int, metavar="N", help="tokens in a sequence")
    scaling.add_argument("--fit", metavar="RUNS.jsonl", help="rows of params, tokens and loss; the fit is then the law")
    scaling.add_argument("--bootstrap", type=int, default=100, metavar="K", help="for the intervals (default: 100)")
    scaling.add_argument("--json", action="store_true", help="the numbers as JSON")
    scaling.set_defaults(action=_scaling)


def _laws(arguments: argparse.Namespace, shown: dict[str, Any]) -> dict[str, Any]:
    """The laws to plan with; adds a description of a fit to `shown`."""
    from hone.eval.scaling import LAWS

    if arguments.fit is None:
        if arguments.law not in ("both", *LAWS):
            raise HoneError(f"no law {arguments.law!r}: choose from both, {', '.join(LAWS)}")
        return {name: law for name, law in LAWS.items() if arguments.law in ("both", name)}
    from hone.data.feed.source import read_rows
    from hone.eval.scaling import fit, read_runs

    if arguments.bootstrap < 0:
        raise HoneError(f"bootstrap is {arguments.bootstrap}: give 0 or more")
    fitted = fit(read_runs(read_rows(arguments.fit), name=arguments.fit), bootstrap=arguments.bootstrap)
    shown["fit"] = {
        "runs": fitted.runs,
        "error": fitted.error,
        **{name: {"value": getattr(fitted.law, name), "interval": fitted.intervals.get(name)} for name in _CONSTANTS},
    }
    return {"fit": fitted.law}


_CONSTANTS = ("E", "A", "B", "alpha", "beta")


def _plan(arguments: argparse.Namespace, law: Any) -> Any:
    from hone.eval import scaling

    names = ("flops", "params", "tokens", "gpu_hours")
    given: dict[str, float] = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if given.keys() == {"params", "tokens"}:
        return scaling.fixed_plan(law, given["params"], given["tokens"])
    if len(given) != 1:
        raise HoneError("give one of --flops, --params, --tokens, --gpu-hours, or --params with --tokens")
    if "params" in given:
        return scaling.for_params(law, given["params"])
    if "tokens" in given:
        return scaling.for_tokens(law, given["tokens"])
    if "flops" in given:
        return scaling.optimum(law, given["flops"])
    if arguments.peak is None:
        raise HoneError("--gpu-hours needs --peak, the device's operations a second: see its data sheet")
    return scaling.optimum(law, scaling.budget(given["gpu_hours"], peak_flops=arguments.peak, mfu=arguments.mfu))


def _shape(arguments: argparse.Namespace) -> Any:
    from hone.eval.scaling import ModelShape

    sides = (arguments.layers, arguments.width, arguments.context)
    if all(side is None for side in sides):
        return None
    if any(side is None for side in sides):
        raise HoneError("--layers, --width and --context belong together: give all three")
    return ModelShape(layers=arguments.layers, width=arguments.width, context=arguments.context)


def _scaling(arguments: argparse.Namespace) -> None:
    from hone.eval.scaling import training_flops

    shown: dict[str, Any] = {}
    laws = _laws(arguments, shown)
    shape = _shape(arguments)
    asked = any(v is not None for v in (arguments.flops, arguments.params, arguments.tokens, arguments.gpu_hours))
    shown["plans"] = []
    for name, law in laws.items() if asked or arguments.fit is None else ():
        plan = _plan(arguments, law)
        whole = training_flops(plan.params, plan.tokens, shape)
        row = {"law": name, "params": plan.params, "tokens": plan.tokens, "tokens_per_param": plan.tokens / plan.params}
        shown["plans"].append({**row, "flops": plan.flops, "flops_with_attention": whole, "loss": plan.loss})
    if arguments.json:
        print(json.dumps(shown))
        return
    if "fit" in shown:
        _show_fit(shown["fit"])
    _show_plans(shown["plans"], laws, attention=shape is not None)


def _show_fit(fitted: dict[str, Any]) -> None:
    print(f"L = E + A / N^alpha + B / D^beta over {fitted['runs']} runs, error {fitted['error']:.3g} in log L")
    for name in _CONSTANTS:
        interval = fitted[name]["interval"]
        bounds = f"  95 %: {interval[0]:.5g} to {interval[1]:.5g}" if interval else ""
        print(f"  {name:<6} {fitted[name]['value']:.5g}{bounds}")


def _show_plans(plans: list[dict[str, Any]], laws: dict[str, Any], *, attention: bool) -> None:
    if not plans:
        return
    head = (
        "law",
        "parameters",
        "tokens",
        "tokens/param",
        "FLOPs 6ND",
        *(["with attention"] if attention else []),
        "loss",
    )
    print("  ".join(f"{cell:>14}" for cell in head))
    for p in plans:
        cells = [
            p["law"],
            f"{p['params']:.4g}",
            f"{p['tokens']:.4g}",
            f"{p['tokens_per_param']:.2f}",
            f"{p['flops']:.4g}",
        ]
        cells += [f"{p['flops_with_attention']:.4g}"] if attention else []
        print("  ".join(f"{cell:>14}" for cell in [*cells, f"{p['loss']:.4f}"]))
    for name, law in laws.items():
        print(f"{name}: {law.E:.5g} + {law.A:.5g}/N^{law.alpha:.4g} + {law.B:.5g}/D^{law.beta:.4g}; {law.source}")


COMMANDS = (Command(name="plan", help="plan a training run: scaling laws", options=_options, run=run_action),)
