"""The wheel: complete, installed where nothing of the repository is, and good for all that needs no extra."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.installed import ENVIRONMENT, PACKAGES, built, installed, run
from tests.programs import started

RUN = """
recipe_options = { layers = 1, width = 32, heads = 2, batch = 2 }
[clock]
round_s = 3.0
rounds = 5
"""
"""It lasts longer than the ten seconds between two lines of ``watch``."""

pytestmark = pytest.mark.swarm


@pytest.fixture(scope="module", name="wheel")
def _wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return built(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module", name="programs")
def _programs(wheel: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment without any extra."""
    return installed(wheel[0], tmp_path_factory.mktemp("bare") / "venv")


def test_the_wheel_has_every_file_of_the_packages(wheel: tuple[Path, Path]) -> None:
    source = wheel[0].parent.parent / "source"
    wanted = {
        str(path.relative_to(source))
        for package in PACKAGES
        for path in (source / package).rglob("*")
        if path.is_file()
    }
    names = zipfile.ZipFile(wheel[0]).namelist()
    assert {"p2p_co2/py.typed", "monitoring/board/style.css", "monitoring/grafana.json"} <= wanted
    assert wanted <= set(names)
    others = {name for name in names if name.split("/")[0] not in PACKAGES}
    assert {name.partition("/")[0] for name in others} == {re.sub(r"-cp.*", ".dist-info", wheel[0].name)}
    about = (
        zipfile.ZipFile(wheel[0]).read(next(name for name in others if name.endswith("/METADATA"))).decode()
    )
    assert "\nLicense-Expression: Apache-2.0\n" in about
    assert any(name.endswith("/licenses/LICENSE") for name in others)


def test_one_wheel_serves_every_python_that_is_supported(wheel: tuple[Path, Path]) -> None:
    assert wheel[0].name.endswith("-cp311-abi3-linux_x86_64.whl")
    built_for = [name for name in zipfile.ZipFile(wheel[0]).namelist() if name.endswith(".so")]
    assert built_for == ["p2p_co2/tensors/codec/_native.abi3.so"] * bool(shutil.which("cc"))


def test_the_sdist_has_what_the_documents_name(wheel: tuple[Path, Path]) -> None:
    with tarfile.open(wheel[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "Dockerfile", ".dockerignore",
        "docs/events.md", "examples/run.toml", "packaging/systemd/p2p-co2-peer.service",
        "tests/test_packaging.py",
    ):  # fmt: skip
        assert name in names, name
    assert not {name for name in names if name.endswith((".pyc", ".so"))}


def test_a_demo_in_an_empty_folder_without_any_extra(programs: Path, tmp_path: Path) -> None:
    said = run([str(programs / "p2p-co2"), "demo", "--seconds", "8", "--peers", "2"], tmp_path)
    assert said.count("board: needs an extra: pip install '.[board]' in a clone of p2p-co2") == 1
    assert (
        said.count("note: no report.html: it needs an extra: pip install '.[board]' in a clone of p2p-co2")
        == 1
    )
    assert (
        said.count("note: no loss.png: it needs an extra: pip install '.[plot]' in a clone of p2p-co2") == 1
    )
    assert said.count("\ndevice: ") == 1
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["digests_equal"] is True
    assert summary["rounds"]["committed"] > 0
    assert not (folder / "report.html").exists()
    where = run(
        [str(programs / "python"), "-c", "import p2p_co2, peers; print(p2p_co2.__file__, peers.__file__)"],
        tmp_path,
    )
    assert where.count(str(programs.parent)) == 2


def test_seed_join_and_watch_without_any_extra(programs: Path, tmp_path: Path) -> None:
    program = str(programs / "p2p-co2")
    (tmp_path / "run.toml").write_text(RUN)
    with started([program, "seed", "run.toml", "--host", "127.0.0.1", "--folder", "seed"], tmp_path) as seed:
        ticket = seed.wait_for(r"p2pco2-\w+")
        join = [program, "join", ticket, "--threads", "1", "--min-peers", "2", "--folder"]
        with (
            started([program, "watch", ticket, "--folder", "watch"], tmp_path) as watch,
            started([*join, "one"], tmp_path) as one,
            started([*join, "two"], tmp_path) as two,
        ):
            watch.wait_for("[12] of 2 peers")
            for peer in (one, two):
                assert peer.ends() == 0, peer.said()
                assert (
                    peer.said().count("board: needs an extra: pip install '.[board]' in a clone of p2p-co2")
                    == 1
                )
                assert peer.said().startswith("device: ")
                assert "agreed state" in peer.said()
            watch.wait_for("Over: 0 of 2 peers")
        assert watch.ends() == 0, watch.said()
    assert seed.ends() == 0, seed.said()


def test_what_needs_an_extra_says_which(programs: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(programs / "p2p-co2"), "board", str(tmp_path)],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    line = "error: the board needs an extra: pip install '.[board]' in a clone of p2p-co2\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)
