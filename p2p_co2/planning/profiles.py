"""Links as volunteers have them, in one table: rehearsals shape real packets by it, simulations virtual ones.

A link is the same wherever it is emulated: both ends' figures add up by the rules written at the fields. The
figures are round numbers of ordinary subscriptions, so that a user recognises their own line; no
measurements."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from p2p_co2.errors import ConfigError

NatKind = Literal["open", "cone", "symmetric"]
"""``open`` can be dialled. ``cone``: behind a router that maps a port alike for all, so hole punching works.
``symmetric``: a mapping of its own per destination (carrier-grade NAT): it meets ``open`` peers by dialling
them, all others through a relay."""
MIX = "home-mix"


@dataclass(frozen=True)
class LinkProfile:
    """One peer's link to the internet.

    ``up_bits_per_s``, ``down_bits_per_s``: what it carries. ``latency_ms``: one way between two peers of this
    profile; between two profiles half of each. ``jitter_ms``: standard deviation of that, again half of each.
    ``loss``: share of packets lost on the way between two peers of this profile, half of each otherwise.
    """

    name: str
    up_bits_per_s: int
    down_bits_per_s: int
    latency_ms: float
    jitter_ms: float
    loss: float
    nat: NatKind


PROFILES: Mapping[str, LinkProfile] = {
    profile.name: profile
    for profile in (
        LinkProfile("fibre", 300_000_000, 300_000_000, 10.0, 1.0, 0.0001, "open"),
        LinkProfile("cable", 40_000_000, 400_000_000, 20.0, 4.0, 0.001, "cone"),
        LinkProfile("dsl", 20_000_000, 100_000_000, 40.0, 5.0, 0.002, "cone"),
        LinkProfile("4g", 15_000_000, 60_000_000, 50.0, 15.0, 0.005, "symmetric"),
        LinkProfile("transatlantic", 100_000_000, 100_000_000, 45.0, 2.0, 0.001, "open"),
        LinkProfile("satellite", 5_000_000, 50_000_000, 300.0, 10.0, 0.01, "symmetric"),
    )
}
MIX_SHARES: Mapping[str, float] = {
    "fibre": 0.25, "cable": 0.30, "dsl": 0.25, "4g": 0.10, "transatlantic": 0.07, "satellite": 0.03,
}  # fmt: skip
"""What share of the peers of ``home-mix`` has which link."""
PROFILE_NAMES: tuple[str, ...] = (*PROFILES, MIX)


def profile_of(name: str, seed: int, index: int) -> LinkProfile:
    """The link of peer ``index`` under profile ``name``; for ``home-mix`` drawn from (``seed``, ``index``)
    alone.

    Raises ``ConfigError`` for an unknown name.
    """
    if name == MIX:
        draw = random.Random(f"{MIX}/{seed}/{index}").random()
        for kind, share in MIX_SHARES.items():
            draw -= share
            if draw < 0:
                return PROFILES[kind]
        return PROFILES["fibre"]
    profile = PROFILES.get(name)
    if profile is None:
        raise ConfigError.of_option("--profile", f"unknown: {name!r}; one of {', '.join(PROFILE_NAMES)}")
    return profile
