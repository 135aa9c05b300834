"""Which line each peer of a rehearsal has: profiles, and what the user changed of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

from bootstrap.options import RehearsalOptions
from p2p_co2.errors import ConfigError
from p2p_co2.planning.profiles import LinkProfile, NatKind, profile_of


@dataclass(frozen=True)
class Line:
    """One peer's emulated line. ``address``: the one that others see it under, "" on loopback."""

    peer: str
    profile: LinkProfile
    address: str = ""

    @property
    def figures(self) -> tuple[float, ...]:
        """As a slowed carrier takes them: bits/s up and down, latency and jitter in seconds, loss."""
        profile = self.profile
        times_s = profile.latency_ms / 1e3, profile.jitter_ms / 1e3
        return profile.up_bits_per_s, profile.down_bits_per_s, *times_s, profile.loss


def lines_of(options: RehearsalOptions, seed: int) -> list[Line]:
    """The lines of peer-1, peer-2 and so on, who have the named profiles in turn. Raises ``ConfigError``."""
    if not 1 <= options.peers <= 32:
        raise ConfigError.of_option("--peers", f"1 to 32 (got {options.peers})")
    names, changes = [name.strip() for name in options.profile.split(",")], _changes(options)
    return [
        Line(f"peer-{index + 1}", replace(profile_of(names[index % len(names)], seed, index), **changes))
        for index in range(options.peers)
    ]


def _changes(options: RehearsalOptions) -> dict[str, Any]:
    """Fields of every profile that get another value. Raises ``ConfigError`` for what no line has."""
    changes: dict[str, Any] = {}
    for option, value, field, unit, least, most in (
        ("--up-mbit", options.up_mbit, "up_bits_per_s", 1e6, 0.1, 1e4),
        ("--down-mbit", options.down_mbit, "down_bits_per_s", 1e6, 0.1, 1e4),
        ("--latency-ms", options.latency_ms, "latency_ms", 1.0, 0.0, 5000.0),
        ("--jitter-ms", options.jitter_ms, "jitter_ms", 1.0, 0.0, 1000.0),
        ("--loss", options.loss, "loss", 1.0, 0.0, 0.5),
    ):
        if value is not None:
            if not least <= value <= most:
                raise ConfigError.of_option(option, f"{least:g} to {most:g} (got {value:g})")
            changes[field] = value * unit
    if options.nat != "profile":
        if options.nat not in get_args(NatKind):
            problem = f"profile, {', '.join(get_args(NatKind))} (got {options.nat!r})"
            raise ConfigError.of_option("--nat", problem)
        changes["nat"] = options.nat
    return changes
