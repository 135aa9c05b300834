"""The figures of the house: its size, its import circles, its classes and names, its constants, its
sentences, its tests.

``python -m tools.house`` prints them, each beside its bar; ``--list`` names what is over a bar. The
architecture test reads the same functions. Only the standard library's ``ast`` is used: nothing of the
product is imported.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tools import prose

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("p2p_co2", "peers", "bootstrap", "monitoring")
SUFFIXES = {".py", ".c", ".proto", ".css"}
MOST_ATTRIBUTES, MOST_METHODS = 15, 25
BARS: dict[str, float | None] = {
    "product lines": 43_500,
    "product files": None,
    "lines of benchmarks": 5_000,
    "files of benchmarks": 15,
    "lines of tools": None,
    "test lines": 28_000,
    "import circles": 0,
    "files in import circles": 0,
    f"classes with more than {MOST_ATTRIBUTES} attributes or {MOST_METHODS} methods": 3,
    "class names that stand for two things": 10,
    "parts that are given the whole that makes them": 0,
    "assignments that pack several values, %": 3,
    "module constants of time": 100,
    "numeric module constants": 350,
    f"sentences of docstrings over {prose.MOST_WORDS} words, %": 2,
    "docstrings that refer to a document that is not here": 0,
    "test functions that start processes": 45,
    "uses of another object's private attributes in tests": 50,
}
"""What each figure may be at most; None: only told. A figure is compared as it is, not rounded."""


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


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All of a file's tree, walked once."""
    return tuple(ast.walk(tree_of(path)))


def module_of(path: Path) -> str:
    """The dotted name that a file is imported by."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def lines_of(paths: Iterator[Path] | tuple[Path, ...]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names that a file imports anywhere: at its head, in functions, for type checkers."""
    found = set[str]()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return frozenset(found)


@cache
def import_graph() -> dict[str, frozenset[str]]:
    """Each product module and those that it imports. The front door's lazy names count: it names them for
    type checkers."""
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
        graph[own] = frozenset(meant - {own})
    return graph


def _names_more(path: Path, module: str, modules: set[str]) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module == module
        and any(f"{module}.{name.name}" not in modules for name in node.names)
        for node in nodes_of(path)
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


@cache
def classes() -> tuple[tuple[str, ast.ClassDef], ...]:
    """Every class of the product, as ``module.Class``."""
    return tuple(
        (f"{module_of(path)}.{node.name}", node)
        for path in sources()
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    )


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


def assignments() -> Iterator[ast.Assign]:
    """Every plain assignment of the product."""
    for path in sources():
        yield from (node for node in nodes_of(path) if isinstance(node, ast.Assign))


def packed_share() -> float:
    """Of all assignments those that give several names a value each at once (``a, b = 1, 2``), in percent."""
    every = list(assignments())
    packed = [
        node for node in every if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    ]
    return 100 * len(packed) / len(every)


def numeric_constants() -> list[str]:
    """Module constants whose value is a number or arithmetic on numbers, as ``module.NAME``.

    Of ``A, B = 1, 2`` each is one."""

    def is_number(value: ast.expr) -> bool:
        if isinstance(value, ast.Constant):
            return isinstance(value.value, int | float) and not isinstance(value.value, bool)
        if isinstance(value, ast.BinOp):
            return is_number(value.left) and is_number(value.right)
        if isinstance(value, ast.UnaryOp):
            return is_number(value.operand)
        return isinstance(value, ast.Name) and value.id.isupper()

    def given(node: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
        if isinstance(node, ast.AnnAssign) and node.value:
            yield node.target, node.value
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                yield from zip(target.elts, value.elts, strict=False)
            else:
                yield target, value

    return [
        f"{module_of(path)}.{target.id}"
        for path in sources()
        for node in tree_of(path).body
        for target, value in given(node)
        if isinstance(target, ast.Name) and target.id.isupper() and is_number(value)
    ]


def time_constants() -> list[str]:
    """Of these the durations: seconds, minutes and so on, by their names."""
    return [name for name in numeric_constants() if re.search(r"_(S|MS|US|NS|HOURS|MINUTES|DAYS)$", name)]


def ambiguous_names() -> dict[str, list[str]]:
    """Class names that are defined in several places, and where."""
    found: dict[str, list[str]] = defaultdict(list)
    for where, node in classes():
        found[node.name].append(where.rpartition(".")[0])
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def docstrings() -> Iterator[tuple[str, str]]:
    """Every docstring, those of constants and fields too, with its module."""
    for path in sources():
        for node in nodes_of(path):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield module_of(path), inspect.cleandoc(node.value.value)


def long_sentences() -> list[tuple[str, str]]:
    """Sentences of docstrings that are too long, each with its module."""
    return [(where, sentence) for where, text in docstrings() for sentence in prose.long_ones(text)]


def long_share() -> float:
    """Of all sentences of docstrings those that are too long, in percent."""
    return 100 * len(long_sentences()) / sum(len(prose.sentences(text)) for _, text in docstrings())


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


def process_tests() -> list[str]:
    """Test functions that are marked ``swarm``: they start processes.

    ``tests/conftest.py`` sees to it that no other one does."""

    def is_marked(nodes: list[ast.expr] | list[ast.stmt]) -> bool:
        return any("mark.swarm" in ast.unparse(node) for node in nodes)

    found = []
    for path in test_files():
        assigned = [node for node in tree_of(path).body if isinstance(node, ast.Assign)]
        whole = is_marked([node for node in assigned if "pytestmark" in ast.unparse(node)])
        found += [
            f"{path.stem}.{node.name}"
            for node in nodes_of(path)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name.startswith("test_")
            and (whole or is_marked(node.decorator_list))
        ]
    return found


def python_files(folder: str) -> tuple[Path, ...]:
    return tuple(sorted((ROOT / folder).rglob("*.py")))


def private_uses() -> dict[str, int]:
    """How often each test file reads or sets ``other._name``, where other is not ``self`` or ``cls``."""
    found: dict[str, int] = defaultdict(int)
    for path in test_files():
        for node in nodes_of(path):
            if (
                isinstance(node, ast.Attribute)
                and re.match(r"_[^_]", node.attr)
                and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
                and not node.attr.startswith("_replace")
            ):
                found[path.name] += 1
    return dict(found)


def figures() -> dict[str, float]:
    """Every figure by its name in ``BARS``."""
    groups = circles()
    values: list[float] = [
        lines_of(product_files()),
        len(product_files()),
        lines_of(python_files("benchmarks")),
        len(python_files("benchmarks")),
        lines_of(python_files("tools")),
        lines_of(test_files()),
        len(groups),
        sum(map(len, groups)),
        len(large_classes().keys() | long_classes().keys()),
        len(ambiguous_names()),
        len(wholes_given_away()),
        packed_share(),
        len(time_constants()),
        len(numeric_constants()),
        long_share(),
        len(foreign_documents()),
        len(process_tests()),
        sum(private_uses().values()),
    ]
    return dict(zip(BARS, values, strict=True))


def print_figures() -> None:
    for name, value in figures().items():
        bar = BARS[name]
        verdict = "" if bar is None else "met" if value <= bar else "over"
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.1f}"
        print(f"{name:56} {shown:>7} {'' if bar is None else f'{bar:7,}':>7} {verdict}")


def print_offenders(rooms: list[str]) -> None:
    """Of all rooms, or of those whose dotted names begin like one of these."""

    def wanted(where: str) -> bool:
        return not rooms or any(where.startswith(room) for room in rooms)

    for group in circles():
        print("circle:", *group)
    for title, table in (("attributes", large_classes()), ("methods", long_classes())):
        for name, count in sorted(table.items(), key=lambda item: -item[1]):
            print(f"{title}: {count} {name}")
    for name, places in ambiguous_names().items():
        if any(map(wanted, places)):
            print("name:", name, *places)
    for line in [*wholes_given_away(), *foreign_documents()]:
        print("whole or document:", line)
    for path in sources():
        for node in nodes_of(path):
            if isinstance(node, ast.Assign) and wanted(module_of(path)):
                target, value = node.targets[0], node.value
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    print(f"packed: {path.relative_to(ROOT)}:{node.lineno}")
    for where, sentence in long_sentences():
        if wanted(where):
            print(f"long: {where}: {sentence}")


if __name__ == "__main__":
    if "--list" in sys.argv:
        print_offenders([name for name in sys.argv[1:] if name != "--list"])
    else:
        print_figures()
