"""Checks of the dataset: prompts and answers belong together, no row occurs twice, every row fits."""

import json
from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import Any

from hone.check.probe import ROWS, Probe
from hone.check.report import Finding, fail_finding, pass_finding, skip_finding, warn_finding
from hone.data.rows.columns import row_kind
from hone.data.rows.convert import truncate_group
from hone.data.rows.record import closed_steps, converter, task_row
from hone.launch import feeds
from hone.types import Group, Rollout, Task

NEAR = 0.9  # of the context: a row this long leaves no room to grow
MANY = 0.5  # of the rows may be copies of others before the check warns
REMEDY_BUG = "rows were mixed up after they were read: this is a bug of Hone or of code that wraps it"


def pairing(probe: Probe) -> Finding:
    """Check that the shuffled source hands out each prompt with its own answer or completion."""
    if feeds.is_streamed(probe.job.recipe.data, probe.reading):
        return skip_finding("the data is read from the disk as the run goes on: it is not compared row by row")
    if probe.job.algo.online:
        strange = [task for task in probe.tasks if not _is_its_row(task, probe.raw)]
        if strange:  # rows may carry ids of their own
            known = {_key(row) for row in _as_tasks(probe.raw)}
            strange = [task for task in strange if _key(task) not in known]
        if strange:
            first, number = strange[0], f"{len(strange)} of {len(probe.tasks)}"
            seen = f"{number} shuffled tasks are no row of the data: {first.prompt!r:.40} with the answer"
            return fail_finding(f"{seen} {first.answer!r:.20}", REMEDY_BUG)
        return pass_finding(f"{len(probe.tasks)} tasks in shuffled order, each with the answer of its own row")
    if not probe.rows or not probe.rows[0].text:
        return skip_finding("a row is one text: there is nothing to pair")
    by_text = defaultdict[str, list[Any]](list)
    for row in probe.raw:
        by_text[_written(row)].append(row)
    strange = [g for g in probe.items if not any(_same(g, row, probe) for row in by_text[g[0].text])]
    if strange:
        seen = f"{len(strange)} of {len(probe.items)} shuffled rows are no row of the data: {strange[0][0].text!r:.40}"
        return fail_finding(seen, REMEDY_BUG)
    return pass_finding(f"{len(probe.items)} rows in shuffled order, each prompt with the completions of its own row")


def _is_its_row(task: Task, rows: list[Any]) -> bool:
    """Whether the task equals the row of its number."""
    number = int(task.id) if task.id.isdecimal() else 0
    return 0 < number <= len(rows) and _key(_as_tasks([rows[number - 1]])[0]) == _key(task)


def _as_tasks(rows: list[Any]) -> list[Task]:
    """The rows as the run reads them. A Task's own prompt and answer win over columns of that name in its extra."""
    named = [{**r.extra, "prompt": r.prompt, "answer": r.answer} if isinstance(r, Task) else r for r in rows]
    return [task_row({name: x for name, x in r.items() if name != "answer" or x is not None}) for r in named]


def _key(task: Task) -> str:
    return json.dumps([task.prompt, task.answer, task.extra], sort_keys=True, default=repr)


def _written(row: Mapping[str, Any]) -> str:
    """The completion of a raw row as `Rollout.text` has it. For a pair it is the chosen one."""
    if "steps" in row or "completions" in row:
        return "".join(closed_steps(row, row.get("steps", row.get("completions", ()))))
    written = row.get("chosen", row.get("completion", ""))
    return written if isinstance(written, str) else written[-1]["content"]


def _same(group: Group, row: Mapping[str, Any], probe: Probe) -> bool:
    kind = row_kind(row, expected=probe.reading.kinds)
    again = converter(kind, turns=probe.reading.turns, shares=probe.reading.shares)(row, probe.job.tokenizer)
    again = truncate_group(again, probe.job.policy.decoder.config.max_position_embeddings)  # as the run does
    return list(map(_content, group)) == list(map(_content, again))


def _content(r: Rollout) -> tuple[Any, ...]:
    return list(r.tokens), list(r.mask), r.label, r.margin, repr(r.step_label)


def copies(probe: Probe) -> Finding:
    """Rows that occur twice, one prompt with different answers, and held-out prompts that are trained on."""
    rows = [_plain(row) for row in probe.raw]
    repeated = len(rows) - len({json.dumps(row, sort_keys=True, default=repr) for row in rows})
    leaked, held_out = _leaks(probe, rows)
    if leaked:
        seen = f"{leaked} of {held_out} prompts of eval_data are in data: the evaluation would be flattered"
        return warn_finding(seen, "take them out of data")
    if disputed := _disputed(rows) if probe.job.algo.online else 0:
        return warn_finding(f"{disputed} prompts occur with different answers", "keep one answer a prompt")
    first = "the first " if feeds.is_streamed(probe.job.recipe.data, probe.reading) else ""
    seen = f"{repeated} of {first}{len(rows)} rows are copies of others"
    if repeated > MANY * len(rows) and len(rows) > 1:
        return warn_finding(seen, "remove the copies, or mean it: they count several times")
    where = "among them" if first else "in data"
    return pass_finding(f"{seen}; {f'none of {held_out} held-out prompts is {where}' if held_out else 'no eval_data'}")


def _plain(row: Any) -> dict[str, Any]:
    if isinstance(row, Task):
        return {"prompt": row.prompt, "answer": row.answer, **row.extra}
    return {name: value for name, value in row.items() if name != "id"}


def _prompt(row: Mapping[str, Any]) -> str:
    """What a row asks: its prompt, the messages before the last answer, or all of a text."""
    messages = row.get("messages")
    if "prompt" not in row and messages:
        messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    prompt = row.get("prompt", messages or row.get("text"))
    return json.dumps(prompt, sort_keys=True, default=repr)


def _leaks(probe: Probe, rows: list[dict[str, Any]]) -> tuple[int, int]:
    if not probe.job.recipe.eval_data:
        return 0, 0
    known = set(map(_prompt, rows))
    held_out = [_prompt(_plain(row)) for row in feeds.load_rows(probe.job.recipe.eval_data, probe.reading)]
    return sum(prompt in known for prompt in held_out), len(held_out)


def _disputed(rows: list[dict[str, Any]]) -> int:
    answers = defaultdict[str, set[str]](set)
    for row in rows:
        if "answer" in row:
            answers[_prompt(row)].add(str(row["answer"]))
    return sum(len(found) > 1 for found in answers.values())


def context(probe: Probe) -> Finding:
    """Prompt and completion fit the model's context: nothing is cut, and completions get all their tokens."""
    limit = probe.job.policy.decoder.config.max_position_embeddings
    if not probe.job.algo.online:
        lengths = [len(r.tokens) for r in probe.rows]
        near = sum(length > NEAR * limit for length in lengths)
        over = sum(length > limit for length in lengths)
        if over:
            return fail_finding(f"{over} of {len(lengths)} rows exceed the context of {limit}", "shorten them")
        return pass_finding(
            f"longest of {len(lengths)} rows {max(lengths)} of {limit} tokens, {near} near the limit, none cut"
        )
    lengths, sample = [len(p) for p in probe.prompts], probe.job.recipe.sample
    most = sample.limit(limit)
    short = sum(length + most > limit for length in lengths) if sample.max_tokens else 0  # 0: all that is left
    seen = f"longest of {len(lengths)} prompts {max(lengths)} + {most} to write, context {limit}"
    if (needed := _solution_length(probe)) > most:
        remedy = f"set sample.max_tokens={min(2 * needed, limit - max(lengths))}"
        return warn_finding(f"{seen}; the data's own solutions take {needed} tokens, at the median", remedy)
    if short:
        remedy = f"set sample.max_tokens to {max(1, limit - max(lengths))} or less, or shorten the prompts"
        return warn_finding(f"{seen}: {short} prompts leave less than sample.max_tokens", remedy)
    return pass_finding(seen)


def _solution_length(probe: Probe) -> int:
    """Tokens of the median worked solution, where the rows of an online run have one; 0 where none has."""
    rows = [row for row in probe.raw[:ROWS] if isinstance(row, Mapping)]
    texts = [_written(row) for row in rows if row.get("completion")]
    lengths = [len(probe.job.tokenizer.encode(text)) for text in texts if text]
    return int(median(lengths)) if lengths else 0
