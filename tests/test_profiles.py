"""Link profiles: one table that every emulation of a link reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple

import pytest

from p2p_co2.errors import ConfigError
from p2p_co2.planning.profiles import MIX_SHARES, PROFILE_NAMES, PROFILES, profile_of


def test_the_named_figures() -> None:
    assert PROFILES["dsl"].up_bits_per_s == 20_000_000
    assert PROFILES["dsl"].latency_ms == 40.0
    assert PROFILE_NAMES == ("fibre", "cable", "dsl", "4g", "transatlantic", "satellite", "home-mix")


def test_every_link_is_possible_and_no_uplink_beats_its_downlink() -> None:
    for name, profile in PROFILES.items():
        assert name == profile.name
        assert 0 < profile.up_bits_per_s <= profile.down_bits_per_s
        assert 0 <= profile.loss < 1
        assert 0 <= 3 * profile.jitter_ms <= profile.latency_ms, "jitter must not send packets back in time"


def test_the_mixture_is_drawn_from_seed_and_index_alone() -> None:
    assert sum(MIX_SHARES.values()) == pytest.approx(1.0)
    drawn = [profile_of("home-mix", 7, index) for index in range(2000)]
    assert drawn == [profile_of("home-mix", 7, index) for index in range(2000)]
    assert drawn != [profile_of("home-mix", 8, index) for index in range(2000)]
    counts = Counter(profile.name for profile in drawn)
    for name, share in MIX_SHARES.items():
        assert abs(counts[name] / 2000 - share) < 0.035


def test_an_unknown_name_is_told_the_right_ones() -> None:
    assert astuple(profile_of("fibre", 1, 2))[0] == "fibre"
    with pytest.raises(ConfigError, match="home-mix"):
        profile_of("fiber", 0, 0)
