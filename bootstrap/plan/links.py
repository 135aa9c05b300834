"""The peers' links of a plan: measured by ``doctor``, given in figures, or of a named profile.

One source at a time, and the plan says which. A measured or given link is everybody's: plan for the slowest
one. Without any of them it is ``DEFAULT_PROFILE``, an ordinary home line.
"""

from __future__ import annotations

import json
from pathlib import Path

from bootstrap.options import PlanOptions
from p2p_co2.errors import ConfigError
from p2p_co2.planning.exchange import Link, link_of
from p2p_co2.planning.profiles import profile_of

DEFAULT_PROFILE = "dsl"
_RATES_BYTES_PER_S = 1.0, 1.25e12
"""The least and the most that a link carries."""


def read_links(options: PlanOptions, seed: int) -> tuple[tuple[Link, ...], str]:
    """One link for each peer, and where they come from in words. Raises ``ConfigError``."""
    peers = options.peers
    figures = bool(options.up_mbit or options.down_mbit or options.rtt_ms or options.loss)
    if figures + bool(options.profile) + (options.link is not None) > 1:
        raise ConfigError.of_option("--profile", "give a profile, figures of a link, or --link, not several")
    if options.link is not None:
        link = _measured(options.link)
        return (link,) * peers, f"measured ({options.link}): {described(link)}"
    if figures:
        link = _figures(options)
        return (link,) * peers, f"given: {described(link)}"
    name = options.profile or DEFAULT_PROFILE
    links = tuple(link_of(profile_of(name, seed, index)) for index in range(peers))
    note = "" if options.profile else ", assumed: measure yours with p2p-co2 doctor TICKET --json"
    kinds = described(links[0]) if len(set(links)) == 1 else f"{len(set(links))} kinds"
    return links, f"profile {name} ({kinds}){note}"


def described(link: Link) -> str:
    """A link in words."""
    words = f"{8e-6 * link.up_bytes_per_s:,.3g} Mbit/s up, {8e-6 * link.down_bytes_per_s:,.3g} down"
    return f"{words}, {1e3 * link.round_trip_s:.3g} ms round trip, {link.loss:.2%} loss"


def _figures(options: PlanOptions) -> Link:
    least_mbit, down_mbit = 8e-6 * _RATES_BYTES_PER_S[0], options.down_mbit or 10 * options.up_mbit
    for option, value, least, most in (
        ("--up-mbit", options.up_mbit, least_mbit, 1e7),
        ("--down-mbit", down_mbit, least_mbit, 1e8),
        ("--rtt-ms", options.rtt_ms, 0, 1e5),
        ("--loss", options.loss, 0, 0.99),
    ):
        if not least <= value <= most:
            raise ConfigError.of_option(option, f"what the link has, {least:g} to {most:g} (got {value:g})")
    return Link(
        up_bytes_per_s=options.up_mbit * 1e6 / 8,
        down_bytes_per_s=down_mbit * 1e6 / 8,
        round_trip_s=options.rtt_ms / 1e3,
        loss=options.loss,
    )


def _measured(path: Path) -> Link:
    """The link that ``doctor --json`` measured."""
    cure = "write it with: p2p-co2 doctor TICKET --json"
    try:
        with path.open("rb") as file:
            table = json.loads(file.read(1 << 20))
    except OSError as error:
        raise ConfigError(str(path), "", f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(str(path), "", f"not JSON; {cure}") from None
    measured = table.get("link") if isinstance(table, dict) else None
    if not isinstance(measured, dict):
        raise ConfigError(str(path), "link", f"missing; {cure}")
    figures = {}
    for name, (least, most) in {
        "up_bytes_per_s": _RATES_BYTES_PER_S,
        "down_bytes_per_s": _RATES_BYTES_PER_S,
        "round_trip_s": (1e-9, 100.0),
    }.items():
        value = measured.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            problem = f"was not measured (got {str(value)[:40]}); run doctor with a ticket"
            raise ConfigError(str(path), f"link.{name}", problem)
        figures[name] = float(value)
    return Link(**figures)
