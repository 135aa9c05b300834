"""The peers' links of a plan: measured by ``doctor``, given in figures, or of a named profile.

One source at a time, and the plan says which. A measured or given link is everybody's: plan for the slowest
one. Without any of them it is ``DEFAULT_PROFILE``, an ordinary home line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from p2p_co2.errors import ConfigError
from p2p_co2.planning import Link, link_of
from p2p_co2.planning.profiles import profile_of

DEFAULT_PROFILE = "dsl"
_LARGEST_BYTES = 1 << 20
_LEAST_BYTES_PER_S, _MOST_BYTES_PER_S = 1.0, 1.25e12
_LONGEST_TRIP_S = 100.0


@dataclass(frozen=True, kw_only=True)
class GivenLink:
    """``profile``: a name of ``planning.profiles``. ``up_mbit``, ``down_mbit`` (per second),
    ``rtt_ms``, ``loss`` (share of packets): figures; ``down_mbit`` 0 means ten times the upload.
    ``file``: what ``p2p-co2 doctor --json`` printed."""

    profile: str = ""
    up_mbit: float = 0.0
    down_mbit: float = 0.0
    rtt_ms: float = 0.0
    loss: float = 0.0
    file: Path | None = None


def read_links(given: GivenLink, peers: int, seed: int) -> tuple[tuple[Link, ...], str]:
    """One link for each of ``peers``, and where they come from in words. Raises ``ConfigError``."""
    figures = bool(given.up_mbit or given.down_mbit or given.rtt_ms or given.loss)
    if figures + bool(given.profile) + (given.file is not None) > 1:
        raise ConfigError.of_option("--profile", "give a profile, figures of a link, or --link, not several")
    if given.file is not None:
        link = _measured(given.file)
        return (link,) * peers, f"measured ({given.file}): {described(link)}"
    if figures:
        link = _figures(given)
        return (link,) * peers, f"given: {described(link)}"
    name = given.profile or DEFAULT_PROFILE
    links = tuple(link_of(profile_of(name, seed, index)) for index in range(peers))
    note = "" if given.profile else ", assumed: measure yours with p2p-co2 doctor TICKET --json"
    kinds = described(links[0]) if len(set(links)) == 1 else f"{len(set(links))} kinds"
    return links, f"profile {name} ({kinds}){note}"


def described(link: Link) -> str:
    """A link in words."""
    words = f"{8e-6 * link.up_bytes_per_s:,.3g} Mbit/s up, {8e-6 * link.down_bytes_per_s:,.3g} down"
    return f"{words}, {1e3 * link.round_trip_s:.3g} ms round trip, {link.loss:.2%} loss"


def _figures(given: GivenLink) -> Link:
    least_mbit = _LEAST_BYTES_PER_S * 8e-6
    for option, value, least, most in (
        ("--up-mbit", given.up_mbit, least_mbit, 1e7),
        ("--down-mbit", given.down_mbit or 10 * given.up_mbit, least_mbit, 1e8),
        ("--rtt-ms", given.rtt_ms, 0, 1e5),
        ("--loss", given.loss, 0, 0.99),
    ):
        if not least <= value <= most:
            raise ConfigError.of_option(option, f"what the link has, {least:g} to {most:g} (got {value:g})")
    return Link(
        up_bytes_per_s=given.up_mbit * 1e6 / 8,
        down_bytes_per_s=(given.down_mbit or 10 * given.up_mbit) * 1e6 / 8,
        round_trip_s=given.rtt_ms / 1e3,
        loss=given.loss,
    )


def _measured(path: Path) -> Link:
    """The link that ``doctor --json`` measured."""
    cure = "write it with: p2p-co2 doctor TICKET --json"
    try:
        with path.open("rb") as file:
            table = json.loads(file.read(_LARGEST_BYTES))
    except OSError as error:
        raise ConfigError(str(path), "", f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(str(path), "", f"not JSON; {cure}") from None
    measured = table.get("link") if isinstance(table, dict) else None
    if not isinstance(measured, dict):
        raise ConfigError(str(path), "link", f"missing; {cure}")
    figures = {}
    for name, least, most in (
        ("up_bytes_per_s", _LEAST_BYTES_PER_S, _MOST_BYTES_PER_S),
        ("down_bytes_per_s", _LEAST_BYTES_PER_S, _MOST_BYTES_PER_S),
        ("round_trip_s", 1e-9, _LONGEST_TRIP_S),
    ):
        value = measured.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            problem = f"was not measured (got {str(value)[:40]}); run doctor with a ticket"
            raise ConfigError(str(path), f"link.{name}", problem)
        figures[name] = float(value)
    return Link(**figures)
