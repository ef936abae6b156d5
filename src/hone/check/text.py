"""Checks of the texts and tokens: template, stop token, first token, padding, mask, round trip."""

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from hone.check.probe import ROWS, Probe
from hone.check.report import Finding, Row, fail_finding, pass_finding, skip_finding, warn_finding
from hone.data.collate import collate
from hone.data.text.chat import render
from hone.data.text.messages import text_of
from hone.data.text.stop_token import WrongStop, unheard_end, written_end, wrong_stop
from hone.data.text.tokenizer import Tokenizer
from hone.types import Batch, Rollout, Stop

Runs = list[tuple[list[int], bool]]  # consecutive tokens that are all trained on, or none of them


def runs_of(row: Rollout) -> Runs:
    """The row cut where training starts and stops."""
    pairs = groupby(zip(row.tokens, row.mask, strict=True), key=lambda pair: bool(pair[1]))
    return [([token for token, _ in run], trained) for trained, run in pairs]


def shown_row(probe: Probe) -> Row:
    """The first row of training, ready to be printed; online, with a completion the policy wrote."""
    if probe.job.algo.online:
        row, note = probe.groups[0][0], "a prompt, and a completion sampled before the first step"
    else:
        row, note = probe.rows[0], "the first row of training"
    tokenizer = probe.job.tokenizer
    return Row(pieces=[(tokenizer.decode(run), trained) for run, trained in runs_of(row)], note=note)


def template(probe: Probe) -> Finding:
    """The template renders every message of a chat, and opens the assistant's turn."""
    tokenizer, remedy = probe.job.tokenizer, "mend chat_template.jinja in the tokenizer's folder"
    chats = _chats(probe)
    if not chats:
        if tokenizer.chat_template and any("prompt" in row for row in probe.raw[:1] if isinstance(row, Mapping)):
            seen = "prompts are plain text, but the tokenizer has a chat template"
            return warn_finding(seen, "write prompts as messages if the model was trained on chats")
        return skip_finding("no row is a chat")
    for n, messages in enumerate(chats, start=1):
        text = render(tokenizer, messages)
        plain = " ".join(text.split())
        # if each turn is a row of its own, a template may leave out earlier answers
        split = probe.job.recipe.read.turns == "split"
        required = [m for m in messages[:-1] if not (split and m["role"] == "assistant")] + [messages[-1]]
        missing = [m for m in required if " ".join(text_of(m).split()) not in plain]
        if missing:
            return fail_finding(
                f"chat {n}: the rendering lacks the {missing[0]['role']}'s {text_of(missing[0])[:30]!r}", remedy
            )
        if messages[-1]["role"] != "assistant" and render(tokenizer, messages, generation=True) == text:
            return fail_finding(
                f"chat {n}: the template does not open the assistant's turn", f"{remedy}: add_generation_prompt"
            )
    return pass_finding(f"{len(chats)} chats: every message is rendered and the assistant's turn is opened")


def _chats(probe: Probe) -> list[Any]:
    if probe.job.algo.online:
        return [task.prompt for task in probe.tasks if not isinstance(task.prompt, str)]
    rows = [row for row in probe.raw[: len(probe.items)] if isinstance(row, Mapping)]
    found = [row.get("messages", row.get("prompt")) for row in rows]
    return [messages for messages in found if messages and not isinstance(messages, str)]


def stop_token(probe: Probe) -> Finding:
    """Every trained turn ends with a stop token that is trained on; online, the sampler knows the stop tokens."""
    tokenizer, job = probe.job.tokenizer, probe.job
    names = " ".join(sorted({tokenizer.eos, *tokenizer.stops}))
    if wrong := _wrong_stop(probe):
        return fail_finding(wrong.seen, wrong.remedy)
    if job.roller is not None:
        vocabulary, stops = job.policy.decoder.config.vocab_size, job.roller.params.stop_ids
        if not tokenizer.stop_ids <= stops or max(stops) >= vocabulary:
            seen = f"the sampler stops at {sorted(stops)}, the tokenizer's {names} are {sorted(tokenizer.stop_ids)}"
            return fail_finding(seen, "use the tokenizer that the model was trained with")
        return pass_finding(f"the sampler stops at {names}")
    if any(r.step_label for r in probe.rows):
        return skip_finding("steps are judged, not written: they have no stop token")
    finished = [
        runs_of(r)[: -1 if r.stop is Stop.LENGTH else None] for r in probe.rows
    ]  # a row that was cut has no end
    ends = [run[-1] in tokenizer.stop_ids for runs in finished for run, trained in runs if trained]
    if not all(ends):
        seen = f"{len(ends) - sum(ends)} of {len(ends)} trained turns do not end with {names}: it would never stop"
        return fail_finding(seen, "write eos_token after the content in the chat template, and name it as eos_token")
    return pass_finding(f"all {len(ends)} trained turns of {len(probe.rows)} rows end with {names}, trained on")


def _wrong_stop(probe: Probe) -> WrongStop | None:
    """Why the stop token is wrong, by the tokenizer, its chat template or the data; None if it is right."""
    tokenizer = probe.job.tokenizer
    wrong = wrong_stop(tokenizer, _texts(probe))
    if wrong is None and _chats(probe):
        wrong = unheard_end(tokenizer)
    return wrong or written_end(tokenizer, _ends(probe))


def _ends(probe: Probe) -> list[str]:
    """The last text of each row, as it is in the files."""
    rows = [row for row in probe.raw[:ROWS] if isinstance(row, Mapping)]
    found = [row.get("completion", row.get("chosen", row.get("text"))) for row in rows]
    return [text for text in found if isinstance(text, str)]


def first_token(probe: Probe) -> Finding:
    """No row begins with the first token twice. None lacks it if the tokenizer adds it."""
    tokenizer = probe.job.tokenizer
    bos = tokenizer.bos_id
    if bos is None:
        return skip_finding("the tokenizer names no first token (bos_token)")
    rows = probe.prompts or [list(r.tokens) for r in probe.rows]
    anywhere = bos not in tokenizer.stop_ids  # if one token begins and ends texts, two may meet between turns
    doubled = sum((bos, bos) in pairwise(tokens if anywhere else tokens[:2]) for tokens in rows)
    if doubled:
        seen = f"{doubled} of {len(rows)} rows have {tokenizer.bos} twice in a row"
        return fail_finding(seen, "write bos_token once in the chat template")
    without = sum(tokens[:1] != [bos] for tokens in rows)
    if without and tokenizer.start_ids:
        return warn_finding(
            f"{without} of {len(rows)} rows do not begin with {tokenizer.bos}", "put bos_token in the template"
        )
    return pass_finding(f"{len(rows)} rows, {len(rows) - without} begin with {tokenizer.bos}, none has it twice")


def padding(probe: Probe) -> Finding:
    """In the collated table every trained target is a real token, and none is the pad token."""
    tokenizer = probe.job.tokenizer
    if probe.job.algo.online:
        return skip_finding("the policy writes what it is trained on: see the completions")
    batch = collate(probe.items, pad_id=tokenizer.pad_id)
    if wrong := misplaced(batch, probe.rows):
        return fail_finding(wrong, "this is a bug of Hone: please report it")
    written = [t for r in probe.rows for t in r.written()]
    name = tokenizer.pad or tokenizer.eos
    if tokenizer.pad_id in tokenizer.stop_ids:
        return pass_finding(
            f"pad is the stop token {name}: padding is told apart by its place, the stop token is trained on"
        )
    if tokenizer.pad_id in written:
        seen = f"the pad token {name} is trained on {written.count(tokenizer.pad_id)} times"
        return fail_finding(seen, "remove it from the data, or name another pad_token")
    return pass_finding(f"{len(batch)} rows: no padding and no {name} among {int(batch.mask.sum())} trained positions")


def misplaced(batch: Batch, rows: Sequence[Rollout]) -> str:
    """The fault of the table, or "". The targets under its mask must be the trained tokens, in order."""
    if wrong := int((batch.mask & ~batch.real).sum()):
        return f"{wrong} padded positions are trained on"
    if any(r.step_label for r in rows):  # the mask marks the ends of steps, not tokens to be written
        return ""
    # the first token of a row has nothing before it to be predicted from
    expected = [t for r in rows for t, m in zip(r.tokens[1:], r.mask[1:], strict=True) if m]
    if batch.targets[batch.mask].tolist() != expected:
        return f"the {int(batch.mask.sum())} targets at the mask are not the {len(expected)} trained tokens of the rows"
    return ""


def mask(probe: Probe) -> Finding:
    """Every row has something to train on, and only pre-training trains on all of it."""
    if probe.job.algo.online:
        return skip_finding("the policy writes what it is trained on: see the completions")
    rows = probe.rows
    if any(r.step_label for r in rows):
        steps = [sum(label == label for label in r.step_label) for r in rows]
        if not all(steps):
            return fail_finding(f"{steps.count(0)} of {len(rows)} rows have no labelled step", "add step_labels")
        return pass_finding(f"{len(rows)} rows with {min(steps)} to {max(steps)} labelled steps")
    empty, full = sum(not any(r.mask) for r in rows), sum(all(r.mask) for r in rows)
    share = sum(sum(r.mask) for r in rows) / sum(len(r.tokens) for r in rows)
    if empty:
        return fail_finding(f"{empty} of {len(rows)} rows have no trained token", "add completions to these rows")
    whole_texts = all("text" in row for row in probe.raw[:1])
    if full and not whole_texts:
        return fail_finding(f"{full} of {len(rows)} rows are trained on their prompt too", "mend the chat template")
    if full < len(rows) and whole_texts:
        return fail_finding(
            f"{len(rows) - full} of {len(rows)} texts are trained on in part", "this is a bug of Hone: please report it"
        )
    return pass_finding(
        f"{share:.0%} of the tokens of {len(rows)} rows are trained on{', as pre-training does' * whole_texts}"
    )


def round_trip(probe: Probe) -> Finding:
    """Text -> tokens -> text loses nothing, and encode(decode(tokens)) gives the tokens again."""
    tokenizer, remedy = probe.job.tokenizer, "use a tokenizer that keeps text: byte-level BPE, no normaliser"
    for text in _texts(probe):
        back = tokenizer.decode(tokenizer.encode(text))
        if back != text:
            same = next((i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), 0)
            return fail_finding(f"{text[same:][:20]!r} comes back as {back[same:][:20]!r}", remedy)
    rows = probe.rows or [Rollout(tokens=t, mask=[False] * len(t)) for t in probe.prompts]
    runs = [run for row in rows for run in _plain_runs(row, tokenizer)]
    changed = sum(tokenizer.encode(tokenizer.decode(run)) != run for run in runs)
    if changed:
        seen = f"{changed} of {len(runs)} runs of tokens are encoded differently when their text is read again"
        return warn_finding(seen, "end prompts with a line break or a special token, so that no token spans the border")
    return pass_finding(f"{len(rows)} rows: text -> tokens -> text and tokens -> text -> tokens are the identity")


def _texts(probe: Probe) -> list[str]:
    """The texts of the rows, where they have any."""
    prompts = [task.prompt for task in probe.tasks if isinstance(task.prompt, str)]
    texts = [row["text"] for row in probe.raw[: len(probe.items)] if isinstance(row, Mapping) and "text" in row]
    spoken = [text_of(message) for chat in _chats(probe) for message in chat]
    return [*prompts, *spoken, *(texts if not probe.job.algo.online else ()), *(r.text for r in probe.rows if r.text)]


def _plain_runs(row: Rollout, tokenizer: Tokenizer) -> list[list[int]]:
    """Tokens between special ones, also cut between prompt and completion, which were encoded apart."""
    special = {tokenizer.id_of(name) for name in tokenizer.special_tokens}
    parts = [groupby(run, key=lambda token: token in special) for run, _ in runs_of(row)]
    return [list(tokens) for part in parts for is_special, tokens in part if not is_special]
