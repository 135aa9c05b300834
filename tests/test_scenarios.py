"""The scenarios of ``tests/scenarios``: each room does what its files say (see ``runner``)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.scenarios import runner

rewrite = cache(runner.rewrite)
"""Once for all scenarios of a file."""


@pytest.mark.parametrize("scenario", runner.scenarios(), ids=str)
def test_scenario(scenario: runner.Scenario, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite-scenarios"):
        rewrite(scenario.path)
        pytest.skip("its file was written anew")
    wrong = scenario.play()
    assert not wrong, "\n".join(["what is expected (-) and what is said (+):", *wrong])


ADDING = """\
=== Sums are added
# A comment.
add 1 2
    to: 3
----
6

refuse
add 7

add 4
----
wrong
=== It begins anew
add 1
"""


class Adding:
    def add(self, *words: str, to: str = "0") -> str:
        return str(sum(map(int, words)) + int(to))

    def refuse(self) -> None:
        raise runner.RemoteProtocolError("bad sum", "of nothing")


def test_a_difference_is_told_with_its_line_and_rewriting_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sums"
    folder.mkdir()
    path = folder / "sums.txt"
    path.write_text(ADDING)
    monkeypatch.setattr(runner, "FOLDER", tmp_path)
    monkeypatch.setattr(runner, "import_module", lambda name: type("module", (), {"Room": Adding}))
    first, second = runner.scenarios()
    assert (first.title, second.title) == ("Sums are added", "It begins anew")
    assert first.play() == [
        f"{path}:8: refuse", "  + refused: bad sum", f"{path}:9: add", "  + 7",
        f"{path}:11: add", "  - wrong", "  + 4",
    ]  # fmt: skip
    runner.rewrite(path)
    assert [scenario.play() for scenario in runner.scenarios()] == [[], []]
    assert path.read_text() == (
        ADDING.replace("refuse\nadd 7\n", "refuse\n----\nrefused: bad sum\n\nadd 7\n----\n7\n").replace(
            "wrong", "4"
        )
        + "----\n1\n"
    )
    runner.rewrite(path)
    assert len(runner.scenarios()) == 2
