"""Which line each peer of a rehearsal has: profiles, and what the user changed of them.

Pure but for errors about the user's input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

from p2p_co2.errors import ConfigError
from p2p_co2.planning.profiles import LinkProfile, NatKind, profile_of


@dataclass(frozen=True, kw_only=True)
class LineChanges:
    """Figures of the profile that get another value; None for none. ``nat`` "profile": as the profile
    says."""

    up_mbit: float | None = None
    down_mbit: float | None = None
    latency_ms: float | None = None
    jitter_ms: float | None = None
    loss: float | None = None
    nat: str = "profile"

    def applied(self, profile: LinkProfile) -> LinkProfile:
        """The profile with the changes. Raises ``ConfigError`` for figures that no line has."""
        changed: dict[str, Any] = {}
        for option, value, field, unit, least, most in (
            ("--up-mbit", self.up_mbit, "up_bits_per_s", 1e6, 0.1, 1e4),
            ("--down-mbit", self.down_mbit, "down_bits_per_s", 1e6, 0.1, 1e4),
            ("--latency-ms", self.latency_ms, "latency_ms", 1.0, 0.0, 5000.0),
            ("--jitter-ms", self.jitter_ms, "jitter_ms", 1.0, 0.0, 1000.0),
            ("--loss", self.loss, "loss", 1.0, 0.0, 0.5),
        ):
            if value is not None:
                if not least <= value <= most:
                    raise ConfigError.of_option(option, f"{least:g} to {most:g} (got {value:g})")
                changed[field] = value * unit
        if self.nat != "profile":
            if self.nat not in get_args(NatKind):
                problem = f"profile, {', '.join(get_args(NatKind))} (got {self.nat!r})"
                raise ConfigError.of_option("--nat", problem)
            changed["nat"] = self.nat
        return replace(profile, **changed)


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


def lines_of(peers: int, profiles: str, changes: LineChanges, seed: int) -> list[Line]:
    """The lines of peer-1, peer-2 and so on. ``profiles``: one name, or several with commas, given out in
    turn. Raises ``ConfigError``."""
    if not 1 <= peers <= 32:
        raise ConfigError.of_option("--peers", f"1 to 32 (got {peers})")
    names = [name.strip() for name in profiles.split(",")]
    return [
        Line(f"peer-{index + 1}", changes.applied(profile_of(names[index % len(names)], seed, index)))
        for index in range(peers)
    ]
