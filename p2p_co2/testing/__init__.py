"""Small swarms on this machine, for tests of one's own training programs.

    with co2.local_swarm(peers=2, rounds=3) as swarm:
        outputs = swarm.run([sys.executable, "my_loop.py"])

A seed runs in a process of its own. ``run`` starts a program once for each peer, with $P2P_CO2_TICKET,
$P2P_CO2_FOLDER and $P2P_CO2_PEER (0, 1, ...) set, waits for all of them, and returns what each printed. Or
join from the test itself: ``co2.join(model, optimizer, run=swarm.ticket)``. With pytest the fixture
``local_swarm`` is this function; what it made ends with the test. Everything stays on the loopback.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from bootstrap.local_swarm import Child, LocalSwarm
from p2p_co2.config import OWN_LOOP, ClockConfig, RunConfig, write_toml
from p2p_co2.errors import EnvironmentFault
from p2p_co2.system.process import program

if TYPE_CHECKING:
    from collections.abc import Callable


class TestSwarm:
    """Made by ``local_swarm``; a context manager. ``ticket``: of the run. ``folder``: where it all lies."""

    __test__ = False  # for pytest, by its name

    def __init__(self, peers: int, run: RunConfig, folder: Path | None) -> None:
        self.peers = peers
        self._run = run
        self._folder = folder
        self._stack = ExitStack()
        self._processes = LocalSwarm(Path())
        self.ticket = ""

    @property
    def folder(self) -> Path:
        return self._processes.folder

    def __enter__(self) -> TestSwarm:
        with ExitStack() as stack:
            folder = self._folder or Path(stack.enter_context(tempfile.TemporaryDirectory("p2p-co2")))
            folder.mkdir(parents=True, exist_ok=True)
            run_file = folder / "run.toml"
            run_file.write_text(write_toml(self._run), encoding="utf-8")
            self._processes = stack.enter_context(LocalSwarm(folder))
            places = ["--folder", str(folder / "seed"), "--host", "127.0.0.1", "--parent", str(os.getpid())]
            command = program("p2p_co2.cli", "seed", str(run_file), *places)
            seed = self._processes.start("seed", command)
            self.ticket = self._processes.wait_for_line(seed, "ticket:", timeout_s=120.0)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start(self, command: Sequence[str], peer: int = 0) -> Child:
        """Start a program for one peer; it ends with the swarm. Its output is in its ``log``."""
        folder = self.folder / f"peer-{peer}"
        variables = {
            "P2P_CO2_TICKET": self.ticket, "P2P_CO2_FOLDER": str(folder), "P2P_CO2_PEER": str(peer),
        }  # fmt: skip
        return self._processes.start(f"peer-{peer}", list(command), variables)

    def run(self, command: Sequence[str], timeout_s: float = 300.0) -> list[str]:
        """Run a program once for each peer, all at the same time; what each printed. Raises
        ``EnvironmentFault`` if one fails or takes longer."""
        children = [self.start(command, peer) for peer in range(self.peers)]
        if not self._processes.wait(children, timeout_s):
            late = next(child for child in children if child.running())
            raise EnvironmentFault(f"{late.name} takes longer than {timeout_s:g} s; {late.last_lines()}")
        for child in children:
            if child.exit_status() != 0:
                raise EnvironmentFault(f"{child.name} failed: {child.last_words()}")
        return [child.log.read_text(encoding="utf-8", errors="replace") for child in children]


def local_swarm(
    peers: int = 2, *, run: RunConfig | None = None, rounds: int = 5, round_s: float = 1.0,
    fragments: int = 2, folder: str | Path | None = None,
) -> TestSwarm:  # fmt: skip
    """A seed on the loopback and ``peers`` peers to start, as a context manager.

    ``run``: the run's settings; without them an own loop's, which ends after ``rounds`` of ``round_s``
    seconds. ``folder``: a temporary one if left out. Raises ``EnvironmentFault`` if no seed can run here.
    """
    clock = ClockConfig(mode="time", round_s=round_s, rounds=rounds)
    settings = run or RunConfig(name="local", recipe=OWN_LOOP, fragments=fragments, clock=clock)
    return TestSwarm(peers, settings, None if folder is None else Path(folder))


def made() -> Iterator[Callable[..., TestSwarm]]:
    """The body of the pytest fixture: ``local_swarm`` whose swarms are entered, and end with the test."""
    with ExitStack() as stack:
        yield lambda *given, **named: stack.enter_context(local_swarm(*given, **named))
