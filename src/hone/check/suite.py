"""The table of checks: a new one is one line. `check` runs all of them, `cheap` those that sample nothing."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from hone.check import data, learning, plan, rewards, sampling, text, update
from hone.check.probe import Probe
from hone.check.report import Finding, Report, Row, fail_finding
from hone.config.recipe import Recipe
from hone.config.rules import validate
from hone.data.text.stop_token import wrong_stop
from hone.errors import HoneError
from hone.launch import build
from hone.launch.job import Run, prepare, torch_settings

Check = Callable[[Probe], Finding]

# `hone run` checks these before its first step: rows and settings, no sampling, no function of the user.
CHEAP: dict[str, Check] = {
    "template": text.template,
    "stop token": text.stop_token,
    "first token": text.first_token,
    "padding": text.padding,
    "mask": text.mask,
    "round trip": text.round_trip,
    "pairing": data.pairing,
    "context": data.context,
    "gold answers": rewards.gold_of_verifiers,
    "disk": plan.disk,
}
ALL: dict[str, Check] = {
    "plan": plan.step,
    **CHEAP,
    "gold answers": rewards.gold,
    "copies": data.copies,
    "completions": sampling.completions,
    "groups differ": sampling.differ,
    "log-probs agree": sampling.agree,
    "published weights": sampling.published,
    "temperature": sampling.temperature,
    "reward values": rewards.values,
    "reward repeats": rewards.repeatable,
    "signal": rewards.signal,
    "forward pass": learning.forward,
    "layouts": learning.layouts,
    "reference": learning.reference,
    "gradient": learning.gradient,
    "batch cut": learning.cut,
    "one step": update.one_step,
    "optimiser": update.settings,
    "update in force": update.in_force,
    "checkpoint": plan.saved,
    "memory": plan.memory,
}


def check(recipe: Recipe) -> Report:
    """Prepare the recipe's own run and examine its step 0; nothing is written to the run's folder."""
    validate(recipe)
    with _run_settings(recipe):
        if (wrong := wrong_stop(build.tokenizer(recipe.model))) is not None:  # other checks would blame the rows
            finding = replace(fail_finding(wrong.seen, wrong.remedy), name="stop token")
            note = "the other checks wait until the stop token is right"
            return Report(recipe=recipe.name, findings=[finding], row=Row(note=note))
        return examine(prepare(recipe))


def examine(job: Run, *, only: Collection[str] = ()) -> Report:
    """Run the checks, all or `only` some, on a run that is prepared and has not begun."""
    probe = Probe(job)
    findings = [_finding(name, one, probe) for name, one in ALL.items() if not only or name in only]
    return Report(recipe=job.recipe.name, findings=findings, row=_row(probe))


def cheap(job: Run) -> list[Finding]:
    """Run the checks that take almost no time."""
    probe = Probe(job)
    return [_finding(name, one, probe) for name, one in CHEAP.items()]


def _finding(name: str, one: Check, probe: Probe) -> Finding:
    """The finding of a check. A check that raises has failed, and the others go on."""
    try:
        return replace(one(probe), name=name)
    except Exception as error:  # rewards and templates are the user's programs: they can raise anything
        kind = "" if isinstance(error, HoneError) else f"{type(error).__name__}: "
        seen = " ".join(f"{kind}{error}".split())
        return replace(fail_finding(seen, "put right what it says; the run would stop here"), name=name)


def _row(probe: Probe) -> Row:
    try:
        return text.shown_row(probe)
    except Exception as error:  # a check has reported it already
        return Row(note=f"no row can be shown: {' '.join(str(error).split())}")


@contextmanager
def _run_settings(recipe: Recipe) -> Iterator[None]:
    """Set determinism and random numbers as the run does, on one thread, and restore them afterwards."""
    with torch.random.fork_rng(), torch_settings(recipe):
        torch.set_num_threads(1)  # little text: more threads would mostly wait for each other
        yield
