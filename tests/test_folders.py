"""folders: one for each run below the user's data folder; never two processes in one."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2p_co2.errors import EnvironmentFault, TicketError
from p2p_co2.system.folders import observer_folder, peer_folder, seed_folder
from p2p_co2.system.process import FolderLock, claim, is_kept
from p2p_co2.ticket import Ticket, read_ticket
from p2p_co2.wire.identity import peer_id_of

RUN, OTHER_RUN = bytes(range(32)), bytes(32)
TICKET = str(Ticket(RUN, peer_id_of(bytes(32)), (f"/ip4/127.0.0.1/tcp/9/p2p/{peer_id_of(bytes(32))}",)))
CLAIMING = """
import sys
from p2p_co2.system.folders import peer_folder
print(peer_folder(bytes(range(32))), flush=True)
sys.stdin.read()
"""


@pytest.fixture(name="home", autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "p2p-co2"


def other_process() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CLAIMING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).resolve().parent.parent,
    )  # fmt: skip


def test_each_run_has_a_folder_of_its_own(home: Path) -> None:
    assert peer_folder(RUN) == home / "runs" / "000102030405" / "peer"
    assert peer_folder(OTHER_RUN) == home / "runs" / "000000000000" / "peer"
    assert observer_folder(RUN, "watch") == home / "runs" / "000102030405" / "watch"
    assert seed_folder("my-run") == home / "seeds" / "my-run"
    assert seed_folder("..") == home / "seeds" / "run", "a name leads nowhere else"


def test_a_data_home_that_is_not_absolute_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("", "data"):
        monkeypatch.setenv("XDG_DATA_HOME", given)
        assert seed_folder("a") == tmp_path / ".local" / "share" / "p2p-co2" / "seeds" / "a"


def test_processes_that_start_together_get_folders_of_their_own_and_the_first_free_one_again(
    home: Path,
) -> None:
    with other_process() as other:
        mine = peer_folder(RUN)
        assert other.stdout is not None
        its = Path(other.stdout.readline().strip())
        assert {mine.name, its.name} == {"peer", "peer-2"}
        other.communicate("", timeout=30)
    FolderLock(mine).release()
    assert peer_folder(RUN).name == "peer"


def test_a_claim_is_handed_to_the_lock_and_is_gone_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    claim(folder)
    claim(folder)
    assert is_kept(folder)
    lock = FolderLock(folder)
    with pytest.raises(EnvironmentFault, match="in use by process"):
        FolderLock(folder)
    lock.release()
    assert is_kept(folder) is False


def test_the_named_folder_is_taken_and_one_that_cannot_be_made_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("P2P_CO2_FOLDER", str(tmp_path / "named"))
    assert peer_folder(RUN) == tmp_path / "named"
    monkeypatch.delenv("P2P_CO2_FOLDER")
    (tmp_path / "p2p-co2").touch()
    with pytest.raises(EnvironmentFault, match=r"cannot use the folder .*--folder"):
        peer_folder(RUN)


def test_a_ticket_is_a_word_a_file_the_input_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "seed.log"
    file.write_text(f'run "x"\nticket: {TICKET}\njoin with it\n')
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"\n  {TICKET}\n"))
    monkeypatch.setenv("P2P_CO2_TICKET", f"@{file}")
    assert (
        read_ticket(f" {TICKET}\n") == read_ticket(f"@{file}") == read_ticket("-") == read_ticket() == TICKET
    )


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le"])
def test_a_ticket_is_found_in_a_file_of_another_system(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "ticket.txt"
    for text in (f"{TICKET}\n", f"the run of Müller\nticket: {TICKET}"):
        file.write_text(text, encoding=encoding, newline="\r\n")
        assert read_ticket(f"@{file}") == TICKET


@pytest.mark.parametrize("error", [errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_told_and_not_in_use(
    monkeypatch: pytest.MonkeyPatch, home: Path, error: int
) -> None:
    def refused(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    FolderLock(home).release()
    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(EnvironmentFault, match=r"has no locks.*--folder"):
        FolderLock(home)
    assert is_kept(home) is None
    with pytest.raises(EnvironmentFault, match=r"has no locks.*--folder"):
        peer_folder(RUN)  # and looks for no free one


def test_a_ticket_that_is_nowhere_says_where_it_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for text, words in (
        ("", r"no ticket: give the word .*\$P2P_CO2_TICKET"),
        (f"@{tmp_path / 'empty'}", "no ticket in .*empty: a ticket begins with"),
        (f"@{tmp_path / 'gone'}", "cannot read a ticket from .*gone: No such file"),
        (f"@{tmp_path}", "cannot read a ticket from .*: Is a directory"),
    ):
        with pytest.raises(TicketError, match=words):
            read_ticket(text)
