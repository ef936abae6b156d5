"""Every place of the source that raises an error for users, by the text of its message, and what each text names.

`python tests/remedies/sites.py` writes the catalogue anew, after a message was added, changed or removed.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE, CATALOGUE = ROOT / "src" / "hone", Path(__file__).with_name("catalogue.txt")
ROOTS = {"HoneError", "Unreadable"}
GAP = "{}"  # where a value stands in a message


@lru_cache(maxsize=1)
def trees() -> dict[Path, list[ast.AST]]:
    """Every node of every file."""
    files = sorted(SOURCE.rglob("*.py"))
    return {path: list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in files}


@lru_cache(maxsize=1)
def errors() -> frozenset[str]:
    """HoneError and the classes made of it."""
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for nodes in trees().values()
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    found, before = set(ROOTS), set[str]()
    while found != before:
        before = set(found)
        found |= {name for name, above in bases.items() if above & found}
    return frozenset(found - {"Interrupted"})


def text_of(node: ast.expr) -> str:
    """A message with a gap for each value; of one that is made elsewhere, what makes it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return text_of(node.body)
    return f"<{ast.unparse(node)}>"


@lru_cache(maxsize=1)
def messages() -> dict[str, list[str]]:
    """The files that raise each message."""
    found = dict[str, list[str]]()
    for path, nodes in trees().items():
        for node in nodes:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in errors()
                and node.args
            ):
                for text in made_of(node.args[0], nodes):
                    found.setdefault(" ".join(text.split()), []).append(str(path.relative_to(SOURCE)))
    return found


@lru_cache(maxsize=1)
def constants() -> dict[str, str]:
    """Messages that have a name of their own, which other files raise."""
    assigned = [node for nodes in trees().values() for node in nodes if isinstance(node, ast.Assign)]
    named = [(node.targets[0], node.value) for node in assigned]
    return {a.id: text_of(b) for a, b in named if isinstance(a, ast.Name) and a.id.isupper() and _is_text(b)}


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


@lru_cache(maxsize=1)
def returned() -> dict[str, list[str]]:
    """What functions of each name return."""
    found = dict[str, list[str]]()
    for function in (node for nodes in trees().values() for node in nodes if isinstance(node, ast.FunctionDef)):
        values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        texts = [text_of(x) for x in values if isinstance(x, ast.Constant | ast.JoinedStr | ast.BinOp | ast.IfExp)]
        found.setdefault(function.name, []).extend(texts)
    return found


def made_of(node: ast.expr, nodes: list[ast.AST]) -> list[str]:
    """The message, or where a function or a variable holds it, the messages that this may be."""
    text, found = text_of(node), list[str]()
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        found = returned().get(name, [])
    elif isinstance(node, ast.Name) and node.id in constants():
        return [constants()[node.id]]
    elif isinstance(node, ast.Name):
        parts = [n for n in nodes if isinstance(n, ast.Tuple | ast.Assign)]
        inside = [x for n in parts for x in (n.elts if isinstance(n, ast.Tuple) else [n.value])]
        found = [text_of(x) for x in inside if isinstance(x, ast.expr) and isinstance(x, ast.Constant | ast.JoinedStr)]
    return [x for x in found if literal(x) > 20 and ": " in x] or [text]


@lru_cache(maxsize=1)
def strings() -> frozenset[str]:
    """Every text of the source that is no docstring: messages are put together from them."""
    found = set[str]()
    for nodes in trees().values():
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if not isinstance(node, ast.Constant | ast.JoinedStr) or id(node) in docs or id(node) in inside:
                continue
            if isinstance(node, ast.JoinedStr) or isinstance(node.value, str):
                found.add(text_of(node))
    return frozenset(found)


def fits(text: str, message: str) -> bool:
    """Whether the message is this text with its gaps filled, or has it inside."""
    at = 0
    for piece in text.split(GAP):
        at = message.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


def raised_by(message: str, says: str = "") -> str | None:
    """The text in the catalogue of which the message is made: the one with the most words of its own; of an error
    around another one, that which has the words of the remedy."""
    found = [text for text in messages() if literal(text) >= 10 and fits(text, message)]
    return max([text for text in found if says and says in text] or found, key=literal, default=None)


def literal(text: str) -> int:
    """Characters of the text itself; none of one that is made elsewhere."""
    return 0 if text.startswith("<") else len(text.replace(GAP, ""))


# --- what kind of remedy a message has ---

NAMED = re.compile(  # a setting, an option, a command, a package, a variable, a page
    r"\b(model|sample|train|read|optim|lora|critic|process|parts|save|limits|reward|algo)\.[a-z_]{2,}|\bout=|--[a-z]"
    r"|`hone |hone\[|HONE_[A-Z]+|\bdocs/\w+\.md|\balgo=|\bteacher=|\bkl=|eval_data|\bdata="
)
ASKED = re.compile(  # what the user has to change in a file, a value or a call of their own
    r"\b(add|append|ask|begin|calibrate|check|choose|convert|copy|correct|cut|delete|did you mean|"
    r"distil|do what|download|end|evaluate|every file belongs|expected|fetch|fill|find|free|get|"
    r"give|go on|install|is it a|is it running|is no base|it is of another|keep|leave|lists them|"
    r"load|lower|make|mark|mend|merge|move|must be|name|needs?|number|open|pip|pick|put|raise|"
    r"read|remove|rename|repair|replace|report|resume|returns?|run|sample|save|say|see|set|"
    r"shorten|show|split|start|take|takes no arguments|there are|train|try|unpack|use|wait|wrap|"
    r"write)\b",
    re.IGNORECASE,
)
KINDS = ("followed", "named", "asked", "made elsewhere", "bare")


def kind_of(text: str, followed: frozenset[str] | set[str]) -> str:
    """followed: a case of this folder does as the message says; named: what it names is looked up; asked: it says what
    to change in the user's own input; made elsewhere: its text is a function's or another error's; bare: no remedy."""
    if text in followed:
        return "followed"
    if not literal(text) or (text.count(GAP) and literal(text) < 10):
        return "made elsewhere"
    if "(the row: " in text:  # around another error
        return "made elsewhere"
    if text.endswith(f": {GAP}") and not NAMED.search(text):  # its remedy is a value
        return "made elsewhere"
    if NAMED.search(text):
        return "named"
    return "asked" if ASKED.search(text) else "bare"


def stored() -> dict[str, str]:
    """The catalogue: each message and its kind."""
    lines = CATALOGUE.read_text(encoding="utf-8").splitlines() if CATALOGUE.exists() else []
    return {text: kind for kind, _, text in (line.partition("\t") for line in lines)}


def written(followed: frozenset[str] | set[str]) -> Iterator[str]:
    for text in sorted(messages(), key=lambda text: (KINDS.index(kind_of(text, followed)), text)):
        yield f"{kind_of(text, followed)}\t{text}\n"


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "run"), str(ROOT / "src"), str(ROOT)]
    from remedy_cases import followed_texts

    CATALOGUE.write_text("".join(written(followed_texts())), encoding="utf-8")
