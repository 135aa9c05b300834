"""The house keeps its floors: imports point down, the wings meet only in the trainer, the applications do not
meet.

Read with the standard library's ``ast``; imports inside functions count, imports for type checkers do not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {
    "errors": 0,
    "ctrl_c": 0,
    "memory": 1,
    "digest": 2,
    "config": 1,
    "governor": 1,
    "profiles": 1,
    "wire": 2,
    "ticket": 2,
    "schedule": 2,
    "codec": 2,
    "outer": 2,
    "fragments": 2,
    "averaging": 2,
    "checkpoint": 2,
    "recipes": 2,
    "heartbeat": 3,
    "telemetry": 3,
    "membership": 4,
    "outlook": 4,
    "rounds": 4,
    "catchup": 4,
    "reports": 4,
    "process": 4,
    "gate": 4,
    "transport": 5,
    "discovery": 5,
    "planning": 5,
    "peer_options": 5,
    "run_recipe": 5,
    "trained": 5,
    "node": 6,
    "simnet": 6,
    "observer": 7,
    "trainer": 7,
    "peers": 8,
    "bootstrap": 8,
    "monitoring": 8,
    "demo_watch": 9,
    "rehearsal_watch": 9,
    "simulation_watch": 9,
    "cli_checks": 9,
    "join_watch": 9,
    "cli_views": 9,
    "cli": 9,
}
TENSOR_WING = {"codec", "outer", "fragments", "averaging", "checkpoint", "recipes"}
MESSAGE_WING = {
    "wire",
    "ticket",
    "membership",
    "rounds",
    "catchup",
    "reports",
    "transport",
    "discovery",
    "node",
    "simnet",
    "observer",
}
MACHINES = {"membership", "rounds", "catchup", "reports", "governor"}
APPLICATIONS = {"peers", "bootstrap", "monitoring"}
NO_TORCH = MESSAGE_WING | {
    "errors",
    "config",
    "governor",
    "planning",
    "profiles",
    "schedule",
    "telemetry",
    "monitoring",
}
LARGEST_FILE_LINES = 600


def sources() -> list[Path]:
    folders = ("p2p_co2", *sorted(APPLICATIONS))
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "_pb2" not in path.name
    ]


def room_of(module: str) -> str:
    """The room that a dotted module name belongs to, or "" for one that is not ours."""
    parts = module.split(".")
    if parts[0] in APPLICATIONS:
        return parts[0]
    return parts[1] if parts[0] == "p2p_co2" and len(parts) > 1 else ""


def room_of_file(path: Path) -> str:
    return room_of(".".join(path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports when it runs."""
    skipped: set[ast.AST] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(child for statement in node.body for child in ast.walk(statement))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def our_imports(path: Path) -> set[str]:
    return {room for name in imports(path) if (room := room_of(name)) in FLOORS}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    room = room_of_file(path)
    if path == ROOT / "p2p_co2" / "__init__.py":
        return  # the front door names the rooms it leads to, and loads them when they are used
    if path.name == "__main__.py":
        return  # an entry point stands above every floor; nothing imports it
    assert room in FLOORS, f"{path}: a new room needs a floor in this test and in the README"
    above = {other for other in our_imports(path) if FLOORS[other] > FLOORS[room]}
    assert not above, f"{path} reaches up to {above}"


def test_no_cycles_between_rooms() -> None:
    graph: dict[str, set[str]] = {room: set() for room in FLOORS}
    for path in sources():
        if path.name != "__main__.py" and (room := room_of_file(path)) in FLOORS:
            graph[room] |= our_imports(path) - {room}
    done: set[str] = set()

    def visit(room: str, trail: tuple[str, ...]) -> None:
        assert room not in trail, " -> ".join((*trail, room))
        if room not in done:
            for other in graph[room]:
                visit(other, (*trail, room))
            done.add(room)

    for room in graph:
        visit(room, ())


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_wings_and_machines_do_not_know_what_they_must_not(path: Path) -> None:
    room, names = room_of_file(path), set(imports(path))
    top = {name.split(".")[0] for name in names}
    if room in NO_TORCH:
        assert not top & {"torch", "bitsandbytes"}, f"{path} is in the message wing and imports torch"
    if room in MESSAGE_WING:
        assert not our_imports(path) & TENSOR_WING, path
    if room in TENSOR_WING:
        assert not our_imports(path) & MESSAGE_WING, path
        assert not top & {"asyncio", "socket", "grpc", "hivemind"}, path
    if room in MACHINES:
        assert not top & {"asyncio", "time", "socket", "random", "threading"}, (
            f"{path}: a machine has no clock"
        )
    if room in APPLICATIONS:
        assert not our_imports(path) & (APPLICATIONS - {room}), f"{path}: applications do not meet"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_house_rules(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)) or not text.strip(), f"{path} does not say what it is for"
    assert len(text.splitlines()) <= LARGEST_FILE_LINES, f"{path} is two rooms"
    assert not re.search(r"^\s*(import|from) (pickle|dill|cloudpickle)\b", text, re.MULTILINE)
    assert not re.search(r"except[^\n]*:\s*\n\s*pass\s*$", text, re.MULTILINE), f"{path} swallows an error"
    assert not re.search(r"except\s*:", text), path


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_docstring_stands_behind_another(path: Path) -> None:
    """It would be of a name that something else was put before."""

    def is_text(node: ast.stmt) -> bool:
        value = node.value if isinstance(node, ast.Expr) else None
        return isinstance(value, ast.Constant) and isinstance(value.value, str)

    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for first, second in pairwise(body if isinstance(body, list) else []):
            assert not (is_text(first) and is_text(second)), f"{path}:{second.lineno}"


def test_broad_excepts_stand_in_named_places_only() -> None:
    places = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sources()
        for line in path.read_text().splitlines()
        if re.search(r"except Exception", line)
    ]
    assert len(places) <= 2, places
    assert all("# named place" in place for place in places), places


def test_the_readme_draws_the_house_as_it_stands() -> None:
    readme = (ROOT / "README.md").read_text()
    tree = readme[readme.index("## The house") :]
    for path in sorted((ROOT / "p2p_co2").iterdir()):
        if path.suffix == ".py" or path.is_dir():
            name = path.stem if path.suffix == ".py" else path.name
            if name.startswith("__") or name in {"py"}:
                continue
            assert re.search(rf"\b{re.escape(name)}\b", tree), f"the README's tree lacks {name}"
    for folder in ("peers", "bootstrap", "monitoring", "tests", "benchmarks", "examples", "docs"):
        assert (ROOT / folder).is_dir()
        assert f"{folder}/" in tree, f"the README's tree lacks {folder}/"
