"""The commands of whoever organises a run: ``init``, ``plan``, ``rehearse`` and ``seed``."""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import asdict
from functools import partial

from bootstrap.options import InitOptions, PlanOptions, RehearsalOptions, SeedOptions
from p2p_co2.cli.command import LOUDNESS, Loudness
from p2p_co2.errors import ConfigError


def init(options: InitOptions) -> None:
    """Print a run file with every setting explained; `p2p-co2 init > run.toml` is a start."""
    from bootstrap.run_file import DEFAULT_RUN_FILE, fitted

    salt = secrets.token_hex(8)
    text = DEFAULT_RUN_FILE.replace('salt = ""' + " " * len(salt), f'salt = "{salt}"')
    if not options.up_mbit and options != InitOptions():
        raise ConfigError.of_option("--up-mbit", "is what --peers and --step-s are for; give it, such as 10")
    print(fitted(text, options) if options.up_mbit else text, end="")


def plan(options: PlanOptions) -> int:
    """Whether links bear a run, what it will cost on them, and what to change. The verdict comes first."""
    from p2p_co2.config import read_run_config

    is_brief = LOUDNESS.get() is Loudness.QUIET
    if read_run_config(options.run_file).pipeline.stages > 1:
        from bootstrap.plan.stages import run_staged_plan

        return run_staged_plan(options, is_brief=is_brief)
    from bootstrap.plan.plan import run_plan

    return run_plan(options, is_brief=is_brief)


def rehearse(options: RehearsalOptions) -> int:
    """The run over slowed lines on this machine, before anybody is invited."""
    from bootstrap.rehearsal import run_rehearsal
    from p2p_co2.cli.demo import RunWatch

    return run_rehearsal(options, partial(RunWatch, loudness=LOUDNESS.get()))


def seed(options: SeedOptions) -> int:
    """Publish a run and print its ticket; peers find each other through this process, which never trains."""
    from bootstrap.seed import Invitation, doubt_of, serve_run

    is_quiet = LOUDNESS.get() is Loudness.QUIET

    def say(text: str) -> None:
        if text and (not is_quiet or "warning: " in text):
            print(text, file=sys.stderr, flush=True)

    def invite(invitation: Invitation) -> None:
        say(doubt_of(invitation))
        told = {name: value for name, value in asdict(invitation).items() if name != "others"}
        print(json.dumps(told) if options.json else invitation.ticket, flush=True)

    if options.json or is_quiet:
        return serve_run(options, say, invite)
    return serve_run(options, partial(print, flush=True))
