"""One conversation under one chat template: what a sampler reads before each assistant turn, and what it writes."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from hone.data.text.messages import Tool, check_messages, clean_message, clean_tools, refuse_special
from hone.data.text.rendering import Chat, Result, render_chats, render_now
from hone.data.text.template import Rendered, Span
from hone.data.text.tokenizer import Tokenizer
from hone.data.text.worker import OverLimit
from hone.errors import HoneError
from hone.types import Message

TOGETHER = 1 << 18  # characters that are rendered for one chat in one request
TALK = [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")]
THOUGHT = re.compile(r"(?:\s*<think>)?(.*?)</think>", re.DOTALL)


@dataclass(frozen=True)
class Turn:
    """An assistant turn: the text before it, opened for the assistant, and with what it writes, stop token included."""

    number: int  # of the message, from 1
    before: str
    after: str
    marks: tuple[Span, ...] | None  # in `after`; None: the template has no marks


class Dialogue:
    """Every rendering has the same tools and the same clock."""

    def __init__(
        self, tokenizer: Tokenizer, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None
    ) -> None:
        check_messages(tokenizer, messages)
        self.tokenizer = tokenizer
        self.messages = [clean_message(m, n) for n, m in enumerate(messages, start=1)]
        self.tools = clean_tools(tokenizer, tools)
        self.now = tokenizer.clock or datetime.now()
        self.template = self._template()
        marks = self._role_marks()
        self.reserved = (*tokenizer.reserved, *marks)
        for name, values in (("message", self.messages), ("tool", self.tools or ())) if marks else ():
            for n, value in enumerate(values, start=1):
                refuse_special(marks, value, f"{name} {n}")

    def _template(self) -> str:
        chosen = self.tokenizer.tool_template if self.tools else None
        chosen = self.tokenizer.chat_template if chosen is None else chosen
        if chosen is None:
            raise HoneError(
                "the tokenizer has no chat template: write the rows as text, as in prompt and completion, or use a "
                "model with a chat template, as chat_template.jinja in its folder is one"
            )
        return chosen

    def _role_marks(self) -> tuple[str, ...]:
        """Added tokens with which the template marks turns although they are not special, as DeepSeek's <|User|>.

        A pair of tags, <think> and </think>, is what a message may hold.
        """
        known, plain = self.tokenizer.role_marks, self.tokenizer.plain_added
        if self.template not in known:
            single = (name for name in plain if not name.startswith("</") and f"</{name[1:]}" not in plain)
            added = sorted(name for name in single if name in self.template)
            chat = replace(self.request((None, False)), messages=TALK) if added else None
            text = getattr(render_now([chat])[0][0], "text", "") if chat else ""  # "": it takes no such talk
            known[self.template] = tuple(name for name in added if name in text)
        return known[self.template]

    def render(self, end: int | None = None, *, generation: bool = False) -> Rendered:
        """The first `end` messages; with `generation`, followed by what opens the assistant's turn."""
        chat = self.request((end, generation))
        return self.checked(end, render_chats([chat])[0][0])

    def request(self, *wanted: tuple[int | None, bool]) -> Chat:
        """What asks for these renderings, each (end, generation), in one request."""
        tokenizer = self.tokenizer
        tokens = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos, "pad_token": tokenizer.pad}
        names = {name: token for name, token in tokens.items() if token is not None} | {**tokenizer.settings}
        names |= {"tools": self.tools, "documents": None}
        return Chat(template=self.template, names=names, messages=self.messages, now=self.now, wanted=wanted)

    def checked(self, end: int | None, result: Result) -> Rendered:
        """The rendering, or HoneError where it failed: a template is the user's program, it can raise anything."""
        if isinstance(result, Rendered):
            return result
        reason = " ".join(str(result).split()) or type(result).__name__
        of, count = f" of {self.tokenizer.source}" if self.tokenizer.source else "", len(self.messages[:end])
        remedy = "use another template" if isinstance(result, OverLimit) else "correct the messages, or the template"
        raise HoneError(f"the chat template{of} failed on {count} messages ({reason}): {remedy}") from result

    def prompt_text(self) -> str:
        """What a sampler reads before it answers; the tools must be in it."""
        return self.with_tools(self.render(generation=True).text)

    def with_tools(self, text: str) -> str:
        """The text, in which every tool must be named."""
        for tool in self.tools or ():
            if str(tool.get("function", tool)["name"]) not in text:
                raise HoneError("the chat template leaves out the tools: use one that writes them, or remove them")
        return text

    def turns(self, numbers: Sequence[int]) -> Iterator[Turn]:
        """The assistant's messages of these numbers, from 0; rendered together as far as that is not much text."""
        size = sum(len(m["content"]) for m in self.messages if isinstance(m["content"], str))
        step = max(1, TOGETHER // max(size, 1))
        for first in range(0, len(numbers), step):
            some = numbers[first : first + step]
            wanted = [(i + more, not more) for i in some for more in (0, 1)]
            results = render_chats([self.request(*wanted)])[0]
            yield from (self._turn(i, *results[2 * n : 2 * n + 2]) for n, i in enumerate(some))

    def _turn(self, i: int, opened: Result, answered: Result) -> Turn:
        """The assistant's message i, up to the first stop token, at which a sampler is stopped."""
        before, rendered = self.with_tools(self.checked(i, opened).text), self.checked(i + 1, answered)
        after, marks = rendered.text, rendered.marks
        if not after.startswith(before):
            restored = self._with_thought(i, before, after)
            after, marks = (after, marks) if restored is None else (restored, None)
        if not after.startswith(before):
            remedy = "use one whose generation prompt is how it begins an assistant turn"
            raise HoneError(not_a_prefix(before, after, turn=i + 1, remedy=remedy))
        self._check_nothing_lost(i, after[len(before) :])
        return Turn(i + 1, before, after[: self._stop(after, len(before))], marks)

    def _stop(self, text: str, start: int) -> int:
        """Where the first stop token after `start` ends; nothing but blanks and special tokens may follow it."""
        end = self.stop_end(text, start)
        if end is None:
            names = sorted((self.tokenizer.eos, *self.tokenizer.stops))
            raise HoneError(
                f"the chat template ends an assistant turn with {text[start:][-20:]!r}, not with a stop token "
                f"({' '.join(names)}): write eos_token after the content, or add the end marker to stop_tokens in "
                "tokenizer_config.json"
            )
        trailing = text[end:]
        for name in self.tokenizer.reserved:
            trailing = trailing.replace(name, "")
        if trailing.strip():
            raise HoneError(
                f"the chat template writes {trailing.strip()[:30]!r} after the stop token of an assistant turn: "
                "move it before"
            )
        return end

    def stop_end(self, text: str, start: int) -> int | None:
        """Where the first stop token after `start` ends. If two begin at one place, the longer one counts."""
        names = (self.tokenizer.eos, *self.tokenizer.stops)
        found = [(at, -at - len(name)) for name in names if (at := text.find(name, start)) >= 0]
        return -min(found)[1] if found else None

    def _check_nothing_lost(self, i: int, written: str) -> None:
        message = self.messages[i]
        if message.get("reasoning_content", "").strip() not in written:
            raise HoneError(
                f"the chat template leaves out the reasoning of message {i + 1}: write it into the content, "
                "or remove reasoning_content"
            )
        calls = message.get("tool_calls", ())
        if any(call["function"]["name"] not in written for call in calls):
            raise HoneError(f"the chat template leaves out a tool call of message {i + 1}: use one that writes it")
        if calls and (message["content"] or "").rpartition("</think>")[2].strip() not in written:
            raise HoneError(
                f"the chat template leaves out the content of message {i + 1}, which calls a tool: remove the content"
            )

    def _with_thought(self, i: int, before: str, after: str) -> str | None:
        """Where the prompt opens <think> and the template drops the thought (DeepSeek-R1): what was sampled.

        before + thought + "</think>" + the answer as the template writes it; None where this is not the case.
        """
        opened = before.rfind("<think>")
        if opened < 0 or before[opened:].strip() != "<think>" or not after.startswith(before[:opened]):
            return None
        message = self.messages[i]
        inline = THOUGHT.match(message["content"] or "")
        thought = message.get("reasoning_content") or (inline and inline.group(1)) or ""
        if not thought.strip():
            raise HoneError(
                f"the chat template opens <think> for the assistant, but message {i + 1} has no reasoning: "
                "add reasoning_content"
            )
        answer = after[opened:].lstrip("\n")
        return f"{before}{thought.strip(chr(10))}\n</think>\n\n{answer}"


def prompt_texts(dialogues: Sequence[Dialogue]) -> list[str]:
    """What a sampler reads before it answers each of them, rendered together."""
    results = render_chats([dialogue.request((None, True)) for dialogue in dialogues])
    return [
        dialogue.with_tools(dialogue.checked(None, result).text)
        for dialogue, (result,) in zip(dialogues, results, strict=True)
    ]


def not_a_prefix(shorter: str, longer: str, *, turn: int, remedy: str) -> str:
    """The message of the refusal: where the two texts part, and what can be done."""
    same = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(longer))
    return (
        f"the chat template rewrites earlier text at message {turn}: {shorter[same:][:30]!r} becomes "
        f"{longer[same:][:30]!r}; {remedy}"
    )
