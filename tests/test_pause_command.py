"""pause and resume: peers of this machine are found by their folders. Real ones are in ``test_hours``."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_co2.cli import main as cli
from p2p_co2.system.folders import peer_folder
from p2p_co2.system.process import FolderLock

RUN = bytes(32)


def said(command: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    try:
        status = cli.main(command)
    except SystemExit as end:
        status = int(end.code or 0)
    shown = capsys.readouterr()
    return status, shown.out + shown.err


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
