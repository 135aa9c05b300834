"""The command ``credit``: what a peer gave to a run, in words, as a proof, and as a picture to show."""

from __future__ import annotations

import time
from html import escape
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.options import says
from monitoring.words import figure, plain
from p2p_co2.cli.here import folder_called
from p2p_co2.errors import ConfigError, RemoteProtocolError
from p2p_co2.node.credit import credit_files, read_credit
from p2p_co2.protocol.credit import Credit, Holder, export, open_credit
from p2p_co2.system.folders import peer_folders
from p2p_co2.ticket import Ticket, read_ticket
from p2p_co2.wire.identity import Identity
from p2p_co2.wire.names import words_of


def credit(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="NAME|FOLDER", help="The peer's name, or its folder; the only peer of yours, if absent."
        ),
    ] = None,
    as_json: Annotated[bool, says("Print the proof, for --check.", "--json")] = False,
    picture: Annotated[Path | None, says("Draw it, too.", metavar="FILE.svg")] = None,
    check: Annotated[Path | None, says("Check what somebody exported with --json.", metavar="FILE")] = None,
    ticket: Annotated[
        str, says("Refuse, with --check, what is not of this run (or @FILE).", metavar="TICKET")
    ] = "",
) -> None:
    """What this peer gave to its run: the tokens and rounds in which the group counted it. It is read from
    the signed commits that the peer keeps in its folder, so it outlasts restarts of everybody."""
    if check is None:
        exports = _exports(folder)
        if as_json:
            print(exports[-1].decode(), end="")
            return
        found = [_checked(one, "this record") for one in exports]
    elif as_json or picture is not None or folder is not None:
        raise ConfigError.of_option("--check", "reads FILE alone; leave NAME, --json and --picture out")
    else:
        with check.open("rb") as file:
            found = [_checked(file.read(2 * Holder.most_bytes + 1), str(check))]
        if ticket and Ticket.parse(read_ticket(ticket)).run.hex() != found[0].holder.run:
            raise ConfigError.of_option("--ticket", f"{check} is of another run, {found[0].holder.run[:12]}")
    for one in found:
        proof = proof_words(one, bool(ticket)) if check is not None else []
        print("\n".join([*given_words(one, "gave" if check is None else "claims"), *proof]))
    if picture is not None:
        picture.write_text(drawn(found[-1]), encoding="utf-8")
        print(f"written to {picture}")


def _exports(folder: Path | None) -> list[bytes]:
    """Of each run or stage that the peer of ``folder`` took part in, the newest last."""
    mine = [one for one in peer_folders() if credit_files(one)]
    which = ", ".join(map(str, mine)) or "none of your peers was counted in a round yet"
    if folder is not None:
        mine = [folder if folder.is_dir() else folder_called(str(folder)) or folder]
    if len(mine) != 1 or not (mine[0] / "identity").is_file():
        raise ConfigError.of_option("NAME|FOLDER", f"name a peer, or its folder: {which}")
    identity = Identity.load_or_create(mine[0] / "identity")
    records = [(head, lines) for head, lines in map(read_credit, credit_files(mine[0])) if lines]
    exports = [export([head, *lines], identity) for head, lines in records if head.peer == identity.peer_id]
    if not exports:
        raise ConfigError.of_option("NAME|FOLDER", f"{mine[0]}: its peer was counted in no round yet")
    return exports


def _checked(data: bytes, where: str) -> Credit:
    try:
        return open_credit(data)
    except RemoteProtocolError as error:
        raise ConfigError(where, "", f"proves nothing: {error}; have it exported again") from None


def _days(credit: Credit) -> str:
    first, last = (
        time.strftime("%d %b %Y", time.localtime(min(credit.curve[place][0], 1e11))) for place in (0, -1)
    )
    return first if first == last else f"{first} to {last}"


def given_words(credit: Credit, gave: str) -> list[str]:
    """What the peer ``gave``, or claims."""
    holder = credit.holder
    part = f", stage {holder.stage} of {holder.stages}" if holder.stages > 1 else ""
    return [
        f"run {plain(holder.name, 64)} ({holder.run[:12]}){part}",
        f"peer {holder.peer}",
        f"{gave} {figure(credit.all_tokens)} tokens in {_exchanges(credit)} fragment exchanges, "
        f"{_days(credit)}",
        f"of these {figure(credit.witnessed[0])} exchanges, {figure(credit.witnessed[1])} tokens, are signed "
        f"by others, too ({figure(len(credit.witnesses))})",
    ]


def _exchanges(credit: Credit) -> str:
    return figure(credit.rounds + credit.earlier[0])


def proof_words(credit: Credit, is_known_run: bool) -> list[str]:
    """What checking it has proven, and what not."""
    run = credit.holder.run
    names = ", ".join(map(str, credit.unseen[:16]))
    doubts = {
        f"which run {run} is; --ticket TICKET says whether it is yours": not is_known_run,
        "that the signers are different people: keys are free, and who has many can sign for himself": True,
        "the times, the run's name, and that whoever shows the file is the key's holder": True,
        f"{figure(credit.earlier[1])} of the tokens, in {figure(credit.earlier[0])} earlier exchanges: their "
        "certificates are not kept": credit.earlier[0] > 0,
        f"how large fragments {names} are, and so which share of the model the others are": bool(names),
    }
    return [
        f"proven: the holder of that key made this file; a group counted {figure(credit.tokens)} tokens of "
        f"it in {figure(credit.rounds)} exchanges, after its caps, each signed by a quorum",
        *([f"proven: the run is that of the ticket, {run[:12]}"] if is_known_run else ()),
        f"others that signed: {', '.join(sorted(credit.witnesses)[:16]) or 'nobody'}",
        *(f"not proven: {what}" for what, holds in doubts.items() if holds),
    ]


def drawn(credit: Credit) -> str:
    """A picture (SVG, 640 x 220): the run, tokens, exchanges and days, and the curve of tokens so far."""
    first = credit.curve[0][0]
    span_s = max(1e-9, *(at - first for at, _ in credit.curve))
    line = " ".join(
        f"{32 + 576 * max(0.0, at - first) / span_s:.1f},{172 - 72 * tokens / credit.all_tokens:.1f}"
        for at, tokens in (*credit.curve[:: max(1, len(credit.curve) // 500)], credit.curve[-1])
    )
    run = escape(plain(credit.holder.name, 64))
    tokens = figure(credit.all_tokens)
    signed = f"{figure(credit.witnessed[0])} signed by others, too ({figure(len(credit.witnesses))})"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 220" role="img"
 font-family="system-ui, sans-serif" font-size="14" fill="#5b6573">
<title>{tokens} tokens for the run {run}</title>
<rect x="1" y="1" width="638" height="218" rx="14" fill="#ffffff" stroke="#e3e7ec" stroke-width="2"/>
<polygon points="32,172 {line} 608,172" fill="#0072B2" fill-opacity="0.14"/>
<polyline points="{line}" fill="none" stroke="#0072B2" stroke-width="2.5"/>
<text x="32" y="42">I train the run {run} with others</text>
<text x="32" y="82" font-size="34" font-weight="600" fill="#1c2430">{tokens}
<tspan font-size="18" font-weight="400">tokens</tspan></text>
<text x="32" y="199">{_exchanges(credit)} exchanges, {signed}</text>
<text x="608" y="199" text-anchor="end">peer {words_of(credit.holder.peer)}</text>
<text x="608" y="42" text-anchor="end">{_days(credit)}</text>
</svg>
"""
