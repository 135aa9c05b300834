"""The commands of whoever organises a run: ``init``, ``plan``, ``rehearse``, ``seed``, ``amend``, and of its
members: ``invite``, ``members`` and ``revoke``."""

from __future__ import annotations

import json
import secrets
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.options import InitOptions, PlanOptions, RehearsalOptions, SeedOptions, says
from p2p_co2.cli.command import LOUDNESS, Loudness
from p2p_co2.errors import ConfigError

_Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="What the person is called.")]
_SeedFolder = Annotated[
    Path | None, says("Use the folder of the run's first seed; the only one with members here, if absent.")
]


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


def invite(
    name: _Name,
    days: Annotated[float, says("Let the ticket hold for so many days.")] = 30.0,
    watch: Annotated[bool, says("Let this person look on, and no more.", "--watch")] = False,
    folder: _SeedFolder = None,
) -> None:
    """Print a ticket for one person, in a run with members. It is a secret: whoever has it comes as that
    person, on any number of machines. The seed need not be up."""
    from bootstrap.members import Book

    print(Book(folder).invite(name, days, watch))
    if LOUDNESS.get() is not Loudness.QUIET:
        told = "the ticket is a secret of that person's: send it by a private way, keep no copy"
        print(told, file=sys.stderr)


def members(folder: _SeedFolder = None) -> None:
    """List whom the organiser has invited, and until when."""
    from bootstrap.members import Book

    book = Book(folder)
    revoked = book.revocation().persons
    for one in book.certificates():
        until = time.strftime("%Y-%m-%d", time.localtime(one.expires_at))
        state = "expired" if one.expires_at < time.time() else f"until {until}"
        state = "revoked" if one.person in revoked else state
        print(f"{one.name}: {state}{', looks on alone' if one.watches else ''}")


def revoke(name: _Name, folder: _SeedFolder = None) -> None:
    """Take part in the run no more: all tickets of NAME. The peers that are up are told, and tell each other
    and whoever comes; the seed need not be up. Say it again if nobody could be told."""
    from bootstrap.members import Book
    from bootstrap.members import revoke as revoke_member

    revoke_member(Book(folder), name, lambda text: print(text, file=sys.stderr))


def amend(
    change: Annotated[
        str, typer.Argument(metavar="SETTING=VALUE", show_default=False, help="Such as outer.lr=0.5.")
    ] = "",
    first: Annotated[
        int | None,
        says("Have it hold from this round on; some ten rounds ahead, if absent.", "--from", metavar="ROUND"),
    ] = None,
    folder: Annotated[
        Path | None, says("Use the folder of the run's first seed; the only one here, if absent.")
    ] = None,
) -> None:
    """Change a setting of a run that goes on: how many rounds it has, or the rates of the outer step. The
    peers that are up are told, and tell each other and whoever comes. Without SETTING=VALUE, list what was
    amended."""
    from bootstrap.members import Book
    from bootstrap.members import amend as amend_run

    book = Book(folder, of_any=True)
    setting, _, value = change.partition("=")
    if change:
        amend_run(book, setting.strip(), value.strip(), first, lambda text: print(text, file=sys.stderr))
        return
    for one in sorted(book.revocation().amendments, key=lambda one: one.round):
        print(f"from round {one.round} on: {one.setting} = {one.value}")
