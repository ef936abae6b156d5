"""Prompts, completions and chats to tokens, with a mask of exactly what the policy writes, stop token included."""

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from hone.data.text.dialogue import Dialogue, Turn, not_a_prefix, prompt_texts
from hone.data.text.messages import Tool, check_messages, refuse_special
from hone.data.text.template import DEFAULT_TEMPLATE
from hone.data.text.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.types import Message

__all__ = [
    "CHAT_SPECIALS", "DEFAULT_TEMPLATE", "Encoded", "Tool", "check_messages", "continue_chat", "encode_completion",
    "encode_steps", "encode_turns", "render", "render_prompt", "render_prompts",
]  # fmt: skip

CHAT_SPECIALS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
Encoded = tuple[list[int], list[bool]]  # tokens, and True where the token is trained on
ChatRows = Literal["joined", "split"]  # one row a chat; or a new row wherever the template rewrites earlier turns


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    generation: bool = False,
    tools: Sequence[Tool] | None = None,
) -> str:
    """The text of a chat; with `generation`, followed by what opens the assistant's turn."""
    return Dialogue(tokenizer, messages, tools=tools).render(generation=generation).text


def _continue(tokenizer: Tokenizer, tokens: list[int], texts: tuple[str, str], *, specials: bool) -> list[int]:
    """The ids to append to `tokens` so that the text `before` becomes `after`.

    A sampler has already committed to the prompt's tokens, so a merge across the boundary is not allowed.
    """
    before, after = texts
    at, first = _last_special(tokenizer, before, tokens) if specials else (0, 0)
    tail, whole = tokens[first:], tokenizer.encode(after[at:], specials=specials)
    if whole[: len(tail)] == tail:
        return whole[len(tail) :]
    rest = tokenizer.encode(after[len(before) :], specials=specials)
    if tokenizer.decode(tail + rest) != tokenizer.decode(whole):  # some decoders drop the first blank of a text
        raise HoneError(
            f"the tokens of the text up to {before[-20:]!r} change when {after[len(before) :][:20]!r} follows: "
            "end the prompt with a special token or a line break"
        )
    return rest


def _last_special(tokenizer: Tokenizer, text: str, tokens: list[int]) -> tuple[int, int]:
    """Its place in the text and in the tokens; what comes after a special token is encoded by itself. (0, 0): none."""
    at, name = max(((text.rfind(name), name) for name in tokenizer.special_tokens), default=(-1, ""))
    first = next((i for i in range(len(tokens) - 1, -1, -1) if tokens[i] in tokenizer.special_ids), -1)
    return (at, first) if min(at, first) >= 0 and tokens[first] == tokenizer.id_of(name) else (0, 0)


def encode_turns(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    start: int = 0,
    tools: Sequence[Tool] | None = None,
    turns: ChatRows = "joined",
) -> list[Encoded]:
    """Tokens up to the last assistant turn's stop token; True on every assistant turn from message `start` on.

    Each rendering must be a prefix of the next: otherwise the model would be trained on a text it never sees. "split":
    in as many rows as it takes for each turn to follow what a sampler reads before it.
    """
    dialogue = Dialogue(tokenizer, messages, tools=tools)
    rows, text, tokens, mask = list[Encoded](), "", list[int](), list[bool]()
    answers = [i for i, m in enumerate(dialogue.messages) if m["role"] == "assistant" and i >= start]
    for i, turn in zip(answers, dialogue.turns(answers), strict=True):
        if turns == "split" and not turn.before.startswith(text):
            rows.append((tokens, mask))
            text, tokens, mask = "", list[int](), list[bool]()
        for shorter, longer in ((text, turn.before), (turn.before, turn.after)):
            if not longer.startswith(shorter):
                remedy = "set read.turns=split, or use a template that only appends"
                raise HoneError(not_a_prefix(shorter, longer, turn=i + 1, remedy=remedy))
        tokens += _continue(tokenizer, tokens, (text, turn.before), specials=True)
        ids = _continue(tokenizer, tokens, (turn.before, turn.after), specials=True)
        written = _written(tokenizer, ids)
        mask += [False] * (len(tokens) - len(mask)) + [True] * written
        tokens += ids
        if turn.marks is not None:
            mask[-written:] = _marked(tokenizer, turn, ids)
        text = turn.after
    rows = [row for row in (*rows, (tokens, mask)) if True in row[1]]
    if not rows:
        raise HoneError(_nothing_to_train(dialogue, start))
    return rows


def _nothing_to_train(dialogue: Dialogue, start: int) -> str:
    if any(m["role"] == "assistant" for m in dialogue.messages[start:]):
        return "the chat template marks nothing with {% generation %}: mark the assistant's words, or remove the marks"
    return "there is no assistant message to train on: add one with the role assistant"


def _written(tokenizer: Tokenizer, turn: list[int]) -> int:
    """How many of the turn's tokens the policy writes: up to the first stop token, after which it is stopped."""
    end = next((i for i, token in enumerate(turn) if token in tokenizer.stop_ids), None)
    if end is None or end != len(turn) - 1:
        raise HoneError(
            f"the text {tokenizer.decode(turn)[-20:]!r} of an assistant turn is not read as ending with its one stop "
            "token: mark the stop tokens as special in tokenizer.json"
        )
    return end + 1


def _marked(tokenizer: Tokenizer, turn: Turn, ids: list[int]) -> list[bool]:
    """True on the turn's tokens that touch a mark, and on to the stop token, which the policy has to write."""
    shift = len(turn.before)
    alone, offsets = tokenizer.encode_with_offsets(turn.after[shift:])
    if alone != ids:  # its first token looks different after the prompt
        shift, (_, offsets) = 0, tokenizer.encode_with_offsets(turn.after)
    offsets = [(a + shift, b + shift) for a, b in offsets[-len(ids) :]]
    marked = [any(a < end and b > first for first, end in turn.marks or ()) for a, b in offsets]
    if True not in marked or marked[-1]:
        return marked
    last = len(marked) - 1 - marked[::-1].index(True)
    between = turn.after[offsets[last][1] : offsets[-1][0]]
    if between.strip():
        raise HoneError(
            f"the generation mark of message {turn.number} ends before {between.strip()[:30]!r}, not with the stop "
            "token: put {% endgeneration %} after it"
        )
    _say_extended(tokenizer.decode(ids[-1:]))
    return marked[: last + 1] + [True] * (len(marked) - 1 - last)


@lru_cache(maxsize=16)
def _say_extended(stop: str) -> None:
    """Once a stop token."""
    text = f"the chat template closes its generation mark before {stop}: {stop} is trained all the same"
    warnings.warn(text, stacklevel=2)


def continue_chat(
    tokenizer: Tokenizer, tokens: Sequence[int], messages: Sequence[Message], new: Sequence[Message]
) -> list[int]:
    """The ids that lead from sampled `tokens` to the next assistant turn: only the `new` messages are tokenised.

    tokens: prompt and sampled turn, stop token included; messages: what they say, that turn last. The rendering of
    messages + new must begin with the text of the tokens.
    """
    if not tokens or tokens[-1] not in tokenizer.stop_ids:
        raise HoneError("the sampled turn has no stop token, it was cut off: nothing can follow it, raise max_tokens")
    if not messages or messages[-1]["role"] != "assistant":
        raise HoneError("the messages must end with the assistant's sampled turn: append it")
    if any(m["role"] == "assistant" for m in new) or not new:
        raise HoneError("the new messages are those of users and tools: give at least one, and none of the assistant")
    text, full = tokenizer.decode(tokens), Dialogue(tokenizer, [*messages, *new]).prompt_text()
    if not full.startswith(text):
        raise HoneError(not_a_prefix(text, full, turn=len(messages), remedy="render the whole chat anew"))
    suffix = full[len(text) :]
    ids = tokenizer.encode(suffix, specials=True)
    if tokenizer.decode([*tokens, *ids]) != text + suffix:
        raise HoneError(f"the text {suffix[:30]!r} is not read the same after a stop token: use byte-level BPE")
    return ids


def render_prompt(
    tokenizer: Tokenizer, prompt: str | Sequence[Message], *, tools: Sequence[Tool] | None = None
) -> list[int]:
    """What the policy reads: plain text as it is (after bos where the tokenizer has one), or an opened chat."""
    return render_prompts(tokenizer, [(prompt, tools)])[0]


def render_prompts(
    tokenizer: Tokenizer, prompts: Sequence[tuple[str | Sequence[Message], Sequence[Tool] | None]]
) -> list[list[int]]:
    """The same of each prompt with its tools, tokenised together."""
    talks = {i: _unanswered(tokenizer, p, tools) for i, (p, tools) in enumerate(prompts) if not isinstance(p, str)}
    chats = dict(zip(talks, prompt_texts([*talks.values()]), strict=True)) if talks else {}
    plain = {i: p for i, (p, _) in enumerate(prompts) if isinstance(p, str)}
    found = dict(zip(chats, tokenizer.encode_all([*chats.values()], specials=True), strict=True))
    texts = zip(plain, tokenizer.encode_all([*plain.values()]), strict=True)
    found |= {i: tokenizer.start_ids + ids for i, ids in texts}
    return [found[i] for i in range(len(prompts))]


def _unanswered(tokenizer: Tokenizer, prompt: Sequence[Message], tools: Sequence[Tool] | None) -> Dialogue:
    dialogue = Dialogue(tokenizer, prompt, tools=tools)
    if prompt[-1]["role"] == "assistant":
        raise HoneError("the prompt ends with an assistant message: end it with the message to be answered")
    return dialogue


def encode_completion(
    tokenizer: Tokenizer,
    prompt: str | Sequence[Message],
    completion: str | Sequence[Message],
    *,
    tools: Sequence[Tool] | None = None,
) -> Encoded:
    """`render_prompt(prompt)` untrained, then the completion and its stop token trained."""
    if not isinstance(prompt, str):
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        check_messages(tokenizer, completion)
        return encode_turns(tokenizer, [*prompt, *completion], start=len(prompt), tools=tools)[0]
    if not isinstance(completion, str):
        raise HoneError("the prompt is text but the completion is messages: give both in the same form")
    head = tokenizer.encode(prompt)
    tail = [*_continue(tokenizer, head, (prompt, prompt + completion), specials=False), tokenizer.eos_id]
    head = tokenizer.start_ids + head
    return head + tail, [False] * len(head) + [True] * len(tail)


def encode_steps(
    tokenizer: Tokenizer,
    prompt: str | Sequence[Message],
    steps: Sequence[str],
    *,
    tools: Sequence[Tool] | None = None,
) -> tuple[Encoded, list[int]]:
    """Prompt, then the steps as one completion without a stop token; also the index of each step's last token."""
    chat = not isinstance(prompt, str)
    start = [] if chat else tokenizer.start_ids
    dialogue = _unanswered(tokenizer, prompt, tools) if chat else None
    text, forbidden = (dialogue.prompt_text(), dialogue.reserved) if dialogue else (str(prompt), ())
    tokens = tokenizer.encode(text, specials=chat)
    written, ends = len(start) + len(tokens), list[int]()
    for n, step in enumerate(steps, start=1):
        refuse_special(forbidden, step, f"step {n}")
        tokens += _continue(tokenizer, tokens, (text, text + step), specials=chat)
        text += step
        ends.append(len(start) + len(tokens) - 1)
    tokens = start + tokens
    return (tokens, [i >= written for i in range(len(tokens))]), ends
