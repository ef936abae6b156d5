"""Objects that stay where they are: a program's functions and objects as its tests see them, and the other way round.

Tests and program run in two sandboxes. Data crosses between them as `sandbox_values` writes it. Anything else stays
behind, and a `Remote` stands for it: what is done to the Remote is asked of the other side, whose answer is data again
or another Remote. A program's methods must not decide what its tests compare with data: a Remote equals nothing but
itself, and only objects of classes that the tests name are compared, added or searched by their own methods, with each
other. Both sides use this module; it imports nothing of Hone but what they have.
"""

import builtins
import itertools
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, NoReturn

from hone.reward import sandbox_values as values

SINGLE, CHUNK = 64, 256  # items of an iterator asked for one at a time, as it may be endless; then so many at once
Record = dict[str, Any]
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor")
ORDER = ("eq", "lt", "le", "gt", "ge")


class Ended(BaseException):
    """The program has ended: no test may take this for an exception that it expects."""


class Line:
    """One side's end of the conversation."""

    def __init__(
        self, *, read: Callable[[], bytes | None], write: Callable[[bytes], None], limit: int, sign: int
    ) -> None:
        self._read, self._write, self._limit, self._sign = read, write, limit, sign
        self.objects, self.numbers = dict[int, Any](), dict[int, int]()
        self.late = dict[int, BaseException]()  # what an iterator raised after items that were not told yet
        self.classes: Mapping[str, type[BaseException]] = {}  # exceptions that tests name and the program defines
        self.kinds: frozenset[str] = frozenset()  # classes of the program that tests name

    def send(self, record: Record) -> None:
        """One record, with numbers for what is no data."""
        self._write(values.dumps(record, limit=self._limit, refer=self._number))

    def loads(self, text: bytes) -> Any:
        """A record of the other side, with this side's own objects in their places."""
        return values.loads(text, resolve=self._resolve)

    def _number(self, value: Any) -> int:
        if isinstance(value, Remote):  # a name of the program has no number before the program gives it one
            return value._number or getattr(value._ask("itself"), "_number", 0)
        key = id(value)
        if key not in self.numbers:  # the object is kept, so its id stays its own
            self.numbers[key] = self._sign * (len(self.objects) + 1)
            self.objects[self.numbers[key]] = value
        return self.numbers[key]

    def _resolve(self, found: values.Opaque) -> Any:
        if found.number * self._sign > 0:
            return self.objects[found.number]
        return Remote(self, found.kind, found.number)

    def ask(self, do: str, on: Any, *args: Any, **kwargs: Any) -> Any:
        """Have it done on the other side, whose own questions are answered meanwhile."""
        self.send({"ask": {"do": do, "on": on, "args": list(args), "kwargs": kwargs}})
        while (text := self._read()) is not None:
            record = self.loads(text)
            if "ask" not in record:
                return self._settled(record["answer"], args, kwargs)
            self.send(self.answer(record["ask"]))
        raise Ended("the conversation is over")

    def answer(self, asked: Mapping[str, Any], module: Mapping[str, Any] | None = None) -> Record:
        """What came of doing what the other side asks. module: where names are looked up, on the program's side."""
        on, args, kwargs = asked["on"], asked["args"], asked["kwargs"]
        if isinstance(on, str):
            if module is None or on not in module:
                return {"answer": {"missing": on}}
            on = module[on]
        elif module is None and not _may(asked["do"], on, args):
            return {"answer": failed(PermissionError("tests lend this only to be called, read and stepped through"))}
        try:
            before = self._written(args, kwargs)
            found: Record = {"value": self._done(asked["do"], on, args, kwargs)}
            same = [i for i, given in enumerate(args) if given is found["value"] and isinstance(given, _CHANGING)]
            found |= {"same": same[0]} if same else {}
            found |= {"changed": [args, kwargs]} if self._written(args, kwargs) != before else {}
            values.dumps(found, limit=self._limit, refer=self._number)  # too large: an error, and not the end
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: the next call is still asked
            return {"answer": failed(error)}
        return {"answer": found}

    def _written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        held = [value for value in (*args, *kwargs.values()) if isinstance(value, _CHANGING)]
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
            self._raise(answer)
        if "changed" in answer:
            new_args, new_kwargs = answer["changed"]
            for old, new in zip([*args, *kwargs.values()], [*new_args, *new_kwargs.values()], strict=True):
                renew(old, new)
        return args[answer["same"]] if "same" in answer else answer["value"]

    def _raise(self, answer: Mapping[str, Any]) -> NoReturn:
        """The same exception, or the nearest of its bases that there is on this side."""
        for module, name in answer["kinds"]:
            if module.startswith(_RUNNERS):
                continue
            kind = self.classes.get(name) or getattr(sys.modules.get(module), name, None)
            if isinstance(kind, type) and issubclass(kind, BaseException):
                error = kind.__new__(kind)
                error.args = tuple(answer["args"])
                raise error
        raise RuntimeError(answer["error"])


_RUNNERS = ("unittest", "_pytest")  # a program that raises their SkipTest shall not have its tests left out


def failed(error: BaseException) -> Record:
    """What an exception is to the other side: its text, its classes, and its arguments where they are data."""
    kinds = [[kind.__module__, kind.__name__] for kind in type(error).__mro__ if issubclass(kind, BaseException)]
    args = [value if isinstance(value, str | int | float | None) else as_text(value) for value in error.args[:8]]
    args = [value[:1000] if isinstance(value, str) else value for value in args]
    return {"error": told(error), "kinds": kinds[:16], "args": args}


def told(error: BaseException) -> str:
    """An exception in one text."""
    said = as_text(error)
    return f"{type(error).__name__}: {said}"[:500] if said else type(error).__name__


def as_text(value: Any) -> str:
    """str(value), whose method may be the program's."""
    try:
        return str(value)
    except BaseException:
        return ""


def renew(old: Any, new: Any) -> None:
    """Make a test's list, set, dictionary or bytes what the program has made of it, in place, also inside."""
    if type(old) is not type(new) or not isinstance(old, _CHANGING):
        return
    if isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, MutableMapping):
        kept = {key: _renewed(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(kept)
    elif isinstance(old, list | deque) and len(old) == len(new):
        for i, value in enumerate(new):
            old[i] = _renewed(old[i], value)
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)
    elif isinstance(old, MutableSequence):
        old[:] = new


def _renewed(old: Any, new: Any) -> Any:
    if type(old) is type(new) and isinstance(old, _CHANGING):
        renew(old, new)
        return old
    return new


_CHANGING = (list, dict, set, deque, bytearray)


class Remote:
    """An object of the other side, or what a name of the program stands for there."""

    __slots__ = ("_ahead", "_kind", "_line", "_number", "_taken")

    def __init__(self, line: Line, kind: str, number: int) -> None:
        for name, value in (("line", line), ("kind", kind), ("number", number), ("ahead", deque()), ("taken", 0)):
            object.__setattr__(self, f"_{name}", value)

    @property
    def _own(self) -> bool:
        """Whether the methods of its class are asked: of classes that tests name, and of what tests lend."""
        return self._kind in self._line.kinds or self._number < 0

    def _ask(self, do: str, *args: Any, **kwargs: Any) -> Any:
        on = self if self._number else self._kind  # a name is looked up each time: the program may rebind it
        return self._line.ask(do, on, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_ASKED) and not self._own:
            raise AttributeError(f"{self._kind!r} object has no attribute {name!r}")
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __iter__(self) -> Iterator[Any]:
        found = self._ask("iter")
        return iter(found) if not isinstance(found, Remote) else found._steps()

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
        return isinstance(instance, Remote) and self._ask("holds", instance) is True

    def __enter__(self) -> Any:
        return self._ask("get", "__enter__")()

    def __exit__(self, *error: object) -> Any:
        return self._ask("get", "__exit__")(None, None, None)

    def __hash__(self) -> int:
        return hash((self._number, self._kind if not self._number else ""))


def _ordered(name: str) -> Callable[[Remote, Any], Any]:
    """A comparison of two objects whose class the tests name is the class's own; of all others only identity is."""

    def compare(self: Remote, other: Any) -> Any:
        if not isinstance(other, Remote):
            return False if name == "eq" else NotImplemented
        if self._number == other._number and (self._number or self._kind == other._kind):
            return name in ("eq", "le", "ge")
        if self._kind != other._kind or not self._own:
            return False if name == "eq" else NotImplemented
        return self._ask(name, other) is True

    return compare


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: Remote, *args: Any) -> Any:
        return self._ask(name, *args)

    return method


def _combined(name: str) -> Callable[[Remote, Any], Any]:
    """Arithmetic of an object with data gives another object: a number would be what the program makes of the data."""

    def method(self: Remote, other: Any) -> Any:
        if not self._own:
            return NotImplemented
        found = self._ask(name, other)
        return found if isinstance(found, Remote) or isinstance(other, Remote) else NotImplemented

    return method


for _name in ORDER:
    setattr(Remote, f"__{_name}__", _ordered(_name))
for _name in ARITHMETIC:
    setattr(Remote, f"__{_name.strip('_')}__", _combined(_name))
    setattr(Remote, f"__r{_name.strip('_')}__", _combined(f"r{_name}"))
for _name in ("len", "bool", "str", "repr", "getitem", "setitem", "delitem"):
    setattr(Remote, f"__{_name}__", _passed_on(_name))
_ASKED = ("is", "startswith", "endswith", "equals", "__eq__", "__contains__")  # methods that say yes to what tests give

_DO: dict[str, Callable[..., Any]] = {
    "itself": lambda on: on,
    "call": lambda on, *args, **kwargs: on(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "iter": iter,
    "holds": lambda kind, value: isinstance(value, kind),
    **{name: getattr(builtins, name) for name in ("len", "bool", "str", "repr")},
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "contains")},
    **{name: getattr(operator, name) for name in (*ARITHMETIC, *ORDER)},
    **{f"r{name}": (lambda f: lambda on, other: f(other, on))(getattr(operator, name)) for name in ARITHMETIC},
}
_NEVER = (type, types.ModuleType, types.FrameType, types.CodeType, Line)
_CALLED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType, type)
_DANGEROUS = ("eval", "exec", "compile", "open", "input", "__import__", "globals", "setattr", "getattr", "breakpoint")


def _may(do: str, on: Any, args: Sequence[Any]) -> bool:
    """Whether a program may do this to what its tests lend it: nothing that leads to the tests' own names."""
    if isinstance(on, _CALLED):
        return do == "call" and all(on is not getattr(builtins, name) for name in _DANGEROUS) and on is not type
    if isinstance(on, _NEVER):
        return False
    if do in ("get", "set"):
        return bool(args) and isinstance(args[0], str) and not args[0].startswith(("_", "gi_", "cr_", "f_", "tb_"))
    return do in _DO or do == "next"


def stand_ins(line: Line, *, called: Sequence[str], used: Sequence[str], raised: Sequence[str]) -> dict[str, Any]:
    """What the program's names are among its tests: those that are called, used otherwise, or caught as exceptions."""
    line.classes = {name: type(name, (Exception,), {}) for name in raised}
    line.kinds = frozenset(name for name in (*called, *used) if name[0].isupper())  # a function's name makes no class
    found: dict[str, Any] = {name: Remote(line, name, 0) for name in called}
    for name in used:  # a constant is data, and only the program knows whether it is one
        try:
            found[name] = line.ask("itself", name)
        except NameError:  # said again by whichever test uses it
            found[name] = Remote(line, name, 0)
    return {**found, **line.classes}
