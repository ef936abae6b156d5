"""Preference pairs: what of them is the prompt, and what readers of other rows make of them.

Many files hold `chosen` and `rejected` as whole dialogues. What both begin with is the prompt: messages that are
equal, or of texts all up to the last mark of an answer ("Assistant:") that both have.
"""

import re
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any, Literal

from hone.data.text.messages import text_of
from hone.errors import HoneError

Row = Mapping[str, Any]
Use = Literal["pairs", "labels", "chosen", "prompts"]  # what an algorithm makes of a pair
SIDES = ("chosen", "rejected")
# where an answer begins in a text: the speaker's name at the beginning of a line
MARK = re.compile(
    r"^[ \t]*(?:#{1,4}[ ]?)?(?:Assistant|AI|Bot|ChatGPT|GPT|Model|Answer|A|Response|Output|Reply|Summary|TL;DR):",
    re.MULTILINE,
)


def with_prompt(row: Row, *, chat: bool) -> tuple[Row, str]:
    """The row with a prompt of its own where its sides are whole dialogues, and the name of the way it was written in.

    chat: HH-RLHF's transcripts become messages; else they stay text, which needs no chat template.
    """
    sides = [row.get(name) for name in SIDES]
    texts = [side for side in sides if isinstance(side, str)]
    if len(texts) == 2 and "prompt" not in row:
        if not all(text.lstrip().startswith("Human:") for text in texts):
            return _split_texts(row, texts), ""
        if not chat:
            return _split_texts(row, texts), "HH-RLHF"
        return split_chats({**row, **{name: transcript(row[name]) for name in SIDES}}), "HH-RLHF"
    return split_chats(row), ""


def split_chats(row: Row) -> Row:
    """Where both sides repeat the whole chat, the messages that they share are the prompt."""
    sides: list[Any] = [row.get(name) for name in SIDES]
    if not all(isinstance(side, list | tuple) and side for side in sides):
        return row
    if all(_role(side[0]) == "assistant" for side in sides):
        return row
    shared = 0
    while shared < min(map(len, sides)) and sides[0][shared] == sides[1][shared]:
        shared += 1
    if shared == len(sides[0]) == len(sides[1]):  # a pair of one reply: the row's check says so
        shared -= 1
    if not shared:
        raise HoneError('"chosen" and "rejected" are chats that do not share a prompt: begin both with the same')
    rest = {name: list(side[shared:]) for name, side in zip(SIDES, sides, strict=True)}
    return {**row, "prompt": _whole_prompt(row.get("prompt"), list(sides[0][:shared])), **rest}


def _whole_prompt(given: Any, shared: list[Any]) -> list[Any]:
    """What both sides begin with, after messages that only the row's own prompt holds, as a system message."""
    if not isinstance(given, list | tuple) or not given:
        return shared
    asked, known = [[(_role(m), _said(m)) for m in messages] for messages in (given, shared)]
    if known[: len(asked)] == asked:
        return shared
    if asked[-len(known) :] == known:
        return list(given)
    if {role for role, _ in asked} == {"system"} and known[0][0] != "system":
        return [*given, *shared]
    raise HoneError(
        '"chosen" and "rejected" are chats that begin with another prompt than "prompt": remove one of them'
    )


def _split_texts(row: Row, texts: Sequence[str]) -> Row:
    """All up to the last mark of an answer that both share; a row without one stays as it is, and lacks a prompt."""
    shared = len(commonprefix(texts))  # noqa: RUF071  characters are meant
    ends = [found.end() for found in MARK.finditer(texts[0]) if found.end() <= shared]
    if not ends:
        return row
    prompt = texts[0][: ends[-1]]
    replies = {name: row[name][len(prompt) :] for name in SIDES}
    # "Assistant: " and nothing more is an empty reply, as it is in a transcript that becomes messages
    return {**row, "prompt": prompt, **{name: reply if reply.strip() else "" for name, reply in replies.items()}}


def _said(message: Any) -> Any:
    return text_of(message) if isinstance(message, Mapping) else message


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):[ ]?")


def transcript(text: str) -> list[dict[str, str]]:
    """A "\\n\\nHuman: ...\\n\\nAssistant: ..." transcript as messages; a speaker's turns in a row are one turn.

    >>> transcript("\\n\\nHuman: hi\\n\\nAssistant: hello")
    [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'hello'}]
    """
    parts = _TURN.split("\n\n" + text.lstrip())
    if parts[0].strip():
        raise HoneError("the transcript begins with neither speaker: begin it with Human: or Assistant:")
    turns = list[dict[str, str]]()
    for speaker, said in zip(parts[1::2], parts[2::2], strict=True):
        role, said = "user" if speaker == "Human" else "assistant", said.strip()
        if turns and turns[-1]["role"] == role:
            said = f"{turns.pop()['content']}\n\n{said}".strip()
        turns.append({"role": role, "content": said})
    return turns


# --- what readers make of a pair ---


def rows_for_reader(row: Row, use: Use) -> tuple[list[Row], str]:
    """The rows that a reader makes of a row, and what to say of it; only pairs, and chats online, are changed."""
    if use == "prompts":
        return _asked(row)
    if use == "pairs" or not row.keys() >= set(SIDES):
        return [row], ""
    if row["chosen"] == row["rejected"]:
        raise HoneError('columns "chosen" and "rejected" are the same: remove the row')
    rest = {name: value for name, value in row.items() if name not in (*SIDES, "margin", "completion", "label")}
    if use == "chosen":
        return [{**rest, "completion": row["chosen"]}], "pairs, of which the chosen reply is trained on"
    rows: list[Row] = [{**rest, "completion": row[n], "label": n == "chosen"} for n in SIDES]
    return rows, "pairs read as two rows each: chosen as desirable, rejected as undesirable"


def _asked(row: Row) -> tuple[list[Row], str]:
    """A problem: the pair's prompt, or a chat up to its last reply."""
    chat = row.get("messages")
    if "prompt" not in row and isinstance(chat, list | tuple) and chat:
        return [{**row, "prompt": _open(chat)}], "prompts taken from chats, each up to its last reply"
    if not row.keys() & set(SIDES):
        return [row], ""
    one = [row[name] for name in SIDES if isinstance(row.get(name), list | tuple) and row[name]]
    if "prompt" not in row and len(one) == 1 and _role(one[0][0]) != "assistant":  # a dialogue without its rival
        row = {**row, "prompt": one[0]}
    prompt = row.get("prompt")
    if isinstance(prompt, list | tuple):
        row = {**row, "prompt": _open(prompt)}
    return [row], "prompts taken from preference pairs" if "prompt" in row else ""


def _open(messages: Sequence[Any]) -> list[Any]:
    """The messages up to the last reply, which is to be written anew."""
    end = len(messages)
    while end and _role(messages[end - 1]) == "assistant":
        end -= 1
    if not end:
        raise HoneError("the chat holds no message to be answered: begin it with one of the user")
    return list(messages[:end])
