"""A rehearsal by somebody who is not root: through the console script, with no option that asks for it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootstrap.local_swarm import environment
from tests.campaign import ROOT, console

pytestmark = pytest.mark.swarm
BOUND_S = 240.0
NOBODY = 65534
RUN = """
name = "rehearsed"
recipe = "own_recipe.py:make"
fragments = 2
[clock]
round_s = 2.0
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of somebody who is not root: of nobody where we are."""
    path = Path(tempfile.mkdtemp(prefix="p2p-co2-nobody-"))
    (path / "run.toml").write_text(RUN)
    shutil.copy(ROOT / "examples" / "own_recipe.py", path)
    if os.geteuid() == 0:
        for each in (path, *path.iterdir()):
            os.chown(each, NOBODY, NOBODY)
    yield path
    shutil.rmtree(path)


def test_without_root_it_is_played_on_loopback_with_slow_carriers_and_says_so(folder: Path) -> None:
    user = NOBODY if os.geteuid() == 0 else None
    groups = None if user is None else list[int]()
    command = console("rehearse", "run.toml", "--peers", "2", "--profile", "dsl", "--seconds", "8")
    variables = {**os.environ, **environment(), "HOME": str(folder), "COLUMNS": "120"}
    with (folder / "output").open("wb") as output:
        try:
            process = subprocess.Popen(
                [*command, "--folder", "run"], cwd=folder, env=variables, stdout=output,
                stderr=subprocess.STDOUT, user=user, group=user, extra_groups=groups,
            )  # fmt: skip
        except PermissionError as error:
            pytest.skip(f"this checkout is for its owner alone, nobody else can run it: {error}")
    try:
        status = process.wait(BOUND_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(BOUND_S)
    said = (folder / "output").read_text()
    assert status == 0, said
    assert "carriers slowed down on loopback" in said
    assert "network namespaces need root" in " ".join(said.split())  # and why
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert "slowed down" in summary["emulation"]
    assert summary["rounds"]["duration_s"]["mean"] > 0.16, "four ways of 40 ms from READY to COMMIT at least"
    assert len(summary["lines"]) == 2
