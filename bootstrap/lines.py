"""Which line each peer of a rehearsal has: profiles, and what the user changed of them.

Pure but for errors about the user's input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

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
        return LinkProfile(
            profile.name,
            _bits_per_s("--up-mbit", self.up_mbit, profile.up_bits_per_s),
            _bits_per_s("--down-mbit", self.down_mbit, profile.down_bits_per_s),
            _within("--latency-ms", self.latency_ms, profile.latency_ms, 5000.0),
            _within("--jitter-ms", self.jitter_ms, profile.jitter_ms, 1000.0),
            _within("--loss", self.loss, profile.loss, 0.5),
            self._nat(profile),
        )

    def _nat(self, profile: LinkProfile) -> NatKind:
        kinds: tuple[NatKind, ...] = get_args(NatKind)
        for kind in kinds:
            if self.nat == kind:
                return kind
        if self.nat != "profile":
            raise ConfigError.of_option("--nat", f"profile, {', '.join(kinds)} (got {self.nat!r})")
        return profile.nat


@dataclass(frozen=True)
class Line:
    """One peer's emulated line. ``address``: the one that others see it under, "" on loopback;
    ``round_trip_s``: to the seed, measured before the start, None if it was not."""

    peer: str
    profile: LinkProfile
    address: str = ""
    round_trip_s: float | None = None

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


def _bits_per_s(option: str, mbit: float | None, otherwise: int) -> int:
    if mbit is None:
        return otherwise
    if not 0.1 <= mbit <= 10_000:
        raise ConfigError.of_option(option, f"0.1 to 10000 Mbit/s (got {mbit:g})")
    return round(mbit * 1e6)


def _within(option: str, value: float | None, otherwise: float, most: float) -> float:
    if value is None:
        return otherwise
    if not 0 <= value <= most:
        raise ConfigError.of_option(option, f"0 to {most:g} (got {value:g})")
    return value
