"""Checks of the reward: it repeats its numbers, tells completions apart and accepts the right answer.

A right answer must score 1, and the answer of another row 0.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hone.algo.select import reward_of
from hone.check.probe import Probe
from hone.check.report import Finding, fail_finding, pass_finding, skip_finding, warn_finding
from hone.config.recipe import MODEL
from hone.data.text.messages import text_of
from hone.launch.measure import ANSWERS
from hone.reward.outcome import commonest
from hone.reward.score import Combined, RewardScorer
from hone.types import Outcome, Rollout, Task

# Hone's rewards that look at the form of a completion and not at its answer
FORM_ONLY = {"format", "tags", "regex", "schema", "grammar", "length", "overlong", "language", "repetition"}
# The forms in which an answer is tried. The first is the one that Hone's verifiers prefer.
FORMS = (
    "<answer>{}</answer>",
    "<think>\n</think>\n<answer>{}</answer>",
    "{}",
    r"\boxed{{{}}}",
    "#### {}",
    "The answer is {}.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A row on which the reward is wrong."""

    row: int  # counts from 1
    kind: str  # gold: refused; shuffled: accepted; invalid: no number; missing: nothing to try
    answer: str  # what was tried
    gold: str
    value: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The counts over all rows, and the rows on which the reward is wrong."""

    tasks: int
    gold: int  # right answers that score 1
    shuffled: int  # answers of other rows that score 0
    tried: int  # of those; rows whose answers are all alike have none
    misses: Sequence[Miss] = field(default_factory=list[Miss])


def made_completion(task: Task, text: str) -> Rollout:
    """A completion that was not sampled."""
    return Rollout(tokens=[0], mask=[True], task=task, text=text)


def prove(
    reward: RewardScorer,
    tasks: Sequence[Task],
    *,
    golds: Sequence[str | None],
    bad: Mapping[int, str] | None = None,
    seed: int = 0,
) -> Proof:
    """Tries each right answer in several forms, then another row's answer in the form that scored 1.

    bad: by row, why a row has no answer.
    """
    there = {i: gold for i, gold in enumerate(golds) if gold is not None and gold.strip()}
    why = {i: "the column is empty" for i in range(len(tasks)) if i not in there} | dict(bad or {})
    misses = [Miss(row=i + 1, kind="missing", answer="", gold="", reason=text) for i, text in why.items()]
    best, forms = _best_forms(reward, tasks, there)
    for i, outcome in best.items():
        if outcome.value != 1:
            kind = "gold" if outcome.valid else "invalid"
            misses.append(_miss(i, kind, there[i], there[i], outcome))
    others = _others(there, seed=seed)
    asked = [i for i in others if best[i].value == 1]
    found = reward([made_completion(tasks[i], forms[i].format(others[i])) for i in asked])
    for i, outcome in zip(asked, found, strict=True):
        if outcome.value != 0:
            misses.append(_miss(i, "shuffled" if outcome.valid else "invalid", others[i], there[i], outcome))
    return Proof(
        tasks=len(tasks),
        gold=sum(o.value == 1 for o in best.values()),
        shuffled=sum(o.value == 0 for o in found),
        tried=len(asked),
        misses=sorted(misses, key=lambda miss: miss.row),
    )


def _best_forms(
    reward: RewardScorer, tasks: Sequence[Task], golds: dict[int, str]
) -> tuple[dict[int, Outcome], dict[int, str]]:
    """For each row the outcome and form of the first try that scores 1, else of the first try."""
    best, forms = dict[int, Outcome](), dict[int, str]()
    for form in FORMS:
        asked = [i for i in golds if i not in best or best[i].value != 1]
        for i, outcome in zip(
            asked, reward([made_completion(tasks[i], form.format(golds[i])) for i in asked]), strict=True
        ):
            if i not in best or outcome.value == 1:
                best[i], forms[i] = outcome, form
    return best, forms


def _others(golds: dict[int, str], *, seed: int) -> dict[int, str]:
    """For each row the different answer of another row, drawn at random."""
    pool, draw = sorted({gold.strip() for gold in golds.values()}), random.Random(seed)
    found = dict[int, str]()
    for i, gold in golds.items() if len(pool) > 1 else ():
        other = pool[draw.randrange(len(pool))]
        found[i] = other if other != gold.strip() else pool[pool.index(other) - 1]
    return found


def _miss(row: int, kind: str, answer: str, gold: str, outcome: Outcome) -> Miss:
    return Miss(row=row + 1, kind=kind, answer=answer, gold=gold, value=outcome.value, reason=outcome.reason)


OFFLINE = "there is no reward: the algorithm is offline"
TEACHER = "the loss reads no reward: a teacher marks each token"
MAX_SWAPPED = 16  # tasks on which another row's answer is tried
MAX_FUNCTION_TASKS = 200  # tasks on which a function of the user's is called with the right answer, once
MAX_PROMPT = 30  # characters of a prompt
TOLERANCE = 1e-4  # a reward model's number depends a little on the rows beside it


def _unused(probe: Probe) -> str:
    """Why the loss reads no reward; "" where it reads one."""
    return OFFLINE if not probe.job.algo.online else TEACHER if probe.job.algo.teacher else ""


def _values(outcomes: Sequence[Outcome]) -> list[float | None]:
    return [o.value for o in outcomes]


def values(probe: Probe) -> Finding:
    """How many rewards are invalid and why, their range, and whether they differ at all."""
    if why := _unused(probe):
        return skip_finding(why)
    outcomes = [r.outcome for g in probe.scored for r in g if r.outcome]
    numbers = [o.value for o in outcomes if o.value is not None]
    reason, _, invalid = commonest(outcomes)
    if invalid:
        row = next(
            r for g in probe.scored for r in g if r.outcome and not r.outcome.valid and r.outcome.reason == reason
        )
        seen = f"{invalid} of {len(outcomes)} rewards are invalid, most often: {reason}; as for {_prompt_end(row.task)}"
        too_many = invalid > probe.job.recipe.train.max_invalid * len(outcomes)
        return (fail_finding if too_many else warn_finding)(
            seen, "correct the reward function, or the rows it fails on"
        )
    low, high = min(numbers), max(numbers)
    mean = sum(numbers) / len(numbers)
    spread = (sum((x - mean) ** 2 for x in numbers) / len(numbers)) ** 0.5
    seen = f"{len(numbers)} rewards from {low:.3g} to {high:.3g}, mean {mean:.3g}, standard deviation {spread:.3g}"
    if low == high:
        remedy = "check that the reward reads what the model writes; or start from a model that is sometimes right"
        return warn_finding(f"{seen}: the same for every completion{_cut_off_note(probe)}", remedy)
    return pass_finding(seen)


def _cut_off_note(probe: Probe) -> str:
    """A note for the case that the check cuts off every completion: rewards of whole ones may differ."""
    if not probe.all_cut_off:
        return ""
    return f" (the check cuts them at {probe.extent.tokens} tokens; `hone eval MODEL DATA --limit 20` lets them end)"


def _prompt_end(task: Task | None) -> str:
    """The task's prompt on one line, only its end if it is long. For a chat it is the last message."""
    prompt = task.prompt if task else ""
    text = prompt if isinstance(prompt, str) else text_of(prompt[-1])
    plain = " ".join(text.split())
    return f"the prompt {plain if len(plain) <= MAX_PROMPT else '...' + plain[-MAX_PROMPT:]!r}"


def repeatable(probe: Probe) -> Finding:
    """The same completion gets the same reward again, in another order, alone; and the reward changes nothing."""
    if why := _unused(probe):
        return skip_finding(why)
    rows = [r for g in probe.groups for r in g]
    before = repr(rows)
    first, second = _values(probe.reward(rows)), _values(probe.reward(rows))
    backwards = _values(probe.reward(rows[::-1]))[::-1]
    alone = [_values(probe.reward([r]))[0] for r in rows[:4]]
    if repr(rows) != before:
        return fail_finding("the reward changed the completions it was given", "let it work on copies")
    if moved := _differing(first, second):
        return warn_finding(
            f"{moved} of {len(rows)} rewards differ when asked twice", "make the reward deterministic: fix its seed"
        )
    if moved := _differing(first, backwards):
        seen = f"{moved} of {len(rows)} rewards differ when the completions come in another order"
        return fail_finding(seen, "return the rewards in the order of the completions, and keep nothing between calls")
    if moved := _differing(first[: len(alone)], alone):
        return warn_finding(
            f"{moved} of {len(alone)} rewards differ when scored alone", "a reward should read one completion only"
        )
    return pass_finding(f"{len(rows)} rewards are the same twice, in reverse order, and {len(alone)} of them alone")


def _differing(left: Sequence[float | None], right: Sequence[float | None]) -> int:
    def same(a: float | None, b: float | None) -> bool:
        return a == b or (a is not None and b is not None and abs(a - b) <= TOLERANCE * max(1.0, abs(a)))

    return sum(not same(a, b) for a, b in zip(left, right, strict=True))


def signal(probe: Probe) -> Finding:
    """The share of groups whose rewards are all equal: a method that compares within a group learns nothing there."""
    if why := _unused(probe):
        return skip_finding(why)
    groups = [[value for r in g if (value := reward_of(r)) is not None] for g in probe.scored]
    equal = sum(len(set(values)) < 2 for values in groups)
    seen = f"{equal} of {len(groups)} groups of {len(probe.scored[0])} have equal rewards"
    if probe.job.algo.group < 2:
        return skip_finding(f"the algorithm does not compare within a group ({seen})")
    if equal == len(groups):
        return warn_finding(
            f"{seen}: nothing to learn from{_cut_off_note(probe)}",
            "use easier problems, a larger sample.group, or a better start",
        )
    if equal > len(groups) / 2:
        return warn_finding(seen, "use problems of middling difficulty, or a larger sample.group")
    return pass_finding(seen)


def verifiers_of(reward: RewardScorer | None) -> dict[str, RewardScorer]:
    """The parts of the reward that are Hone's own verifiers of an answer."""
    parts = reward.rewards if isinstance(reward, Combined) else {}
    return {name: part.reward for name, part in parts.items() if name in ANSWERS}


def _reads_no_answer(reward: RewardScorer | None) -> bool:
    names = list(reward.rewards) if isinstance(reward, Combined) else []
    return bool(names) and all(name.partition(":")[0] in FORM_ONLY or MODEL.fullmatch(name) for name in names)


def gold(probe: Probe) -> Finding:
    """The right answer is accepted, and another row's answer is not."""
    return _gold(probe, probe.many_items)


def gold_of_verifiers(probe: Probe) -> Finding:
    """As `gold`, but only for Hone's verifiers: a user's function may cost time or money."""
    found = verifiers_of(probe.job.reward)
    if probe.job.algo.online and not found:
        return skip_finding("the reward is not one of Hone's verifiers")
    return _gold(probe, probe.many_items if next(iter(found), "") == "math" else probe.items)


def _gold(probe: Probe, tasks: Sequence[Task]) -> Finding:
    if why := _unused(probe):
        return skip_finding(why)
    answered = [task for task in tasks if task.answer is not None]
    if found := verifiers_of(probe.job.reward):
        if len(answered) < len(tasks):
            seen = f"{len(tasks) - len(answered)} of {len(tasks)} tasks have no answer, {next(iter(found))} needs it"
            return fail_finding(seen, 'add the column "answer"')
        return _by_verifier(found, tasks, max_invalid=probe.job.recipe.train.max_invalid)
    if _reads_no_answer(probe.job.reward):
        return skip_finding("no part of the reward reads an answer")
    if found := _invalid_gold(probe, tasks[:MAX_FUNCTION_TASKS]):
        return found
    return _by_function(probe, answered[:MAX_SWAPPED]) if answered else skip_finding("the rows have no answer")


def _invalid_gold(probe: Probe, tasks: Sequence[Task]) -> Finding | None:
    """Tries the function on right answers, for the few sampled completions do not show every row on which it fails."""
    rows = _encoded(probe, [made_completion(task, FORMS[0].format(task.answer or "")) for task in tasks])
    bad = [(r, o.reason) for r, o in zip(rows, probe.reward(rows), strict=True) if not o.valid]
    if not bad:
        return None
    row, reason = bad[0]
    seen = f"{len(bad)} of {len(tasks)} gold answers get an invalid reward, at first: {reason}"
    seen = f"{seen}; for {_prompt_end(row.task)}"
    verdict = fail_finding if len(bad) > probe.job.recipe.train.max_invalid * len(tasks) else warn_finding
    return verdict(seen, "correct the reward function, or the rows it fails on")


def _encoded(probe: Probe, rows: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts with the tokens of their own text."""
    tokens = [probe.job.tokenizer.encode(r.text) for r in rows]
    return [replace(r, tokens=t, mask=[True] * len(t)) for r, t in zip(rows, tokens, strict=True)]


def _other(task: Task, tasks: Sequence[Task]) -> str | None:
    """A different answer of another row."""
    different = (t.answer for t in tasks if t.answer is not None and t.answer.strip() != (task.answer or "").strip())
    return next(different, None)


def _by_verifier(verifiers: Mapping[str, RewardScorer], tasks: Sequence[Task], *, max_invalid: float) -> Finding:
    name, verifier = next(iter(verifiers.items()))
    best, forms = _best_forms(verifier, tasks, {i: task.answer or "" for i, task in enumerate(tasks)})
    tried = [(task, best[i]) for i, task in enumerate(tasks)]
    invalid = [f"{_row_name(task)}{o.reason}" for task, o in tried if not o.valid]
    refused = [f"{_row_name(task)}{task.answer!r:.40}" for task, o in tried if o.valid and o.value != 1]
    if invalid or refused:
        why = invalid[0] if invalid else f"{refused[0]} is refused in every form"
        seen = f"{name} does not accept {len(invalid + refused)} of {len(tasks)} gold answers: {why}"
        verdict = fail_finding if len(invalid + refused) > max_invalid * len(tasks) else warn_finding
        return verdict(seen, "correct the column answer, or use another verifier")
    swapped = [
        made_completion(task, forms[i].format(other))
        for i, task in enumerate(tasks[:MAX_SWAPPED])
        if (other := _other(task, tasks)) is not None
    ]
    accepted = sum(o.value == 1 for o in verifier(swapped))
    seen = f"{name} accepts {len(tasks)} gold answers, and {accepted} of {len(swapped)} answers of other rows"
    if accepted:
        verdict = fail_finding if accepted > len(swapped) / 2 else warn_finding
        return verdict(seen, "a verifier that accepts a wrong answer teaches nothing: compare the answers by hand")
    shown = " or ".join(" ".join(form.format("X").split()) for form in FORMS if form in forms.values())
    return pass_finding(f"{seen}, tried as {shown}")


def _row_name(task: Task) -> str:
    """Where the row is, as in "row 7: " or "data.jsonl:7: "."""
    return f"{f'row {task.id}' if task.id.isdecimal() else task.id}: " if task.id else ""


def _by_function(probe: Probe, tasks: Sequence[Task]) -> Finding:
    """Finds the form in which the right answer most often earns more than another row's."""
    pairs = [(task, task.answer or "", other) for task in tasks if (other := _other(task, tasks)) is not None]
    if not pairs:
        return skip_finding("all answers are the same")
    best, form = 0, FORMS[0]
    for tried in FORMS:
        tries = [made_completion(task, tried.format(text)) for task, own, other in pairs for text in (own, other)]
        rows = _encoded(probe, tries)
        found = [0.0 if o.value is None else o.value for o in probe.reward(rows)]
        preferred = sum(found[i] > found[i + 1] for i in range(0, len(found), 2))
        if preferred > best:
            best, form = preferred, tried
    shown = " ".join(form.format("X").split())
    seen = f"the right answer, written as {shown}, earns more than another row's on {best} of {len(pairs)} tasks"
    if best < len(pairs):
        return warn_finding(seen, "check by hand what the reward gives to a right answer")
    return pass_finding(seen)
