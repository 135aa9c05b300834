"""The commands for a first look: ``demo`` and ``simulate``. They need nobody else and no run file."""

from __future__ import annotations

from functools import partial

from bootstrap.options import DemoOptions
from p2p_co2.cli.command import LOUDNESS, Loudness
from p2p_co2.cli.options import SimulationOptions


def demo(options: DemoOptions) -> int:
    """A whole swarm on this machine: one seed and several peers, each a process of its own, on real text."""
    from bootstrap.demo import run_demo
    from p2p_co2.cli.demo import RunWatch

    return run_demo(options, partial(RunWatch, board=options.board, loudness=LOUDNESS.get()))


def simulate(options: SimulationOptions) -> int:
    """Play a run of many peers on virtual time, with the real protocol, and check its laws at every step.
    Exit status 0: no law was broken."""
    from p2p_co2.cli.simulate import run_simulation

    is_quiet = LOUDNESS.get() is Loudness.QUIET

    def say(line: str) -> None:
        if not is_quiet or line.startswith(("law violations", "  ")):
            print(line)

    return run_simulation(options, say)
