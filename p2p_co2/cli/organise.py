"""The commands of whoever organises a run: ``init``, ``plan``, ``rehearse`` and ``seed``."""

from __future__ import annotations

from bootstrap.options import PlanOptions, RehearsalOptions, SeedOptions
from p2p_co2.cli.command import takes
from p2p_co2.system.ctrl_c import hand_over, take_back


def init() -> None:
    """Print a run file with every setting explained; `p2p-co2 init > run.toml` is a start."""
    from bootstrap.run_file import DEFAULT_RUN_FILE

    print(DEFAULT_RUN_FILE, end="")


@takes(PlanOptions)
def plan(options: PlanOptions) -> int:
    """What a run will cost on given links, whether they are enough, and what to change."""
    from bootstrap.plan.stages import run_any_plan

    return run_any_plan(options)


@takes(RehearsalOptions)
def rehearse(options: RehearsalOptions) -> int:
    """The run over emulated internet lines, before anybody is invited: needs root for real packets."""
    take_back()
    from bootstrap.rehearsal import run_rehearsal
    from p2p_co2.cli.demo import RunWatch

    hand_over()
    return run_rehearsal(options, RunWatch)


@takes(SeedOptions)
def seed(options: SeedOptions) -> int:
    """Publish a run and print its ticket; peers find each other through this process, which never trains."""
    from bootstrap.seed import serve_run

    return serve_run(options)
