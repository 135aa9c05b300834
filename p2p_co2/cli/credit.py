"""The command ``credit``: what a peer gave to a run, in words, as a proof, and as a picture to show."""

from __future__ import annotations

import time
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bootstrap.options import says
from p2p_co2.cli.volunteer import PeerFolder
from p2p_co2.errors import ConfigError, RemoteProtocolError
from p2p_co2.system.folders import peer_folders
from p2p_co2.ticket import Ticket, read_ticket

if TYPE_CHECKING:
    from p2p_co2.protocol.credit import Credit


def credit(
    folder: PeerFolder = None,
    as_json: Annotated[bool, says("Print the proof, for --check.", "--json")] = False,
    picture: Annotated[Path | None, says("Draw it, too.", metavar="FILE.svg")] = None,
    check: Annotated[Path | None, says("Check what somebody exported with --json.", metavar="FILE")] = None,
    ticket: Annotated[
        str, says("With --check: of the run that it should be of (or @FILE).", metavar="TICKET")
    ] = "",
) -> None:
    """What this peer gave to its run: the tokens and rounds in which the group counted it. It is read from
    the signed commits that the peer keeps in its folder, so it outlasts restarts of everybody."""
    if check is not None:
        if as_json or folder is not None:
            raise ConfigError.of_option("--check", "reads FILE alone; leave FOLDER and --json out")
        found = [_checked(_read(check), str(check))]
        if ticket and Ticket.parse(read_ticket(ticket)).run.hex() != found[0].holder.run:
            raise ConfigError.of_option("--ticket", f"{check} is of another run, {found[0].holder.run[:12]}")
    else:
        exports = _exports(folder)
        if as_json:
            print(exports[-1].decode(), end="")
            return
        found = [_checked(one, "the record") for one in exports]
    for one in found:
        print("\n".join([*words(one), *(proof_words(one, bool(ticket)) if check is not None else ())]))
    if picture is not None:
        picture.write_text(drawn(found[-1]), encoding="utf-8")
        print(f"written to {picture}")


def _exports(folder: Path | None) -> list[bytes]:
    """Of each run or stage that the peer of ``folder`` took part in, the newest last."""
    from p2p_co2.node.credit import credit_files, read_credit
    from p2p_co2.protocol.credit import export
    from p2p_co2.wire.identity import Identity

    mine = [one for one in peer_folders() if credit_files(one)] if folder is None else [folder]
    if len(mine) != 1:
        which = ", ".join(map(str, mine)) or "none of your peers was counted in a round yet"
        raise ConfigError.of_option("FOLDER", f"name the peer's folder: {which}")
    if not (mine[0] / "identity").is_file():
        raise ConfigError.of_option("FOLDER", f"{mine[0]} is no peer's folder")
    identity = Identity.load_or_create(mine[0] / "identity")
    records = [(head, lines) for head, lines in map(read_credit, credit_files(mine[0])) if lines]
    exports = [export([head, *lines], identity) for head, lines in records if head.peer == identity.peer_id]
    if not exports:
        raise ConfigError.of_option("FOLDER", f"{mine[0]}: its peer was counted in no round yet")
    return exports


def _read(path: Path) -> bytes:
    from p2p_co2.protocol.credit import MAX_EXPORT_BYTES

    with path.open("rb") as file:
        return file.read(MAX_EXPORT_BYTES + 1)


def _checked(data: bytes, where: str) -> Credit:
    from p2p_co2.protocol.credit import open_credit

    try:
        return open_credit(data)
    except RemoteProtocolError as error:
        raise ConfigError(where, "", f"does not hold: {error}; ask for a new export") from None


def _day(at: float) -> str:
    return time.strftime("%d %b %Y", time.localtime(min(at, 1e11)))


def words(credit: Credit) -> list[str]:
    """What the peer gave."""
    from monitoring.words import figure, plain

    holder = credit.holder
    rounds = credit.rounds + credit.earlier[0]
    part = f", stage {holder.stage} of {holder.stages}" if holder.stages > 1 else ""
    lines = [
        f"run {plain(holder.name, 64)} ({holder.run[:12]}){part}",
        f"peer {holder.peer}",
        f"gave {figure(credit.all_tokens)} tokens in {figure(rounds)} fragment exchanges, from "
        f"{_day(credit.since_at)} to {_day(credit.curve[-1][0] if credit.curve else credit.since_at)}",
    ]
    if credit.earlier[0]:
        lines.append(
            f"certificates are kept of the newest {figure(credit.rounds)} exchanges, {figure(credit.tokens)} "
            "tokens; the rest is a sum"
        )
    count, tokens = credit.witnessed
    lines.append(
        f"{figure(count)} exchanges, {figure(tokens)} tokens, are signed by others, too: "
        f"{figure(len(credit.witnesses))} peers"
    )
    return lines


def proof_words(credit: Credit, is_known_run: bool) -> list[str]:
    """What checking it has proven, and what not."""
    from monitoring.words import figure

    holder = credit.holder
    lines = [
        f"proven: the holder of that key made this file; the group counted {figure(credit.tokens)} tokens of "
        f"it in {figure(credit.rounds)} exchanges, after its caps, each with the signatures of a quorum",
        f"the run is that of the ticket, {holder.run[:12]}"
        if is_known_run
        else f"not proven: which run {holder.run} is; --ticket TICKET says whether it is yours",
        "not proven: that the signers are different people, or in the run that you know: keys are free, so "
        "who has several can sign for himself; compare them with peers that you know",
        "not proven: the times, the run's name, and that whoever shows you the file is its holder",
    ]
    if credit.earlier[0]:
        lines.append(
            f"not proven: {figure(credit.earlier[1])} tokens in {figure(credit.earlier[0])} exchanges before "
            "these; their certificates are not kept"
        )
    if credit.unseen:
        names = ", ".join(map(str, credit.unseen[:16]))
        lines.append(
            f"not proven: how large fragments {names} are, and so which share of the model the others are: "
            "no exchange of them is in the file"
        )
    return lines


def drawn(credit: Credit) -> str:
    """A picture (SVG, 640 x 220): the run, tokens, exchanges and days, and the curve of tokens so far."""
    from monitoring.words import figure, plain

    first = credit.since_at
    last = max([first, *(at for at, _ in credit.curve)])
    kept = [*credit.curve[:: max(1, len(credit.curve) // 500)], *credit.curve[-1:]]
    points = [
        (32 + 576 * min(1.0, max(0.0, at - first) / max(last - first, 1e-9)),
         172 - 72 * min(1.0, tokens / max(credit.all_tokens, 1e-9)))
        for at, tokens in kept
    ]  # fmt: skip
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    run = escape(plain(credit.holder.name, 64))
    tokens = figure(credit.all_tokens)
    rounds = figure(credit.rounds + credit.earlier[0])
    signed = f"{figure(credit.witnessed[0])} signed by {figure(len(credit.witnesses))} others, too"
    days = _day(first) if _day(first) == _day(last) else f"{_day(first)} to {_day(last)}"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 220" role="img"
 font-family="system-ui, sans-serif" font-size="14" fill="#5b6573">
<title>{tokens} tokens for the run {run}</title>
<rect x="1" y="1" width="638" height="218" rx="14" fill="#ffffff" stroke="#e3e7ec" stroke-width="2"/>
<polygon points="32,172 {line} 608,172" fill="#0072B2" fill-opacity="0.14"/>
<polyline points="{line}" fill="none" stroke="#0072B2" stroke-width="2.5"/>
<text x="32" y="42">I train the run {run} with others</text>
<text x="32" y="82" font-size="34" font-weight="600" fill="#1c2430">{tokens}
<tspan font-size="18" font-weight="400">tokens</tspan></text>
<text x="32" y="199">{rounds} exchanges, {signed}</text>
<text x="608" y="199" text-anchor="end">{days}, peer {credit.holder.peer[-6:]}</text>
</svg>
"""
