"""The settings of a run by round: those of its run file, and what its organiser has amended since.

A ``RunConfig`` is fixed: its digest is the run. The run's key may sign besides that one of ``AMENDABLE`` is
another from a round on (``Amendment``), and ``wire.members`` passes that on.

Law: round v of a fragment takes the settings that hold in v, whoever computes it and whenever. A peer that
did not hear in time computes other bits, and takes over the others' state as after any fault. Nothing can be
amended that reaches beyond the run: no path, address or recipe.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError

from p2p_co2.config import RunConfig, problems_of
from p2p_co2.errors import ConfigError
from p2p_co2.wire.limits import MAX_VERSION
from p2p_co2.wire.messages_pb2 import Amendment
from p2p_co2.wire.names import is_name

AMENDABLE = ("clock.rounds", "outer.lr", "outer.momentum", "outer.clip", "outer.clip_phi")
MAX_AMENDMENTS = 4 * len(AMENDABLE)
"""Of one run."""


def is_bounded(one: Amendment) -> bool:
    """Whether it may be read: a short text, and a round that a run can have."""
    return 0 < one.round <= MAX_VERSION and one.setting in AMENDABLE and is_name(one.value)


def amended(run: RunConfig, setting: str, value: str) -> RunConfig:
    """``run`` with another ``value`` of one setting, checked as in a run file. Raises ``ConfigError``."""
    if setting not in AMENDABLE:
        may = ", ".join(AMENDABLE)
        raise ConfigError.of_option(setting, f"is fixed for the whole run; what may be amended: {may}")
    table, key = setting.split(".")
    settings = run.model_dump()
    settings[table][key] = value
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError.of_option(setting, "; ".join(problems_of(RunConfig, error).values())) from None


def value_of(run: RunConfig, setting: str) -> str:
    """That of ``run`` as a text which ``amended`` reads as the same."""
    table, key = setting.split(".")
    return str(getattr(getattr(run, table), key))


class RunTerms:
    """Of one run. One thread amends; any may read."""

    def __init__(self, run: RunConfig) -> None:
        self._by_round: tuple[tuple[int, RunConfig], ...] = ((0, run),)
        self._told = set[str]()
        self.news: list[str] = []
        """What is amended, in words, and not told yet."""

    def at(self, round_: float) -> RunConfig:
        """The settings that hold in a round of a fragment, or at a position of the run."""
        return [run for first, run in self._by_round if not first or first <= round_][-1]

    def rounds(self, position: float) -> int:
        """When the run ends, as it is known at ``position``; 0 for never."""
        return self.at(position).clock.rounds

    def amend(self, amendments: Iterable[Amendment]) -> None:
        """These hold, and no others; of one round each on the one before it. Raises ``ConfigError`` if a
        value is not allowed; then nothing is changed."""
        known = [self._by_round[0]]
        words = []
        for one in sorted(amendments, key=lambda one: one.round):
            known.append((one.round, amended(known[-1][1], one.setting, one.value)))
            words.append(f"from round {one.round} on {one.setting} is {one.value}, says the run's organiser")
        self._by_round = tuple(known)
        self.news += [text for text in words if text not in self._told]
        self._told.update(words)
