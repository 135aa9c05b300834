"""When this peer works and when it rests: the hours its owner gave it, and the owner's last word.

A machine without a clock: the minute of the local day is handed in. Without hours it works; a wish (pause,
go on) overrides the hours until they next open or close, and counts for ever where there are none. A wish
may come from a signal handler or another thread: it is one assignment."""

from __future__ import annotations

import re

from p2p_co2.errors import ConfigError

BY_HAND = "paused by hand"
_DAY = 24 * 60
_SPAN = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)")


def read_hours(text: str) -> tuple[tuple[int, int], ...]:
    """ "22:00-07:00, 12:30-13:30" as (first minute of the day, minutes); "" is none. Raises
    ``ConfigError``."""
    spans = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _SPAN.fullmatch(part)
        if found is None:
            raise ConfigError("hours", "", f"{part!r} is no span of the day; write 22:00-07:00")
        start_h, start_min, stop_h, stop_min = map(int, found.groups())
        start, stop = 60 * start_h + start_min, 60 * stop_h + stop_min
        if start == stop or stop > _DAY:
            raise ConfigError("hours", "", f"{part!r} ends where it begins, or after 24:00")
        spans.append((start, (stop - start) % _DAY or _DAY))
    return tuple(spans)


class Governor:
    """``hours``: as ``read_hours`` takes them, local time; "" for always."""

    def __init__(self, hours: str = "") -> None:
        self._hours, self._spans = hours, read_hours(hours)
        self._wish: bool | None = None
        """What a person wants, True to rest; None to follow the hours."""
        self._was_open: bool | None = None

    def pause(self) -> None:
        self._wish = True

    def go_on(self) -> None:
        self._wish = False

    def toggle(self, minute: int) -> None:
        """The other of the two, as things stand."""
        self._wish = not self.resting(minute)

    def resting(self, minute: int) -> str:
        """Why to rest at ``minute`` of the local day; "" to work."""
        is_open = not self._spans or any((minute - start) % _DAY < minutes for start, minutes in self._spans)
        if self._was_open is not None and is_open != self._was_open:
            self._wish = None
        self._was_open = is_open
        if self._wish is None:
            return "" if is_open else f"outside its hours ({self._hours})"
        return BY_HAND if self._wish else ""
