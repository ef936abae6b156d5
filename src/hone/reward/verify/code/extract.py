"""The program that a completion settles on, among its fenced blocks, and which of them that is.

Of several blocks the last that defines what the tests call counts; for a script the last that reads its input. Names
that it uses and does not define are taken from the completion's other blocks. So output, usage examples and first
attempts do no harm, and of several different solutions one counts, by a rule that the completion cannot bend.
"""

import ast
import builtins
import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

from hone.data.rows.code_names import free_names, root_name
from hone.reward.verify.answers import answer_tag, spoken_text
from hone.reward.verify.code.parse import parsed, readings, without_prose

MAX_PARTS = 20  # of a text without a fence that are looked at
MAX_INDENT = 40  # characters before the fence of a block
PYTHON = frozenset(["", "python", "py", "python3"])  # what stands behind the backticks of a block that counts
_VERSIONS = re.compile(r"i?py(?:thon)?[\d.]*|pycon|python-repl|doctest")  # py3, python3.11, ipython, a transcript
_LANGUAGE = re.compile(_VERSIONS.pattern + r"|text|txt|output|bash|sh|shell|console|json|c|cpp|java|js|javascript")
_FENCE = re.compile(r"(?P<before>[^`~\n]*)(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]*)")
_INLINE = re.compile(r"[^`\n]*```(?P<inside>[^`\n]+)```[^`\n]*")
_MARKER = re.compile(r"\s*(?:[-*+]|\d{1,9}[.)])?\s*|\s*>\s?")
_BEGINS = re.compile(r"(?:async\s+def|def|class|import|from|@\w)\b")
_DEFINES = re.compile(r"^(?:(?:async\s+)?def|class)\s+(\w+)|^(\w+)\s*=(?!=)", re.MULTILINE)
_INDENTED = re.compile(r"(?:^|\n\n)((?:(?: {4}|\t)[^\n]*\n|\n(?= {4}|\t))+)")  # a block of Markdown's older kind
_SPAN = re.compile(r"(?<!`)`{1,2}([^`\n]+)`{1,2}(?!`)")
_FUTURE = re.compile(r"^from __future__ import [^(\n]+$", re.MULTILINE)
_READS = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\s*\(\s*0\b|\bfileinput\b|/dev/stdin")


@dataclass(frozen=True)
class Block:
    """Some code of a completion. number: its place among the fenced blocks, from 1; 0: it stands in no fence."""

    tag: str
    code: str
    number: int
    closed: bool = True

    @cached_property
    def tree(self) -> ast.Module | None:
        """The syntax tree. None if it is not Python, or too large to be read safely in this process."""
        return parsed(self.code)

    @cached_property
    def names(self) -> frozenset[str]:
        """What it gives a value at its top level, imports aside."""
        if self.tree is None:
            return frozenset(name for found in _DEFINES.findall(self.code) for name in found if name)
        return frozenset(name for statement in self.tree.body for name in defined_names(statement))

    @cached_property
    def lines(self) -> list[str]:
        return self.code.split("\n")

    @cached_property
    def fills(self) -> dict[str, list[tuple[ast.stmt, set[str]]]]:
        """By name, statements of the top level that go on filling what it holds (a table, a list of primes), and the
        names that each of them lacks."""
        found = dict[str, list[tuple[ast.stmt, set[str]]]]()
        for statement in self.tree.body if self.tree is not None else ():
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                filled = {name for node in ast.walk(statement) if (name := _filled(node))}
                lacking = _lacking(ast.unparse(statement)) if filled else set[str]()
                for name in filled:
                    found.setdefault(name, []).append((statement, lacking))
        return found

    @property
    def is_program(self) -> bool:
        """Whether it does anything: a number, a name or a list is what a program printed."""
        if self.tree is None:
            return False
        return any(isinstance(node, _ACTS) for node in ast.walk(self.tree))


_ACTS = (ast.Call, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.For, ast.While, ast.Assign)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """A program, and in words which block it is where there were several."""

    source: str
    taken: str = ""


def defined_names(statement: ast.AST, *, imports: bool = False) -> Iterator[str]:
    """The names that a statement of the top level gives a value, in whatever block it does."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from ((a.asname or a.name.partition(".")[0] for a in statement.names) if imports else ())
    elif isinstance(statement, ast.Name):
        yield from [statement.id] if isinstance(statement.ctx, ast.Store) else []
    elif not isinstance(statement, _SCOPES):
        for inner in ast.iter_child_nodes(statement):
            yield from defined_names(inner, imports=imports)


_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def extract(
    completion: str,
    *,
    wanted: Sequence[str],
    prompt: object = "",
    before: str | None = None,
    fences: Collection[str] = PYTHON,
) -> Extracted | None:
    """The program of a completion; None where there is none.

    wanted: the names that tests call, none for a script. fences: names of blocks that count.
    before: what the prompt puts before the function, where a completion may go on from it.
    """
    text = spoken_text(completion, prompt).replace("\r\n", "\n").replace("\r", "\n")
    tagged = answer_tag(text)
    chosen = None if tagged is None else _chosen(tagged, wanted, fences, strict=True)
    chosen = chosen or _chosen(text, wanted, fences)
    if before is not None and isinstance(prompt, str) and not (chosen and _defines(chosen[0], wanted)):
        for part in filter(None, (tagged, text)):
            body = _before_fence(part).strip("\n")
            if body[:1].isspace() and parsed(prompt + body) is not None:
                return Extracted(source=prompt + body + "\n")
    if chosen is None:
        return None
    block, others = chosen
    if "python" not in fences:
        return Extracted(source=block.code, taken=_told([block], others))
    code, added = _completed(block, others, given=before or "")
    if before is not None and isinstance(prompt, str):
        code = f"{before}\n{code}" if _defines(block, wanted) else _continued(prompt, code)
    code = _future_first(code)
    return Extracted(source=code, taken=_told([*added, block], others)) if code.strip() else None


def _future_first(code: str) -> str:
    """What must stand before all else, where other blocks or the prompt were put before it."""
    tree = parsed(code) if "__future__" in code else None
    body = tree.body if tree else []
    places = [i for i, s in enumerate(body) if isinstance(s, ast.ImportFrom) and s.module == "__future__"]
    if not places or places[-1] <= len(places) - (ast.get_docstring(ast.Module(body, [])) is None):
        return code
    return "\n".join([*(ast.unparse(body[i]) for i in places), _FUTURE.sub("", code)])


def _before_fence(text: str) -> str:
    """What stands before the first fence, which closes the one that the prompt has opened."""
    return "\n".join(takewhile(lambda line: _opening(line) is None, text.split("\n")))


def _defines(block: Block, wanted: Sequence[str]) -> bool:
    return any(name in block.names for name in wanted)


def _continued(prompt: str, code: str) -> str:
    """A function's body put behind its head: indented where the completion did not, without sentences that follow."""
    indented = prompt + textwrap.indent(code, "    ")
    if not code[:1].isspace() and parsed(indented) is not None:
        return indented
    return without_prose(prompt + code, least=prompt.count("\n") + 1) or prompt + code


def _chosen(
    text: str, wanted: Sequence[str], fences: Collection[str], *, strict: bool = False
) -> tuple[Block, list[Block]] | None:
    """The block that counts, and all that could have; strict: only what is a program."""
    found = [_tidied(block, wanted) for block in blocks(text) if counts(block.tag, fences)]
    if not found:
        alone = _unfenced(text, wanted) if "python" in fences else Block("", text, 0)
        known = alone.tree is not None and (_defines(alone, wanted) if wanted else alone.is_program)
        like = known or "python" not in fences or text[:1].isspace() or any(map(_BEGINS.match, text.split("\n")))
        return (alone, [alone]) if alone.code.strip() and (known if strict else like or alone.tree) else None
    if strict and not any(block.code.strip() for block in found):
        return None
    named = [block for block in found if block.tag] or found
    if "python" in fences and not any(_defines(block, wanted) if wanted else block.is_program for block in found):
        head = _unfenced(_before_fence(text), wanted)
        if head.tree is not None and (_defines(head, wanted) if wanted else head.is_program):
            return head, [head]
    if "python" not in fences:
        return named[-1], found
    if wanted:
        most = max(len(block.names & set(wanted)) for block in found)
        defining = [block for block in found if most and len(block.names & set(wanted)) == most]
    else:
        programs = [block for block in named if block.is_program] or [block for block in found if block.is_program]
        defining = [block for block in programs if _READS.search(block.code)] or programs
    return (defining or [block for block in named if block.tree] or named)[-1], found


def _tidied(block: Block, wanted: Sequence[str]) -> Block:
    """The block as it stands, or without what is none of the program, where only that is one."""
    for code in readings(block.code, closed=block.closed):
        plain = replace(block, code=code)
        if plain.tree is not None and (_defines(plain, wanted) if wanted else plain.names or plain.is_program):
            return plain
    return block


def counts(tag: str, fences: Collection[str]) -> bool:
    """Whether a block of this name counts."""
    return tag in fences or ("python" in fences and _VERSIONS.fullmatch(tag) is not None)


def _completed(block: Block, others: Sequence[Block], *, given: str) -> tuple[str, list[Block]]:
    """The block behind the statements of other blocks that it needs, and those blocks."""
    found = dict[str, tuple[Block, ast.stmt]]()  # of several blocks that define a name, the last before this one
    for other in sorted(others, key=lambda other: (other.number > block.number, -other.number)):
        for statement in other.tree.body if other is not block and other.tree is not None else ():
            for name in defined_names(statement, imports=True):
                found.setdefault(name, (other, statement))
    known = {name for s in (parsed(given) or ast.Module([], [])).body for name in defined_names(s, imports=True)}
    waiting, seen = sorted(_lacking(block.code) - known), set(known)
    waiting += ["*"] * any(name not in found for name in waiting)
    where = dict[tuple[int, int], str]()  # block and line -> statement
    while waiting:
        name = waiting.pop()
        if name in seen or name not in found:
            continue
        seen.add(name)
        other, statement = found[name]
        fills = [filling for filling, lacking in other.fills.get(name, ()) if lacking <= found.keys()]
        for needed in (statement, *fills):
            if (other.number, needed.lineno) not in where:
                where[other.number, needed.lineno] = text = _segment(other.lines, needed)
                waiting += sorted(_lacking(text) - seen - block.names)
    numbers = {number for number, _ in where}
    added = [other for other in others if other.number in numbers]
    return "\n".join([*(where[place] for place in sorted(where)), block.code]), added


def _filled(node: ast.AST) -> str:
    """a of a[i] = 1, a.b = 1, a += 1 and a.append(1)."""
    if isinstance(node, ast.AugAssign):
        return root_name(node.target)
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return root_name(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FILLS:
        return root_name(node.func)
    return ""


_FILLS = ("append", "extend", "add", "update", "insert", "setdefault", "sort")


def _segment(lines: Sequence[str], statement: ast.stmt) -> str:
    """A statement's lines, with its decorators."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(lines[first - 1 : statement.end_lineno])


def _lacking(code: str) -> set[str]:
    if parsed(code) is None:
        return set()
    try:
        return free_names(code) - set(dir(builtins))
    except (SyntaxError, ValueError, RecursionError):
        return set()


def _told(taken: Sequence[Block], others: Sequence[Block]) -> str:
    if len(others) < 2:
        return ""
    numbers = sorted({block.number for block in taken})
    return f"took block {' and '.join(map(str, numbers))} of {len(others)}"


def _unfenced(text: str, wanted: Sequence[str]) -> Block:
    """Code that stands in no fence: all of the text, or what of it is a program."""
    whole = _tidied(Block("", text.removeprefix("\ufeff"), 0), wanted)
    if text[:1].isspace() or (whole.tree is not None and (_defines(whole, wanted) or not wanted)):
        return whole
    lines = text.split("\n")
    starts = [i for i, line in enumerate(lines) if _BEGINS.match(line)]
    parts = [without_prose("\n".join(lines[starts[0] :]))] if starts else []
    parts += [textwrap.dedent(part) for part in _INDENTED.findall(text)]
    parts += [span + "\n" for span in reversed(_SPAN.findall(text))]
    for part in parts[:MAX_PARTS]:
        found = Block("", part, 0)
        if found.tree is not None and (_defines(found, wanted) if wanted else found.code is parts[0] and starts):
            return found
    return whole


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a text, in order; the last may lack its end."""
    lines, found, at = text.split("\n"), list[Block](), 0
    while at < len(lines):
        single = _INLINE.fullmatch(lines[at])
        if single is not None:
            tag, code = _tag(single["inside"])
            known = _VERSIONS.fullmatch(tag) is not None
            found.append(Block(tag if known else "", (code if known else single["inside"]) + "\n", len(found) + 1))
        opening = _opening(lines[at])
        at += 1
        if opening is None or single is not None:
            continue
        before, fence, info = opening
        tag, rest = _tag(info)
        end, last = _closing(lines, at, fence)
        body = [_unindented(line, before) for line in lines[at:end]] + last
        head = [rest] if _BEGINS.match(rest) else []  # the code begins on the fence's own line
        code = "\n".join([*head, *body]).removeprefix("\ufeff")
        closed = end < len(lines)
        found.append(Block(tag, code + "\n" * (bool(code) and closed), len(found) + 1, closed))
        reopened = end < len(lines) and not last and _LANGUAGE.fullmatch(_tag(lines[end].strip().lstrip("`~"))[0])
        at = end if reopened else end + 1
    return found


def _opening(line: str) -> tuple[str, str, str] | None:
    """What stands before a fence that opens a block, the fence, and what stands behind it."""
    found = _FENCE.fullmatch(line)
    if found is None:
        return None
    before, fence, info = found["before"], found["fence"], found["info"]
    plain = len(before) <= MAX_INDENT and _MARKER.fullmatch(before) is not None
    led = before.rstrip().endswith((":", ">")) or _VERSIONS.fullmatch(_tag(info)[0]) is not None
    return (before if plain else "", fence, info) if plain or (led and fence[0] == "`") else None


def _tag(info: str) -> tuple[str, str]:
    """The name of a block in lower case, and what follows it: `python title="x.py"`, `{.python}`, `py:main.py`."""
    found = re.match(r"[\s{.]*([\w+#/-]*(?:\.\d+)?)[\s,:;}({]?(.*)", info, re.DOTALL)
    assert found is not None
    return found[1].lower(), found[2].strip()


def _closing(lines: Sequence[str], start: int, fence: str) -> tuple[int, list[str]]:
    """The line that closes a block, and the code that stands on it before the fence; len(lines) where none does."""
    first = (len(lines), list[str]())
    for at in range(start, len(lines)):
        text = lines[at].strip().removeprefix(">").strip()
        ends = text.startswith(fence)
        if not ends and not (text.endswith(fence) and text.count(fence) == 1 and fence[0] == "`"):
            continue
        here = (at, list[str]()) if ends else (at, [lines[at][: lines[at].rindex(fence)]])
        inside = "\n".join(lines[start:at])
        if (inside.count('"""') + inside.count("'''")) % 2 == 0:
            return here if first[0] == len(lines) or parsed("\n".join([inside, *here[1]])) else first
        first = min(first, here)  # it stands in a docstring, if that ends
        if at - start > 2000:
            break
    return first


def _unindented(line: str, before: str) -> str:
    """A line of a block without the indentation, or the mark of a quotation, of its fence."""
    if before.strip() == ">":
        return re.sub(r"^\s*> ?", "", line)
    width = len(before)
    lead = line[:width]
    return line[width:] if not lead.strip() else line[len(lead) - len(lead.lstrip()) :]
