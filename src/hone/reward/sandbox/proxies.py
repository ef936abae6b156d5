"""Objects that stay where they are: a program's functions and objects as its tests see them, and the other way round.

Tests and program run in two sandboxes. Data crosses between them as `values` writes it. Anything else stays
behind, and a `Proxy` stands for it: what is done to the Proxy is asked of the other side, whose answer is data again
or another Proxy. A program's methods must not decide what its tests compare with data: a Proxy equals nothing but
itself, and only objects of classes that the tests name are compared, added or searched by their own methods, with each
other. Both sides use this module; it imports nothing of Hone but what they have.
"""

import builtins
import contextlib
import copy
import itertools
import operator
import types
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from hone.reward.sandbox import values
from hone.reward.sandbox.exceptions import exception_class, exception_record, rebuild

SINGLE, CHUNK = 64, 256  # items of an iterator asked for one at a time, as it may be endless; then so many at once
WATCHED = 10_000  # bytes of an attribute that is watched for changes
Record = dict[str, Any]
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor")
ORDER = ("eq", "lt", "le", "gt", "ge")
ALONE = ("neg", "pos", "invert", "abs", "int", "float", "round", "index")


class Ended(BaseException):
    """The program has ended: no test may take this for an exception that it expects."""


class Channel:
    """One side's end of the conversation."""

    def __init__(
        self, *, read: Callable[[], bytes | None], write: Callable[[bytes], None], limit: int, sign: int
    ) -> None:
        self._read, self._write, self._limit, self._sign = read, write, limit, sign
        self.objects, self.numbers = dict[int, Any](), dict[int, int]()
        self.late = dict[int, BaseException]()  # what an iterator raised after items that were not told yet
        self.remotes = dict[int, Any]()  # what stands for an object of the other side is one object itself
        self.lists = deque[tuple[Proxy, str, Any, bytes]](maxlen=8)  # attributes read last, and as what they were read
        self.derived = set[int]()  # objects that a program has made of data in tests' arithmetic
        self.classes: Mapping[str, type[BaseException]] = {}  # exceptions that tests name and the program defines
        self.kinds: frozenset[str] = frozenset()  # classes of the program that tests name

    def send(self, record: Record) -> None:
        """One record, with numbers for what is no data."""
        self._write(values.dumps(record, limit=self._limit, refer=self._number))

    def loads(self, text: bytes) -> Any:
        """A record of the other side, with this side's own objects in their places."""
        return values.loads(text, resolve=self._resolve)

    def _number(self, value: Any) -> int:
        if isinstance(value, Proxy):  # a name of the program has no number before the program gives it one
            return value._number or getattr(value._ask("itself"), "_number", 0)
        key = id(value)
        if key not in self.numbers:  # the object is kept, so its id stays its own
            self.numbers[key] = self._sign * (len(self.objects) + 1)
            self.objects[self.numbers[key]] = value
        return self.numbers[key]

    def _resolve(self, found: values.Opaque) -> Any:
        if found.number * self._sign > 0:
            return self.objects[found.number]
        if found.number not in self.remotes:
            self.remotes[found.number] = _as_awaited(Proxy(self, found.kind, found.number))
        return self.remotes[found.number]

    def ask(self, do: str, on: Any, *args: Any, **kwargs: Any) -> Any:
        """Have it done on the other side, whose own questions are answered meanwhile."""
        self._write_back()
        self.send({"ask": {"do": do, "on": on, "args": list(args), "kwargs": kwargs}})
        while (text := self._read()) is not None:
            record = self.loads(text)
            if "ask" not in record:
                return self._settled(record["answer"], args, kwargs)
            self.send(self.answer(record["ask"]))
        raise Ended("the conversation is over")

    def answer(self, asked: Mapping[str, Any], module: Mapping[str, Any] | None = None) -> Record:
        """The answer to what the other side asks. module: where names are looked up, on the program's side."""
        on, args, kwargs = asked["on"], asked["args"], asked["kwargs"]
        if isinstance(on, str):
            if module is None or on not in module:
                return {"answer": {"missing": on}}
            on = module[on]
        elif module is None and not _may(asked["do"], on, args):
            return {
                "answer": exception_record(
                    PermissionError("tests lend this only to be called, read and stepped through")
                )
            }
        try:
            before = self._written(args, kwargs)
            found: Record = {"value": self._done(asked["do"], on, args, kwargs)}
            self._write_back()
            same = [i for i, given in enumerate(args) if given is found["value"] and isinstance(given, values.CHANGING)]
            found |= {"same": same[0]} if same else {}
            found |= {"changed": [args, kwargs]} if self._written(args, kwargs) != before else {}
            values.dumps(found, limit=self._limit, refer=self._number)  # too large: an error, and not the end
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: the next call is still asked
            return {"answer": exception_record(error)}
        return {"answer": found}

    def watch(self, on: "Proxy", name: str, value: Any) -> None:
        """A copy of an attribute was read; where this side changes it, the other side's shall change too."""
        written = self._written([value], {})
        if written and len(written) < WATCHED:
            self.lists.append((on, name, value, written))

    def _write_back(self) -> None:
        watched = list(self.lists)
        self.lists.clear()
        for on, name, value, before in watched:
            if self._written([value], {}) != before:
                self.ask("renew", on, name, value)
            self.watch(on, name, value)

    def _written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        held = [value for value in (*args, *kwargs.values()) if isinstance(value, values.CHANGING)]
        return values.dumps(held, limit=self._limit, refer=self._number) if held else b""

    def _done(self, do: str, on: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if do == "next":
            return self._stepped(on, int(args[0]))
        return _DO[do](on, *args, **kwargs)

    def _stepped(self, iterator: Iterator[Any], most: int) -> tuple[list[Any], bool]:
        """The next items, and whether there are no more."""
        found, key = list[Any](), id(iterator)
        if key in self.late:
            raise self.late.pop(key)
        try:
            for item in itertools.islice(iterator, most):
                found.append(item)
        except BaseException as error:
            if not found:
                raise
            self.late[key] = error
            return found, False
        return found, len(found) < most

    def _settled(self, answer: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if "ended" in answer:
            raise Ended(answer["ended"])
        if "missing" in answer:
            raise NameError(f"the program does not define {answer['missing']}")
        if "error" in answer:
            raise rebuild(answer, self.classes)
        if "changed" in answer:
            new_args, new_kwargs = answer["changed"]
            for old, new in zip([*args, *kwargs.values()], [*new_args, *new_kwargs.values()], strict=True):
                values.renew(old, new)
        return args[answer["same"]] if "same" in answer else answer["value"]


class Proxy:
    """An object of the other side, or what a name of the program stands for there."""

    __slots__ = ("_ahead", "_kind", "_line", "_number", "_taken")

    def __init__(self, line: Channel, kind: str, number: int) -> None:
        for name, value in (("line", line), ("kind", kind), ("number", number), ("ahead", deque()), ("taken", 0)):
            object.__setattr__(self, f"_{name}", value)

    @property
    def _own(self) -> bool:
        """Whether the class's own methods are asked: tests name the class, or tests have lent the object."""
        return self._kind in self._line.kinds or self._number < 0

    def _ask(self, do: str, *args: Any, **kwargs: Any) -> Any:
        on = self if self._number else self._kind  # a name is looked up each time: the program may rebind it
        return self._line.ask(do, on, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_ASKED) and not self._own:
            raise AttributeError(f"{self._kind!r} object has no attribute {name!r}")
        found = self._ask("get", name)
        self._line.watch(self, name, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __delattr__(self, name: str) -> None:
        self._ask("del", name)

    def __copy__(self) -> Any:
        return self._ask("copy")

    def __deepcopy__(self, memo: Any) -> Any:
        return self._ask("deepcopy")

    def __iter__(self) -> Iterator[Any]:
        found = self._ask("iter")
        return iter(found) if not isinstance(found, Proxy) else found._steps()

    def _steps(self) -> Iterator[Any]:
        while True:
            try:
                item = next(self)
            except StopIteration:
                return
            yield item

    def __next__(self) -> Any:
        if not self._ahead:
            items, _ = self._ask("next", 1 if self._taken < SINGLE else CHUNK)
            self._ahead.extend(items)
            object.__setattr__(self, "_taken", self._taken + 1)
        if not self._ahead:
            raise StopIteration
        return self._ahead.popleft()

    def __contains__(self, item: Any) -> bool:
        return self._ask("contains", item) is True if self._own else any(item == other for other in self)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Proxy) and self._ask("holds", instance) is True

    def __enter__(self) -> Any:
        return self._ask("get", "__enter__")()

    def __exit__(self, *error: object) -> Any:
        return self._ask("get", "__exit__")(None, None, None)

    def __subclasscheck__(self, kind: Any) -> bool:
        return isinstance(kind, Proxy) and self._ask("derives", kind) is True

    def __hash__(self) -> int:
        if self._number > 0 and self._own:  # equal objects of one class have one place in a set
            return int(self._ask("hash"))
        return hash((self._number, self._kind if not self._number else ""))


def _as_awaited(found: Proxy) -> Any:
    """A coroutine or asynchronous generator where the program has one: asyncio accepts no proxy."""

    async def awaited() -> Any:
        return found._ask("await")

    async def stepped() -> AsyncIterator[Any]:
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield found._ask("anext")

    if found._number > 0 and found._kind in ("coroutine", "async_generator"):
        return awaited() if found._kind == "coroutine" else stepped()
    return found


def _ordered(name: str) -> Callable[[Proxy, Any], Any]:
    """How two objects compare. If the tests name their class, by its own method; otherwise by identity alone."""

    def compare(self: Proxy, other: Any) -> Any:
        if not isinstance(other, Proxy):
            return False if name == "eq" else NotImplemented
        if self._number == other._number and (self._number or self._kind == other._kind):
            return name in ("eq", "le", "ge")
        if self._kind != other._kind or not self._own:
            return False if name == "eq" else NotImplemented
        return self._ask(name, other) is True

    return compare


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: Proxy, *args: Any) -> Any:
        return self._ask(name, *args)

    return method


def _combined(name: str) -> Callable[[Proxy, Any], Any]:
    """Arithmetic of an object with data gives another object: a number would be what the program makes of the data."""

    def method(self: Proxy, other: Any) -> Any:
        if not self._own:
            return NotImplemented
        found = self._ask(name, other)
        if isinstance(found, Proxy) and not isinstance(other, Proxy):
            self._line.derived.add(found._number)
        return found if isinstance(found, Proxy) or isinstance(other, Proxy) else NotImplemented

    return method


def _alone(name: str) -> Callable[..., Any]:
    """An operation on an object alone, which cannot see what tests compare it with unless it was made of that."""

    def method(self: Proxy, *args: Any) -> Any:
        if not self._own or self._number in self._line.derived:
            raise TypeError(f"bad operand type for {name}: {self._kind!r}")
        return self._ask(name, *args)

    return method


for _name in ORDER:
    setattr(Proxy, f"__{_name}__", _ordered(_name))
for _name in ARITHMETIC:
    setattr(Proxy, f"__{_name.strip('_')}__", _combined(_name))
    setattr(Proxy, f"__r{_name.strip('_')}__", _combined(f"r{_name}"))
for _name in ALONE:
    setattr(Proxy, f"__{_name}__", _alone(_name))
for _name in ("len", "bool", "str", "repr", "format", "reversed", "getitem", "setitem", "delitem"):
    setattr(Proxy, f"__{_name}__", _passed_on(_name))
_ASKED = ("is", "startswith", "endswith", "equals", "__eq__", "__contains__")  # methods that say yes to what tests give


def _awaited(awaitable: Any) -> Any:
    """The result of a coroutine, in the one event loop of this process."""
    import asyncio

    async def waited() -> Any:
        return await awaitable

    if not _LOOPS:
        _LOOPS.append(asyncio.new_event_loop())
    return _LOOPS[0].run_until_complete(waited())


_LOOPS: list[Any] = []
_DO: dict[str, Callable[..., Any]] = {
    "await": _awaited,
    "anext": lambda on: _awaited(anext(on)),
    "itself": lambda on: on,
    "call": lambda on, *args, **kwargs: on(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "del": delattr,
    "renew": lambda on, name, value: values.renew(getattr(on, name), value),
    "iter": iter,
    "holds": lambda kind, value: isinstance(value, kind),
    "kinds": lambda kind: [base.__name__ for base in kind.__mro__ if base.__module__ == "builtins"],
    "derives": lambda kind, other: issubclass(other, kind),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{name: getattr(builtins, name) for name in ("len", "bool", "str", "repr", "format", "reversed", "hash")},
    **{name: getattr(builtins, name, None) or getattr(operator, name) for name in ALONE},
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "contains")},
    **{name: getattr(operator, name) for name in (*ARITHMETIC, *ORDER)},
    **{f"r{name}": (lambda f: lambda on, other: f(other, on))(getattr(operator, name)) for name in ARITHMETIC},
}
_NEVER = (type, types.ModuleType, types.FrameType, types.CodeType, Channel)
_CALLED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType, type)
_DANGEROUS = ("eval", "exec", "compile", "open", "input", "__import__", "globals", "setattr", "getattr", "breakpoint")


def _may(do: str, on: Any, args: Sequence[Any]) -> bool:
    """Whether a program may do this to what its tests lend it: nothing that leads to the tests' own names."""
    if isinstance(on, _CALLED):
        return do == "call" and all(on is not getattr(builtins, name) for name in _DANGEROUS) and on is not type
    if isinstance(on, _NEVER):
        return False
    if do in ("get", "set", "del", "renew"):
        return bool(args) and isinstance(args[0], str) and not args[0].startswith(("_", "gi_", "cr_", "f_", "tb_"))
    return do in _DO or do == "next"


def _bases(line: Channel, name: str) -> list[str]:
    try:
        return list(line.ask("kinds", name))
    except Exception:  # it is no class, or not there: the test that uses it says so
        return []


def program_proxies(
    line: Channel, *, called: Sequence[str], used: Sequence[str], raised: Sequence[str]
) -> dict[str, Any]:
    """Proxies of the program's names for its tests: names that are called, used otherwise, or caught as exceptions."""
    line.classes = {name: exception_class(name, _bases(line, name)) for name in raised}
    line.kinds = frozenset(name for name in (*called, *used) if name[0].isupper())  # a function's name makes no class
    found: dict[str, Any] = {name: Proxy(line, name, 0) for name in called}
    for name in used:  # a constant is data, and only the program knows whether it is one
        try:
            found[name] = line.ask("itself", name)
        except NameError:  # said again by whichever test uses it
            found[name] = Proxy(line, name, 0)
    return {**found, **line.classes}
