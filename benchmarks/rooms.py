"""The rooms of a source tree, drawn: which folder imports which, in layers, and where imports go in a circle.

    python -m benchmarks.rooms [--tree FOLDER] [--svg FILE]

Reads the imports of every module of FOLDER/src/hone, wherever in the module they stand, and prints the counts. A room
is a folder of the package; a module that lies beside the folders is drawn as a small box of its own. Each room stands
above all that it imports. Rooms that import each other share a layer, and their arrows are red. So is the edge of a
room whose modules import each other in a cycle.
"""

import argparse
import ast
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Graph = dict[str, set[str]]
SHORT = 60  # lines
DOOR = "hone"  # the package itself: it only passes public names on

# Sizes in pixels.
LAYER, BOX, GAP, MARGIN, LETTER, TITLE = 72, 38, 22, 26, 7.4, 90
STYLE = """text{font-family:system-ui,sans-serif;font-size:13px;fill:#1a1a1a}
.small{font-size:11px;fill:#555}.title{font-size:17px;font-weight:600}
rect{fill:#eef3fb;stroke:#5b7db1;rx:6}.loose rect{fill:#fff;stroke:#999;stroke-dasharray:4 3}
.knot rect{stroke:#c62828;stroke-width:2}
path{fill:none;stroke:#9aa7b8;stroke-width:1}.implied{stroke:#dfe4ea}.circle{stroke:#c62828;stroke-width:1.6}"""


@dataclass(frozen=True)
class Tree:
    """A package as a graph of its modules. A module's name leaves out `hone.`"""

    imports: Graph
    folders: frozenset[str]  # rooms; the other names at the top are modules

    @property
    def rooms(self) -> Graph:
        """The graph of rooms and of the modules beside them."""
        found: Graph = {room_of(name): set() for name in self.imports}
        for name, others in self.imports.items():
            found[room_of(name)] |= {room_of(other) for other in others} - {room_of(name)}
        return found

    def size(self, room: str) -> int:
        """How many modules are in it."""
        return sum(room_of(name) == room for name in self.imports)

    def knotted(self, room: str) -> int:
        """How many of them are in an import cycle."""
        circles = [circle for circle in circles_of(self.imports) if len(circle) > 1]
        return sum(room_of(name) == room for circle in circles for name in circle)

    def counts(self) -> dict[str, int]:
        """What a reader has to find the way through."""
        circles = [circle for circle in circles_of(self.imports) if len(circle) > 1]
        rooms = [circle for circle in circles_of(self.rooms) if len(circle) > 1]
        edges = [(name, other) for name, others in self.imports.items() for other in others]
        return {
            "rooms": len(self.folders),
            "modules": len(self.imports),
            "modules beside the rooms": sum("." not in name and name not in self.folders for name in self.imports),
            "imports between modules": len(edges),
            "imports from room to room": sum(room_of(name) != room_of(other) for name, other in edges),
            "modules in import cycles": sum(map(len, circles)),
            "modules in the largest cycle": max(map(len, circles), default=0),
            "rooms in import cycles": sum(map(len, rooms)),
        }


def room_of(module: str) -> str:
    """algo.terms -> algo"""
    return module.partition(".")[0]


def read(source: Path) -> Tree:
    """The package in a folder."""
    files = {_name(path.relative_to(source)): path for path in sorted(source.rglob("*.py"))}
    imports = {name: {other for other in _imported(path, files) if other != name} for name, path in files.items()}
    empty = {name for name, path in files.items() if path.name == "__init__.py" and not imports[name]}
    kept = {name: others - empty for name, others in imports.items() if name not in empty}
    return Tree(kept, frozenset(room_of(name) for name in kept if (source / room_of(name)).is_dir()))


def lengths(source: Path, tree: Tree) -> dict[str, int]:
    """How much there is to read, and how many modules only one other needs."""
    texts = {_name(path.relative_to(source)): path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py"))}
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    importers = Counter(other for others in tree.imports.values() for other in others)
    single = [name for name in tree.imports if importers[name] == 1]
    return {
        "files": len(texts),
        "lines": sum(lines.values()),
        "lines of code": sum(map(code_lines, texts.values())),
        "modules with one importer": len(single),
        f"of these under {SHORT} lines": sum(lines[name] < SHORT for name in single),
    }


def code_lines(text: str) -> int:
    """The lines of a module that are neither empty nor comment nor docstring."""
    tree = ast.parse(text)
    parts = [node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.expr | ast.excepthandler | ast.arg)]
    code = {line for node in parts for line in (node.lineno, node.end_lineno)}
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            code -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(code)


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or DOOR


def _imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of the package that a module imports. What only a type checker reads is left out, except in the
    package itself, where it lists the names that are imported when they are first used."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    door = known.get(DOOR) == path
    for node in _run(tree.body, everything=door):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == DOOR:
                yield _module(name, known)


def _run(body: Iterable[ast.AST], *, everything: bool) -> Iterator[ast.AST]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not everything:
            yield from _run(node.orelse, everything=everything)
        else:
            yield node
            yield from _run(ast.iter_child_nodes(node), everything=everything)


def _module(dotted: str, known: Mapping[str, Path]) -> str:
    """The longest beginning of hone.a.b.name that is a module."""
    parts = dotted.split(".")[1:]
    while parts and ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts) or DOOR


def circles_of(graph: Graph) -> list[list[str]]:
    """Strongly connected components, each before those that import it (Tarjan 1972, without recursion)."""
    order, low = dict[str, int](), dict[str, int]()
    stack, found = list[str](), list[list[str]]()
    for start in sorted(graph):
        work = [] if start in order else [(start, iter(sorted(graph[start])))]
        while work:
            name, others = work[-1]
            if name not in order:
                order[name] = low[name] = len(order)
                stack.append(name)
            for other in others:
                if other not in order:
                    work.append((other, iter(sorted(graph[other]))))
                    break
                if other in stack:
                    low[name] = min(low[name], order[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == order[name]:
                    found.append(sorted(stack[stack.index(name) :]))
                    del stack[stack.index(name) :]
    return found


def layers_of(graph: Graph) -> dict[str, int]:
    """How far above the ground each room stands: one more than the highest that it imports."""
    layer = dict[str, int]()
    for circle in circles_of(graph):
        below = [layer[other] for name in circle for other in graph[name] if other not in circle]
        layer |= dict.fromkeys(circle, max(below, default=-1) + 1)
    return layer


def implied(graph: Graph, name: str, other: str) -> bool:
    """Whether a room also reaches another by way of a third."""
    seen, waiting = {name, other}, [third for third in graph[name] if third != other]
    while waiting:
        third = waiting.pop()
        if other in graph[third]:
            return True
        waiting += [next_ for next_ in graph[third] if next_ not in seen]
        seen |= graph[third]
    return False


def drawing(tree: Tree, title: str) -> str:
    """An SVG: each room above those it imports; imports that are implied by others are pale, those in a circle red."""
    graph, layer = tree.rooms, layers_of(tree.rooms)
    rows = _arranged(graph, layer)
    labels = {name: _label(tree, name) for name in graph}
    wide = {name: max(64.0, LETTER * max(map(len, labels[name])) + 18) for name in graph}
    total = [sum(wide[name] + GAP for name in row) - GAP for row in rows]
    width, top = max(*total, 640) + 2 * MARGIN, len(rows) - 1
    place = dict[str, tuple[float, float]]()
    for number, row in enumerate(rows):
        x = (width - total[number]) / 2
        for name in row:
            place[name] = (x + wide[name] / 2, TITLE + MARGIN + (top - number) * LAYER)
            x += wide[name] + GAP
    ring = {name: number for number, circle in enumerate(circles_of(graph)) for name in circle}
    lines = [
        _arrow(place[name], place[other], _kind(graph, ring, name, other))
        for name in sorted(graph)
        for other in sorted(graph[name])
    ]
    lines.sort(key=lambda line: ("implied" not in line, "circle" in line))  # what matters is drawn last
    boxes = [_box(place[name], wide[name], labels[name], _look(tree, name)) for name in sorted(graph)]
    high = TITLE + MARGIN + top * LAYER + BOX + MARGIN
    counts = tree.counts()
    said = [f"{count} {what}" for what, count in counts.items()]
    head = f'<text class="title" x="{MARGIN}" y="28">{escape(title)}</text>'
    head += "".join(
        f'<text class="small" x="{MARGIN}" y="{48 + 16 * number}">{escape(" · ".join(part))}</text>'
        for number, part in enumerate((said[:3], said[3:5], said[5:]))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {high:.0f}" role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8" style="fill:none;stroke:#667"/></marker></defs>'
        f'<rect width="100%" height="100%" style="fill:#fff;stroke:none"/>\n{head}\n'
        + "\n".join([*lines, *boxes])
        + "\n</svg>\n"
    )


def _label(tree: Tree, name: str) -> tuple[str, str]:
    if name not in tree.folders:
        return name if name == DOOR else f"{name}.py", ""
    size, knotted = tree.size(name), tree.knotted(name)
    return f"{name}/", f"{size} module{'s' * (size != 1)}" + (f", {knotted} in a cycle" if knotted else "")


def _look(tree: Tree, name: str) -> str:
    return "loose" if name not in tree.folders else "knot" if tree.knotted(name) else "room"


def _kind(graph: Graph, ring: Mapping[str, int], name: str, other: str) -> str:
    if ring[name] == ring[other]:
        return "circle"
    return "implied" if implied(graph, name, other) else "direct"


def _arranged(graph: Graph, layer: Mapping[str, int]) -> list[list[str]]:
    """The rooms of each layer from the ground up, moved beside what they are connected with."""
    rows = [sorted(name for name in graph if layer[name] == number) for number in range(max(layer.values()) + 1)]
    near = {name: graph[name] | {other for other in graph if name in graph[other]} for name in graph}
    for _ in range(8):
        at = {name: (number + 0.5) / len(row) for row in rows for number, name in enumerate(row)}
        for row in rows:
            row.sort(key=lambda name: (sum(at[o] for o in near[name]) / max(len(near[name]), 1), name))
    return rows


def _arrow(start: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    (x, y), (to, down) = start, end
    if math.isclose(y, down):  # rooms of one layer: over the top of those between
        lift = y - 20 - abs(to - x) / 12
        path = f"M{x:.0f} {y:.0f}C{x:.0f} {lift:.0f} {to:.0f} {lift:.0f} {to:.0f} {y:.0f}"
    else:
        middle = (y + BOX + down) / 2
        path = f"M{x:.0f} {y + BOX:.0f}C{x:.0f} {middle:.0f} {to:.0f} {middle:.0f} {to:.0f} {down:.0f}"
    return f'<path class="{kind}" marker-end="url(#tip)" d="{path}"/>'


def _box(place: tuple[float, float], wide: float, label: tuple[str, str], look: str) -> str:
    (x, y), (name, size) = place, label
    text = f'<text x="{x:.0f}" y="{y + (16 if size else 24):.0f}" text-anchor="middle">{escape(name)}</text>'
    if size:
        text += f'<text class="small" x="{x:.0f}" y="{y + 31:.0f}" text-anchor="middle">{size}</text>'
    box = f'<rect x="{x - wide / 2:.0f}" y="{y:.0f}" width="{wide:.0f}" height="{BOX}"/>'
    return f'<g class="{look}">{box}{text}</g>'


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the rooms of a source tree and count its imports.")
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="FOLDER", help="a clone of Hone (this one)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="where the drawing goes")
    parser.add_argument("--title", default="The rooms of hone", help="what the drawing is called")
    given = parser.parse_args()
    tree = read(given.tree / "src" / "hone")
    for what, count in (lengths(given.tree / "src" / "hone", tree) | tree.counts()).items():
        print(f"{count:6} {what}")
    if given.svg:
        given.svg.write_text(drawing(tree, given.title), encoding="utf-8")


if __name__ == "__main__":
    main()
