"""The house keeps its floors: imports point down, the wings meet only in the trainer, the applications do not
meet, and no class, circle or part outgrows the rules.

Read with the standard library's ``ast`` by ``tools.house``: imports in functions and for type checkers count.
"""

from __future__ import annotations

import ast
import re
from itertools import pairwise

from tools import house

ROOT = house.ROOT
FLOORS = (
    {"errors", "system", "digest", "codec_specs", "rule_specs", "version"},
    {"config", "telemetry", "wire", "scores", "planning.profiles"},
    {"ticket", "tensors"},
    {"protocol", "recipes"},
    {"net", "peer_options", "trained", "planning"},
    {"node"},
    {"trainer"},
    {"peers", "bootstrap", "monitoring", "simnet", "swarm", "integrations"},
    {"cli", "testing"},
)
"""From the ground up. A room stands on the floor of its longest name that is listed."""
FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}
MESSAGE_WING = {"wire", "protocol", "net", "node", "ticket"}
APPLICATIONS = {"peers", "bootstrap", "monitoring"}
NO_TORCH = MESSAGE_WING | {
    "errors",
    "config",
    "codec_specs",
    "rule_specs",
    "system",
    "planning",
    "telemetry",
    "digest",
    "scores",
    "monitoring",
}
MACHINES = {"protocol.membership", "protocol.rounds", "protocol.catchup", "protocol.reports"}

TOO_LARGE = {
    "p2p_co2.protocol.rounds.fragment.FragmentRounds": "all states of a fragment's rounds in one place, a"
    " method for each message and event that moves it from one to another",
    "p2p_co2.protocol.rounds.machine.Rounds": "the door of the room: what node, trainer and catch-up ask",
    "p2p_co2.protocol.pipeline.machine.Pipeline": "one state machine of the seven phases of a microbatch",
}
"""The classes that may be larger than the rule, each with its reason."""
REACHED = {
    "product lines": 56_074,
    "test lines": 42_312,
    "module constants of time": 123,
    "numeric module constants": 514,
    "test functions that start processes": 76,
}
"""Figures of the house that miss their bars, as far as they have come. They only fall."""


def room_of(module: str) -> str:
    """The longest listed room that a dotted module name lies in, or "" for one that is not ours."""
    name = module.removeprefix("p2p_co2.")
    while name and name not in FLOOR_OF:
        name = name.rpartition(".")[0]
    return name


def wing_of(module: str) -> str:
    """The folder directly under ``p2p_co2``, or the application."""
    return module.removeprefix("p2p_co2.").partition(".")[0]


def test_imports_point_down() -> None:
    above = []
    for path in house.sources():
        # The front door names the rooms it leads to; an entry point stands above every floor.
        if path == ROOT / "p2p_co2" / "__init__.py" or path.name == "__main__.py":
            continue
        module = house.module_of(path)
        room = room_of(module)
        assert room or module.count(".") == 1, f"{path}: a new room needs a floor in this test"
        floor, others = FLOOR_OF.get(room, -1), house.import_graph()[module]
        above += [f"{module}: {other}" for other in others if FLOOR_OF.get(room_of(other), -1) > floor]
    assert not above


def test_wings_and_machines_do_not_know_what_they_must_not() -> None:
    for path in house.sources():
        module = house.module_of(path)
        wing, tops = wing_of(module), {name.split(".")[0] for name in house.imports(path)}
        wings = {wing_of(name) for name in house.import_graph()[module]}
        if wing in NO_TORCH:
            assert not tops & {"torch", "bitsandbytes"}, f"{path} is in the message wing and imports torch"
        if wing in MESSAGE_WING:
            assert "tensors" not in wings, path
        if wing == "tensors":
            assert not wings & MESSAGE_WING, path
            assert not tops & {"asyncio", "socket", "grpc", "hivemind"}, path
        if room_of(module) in MACHINES:
            clocks = {"asyncio", "time", "socket", "random", "threading"}
            assert not tops & clocks, f"{path}: a machine has no clock"
        if wing in APPLICATIONS:
            assert not wings & (APPLICATIONS - {wing}), f"{path}: applications do not meet"


def test_the_rules_of_the_house() -> None:
    """See ``python -m tools.house --list``."""
    assert not house.circles()
    assert house.large_classes().keys() | house.long_classes().keys() <= TOO_LARGE.keys()
    assert not house.wholes_given_away()
    over = {
        name: value
        for name, value in house.figures().items()
        if (bar := house.BARS[name]) is not None and not name.startswith("classes with more")
        if value > max(bar, REACHED.get(name, bar))
    }
    assert not over


def test_files_say_what_they_are_for_and_hide_nothing() -> None:
    """And no docstring stands behind another: it would be of a name that something else was put before."""

    def is_text(node: ast.stmt) -> bool:
        value = node.value if isinstance(node, ast.Expr) else None
        return isinstance(value, ast.Constant) and isinstance(value.value, str)

    broad = []
    for path in house.sources():
        text, tree = path.read_text(encoding="utf-8"), house.tree_of(path)
        assert ast.get_docstring(tree) or not text.strip(), f"{path} does not say what it is for"
        assert not re.search(r"^\s*(import|from) (pickle|dill|cloudpickle)\b", text, re.MULTILINE), path
        assert not re.search(r"except[^\n]*:\s*\n\s*pass\s*$", text, re.MULTILINE), (
            f"{path} swallows an error"
        )
        assert not re.search(r"except\s*:", text), path
        broad += [f"{path}: {line}" for line in text.splitlines() if "except Exception" in line]
        for body in (getattr(node, "body", None) for node in ast.walk(tree)):
            for first, second in pairwise(body if isinstance(body, list) else []):
                assert not (is_text(first) and is_text(second)), f"{path}:{second.lineno}"
    assert len(broad) <= 2, broad
    assert all("# named place" in place for place in broad), broad


def test_the_page_of_the_architecture_draws_the_same_floors() -> None:
    drawn = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    floors: dict[int, set[str]] = {}
    for line in filter(str.strip, drawn.splitlines()):
        if (named := line[:10].split()) and named[0] == "floor":
            floor = int(named[1])
        floors.setdefault(floor, set()).update(re.split(r" {3,}", line[10:].strip())[0].split())
    assert floors == dict(enumerate(FLOORS))


def test_the_page_of_the_architecture_draws_the_house_as_it_stands() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    tree = page[page.index("## The house") : page.index("## The way of one fragment")]
    for path in sorted((ROOT / "p2p_co2").iterdir()):
        if path.suffix == ".py" or path.is_dir():
            name = path.stem if path.suffix == ".py" else path.name
            if name.startswith("__") or name in {"py"}:
                continue
            assert re.search(rf"\b{re.escape(name)}\b", tree), f"the page's tree lacks {name}"
    for folder in ("peers", "bootstrap", "monitoring", "tests", "benchmarks", "tools", "examples", "docs"):
        assert (ROOT / folder).is_dir()
        assert f"{folder}/" in tree, f"the page's tree lacks {folder}/"
