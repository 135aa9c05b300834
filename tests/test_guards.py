"""The guards of a change: command lines are those of the benchmarks, and each checkout is asked in its own
words."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from laboratory import load

guards = load("guards")


@pytest.mark.parametrize("name", [name for name, guard in guards.GUARDS.items() if guard.new[0] != "-m"])
def test_a_guard_is_a_command_of_its_benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, *words = guards.GUARDS[name].new
    module = load(Path(script).stem)
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(module, "run", lambda parser, workers=None: parsers.append(parser))
    module.main()
    assert callable(parsers[0].parse_args(words).run_it)


def checkout(folder: Path, script: str, answer: object, is_old: bool) -> Path:
    (folder / "benchmarks").mkdir(parents=True)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    text = f"import sys; print({json.dumps(json.dumps(answer))}); sys.exit('fail' in sys.argv)"
    (folder / "benchmarks" / f"{script}.py").write_text(text)
    if not is_old:
        (folder / "benchmarks" / "common.py").touch()
    return folder


@pytest.mark.swarm
def test_each_checkout_is_asked_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = guards.Guard(
        ("benchmarks/new.py",), {"speed": (("a", "b"), 0.9, False)}, ("benchmarks/old.py",), {"speed": ("c",)}
    )
    monkeypatch.setattr(guards, "GUARDS", {"one": guard})
    monkeypatch.setattr(guards, "ROOT", checkout(tmp_path / "here", "new", {"a": {"b": 0.95}}, is_old=False))
    beside = checkout(tmp_path / "beside", "old", {"c": 1.0}, is_old=True)
    table = guards.measure(argparse.Namespace(beside=beside, pairs=2, only=None, more=False))
    expected = {"here": 0.95, "here_all": [0.95] * 2, "beside": 1.0, "beside_all": [1.0] * 2, "met": True}
    assert table["speed"] == {"bar": 0.9, "bar_is_the_most": False, **expected}


@pytest.mark.parametrize("words", [("benchmarks/new.py", "fail"), ("benchmarks/gone.py",)])
def test_a_command_that_fails_gives_no_figure(words: tuple[str, ...], tmp_path: Path) -> None:
    place = checkout(tmp_path / "here", "new", {"a": 1.0}, is_old=False)
    assert guards.ask(place, guards.Guard(words, {"speed": (("a",), 0.9, False)})) == {}
