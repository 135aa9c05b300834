"""pause, resume, leave, prune: peers of this machine are found by their names or folders. Real ones are in
``test_hours``."""

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
    for name, called in (("peer", "anna"), ("peer-2", "bob")):
        (home / name / "name").write_text(f"{called}\na run\n")
    assert said(["pause", "anna"], capsys)[0] == 0
    assert [(home / name / "wish").read_text() for name in ("peer", "peer-2")] == ["pause\n", "go on\n"]
    status, words = said(["pause", "carl"], capsys)
    assert (status, "carl is no peer's folder, nor what a peer here is called" in words) == (2, True)
    (home / "peer-2" / "name").write_text("anna\n")
    status, words = said(["leave", "anna"], capsys)
    assert (status, f"2 peers here are called anna; name one's folder: {home}/peer, " in words) == (2, True)
    locks.pop().release()
    (home / "peer" / "lock").write_text("1\n")  # of another container: that process has nothing open here
    status, words = said(["leave", "anna"], capsys)
    assert (status, f"no process of yours runs in {home}/peer" in words) == (1, True)
    locks.pop().release()
    status, words = said(["pause", str(home / "peer")], capsys)
    assert (status, "no process runs there now" in words) == (0, True)


def test_what_is_no_peers_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("positions", "identity", "lock"):  # those of a seed
        status, words = said(["pause", str(tmp_path)], capsys)
        assert (status, f"FOLDER: {tmp_path} is no peer's folder" in words) == (2, True)
        (tmp_path / name).touch()
    assert said(["pause", str(tmp_path), "--all"], capsys)[0] == 2


def test_prune_deletes_what_no_process_keeps_and_follows_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    old, kept = peer_folder(RUN), peer_folder(b"1" * 32)
    outside = tmp_path / "outside"
    for folder in (old / "checkpoint", kept, outside, tmp_path / "data" / "p2p-co2" / "seeds" / "run"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_bytes(bytes(3000))
    (old / "name").write_text("anna\nmy-run\n")
    (old / "outside").symlink_to(outside)
    home = tmp_path / "data" / "p2p-co2" / "runs"
    (home / "linked").symlink_to(outside.parent)
    (home / "other").mkdir()
    (home / "other" / "peer").symlink_to(outside)
    locks = [FolderLock(folder) for folder in (old, kept)]
    locks[0].release()
    before = sorted(tmp_path.rglob("*"))
    status, listed = said(["prune"], capsys)
    assert (status, sorted(tmp_path.rglob("*"))) == (0, before)
    assert f"{old}, run my-run\n" in listed
    assert f"{kept}, in use by process " in listed
    assert "prune --yes deletes 3.0 kB" in listed
    assert listed.count("kB  ") == 2, "neither what links lead to nor a seed's folder"
    assert said(["prune", "--yes"], capsys)[0] == 0
    assert [path for path in before if not path.is_relative_to(old.parent)] == sorted(tmp_path.rglob("*"))
    locks[1].release()
