"""The figures of the house: its size, its import circles, its classes, its constants, its tests.

``python -m tests.house`` prints them, each beside its bar; ``--list`` names what is over a bar. The
architecture test reads the same functions. Only the standard library's ``ast`` is used: nothing of the
product is imported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("p2p_co2", "peers", "bootstrap", "monitoring")
SUFFIXES = {".py", ".c", ".proto", ".css"}
MOST_ATTRIBUTES, MOST_METHODS = 15, 25
BARS = {
    "product lines": 33_000,
    "product files": None,
    "import circles": 0,
    "files in import circles": 0,
    f"classes with more than {MOST_ATTRIBUTES} attributes or {MOST_METHODS} methods": 3,
    "parts that are given the whole that makes them": 0,
    "module constants of time": 100,
    "numeric module constants": 300,
    "docstrings that refer to a document that is not here": 0,
    "test lines": 28_000,
    "uses of another object's private attributes in tests": 50,
}


@cache
def product_files() -> tuple[Path, ...]:
    """Every product file that we write by hand: what the schema's compiler makes is left out."""
    return tuple(
        path
        for folder in PRODUCT
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SUFFIXES and "_pb2" not in path.name
    )


@cache
def sources() -> tuple[Path, ...]:
    """The product's Python files."""
    return tuple(path for path in product_files() if path.suffix == ".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_of(path: Path) -> str:
    """The dotted name that a file is imported by."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def lines_of(paths: Iterator[Path] | tuple[Path, ...]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere: at its head, in functions, for type checkers."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return found


@cache
def import_graph() -> dict[str, frozenset[str]]:
    """Each product module and those that it imports. The front door's lazy names are left out."""
    modules = {module_of(path) for path in sources()}
    graph = {}
    for path in sources():
        own = module_of(path)
        direct = imports(path) & modules
        # ``from a.b import c`` names a.b too: where a.b.c is a module, it is the one that is meant.
        meant = {
            name
            for name in direct
            if not any(other.startswith(name + ".") for other in direct) or _names_more(path, name, modules)
        }
        graph[own] = frozenset(() if own == "p2p_co2" else meant - {own, "p2p_co2"})
    return graph


def _names_more(path: Path, module: str, modules: set[str]) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module == module
        and any(f"{module}.{name.name}" not in modules for name in node.names)
        for node in ast.walk(tree_of(path))
    )


def circles() -> list[list[str]]:
    """Groups of modules that reach each other by imports (Tarjan's strongly connected components)."""
    graph, index, low = import_graph(), {}, {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return sorted(found)


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Every class of the product, as ``module.Class``."""
    for path in sources():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                yield f"{module_of(path)}.{node.name}", node


def attributes_of(node: ast.ClassDef) -> set[str]:
    """What an object of the class holds that its own methods set: ``self.x = ...``."""
    found = set()
    for child in ast.walk(node):
        targets = (
            child.targets
            if isinstance(child, ast.Assign)
            else [child.target]
            if isinstance(child, ast.AnnAssign | ast.AugAssign)
            else []
        )
        for target in targets:
            for leaf in ast.walk(target):
                if (
                    isinstance(leaf, ast.Attribute)
                    and isinstance(leaf.value, ast.Name)
                    and leaf.value.id == "self"
                    and isinstance(leaf.ctx, ast.Store)
                ):
                    found.add(leaf.attr)
    return found


def large_classes() -> dict[str, int]:
    """Classes with too many attributes, and how many."""
    return {name: len(held) for name, node in classes() if len(held := attributes_of(node)) > MOST_ATTRIBUTES}


def long_classes() -> dict[str, int]:
    """Classes with too many methods, and how many."""
    return {
        name: count
        for name, node in classes()
        if (count := sum(isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) for child in node.body))
        > MOST_METHODS
    }


def wholes_given_away() -> list[str]:
    """``Part(self, ...)`` inside of a class: a part is given the whole that makes it."""
    names = {node.name for _, node in classes()}
    return sorted(
        f"{where}: {call.func.id}(self)"
        for where, node in classes()
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in names
        and any(
            isinstance(given, ast.Name) and given.id == "self"
            for given in (*call.args, *(keyword.value for keyword in call.keywords))
        )
    )


def numeric_constants() -> list[str]:
    """Module constants whose value is a number or arithmetic on numbers, as ``module.NAME``."""

    def is_number(value: ast.expr) -> bool:
        if isinstance(value, ast.Constant):
            return isinstance(value.value, int | float) and not isinstance(value.value, bool)
        if isinstance(value, ast.BinOp):
            return is_number(value.left) and is_number(value.right)
        if isinstance(value, ast.UnaryOp):
            return is_number(value.operand)
        return isinstance(value, ast.Name) and value.id.isupper()

    found = []
    for path in sources():
        for node in tree_of(path).body:
            target = (
                node.targets[0]
                if isinstance(node, ast.Assign)
                else node.target
                if isinstance(node, ast.AnnAssign)
                else None
            )
            if isinstance(target, ast.Name) and target.id.isupper() and node.value and is_number(node.value):
                found.append(f"{module_of(path)}.{target.id}")
    return found


def time_constants() -> list[str]:
    """Of these the durations: seconds, minutes and so on, by their names."""
    return [name for name in numeric_constants() if re.search(r"_(S|MS|US|NS|HOURS|MINUTES|DAYS)$", name)]


def foreign_documents() -> list[str]:
    """Docstrings and comments that point at a document that is not in the repository."""
    pattern = re.compile(r"\bPIPELINE\.md\b|\b(DESIGN|ALGORITHMS|HOUSE|STYLE|USERS|HIVEMIND)(\.md)?\b")
    return [
        f"{module_of(path)}: {match[0]}"
        for path in sources()
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]


def test_files() -> tuple[Path, ...]:
    return tuple(sorted((ROOT / "tests").rglob("*.py")))


def private_uses() -> dict[str, int]:
    """How often each test file reads or sets ``other._name``, where other is not ``self`` or ``cls``."""
    found: dict[str, int] = defaultdict(int)
    for path in test_files():
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.Attribute)
                and re.match(r"_[^_]", node.attr)
                and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
                and not node.attr.startswith("_replace")
            ):
                found[path.name] += 1
    return dict(found)


def figures() -> dict[str, int]:
    """Every figure by its name in ``BARS``."""
    groups = circles()
    values = [
        lines_of(product_files()),
        len(product_files()),
        len(groups),
        sum(map(len, groups)),
        len(large_classes().keys() | long_classes().keys()),
        len(wholes_given_away()),
        len(time_constants()),
        len(numeric_constants()),
        len(foreign_documents()),
        lines_of(test_files()),
        sum(private_uses().values()),
    ]
    return dict(zip(BARS, values, strict=True))


def print_figures() -> None:
    for name, value in figures().items():
        bar = BARS[name]
        verdict = "" if bar is None else "met" if value <= bar else "over"
        print(f"{name:56} {value:7,} {'' if bar is None else f'{bar:7,}':>7} {verdict}")


def print_offenders() -> None:
    for group in circles():
        print("circle:", *group)
    for title, table in (("attributes", large_classes()), ("methods", long_classes())):
        for name, count in sorted(table.items(), key=lambda item: -item[1]):
            print(f"{title}: {count} {name}")
    for line in wholes_given_away():
        print("whole:", line)
    for line in foreign_documents():
        print("document:", line)


if __name__ == "__main__":
    print_figures()
    if "--list" in sys.argv:
        print_offenders()
