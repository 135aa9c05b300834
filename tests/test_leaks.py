"""Nothing leaks at exit: no daemon, thread, socket or temporary file survives a peer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.recipes import recipe_digest
from tests.swarms import ENVIRONMENT, ROOT, swarm

RUN = RunConfig(
    name="leaks",
    recipe="own-loop",
    recipe_digest=recipe_digest("own-loop", {}),
    fragments=2,
    clock=ClockConfig(mode="time", round_s=0.5),
)


@pytest.mark.swarm
def test_joining_and_leaving_leaves_nothing(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with swarm(tmp_path, RUN) as running:
        ended = subprocess.run(
            [sys.executable, str(ROOT / "tests" / "leak_check.py"), running.ticket, str(tmp_path / "peer")],
            capture_output=True,
            text=True,
            timeout=400,
            env={**ENVIRONMENT, "TMPDIR": str(temporary)},
            cwd=ROOT,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr[-3000:]
    first, second, third = json.loads(ended.stdout.splitlines()[-1])
    for after in (first, second, third):
        assert after["threads"] == []
        assert after["children"] == []
        assert after["files"] == []
    assert third["fds"] <= second["fds"], (first, second, third)
    assert third["sockets"] <= second["sockets"]
    left = [
        path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor")
    ]  # torch's own
    assert left == []
