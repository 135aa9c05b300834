"""The guards of a change: command lines are those of the benchmarks, and two checkouts stand side by side."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from laboratory import load

guards = load("guards")


@pytest.mark.parametrize("name", [name for name, guard in guards.GUARDS.items() if guard.words[0] != "-m"])
def test_a_guard_is_a_command_of_its_benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, *words = guards.GUARDS[name].words
    module = load(Path(script).stem)
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(module, "run", lambda parser, workers=None: parsers.append(parser))
    module.main()
    assert callable(parsers[0].parse_args(words).run_it)


def test_two_checkouts_take_turns_and_stand_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, given = list[str](), iter([0.95, 1.0, 1.1, 0.85])
    guard = guards.Guard(("benchmarks/one.py",), {"speed": (("a", "b"), 0.9, False)})
    monkeypatch.setattr(guards, "GUARDS", {"one": guard})
    monkeypatch.setattr(guards, "ROOT", Path("/here"))

    def ask(place: Path, guard: object) -> dict[str, float]:
        asked.append(place.name)
        return {"speed": next(given)}

    monkeypatch.setattr(guards, "ask", ask)
    table = guards.measure(argparse.Namespace(beside=Path("/beside"), pairs=2, only=None, more=False))
    expected = {"here": 0.9, "here_all": [0.95, 0.85], "beside": 1.05, "beside_all": [1.0, 1.1], "met": True}
    assert table["speed"] == {"bar": 0.9, "bar_is_the_most": False, **expected}
    assert asked == ["here", "beside", "beside", "here"]


@pytest.mark.parametrize("words", [("benchmarks/new.py", "fail"), ("benchmarks/gone.py",)])
def test_a_command_that_fails_gives_no_figure(words: tuple[str, ...], tmp_path: Path) -> None:
    for folder in ("benchmarks", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    text = f"import sys; print({json.dumps(json.dumps({'a': 1.0}))}); sys.exit('fail' in sys.argv)"
    (tmp_path / "benchmarks" / "new.py").write_text(text)
    assert guards.ask(tmp_path, guards.Guard(words, {"speed": (("a",), 0.9, False)})) == {}
