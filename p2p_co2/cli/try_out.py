"""The commands for a first look: ``demo`` and ``simulate``. They need nobody else and no run file."""

from __future__ import annotations

from functools import partial

from bootstrap.options import DemoOptions
from p2p_co2.cli.command import LOUDNESS, Loudness, takes
from p2p_co2.cli.options import SimulationOptions
from p2p_co2.system.ctrl_c import hand_over, take_back


@takes(DemoOptions)
def demo(options: DemoOptions) -> int:
    """A whole swarm on this machine: one seed and several peers, each a process of its own, on real text."""
    take_back()
    from bootstrap.demo import run_demo
    from p2p_co2.cli.demo import RunWatch

    hand_over()
    return run_demo(options, partial(RunWatch, board=options.board, loudness=LOUDNESS.get()))


@takes(SimulationOptions)
def simulate(options: SimulationOptions) -> int:
    """Play a run of many peers on virtual time, with the real protocol, and check its laws at every step.
    Exit status 0: no law was broken."""
    take_back()
    from p2p_co2.cli.simulate import run_simulation

    hand_over()
    is_quiet = LOUDNESS.get() is Loudness.QUIET

    def say(line: str) -> None:
        if not is_quiet or line.startswith(("law violations", "  ")):
            print(line)

    return run_simulation(options, say)
