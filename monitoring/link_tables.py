"""Tables of a rehearsal's lines: what was emulated, and what the swarm made of it.

Law: as ``terminal``: missing figures are a dash, text from a peer is never markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from monitoring.words import figure, percent, plain
from p2p_co2.planning.profiles import LinkProfile

NAT_WORDS = {
    "open": "none, can be dialled",
    "cone": "keeps ports (cone)",
    "symmetric": "new port each time (symmetric)",
}


def lines_table(lines: Sequence[tuple[str, LinkProfile, str, float | None]]) -> Table:
    """The emulated lines: (peer, profile, address as others see it, measured round trip to the seed in
    seconds or None)."""
    headings = (
        "peer", "profile", "up\nMbit/s", "down\nMbit/s", "one way\nms", "jitter\nms", "loss", "router",
        "seen as", "round trip\nto seed, ms",
    )  # fmt: skip
    table = _table("emulated lines (one way and loss: between two peers of this profile)", headings)
    for peer, profile, address, round_trip_s in lines:
        _row(
            table,
            peer,
            profile.name,
            _mbit(profile.up_bits_per_s),
            _mbit(profile.down_bits_per_s),
            f"{profile.latency_ms:g}",
            f"{profile.jitter_ms:g}",
            f"{100 * profile.loss:g} %",
            NAT_WORDS[profile.nat],
            address or "-",
            figure(None if round_trip_s is None else 1e3 * round_trip_s),
        )
    return table


def used_table(summary: dict[str, Any]) -> Table:
    """What each peer's line carried during exchanges, and how well its processor was used meanwhile."""
    headings = (
        "peer", "router", "links", "up while\nexchanging, Mbit/s", "of the\nline", "down while\nexchanging",
        "of the\nline", "compute\nused", "after the\nfirst rounds", "staleness",
    )  # fmt: skip
    table = _table("lines in use", headings)
    exchanges, peers = summary["exchanges"], summary["peer_table"]
    for name, line in summary["lines"].items():
        used = exchanges["while_exchanging"].get(name, {})
        peer = peers.get(name, {})
        carriers = sorted((peer.get("carriers") or {}).values())
        _row(
            table,
            name,
            NAT_WORDS[line["nat"]],
            ", ".join(f"{carriers.count(kind)} {kind}" for kind in dict.fromkeys(carriers)) or "-",
            figure(used.get("up_mbit_per_s"), 1),
            percent(used.get("up_share")),
            figure(used.get("down_mbit_per_s"), 1),
            percent(used.get("down_share")),
            percent(peer.get("utilisation")),
            percent(summary["steady"]["utilisation"].get(name)),
            figure(peer.get("staleness_mean"), 2),
        )
    return table


def exchanges_line(summary: dict[str, Any]) -> Text:
    """The exchanges in a sentence."""
    figures = summary["exchanges"]
    duration, share = figures["duration_s"], figures["line_share"]
    return Text(
        f"{figures['count']} exchanges, median {figure(duration['median'], 2)} s "
        f"({figure(duration['lowest'], 2)} to {figure(duration['highest'], 2)}); "
        f"line used in an exchange: median {percent(share['median'])}, "
        f"payload alone {percent(figures['goodput_share']['median'])}, "
        f"until all means had come {percent(figures['transfer_share']['median'])}; "
        f"an exchange was going on {percent(figures['exchanging_share'])} of the time"
    )


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(
        title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, header_style="bold",
        padding=(0, 1, 0, 0), pad_edge=False, show_edge=False,
    )  # fmt: skip
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")
    return table


def _row(table: Table, *cells: str) -> None:
    table.add_row(*(Text(plain(cell, 40)) for cell in cells))


def _mbit(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e6:g}"
