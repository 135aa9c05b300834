"""Where a peer, a seed or an observer keeps its files when nobody names a folder.

A folder of its own for each run, below the user's data folder (XDG Base Directory Specification):

    $XDG_DATA_HOME/p2p-co2/runs/<12 hex digits of the run's digest>/peer     identity, checkpoint, events
    $XDG_DATA_HOME/p2p-co2/runs/<the same>/board, watch, metrics             identities of observers
    $XDG_DATA_HOME/p2p-co2/seeds/<name of the run>                           a seed's identity

``$XDG_DATA_HOME`` is ``~/.local/share`` unless set. A second process on the machine gets ``peer-2``, a third
``peer-3``: the first whose lock is free, which it takes at once. One that was named with ``$P2P_CO2_FOLDER``
is taken as it is; observers read ``$P2P_CO2_OBSERVER_FOLDER``, since the other is exported for a peer.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from p2p_co2.errors import EnvironmentFault
from p2p_co2.system.process import VARIABLES, claim, is_kept

FOLDER_VARIABLE = VARIABLES + "FOLDER"


def keep_private(path: Path, content: bytes) -> None:
    """Write a file that this user alone may read, as a whole or not at all. Raises ``OSError``."""
    whole = path.with_name(f"{path.name}.new")  # on a full disk a torn one would be no help
    whole.unlink(missing_ok=True)
    descriptor = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        whole.rename(path)
    finally:
        whole.unlink(missing_ok=True)


def data_home() -> Path:
    """Where all of them lie. Raises ``EnvironmentFault`` for a user without a home."""
    given = Path(os.environ.get("XDG_DATA_HOME", ""))
    if given.is_absolute():  # others are to be ignored, says the specification
        return given / "p2p-co2"
    try:
        return Path.home() / ".local" / "share" / "p2p-co2"
    except RuntimeError:
        raise EnvironmentFault("this user has no home folder; name a folder with --folder") from None


def peer_folder(run: bytes) -> Path:
    """For a peer of the run with this digest (32 bytes), locked for this process. The ``FolderLock`` that it
    makes later takes the lock over. Raises ``EnvironmentFault``."""
    if named := os.environ.get(FOLDER_VARIABLE):
        return Path(named).expanduser()
    return _first_free(_of_run(run), "peer")


def peer_folders() -> list[Path]:
    """Those of this user's peers, of all runs, as far as nobody named others."""
    if named := os.environ.get(FOLDER_VARIABLE):
        return [Path(named).expanduser()]
    found = sorted((data_home() / "runs").glob("*/peer*"))
    return [folder for folder in found if (folder / "identity").is_file()]


def observer_folder(run: bytes, command: str) -> Path:
    """For an observer of the run: ``command`` is "board", "watch" or "metrics". As ``peer_folder``."""
    return _first_free(_of_run(run), command)


def seed_folder(name: str) -> Path:
    """For a seed of the run of this name. One seed of a name on a machine: it is not numbered."""
    return data_home() / "seeds" / (name.strip(".") or "run")


def _of_run(run: bytes) -> Path:
    return data_home() / "runs" / run.hex()[:12]


def _first_free(parent: Path, name: str) -> Path:
    """Of ``name``, ``name-2``, ``name-3`` ... the first that no other process has, claimed."""
    for number in count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        if _is_claimed(folder):
            return folder
    raise AssertionError("numbers do not end")


def _is_claimed(folder: Path) -> bool:
    """Claim it, unless another process has it. Raises ``EnvironmentFault`` where nobody could."""
    try:
        claim(folder)
    except EnvironmentFault:
        if is_kept(folder):
            return False
        raise
    return True
