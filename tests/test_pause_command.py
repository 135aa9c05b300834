"""pause and resume: real peers of this machine, found by their folders, told by another process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from p2p_co2.cli import main as cli
from p2p_co2.system.folders import peer_folder
from p2p_co2.system.process import FolderLock
from p2p_co2.telemetry.events import CheckpointSaved, Paused, Progress, Resumed
from tests.campaign import RECIPE, Campaign, console, paced_run

RUN = bytes(32)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Campaign]:
    with Campaign(tmp_path) as swarm:
        yield swarm


def said(command: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    try:
        status = cli.main(command)
    except SystemExit as end:
        status = int(end.code or 0)
    shown = capsys.readouterr()
    return status, shown.out + shown.err


@pytest.mark.swarm
def test_a_peer_that_is_paused_twice_rests_until_it_is_resumed(
    swarm: Campaign, capsys: pytest.CaptureFixture[str]
) -> None:
    swarm.start_seed(paced_run(1.0, step_s=0.05))
    peer = swarm.join("ada")
    swarm.wait_until("trains", lambda: any(one.inner_steps for one in swarm.events("ada", Progress)))
    folder = str(swarm.folder / "ada")
    for _ in range(2):
        status, words = said(["pause", folder], capsys)
        assert status == 0
        assert f"({'process ' + str(peer.pid)})" in words
    rests = swarm.wait_for("ada", Paused)
    assert rests.reason == "paused by hand"
    assert swarm.events("ada", CheckpointSaved), "it may be switched off now"
    steps = swarm.events("ada", Progress)[-1].inner_steps

    assert said(["resume", folder], capsys)[0] == 0
    goes_on = swarm.wait_for("ada", Resumed)
    assert [one.inner_steps for one in swarm.events("ada", Progress) if one.at < goes_on.at][-1] == steps
    assert len(swarm.events("ada", Paused)) == 1
    swarm.wait_until("trains on", lambda: swarm.events("ada", Progress)[-1].inner_steps > steps)

    # A pause outlives the process, and says so.
    assert said(["pause", folder], capsys)[0] == 0
    swarm.wait_for("ada", Paused, since=goes_on.at)
    swarm.interrupt(peer)
    assert swarm.wait([peer], 30.0)
    again = swarm.start("again", console("join", swarm.ticket, "--folder", folder, "--recipe", RECIPE))
    swarm.wait_until("is told", lambda: "was paused before" in again.log.read_text())


def test_the_only_peer_that_runs_is_found_and_of_several_one_is_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    status, words = said(["pause"], capsys)
    assert (status, "no peer runs here" in words) == (1, True)
    locks = []
    for _ in range(2):
        folder = peer_folder(RUN)
        locks.append(FolderLock(folder))
        (folder / "identity").touch()
        if len(locks) == 1:
            assert said(["pause"], capsys)[0] == 0
            assert (folder / "wish").read_text() == "pause\n"
    status, words = said(["resume"], capsys)
    assert status == 2
    assert "2 peers run here; name one, or --all: " in words
    assert said(["resume", "--all"], capsys)[0] == 0
    home = tmp_path / "p2p-co2" / "runs" / "000000000000"
    assert [(home / name / "wish").read_text() for name in ("peer", "peer-2")] == ["go on\n"] * 2
    for lock in locks:
        lock.release()
    status, words = said(["pause", str(home / "peer")], capsys)
    assert (status, "no process runs there now" in words) == (0, True)


def test_what_is_no_peers_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("positions", "identity", "lock"):  # those of a seed
        status, words = said(["pause", str(tmp_path)], capsys)
        assert (status, f"FOLDER: {tmp_path} is no peer's folder" in words) == (2, True)
        (tmp_path / name).touch()
    assert said(["pause", str(tmp_path), "--all"], capsys)[0] == 2
