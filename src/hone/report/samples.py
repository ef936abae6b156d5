"""Sample rollouts in the report: one problem through the stages, and single rollouts. All text is escaped."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hone.log.invalid import Total
from hone.report.chart import label, number
from hone.report.page import text

Sample = Mapping[str, Any]
PART = re.compile(r"<(think|answer)>(.*?)(</\1>|(?=<(?:think|answer)>)|\Z)", re.DOTALL)


def completion(raw: str) -> str:
    """The completion with its <think> and <answer> parts marked. A part that is not closed ends at the next one."""
    found: list[str] = []
    place = 0
    for match in PART.finditer(raw):
        kind, inner, end = match.groups()
        found.append(text(raw[place : match.start()]))
        close = f"<i>{text(end)}</i>" if end else ""
        found.append(f'<span class="{kind}"><i>&lt;{kind}&gt;</i>{text(inner)}{close}</span>')
        place = match.end()
    return "".join([*found, text(raw[place:])])


def problems(samples: Sequence[Sample]) -> tuple[list[list[Sample]], list[Sample]]:
    """The problems that more than one stage answered, and all other samples."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(str(sample.get("problem") or sample.get("prompt", "")), []).append(sample)
    together = [group for group in groups.values() if len({s.get("stage") for s in group}) > 1]
    alone = [s for group in groups.values() if len({s.get("stage") for s in group}) <= 1 for s in group]
    return together, alone


MOST_BESIDE = 4  # answers side by side


def side_by_side(group: Sequence[Sample], stages: Sequence[str]) -> str:
    """One problem, its answers side by side in the order of the stages."""
    ordered = sorted(group, key=lambda s: _place(s, stages))
    answers = "".join(_answer(sample, stages) for sample in ordered)
    lines = -(-len(ordered) // MOST_BESIDE)  # of about as many answers each: five are three and two
    classes = f"answers of{-(-len(ordered) // lines)}"
    return f'<article class="problem">{_head(ordered)}<div class="{classes}">{answers}</div></article>'


def single(sample: Sample, stages: Sequence[str]) -> str:
    return f'<article class="problem">{_head([sample])}<div class="answers">{_answer(sample, stages)}</div></article>'


def invalid_rewards(found: Sequence[Total]) -> str:
    """A table of why rewards are invalid, by kind; "" where none is."""
    if not found:
        return ""
    lines = "".join(
        f'<tr><th scope="row">{text(total.kind)}</th><td data-name="count"><span>{total.count:,}</span></td>'
        f'<td data-name="first at step"><span>{total.step:,}</span></td>'
        f'<td data-name="the first in full" class="reason">{text(total.reason)}</td></tr>'
        for total in found
    )
    names = ("why", "count", "first at step", "the first in full")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return (
        '<h2>Invalid rewards</h2><p class="hint">Completions that got no reward, by kind of reason: they are left out '
        'of every mean and of training.</p><div class="card scroll"><table class="reasons"><thead>'
        f"<tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _head(group: Sequence[Sample]) -> str:
    """The prompt, the right answer, and whether the last stage got right what the first got wrong."""
    first, last = group[0], group[-1]
    gold = f'<p class="gold">answer <b>{text(first["answer"])}</b></p>' if first.get("answer") is not None else ""
    turns: dict[tuple[object, object], tuple[str, str]] = {
        (False, True): ("good", "wrong → right"),
        (True, False): ("bad", "right → wrong"),
    }
    turn = turns.get((first.get("correct"), last.get("correct"))) if len(group) > 1 else None
    badge = f'<span class="badge {turn[0]}">{turn[1]}</span>' if turn else ""
    return f'<header><div class="prompt" dir="auto">{text(first.get("prompt", ""))}</div>{gold}{badge}</header>'


def _answer(sample: Sample, stages: Sequence[str]) -> str:
    where = text(sample.get("stage", "")) or "rollout"
    if number(sample.get("step")) is not None:
        where += f" <small>step {text(sample['step'])}</small>"
    colour = f"s{_place(sample, stages) % 6}"
    written = completion(str(sample.get("completion", ""))) or '<span class="none">(empty)</span>'
    return (
        f'<section class="answer-box {colour}"><h4><span>{where}</span>{_verdict(sample)}</h4>'
        f'<pre dir="auto">{written}</pre><p class="facts">{_facts(sample)}</p></section>'
    )


def _verdict(sample: Sample) -> str:
    kinds = {True: ("good", "✓ right"), False: ("bad", "✗ wrong")}
    kind = kinds.get(sample["correct"]) if isinstance(sample.get("correct"), bool) else None
    return f'<span class="badge {kind[0]}">{kind[1]}</span>' if kind else ""


def _facts(sample: Sample) -> str:
    """reward 1 (format 0.5, answer 0.5), 31 tokens, cut off"""
    facts: list[str] = []
    if "reward" in sample:
        reward = number(sample["reward"])
        facts.append("reward <b>invalid</b>" if reward is None else f"reward <b>{label(reward)}</b>")
    if sample.get("reason"):
        facts.append(f"<span>{text(sample['reason'])}</span>")
    parts = sample.get("parts")
    parts = parts if isinstance(parts, Mapping) else {}
    facts += [f"{text(name)} {_shown(value)}" for name, value in parts.items()]
    if (length := number(sample.get("length"))) is not None:
        facts.append(f"{label(length)} tokens")
    if sample.get("stop"):
        facts.append(
            {"length": "cut off at the limit", "token": "stopped"}.get(str(sample["stop"]), text(sample["stop"]))
        )
    return " · ".join(facts)


def _shown(value: object) -> str:
    found = number(value)
    return text(value) if found is None else label(found)


def _place(sample: Sample, stages: Sequence[str]) -> int:
    stage = sample.get("stage")
    return stages.index(stage) if stage in stages else len(stages)
