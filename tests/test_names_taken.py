"""A user's own modules may have the names of our packages: each runs what is its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2p_co2.system.process import program
from tests.test_architecture import ROOT

NAMES = ("peers", "bootstrap", "monitoring", "tests", "program", "process")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's folder whose modules must not be imported by us."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user\\'s own')\n")
    return tmp_path


def said(command: list[str], home: Path) -> tuple[int, str]:
    """Of a process that starts in ``home``, which is also on the module path before our packages."""
    path = os.pathsep.join([str(home), str(ROOT)])
    ended = subprocess.run(
        command, cwd=home, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("module", ["peers", "bootstrap", "monitoring"])
def test_our_programs_run_our_packages(module: str, home: Path) -> None:
    status, words = said(program(module, "--help"), home)
    assert status == 0, words
    assert "usage" in words.lower()


def test_the_command_line_imports_our_packages(home: Path) -> None:
    console_script = str(Path(sys.executable).parent / "p2p-co2")
    status, words = said([console_script, "join", "p2pco2-nonsense", "--folder", "here"], home)
    assert (status, "the user's own" in words) == (2, False), words
    assert "ticket" in words


def test_the_library_imports_none_of_them_into_a_users_program(home: Path) -> None:
    (home / "train.py").write_text(
        "import sys, p2p_co2.trainer\n"
        "print(sorted({'peers', 'bootstrap', 'monitoring'} & set(sys.modules)))\n"
    )
    assert said([sys.executable, "train.py"], home) == (0, "[]\n")
