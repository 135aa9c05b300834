"""The extras: named as in pyproject.toml, told in one line where they are missing, not imported to look."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from p2p_co2.errors import EnvironmentFault
from p2p_co2.system import extras

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_extras_are_those_of_the_project_and_all_is_all_of_them() -> None:
    offered = PROJECT["optional-dependencies"]
    assert offered.keys() - {"all", "dev"} == extras.LIBRARIES.keys()
    (everything,) = offered["all"]
    assert set(everything.removeprefix("p2p-co2[").removesuffix("]").split(",")) == extras.LIBRARIES.keys()


def test_nobody_is_told_to_ask_the_index_for_a_name_that_is_not_ours() -> None:
    kinds, asked = {".py", ".md", ".toml", ".txt", ".service", ".yml", ".json", ""}, []
    for path in ROOT.rglob("*"):
        place = path.relative_to(ROOT)
        if place.parts[0].startswith(".") or place.parts[0] in {"shared", "runs", "build", "site"}:
            continue
        if path.is_file() and path.suffix in kinds and place.parts != ("docs", "LOG.md"):
            text = path.read_text(encoding="utf-8", errors="replace")
            asked += [str(place)] * bool(re.search(r"pipx? install (-\S+ )*['\"]?p2p[-_]co2", text))
    assert not asked


def test_what_is_missing_is_told_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not extras.missing("board")
    extras.require("board", "the board")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert extras.missing("board") == "needs an extra: pip install '.[board]' in a clone of p2p-co2"
    with pytest.raises(
        EnvironmentFault,
        match=r"^the board needs an extra: pip install '\.\[board\]' in a clone of p2p-co2$",
    ):
        extras.require("board", "the board")


def test_looking_imports_nothing_nor_do_codecs_that_do_not_need_it() -> None:
    script = (
        "import sys\nfrom p2p_co2.system.extras import LIBRARIES, missing\n"
        "for extra in LIBRARIES: missing(extra)\n"
        "print(sorted({name for names in LIBRARIES.values() for name in names} & set(sys.modules)))\n"
        "import p2p_co2.trainer\nfrom p2p_co2.tensors.codec import get_codec\nget_codec('q2')\n"
        "print('bitsandbytes' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert told.stdout == "[]\nFalse\n"


FORBID = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"nicegui", "prometheus_client", "matplotlib", "fastapi", "uvicorn"}:
            raise ImportError(f"{name} is forbidden here")
sys.meta_path.insert(0, Forbid())
from p2p_co2.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["board", "."], "the board needs an extra: pip install '.[board]' in a clone of p2p-co2"),
        (
            ["plan", "examples/run.toml", "--step-s", "1", "--parameters", "9", "--plot", "it.png"],
            "--plot needs an extra: pip install '.[plot]' in a clone of p2p-co2",
        ),
    ],
)
def test_a_command_that_needs_an_extra_says_so(command: list[str], line: str) -> None:
    told = subprocess.run(
        [sys.executable, "-c", FORBID, *command],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (told.returncode, told.stdout, told.stderr) == (1, "", f"error: {line}\n")
