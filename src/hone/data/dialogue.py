"""One conversation under one chat template: what a sampler reads before each assistant turn, and what it writes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from hone.data.messages import Tool, check_messages, clean_message, clean_tools, with_written_arguments
from hone.data.template import Rendered, Span, run_template
from hone.data.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.types import Message

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

    def _template(self) -> str:
        chosen = self.tokenizer.tool_template if self.tools else None
        chosen = self.tokenizer.chat_template if chosen is None else chosen
        if chosen is None:
            raise HoneError(
                "the tokenizer has no chat template: add chat_template.jinja to its folder "
                "(hone.data.chat has a default)"
            )
        return chosen

    def render(self, end: int | None = None, *, generation: bool = False) -> Rendered:
        """The first `end` messages; with `generation`, followed by what opens the assistant's turn."""
        messages = self.messages[:end]
        try:
            return self._render(messages, generation)
        except Exception as error:  # a template is the user's program: it can raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise HoneError(f"the chat template failed on {len(messages)} messages: {reason}") from error

    def opened(self, end: int | None = None) -> str:
        """What a sampler reads before it answers the first `end` messages; the tools must be in it."""
        text = self.render(end, generation=True).text
        for tool in self.tools or ():
            if str(tool.get("function", tool)["name"]) not in text:
                raise HoneError("the chat template leaves out the tools: use one that writes them, or remove them")
        return text

    def _render(self, messages: list[dict[str, Any]], generation: bool) -> Rendered:
        """Templates disagree on two forms; of each, the one that is not written out as Python would print it."""
        arguments = [c["function"]["arguments"] for m in messages for c in m.get("tool_calls", ())]
        try:
            rendered = self._without_none(messages, generation)
            if not any(a and str(a) in rendered.text for a in arguments):
                return rendered
        except TypeError:  # a template that adds the arguments to text wants them as text
            if not arguments:
                raise
        return self._without_none(with_written_arguments(messages), generation)

    def _without_none(self, messages: list[dict[str, Any]], generation: bool) -> Rendered:
        rendered = self._run(messages, generation)
        if "None" not in rendered.text or all(m["content"] is not None for m in messages):
            return rendered
        empty = self._run(
            [{**m, "content": "" if m["content"] is None else m["content"]} for m in messages], generation
        )
        return empty if rendered.text.count("None") > empty.text.count("None") else rendered

    def _run(self, messages: list[dict[str, Any]], generation: bool) -> Rendered:
        tokenizer = self.tokenizer
        tokens = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos, "pad_token": tokenizer.pad}
        names = {name: token for name, token in tokens.items() if token is not None} | {**tokenizer.settings}
        given = {"messages": messages, "tools": self.tools, "documents": None, "add_generation_prompt": generation}
        return run_template(self.template, {**names, **given}, now=self.now)

    def turn(self, i: int) -> Turn:
        """The assistant's message i, up to the first stop token, at which a sampler is stopped."""
        before, rendered = self.opened(i), self.render(i + 1)
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
        """Where the first stop token after `start` ends; of two that begin at one place, the longer is read."""
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


def not_a_prefix(shorter: str, longer: str, *, turn: int, remedy: str) -> str:
    """The message of the refusal: where the two texts part, and what can be done."""
    same = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(longer))
    return (
        f"the chat template rewrites earlier text at message {turn}: {shorter[same:][:30]!r} becomes "
        f"{longer[same:][:30]!r}; {remedy}"
    )
