"""The process that reads what strangers wrote: templates, regular expressions and tokenizer files, under limits.

The kernel holds the limits: memory by RLIMIT_AS, processor time by a timer whose signal ends the process, in the midst
of C too. It imports no torch, so that it is up within a tenth of a second. Requests come as marshal, from the parent;
answers go back as JSON, for nothing that a stranger's text makes may run in the parent.
"""

import json
import marshal
import os
import re
import resource
import signal
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NoReturn

from hone.data.text.template import render_chat

HEAD = struct.Struct("!Q")  # the length of what follows
OWN = 192 << 20  # bytes of address space for the interpreter and its libraries, beside what a request may use
NO_MEMORY, RETIRED = 77, 78  # exit codes: not even the answer could be written; the answer was the last one
OK, FAILED, MEMORY = "ok", "failed", "memory"  # what became of a request
SPENT = json.dumps([MEMORY])[:-1].encode()  # how an answer begins that ran out of memory
SHOWN = 300  # characters of a reason
Arm = Callable[[], None]  # starts the timer anew


def serve(number: int) -> NoReturn:
    """Answer requests on a socket, given by its file descriptor, until the other end closes."""
    end = socket.socket(fileno=number)
    frames = Frames(end)
    _give_up_rights()
    held = 0
    try:
        while True:
            kind, seconds, memory, argument = marshal.loads(frames.next())
            if memory != held:
                held = memory
                _limit(resource.RLIMIT_AS, OWN + memory)
            answer = _answer(kind, argument, seconds)
            end.sendall(HEAD.pack(len(answer)) + answer)
            if answer.startswith(SPENT):
                os._exit(RETIRED)  # what is left of its memory may be in pieces
    except MemoryError:
        os._exit(NO_MEMORY)
    except (OSError, EOFError):  # the parent has gone
        os._exit(0)


def _give_up_rights() -> None:
    """Nothing here writes files or starts programs, and Ctrl-C is for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for what in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        _limit(what, 0)


def _limit(what: int, value: int) -> None:
    """The soft limit only: another request may be allowed more."""
    hard = resource.getrlimit(what)[1]
    with suppress(ValueError, OSError):  # lower ones that the administrator has set stay
        resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


class Frames:
    """Messages of a socket, each after its length; what was read of the next one is kept for it."""

    def __init__(self, end: socket.socket) -> None:
        self.end, self.rest = end, b""

    def next(self) -> bytes:
        """EOFError where there is none any more."""
        data = self.rest or self._more()
        while len(data) < HEAD.size:
            data += self._more()
        stop = HEAD.size + HEAD.unpack_from(data)[0]
        if len(data) < stop:
            parts = [data]
            missing = stop - len(data)
            while missing > 0:
                parts.append(self._more())
                missing -= len(parts[-1])
            data = b"".join(parts)
        self.rest = data[stop:]
        return data[HEAD.size : stop]

    def _more(self) -> bytes:
        part = self.end.recv(1 << 18)
        if not part:
            raise EOFError
        return part


def _answer(kind: str, argument: Any, seconds: float) -> bytes:
    def arm() -> None:  # it counts processor time, so that it need not be stopped while the process waits
        signal.setitimer(signal.ITIMER_PROF, seconds)

    arm()
    try:
        found: list[Any] = [OK, TASKS[kind](argument, arm)]
        return json.dumps(found, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except MemoryError:
        return SPENT + b', ""]'
    except BaseException as error:  # Rust's panics are no Exception
        return json.dumps([FAILED, reason(error)]).encode()


def reason(error: BaseException) -> str:
    """The error in one printable line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in text)[:SHOWN]


# --- what can be asked for ---


def _render(argument: Any, arm: Arm) -> list[list[Any]]:
    """Chats under one template; each rendering has a clock of its own. One that fails leaves the others alone."""
    template, names, longest, chats = argument
    return [_rendered(template, names, marshal.loads(chat), longest, arm) for chat in chats]


def _rendered(template: str, names: dict[str, Any], chat: Any, longest: int, arm: Arm) -> list[Any]:
    now, messages, wanted = chat
    found = list[Any]()
    for end, generation in wanted:
        arm()
        try:
            given = {**names, "add_generation_prompt": generation}
            rendered = render_chat(template, given, messages[:end], now=now)
            if len(rendered.text) > longest:
                raise ValueError(f"it wrote more than {longest} characters")
            found.append([rendered.text, rendered.marks])
        except MemoryError:
            raise
        except Exception as error:  # a template can raise anything
            found.append([reason(error)])
    return found


def _match(argument: Any, arm: Arm) -> list[int]:
    """For each name, the number of the first pattern that matches it as a whole, or -1."""
    patterns, names = argument
    compiled = [re.compile(pattern) for pattern in patterns]
    return [next((n for n, p in enumerate(compiled) if p.fullmatch(name)), -1) for name in names]


def _tokenizer(path: str, arm: Arm) -> str:
    """Read a tokenizer.json, and encode texts that are hard for its patterns."""
    with open(path, encoding="utf-8") as file:
        try:
            content = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise TypeError(f"it holds a {type(content).__name__}, not a JSON object")
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(path)
    inner.no_padding()
    inner.no_truncation()
    for text in ("", *hard_texts(content)):
        inner.encode(text)
    inner.decode([0])
    inner.to_str()
    return ""


def hard_texts(content: Any) -> list[str]:
    """Long repetitions of what a tokenizer's patterns name: what makes a slow pattern slow."""
    patterns = list(_patterns(content))
    letters = dict.fromkeys([*"aA0 .\n", *(c for p in patterns for c in p if c.isalnum())])
    marks = "".join(
        dict.fromkeys(c for p in patterns for c in p if not c.isalnum())
    )  # a search may look for them first
    return [c * 2000 + tail for c in list(letters)[:60] for tail in ("", "!", f"!{marks}")] if patterns else []


def _patterns(content: Any) -> Iterable[str]:
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        todo = [content.get(part)]
        while todo:
            item = todo.pop()
            if isinstance(item, dict) and isinstance(item.get("Regex"), str):
                yield item["Regex"]
            todo += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()


TASKS: dict[str, Callable[[Any, Arm], Any]] = {"render": _render, "match": _match, "tokenizer": _tokenizer}
