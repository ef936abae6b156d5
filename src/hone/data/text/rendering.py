"""Chats under their templates: Hone's own is rendered here, any other in the bounded worker, many chats a request."""

import marshal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from hone.data.text import template as limits
from hone.data.text.template import DEFAULT_TEMPLATE, Rendered, render_chat
from hone.data.text.worker import WORKER, Failed, OverLimit, plain
from hone.errors import HoneError

AT_ONCE, LETTERS = 64, 1 << 18  # chats of one request, and characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Messages and a template; each that is wanted is (end, generation).

    It is the first `end` messages (None: all), with `generation` followed by what opens the assistant's turn.
    """

    template: str
    names: Mapping[str, Any]  # the template's variables but the messages
    messages: Sequence[dict[str, Any]]
    now: datetime
    wanted: Sequence[tuple[int | None, bool]]


Result = Rendered | Exception
Results = list[Result]  # one for each that is wanted


class _Later(BaseException):
    """Raised in place of a rendering while `render_ahead` only notes which renderings will be asked for."""


class _Ahead(threading.local):
    """The renderings that this thread has asked for ahead of their use."""

    noted: list[Chat] | None = None  # None: they are made, not noted
    made: dict[bytes, Results] | None = None


_ahead = _Ahead()


def render_ahead(calls: Iterable[Callable[[], object]]) -> None:
    """Render in one request what each call asks for first. When the call is made again, the result is there.

    A call is stopped at the first rendering that it asks for, so it does twice what it does before that.
    """
    _ahead.made, _ahead.noted = None, list[Chat]()
    try:
        for call in calls:
            with suppress(_Later, HoneError):
                call()
    finally:
        chats, _ahead.noted = _ahead.noted, None
    _ahead.made = dict(zip(map(_key, chats), render_chats(chats), strict=True)) if len(chats) > 1 else None


def _key(chat: Chat) -> bytes:
    # version 0 writes equal values alike; later ones write one that was met before as a reference to it
    return _marshalled((chat.template, chat.names, chat.messages, chat.wanted), version=0)


def render_chats(chats: Sequence[Chat]) -> list[Results]:
    """Each chat's renderings, or why they failed. A chat that fails leaves the others alone."""
    if _ahead.noted is not None and any(chat.template != DEFAULT_TEMPLATE for chat in chats):
        _ahead.noted += chats
        raise _Later
    if _ahead.made and len(chats) == 1 and (found := _ahead.made.pop(_key(chats[0]), None)) is not None:
        return [found]
    return render_now(chats)


def render_now(chats: Sequence[Chat]) -> list[Results]:
    """The same without looking ahead."""
    own = {i: _render_own(chat) for i, chat in enumerate(chats) if chat.template == DEFAULT_TEMPLATE}
    others = [i for i in range(len(chats)) if i not in own]
    found = own | dict(zip(others, _render_in_worker([chats[i] for i in others]), strict=True))
    return [found[i] for i in range(len(chats))]


def _render_own(chat: Chat) -> Results:
    found, now = Results(), chat.now.isoformat()
    for end, generation in chat.wanted:
        names = {**chat.names, "add_generation_prompt": generation}
        try:
            found.append(render_chat(chat.template, names, chat.messages[:end], now=now))
        except Exception as error:  # it refuses roles that it does not know
            found.append(error)
    return found


def _render_in_worker(chats: Sequence[Chat]) -> list[Results]:
    """A chat over its limit ends the worker. The chats after it are not rendered: each fails with the same error."""
    bounds = {"seconds": limits.SECONDS, "memory": limits.MEMORY}
    found = list[Results]()
    if len(chats) > 1:
        answers = WORKER.ask_all("render", (_request(batch) for batch in _batches(chats)), **bounds)
        found = [_results(answer) for of_batch in answers for answer in of_batch]
    for chat in chats[len(found) :]:
        try:
            found.append(_results(WORKER.ask("render", _request([chat]), **bounds)[0]))
        except (OverLimit, Failed) as error:
            found += [Results([error] * len(left.wanted)) for left in chats[len(found) :]]
            break
    return found


def _batches(chats: Sequence[Chat]) -> Iterator[Sequence[Chat]]:
    """Runs of chats under one template, with the same tools."""
    first, size = 0, 0
    for i, chat in enumerate(chats):
        long = sum(len(m["content"]) for m in chat.messages if isinstance(m["content"], str))
        same = chat.template == chats[first].template and chat.names == chats[first].names
        if i > first and (not same or i - first == AT_ONCE or size + long > LETTERS):
            yield chats[first:i]
            first, size = i, 0
        size += long
    yield chats[first:]


def _request(chats: Sequence[Chat]) -> Any:
    return chats[0].template, plain(chats[0].names), limits.CHARACTERS, [_packed(chat) for chat in chats]


def _packed(chat: Chat) -> bytes:
    return _marshalled((chat.now.isoformat(), chat.messages, chat.wanted))


def _marshalled(value: Any, *, version: int = marshal.version) -> bytes:
    try:
        return marshal.dumps(value, version)
    except ValueError:  # it holds what is neither text, nor a number, a list or an object
        return marshal.dumps(plain(value), version)


def _results(answers: list[Any]) -> Results:
    return [_result(*answer) for answer in answers]


def _result(text: str, *marks: list[list[int]] | None) -> Result:
    """One rendering. If it failed, there is only the reason."""
    if not marks:
        return Failed(text)
    return Rendered(text, None if marks[0] is None else tuple((a, b) for a, b in marks[0]))
