"""Finds the program of a completion among its fenced blocks.

Of several blocks the last one counts that defines what the tests call; for a script, the last one that reads its input.
Names that it uses and does not define are taken from the completion's other blocks. So output, usage examples and first
attempts do no harm, and of several solutions a fixed rule picks one.
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
from hone.reward.verify.code.parse import parse_python, readings, without_prose

MAX_CANDIDATES = 20  # parts of a text without a fence that are tried
MAX_INDENT = 40  # characters before a block's fence
PYTHON = frozenset(["", "python", "py", "python3"])  # names after the backticks of a block that counts
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
    """Code of a completion. number: its number among the fenced blocks, from 1; 0: it has no fence."""

    tag: str
    code: str
    number: int
    closed: bool = True

    @cached_property
    def tree(self) -> ast.Module | None:
        """The syntax tree; None if the code is not Python, or too large to parse safely in this process."""
        return parse_python(self.code)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names that it defines at its top level, without imports."""
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
                filled = {name for node in ast.walk(statement) if (name := _filled_name(node))}
                lacking = _undefined_names(ast.unparse(statement)) if filled else set[str]()
                for name in filled:
                    found.setdefault(name, []).append((statement, lacking))
        return found

    @property
    def is_program(self) -> bool:
        """Whether the code does anything. A number, a name or a list is a program's output."""
        if self.tree is None:
            return False
        return any(isinstance(node, _ACTS) for node in ast.walk(self.tree))


_ACTS = (ast.Call, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.For, ast.While, ast.Assign)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """A program; `taken` says which block it is where there are several."""

    source: str
    taken: str = ""


def defined_names(statement: ast.AST, *, imports: bool = False) -> Iterator[str]:
    """The names that a top-level statement defines, also inside `if`, `for` and other blocks."""
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
    chosen = None if tagged is None else _choose_block(tagged, wanted, fences, strict=True)
    chosen = chosen or _choose_block(text, wanted, fences)
    if before is not None and isinstance(prompt, str) and not (chosen and _defines(chosen[0], wanted)):
        for part in filter(None, (tagged, text)):
            body = _before_fence(part).strip("\n")
            if body[:1].isspace() and parse_python(prompt + body) is not None:
                return Extracted(source=prompt + body + "\n")
    if chosen is None:
        return None
    block, others = chosen
    if "python" not in fences:
        return Extracted(source=block.code, taken=_taken_text([block], others))
    code, added = _with_needed_statements(block, others, given=before or "")
    if before is not None and isinstance(prompt, str):
        code = f"{before}\n{code}" if _defines(block, wanted) else _continue_prompt(prompt, code)
    code = _future_first(code)
    return Extracted(source=code, taken=_taken_text([*added, block], others)) if code.strip() else None


def _future_first(code: str) -> str:
    """The code with its `__future__` imports first, where other blocks or the prompt were put before them."""
    tree = parse_python(code) if "__future__" in code else None
    body = tree.body if tree else []
    places = [i for i, s in enumerate(body) if isinstance(s, ast.ImportFrom) and s.module == "__future__"]
    if not places or places[-1] <= len(places) - (ast.get_docstring(ast.Module(body, [])) is None):
        return code
    return "\n".join([*(ast.unparse(body[i]) for i in places), _FUTURE.sub("", code)])


def _before_fence(text: str) -> str:
    """The text before the first fence. That fence closes a block that the prompt has opened."""
    return "\n".join(takewhile(lambda line: _opening(line) is None, text.split("\n")))


def _defines(block: Block, wanted: Sequence[str]) -> bool:
    return any(name in block.names for name in wanted)


def _continue_prompt(prompt: str, code: str) -> str:
    """The prompt's function head with the completion's body, indented where needed, without sentences after it."""
    indented = prompt + textwrap.indent(code, "    ")
    if not code[:1].isspace() and parse_python(indented) is not None:
        return indented
    return without_prose(prompt + code, least=prompt.count("\n") + 1) or prompt + code


def _choose_block(
    text: str, wanted: Sequence[str], fences: Collection[str], *, strict: bool = False
) -> tuple[Block, list[Block]] | None:
    """The block that counts, and all candidates. strict: only a block that is a program."""
    found = [_cleaned_block(block, wanted) for block in blocks(text) if counts(block.tag, fences)]
    if not found:
        alone = _block_without_fence(text, wanted) if "python" in fences else Block("", text, 0)
        known = alone.tree is not None and (_defines(alone, wanted) if wanted else alone.is_program)
        like = known or "python" not in fences or text[:1].isspace() or any(map(_BEGINS.match, text.split("\n")))
        return (alone, [alone]) if alone.code.strip() and (known if strict else like or alone.tree) else None
    if strict and not any(block.code.strip() for block in found):
        return None
    named = [block for block in found if block.tag] or found
    if "python" in fences and not any(_defines(block, wanted) if wanted else block.is_program for block in found):
        head = _block_without_fence(_before_fence(text), wanted)
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


def _cleaned_block(block: Block, wanted: Sequence[str]) -> Block:
    """The block, or the first of its cleaned readings that is a program."""
    for code in readings(block.code, closed=block.closed):
        plain = replace(block, code=code)
        if plain.tree is not None and (_defines(plain, wanted) if wanted else plain.names or plain.is_program):
            return plain
    return block


def counts(tag: str, fences: Collection[str]) -> bool:
    """Whether a block with this name counts."""
    return tag in fences or ("python" in fences and _VERSIONS.fullmatch(tag) is not None)


def _with_needed_statements(block: Block, others: Sequence[Block], *, given: str) -> tuple[str, list[Block]]:
    """The block after the statements that it needs from other blocks; and those blocks."""
    found = dict[str, tuple[Block, ast.stmt]]()  # of several blocks that define a name, the last before this one
    for other in sorted(others, key=lambda other: (other.number > block.number, -other.number)):
        for statement in other.tree.body if other is not block and other.tree is not None else ():
            for name in defined_names(statement, imports=True):
                found.setdefault(name, (other, statement))
    known = {name for s in (parse_python(given) or ast.Module([], [])).body for name in defined_names(s, imports=True)}
    waiting, seen = sorted(_undefined_names(block.code) - known), set(known)
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
                where[other.number, needed.lineno] = text = _lines_of(other.lines, needed)
                waiting += sorted(_undefined_names(text) - seen - block.names)
    numbers = {number for number, _ in where}
    added = [other for other in others if other.number in numbers]
    return "\n".join([*(where[place] for place in sorted(where)), block.code]), added


def _filled_name(node: ast.AST) -> str:
    """The name a in a[i] = 1, a.b = 1, a += 1 and a.append(1)."""
    if isinstance(node, ast.AugAssign):
        return root_name(node.target)
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return root_name(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FILLS:
        return root_name(node.func)
    return ""


_FILLS = ("append", "extend", "add", "update", "insert", "setdefault", "sort")


def _lines_of(lines: Sequence[str], statement: ast.stmt) -> str:
    """A statement's lines, with its decorators."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(lines[first - 1 : statement.end_lineno])


def _undefined_names(code: str) -> set[str]:
    if parse_python(code) is None:
        return set()
    try:
        return free_names(code) - set(dir(builtins))
    except (SyntaxError, ValueError, RecursionError):
        return set()


def _taken_text(taken: Sequence[Block], others: Sequence[Block]) -> str:
    if len(others) < 2:
        return ""
    numbers = sorted({block.number for block in taken})
    return f"took block {' and '.join(map(str, numbers))} of {len(others)}"


def _block_without_fence(text: str, wanted: Sequence[str]) -> Block:
    """Code without a fence: all of the text, or the part of it that is a program."""
    whole = _cleaned_block(Block("", text.removeprefix("\ufeff"), 0), wanted)
    if text[:1].isspace() or (whole.tree is not None and (_defines(whole, wanted) or not wanted)):
        return whole
    lines = text.split("\n")
    starts = [i for i, line in enumerate(lines) if _BEGINS.match(line)]
    parts = [without_prose("\n".join(lines[starts[0] :]))] if starts else []
    parts += [textwrap.dedent(part) for part in _INDENTED.findall(text)]
    parts += [span + "\n" for span in reversed(_SPAN.findall(text))]
    for part in parts[:MAX_CANDIDATES]:
        found = Block("", part, 0)
        if found.tree is not None and (_defines(found, wanted) if wanted else found.code is parts[0] and starts):
            return found
    return whole


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a text, in order. The last one may not be closed."""
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
        body = [_without_indentation(line, before) for line in lines[at:end]] + last
        head = [rest] if _BEGINS.match(rest) else []  # the code begins on the fence's own line
        code = "\n".join([*head, *body]).removeprefix("\ufeff")
        closed = end < len(lines)
        found.append(Block(tag, code + "\n" * (bool(code) and closed), len(found) + 1, closed))
        reopened = end < len(lines) and not last and _LANGUAGE.fullmatch(_tag(lines[end].strip().lstrip("`~"))[0])
        at = end if reopened else end + 1
    return found


def _opening(line: str) -> tuple[str, str, str] | None:
    """The text before a fence that opens a block, the fence, and the text after it; None for any other line."""
    found = _FENCE.fullmatch(line)
    if found is None:
        return None
    before, fence, info = found["before"], found["fence"], found["info"]
    plain = len(before) <= MAX_INDENT and _MARKER.fullmatch(before) is not None
    led = before.rstrip().endswith((":", ">")) or _VERSIONS.fullmatch(_tag(info)[0]) is not None
    return (before if plain else "", fence, info) if plain or (led and fence[0] == "`") else None


def _tag(info: str) -> tuple[str, str]:
    """A block's name in lower case, and the text after it: `python title="x.py"`, `{.python}`, `py:main.py`."""
    found = re.match(r"[\s{.]*([\w+#/-]*(?:\.\d+)?)[\s,:;}({]?(.*)", info, re.DOTALL)
    assert found is not None
    return found[1].lower(), found[2].strip()


def _closing(lines: Sequence[str], start: int, fence: str) -> tuple[int, list[str]]:
    """The number of the line that closes a block (len(lines): none), and the code before the fence on it."""
    first = (len(lines), list[str]())
    for at in range(start, len(lines)):
        text = lines[at].strip().removeprefix(">").strip()
        ends = text.startswith(fence)
        if not ends and not (text.endswith(fence) and text.count(fence) == 1 and fence[0] == "`"):
            continue
        here = (at, list[str]()) if ends else (at, [lines[at][: lines[at].rindex(fence)]])
        inside = "\n".join(lines[start:at])
        if (inside.count('"""') + inside.count("'''")) % 2 == 0:
            return here if first[0] == len(lines) or parse_python("\n".join([inside, *here[1]])) else first
        first = min(first, here)  # it stands in a docstring, if that ends
        if at - start > 2000:
            break
    return first


def _without_indentation(line: str, before: str) -> str:
    """A line of a block without the indentation or the quotation mark that its fence has."""
    if before.strip() == ">":
        return re.sub(r"^\s*> ?", "", line)
    width = len(before)
    lead = line[:width]
    return line[width:] if not lead.strip() else line[len(lead) - len(lead.lstrip()) :]
