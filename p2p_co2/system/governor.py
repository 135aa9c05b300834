"""When this peer works and when it rests: the hours its owner gave it, and the owner's last word.

A machine without a clock: the minute of the local day is handed in. Without hours it works, but while its
owner uses the machine (``Owner``). A wish (pause, go on) overrides the hours until they next open or close;
where there are none it counts for ever. To go on overrides what the owner uses now, until that is over. A
wish may come from a signal handler or another thread. Or it comes from another process,
``p2p-co2 pause`` or the peer's own page, by a file in the peer's folder (``WishFile``)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from p2p_co2.errors import ConfigError, EnvironmentFault

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
        start = 60 * start_h + start_min
        stop = 60 * stop_h + stop_min
        if start == stop or stop > _DAY:
            raise ConfigError("hours", "", f"{part!r} ends where it begins, or after 24:00")
        spans.append((start, (stop - start) % _DAY or _DAY))
    return tuple(spans)


class Wish(StrEnum):
    """What a person wants of a peer."""

    PAUSE = "pause"
    GO_ON = "go on"


class WishFile:
    """The file ``wish`` in a peer's ``folder``: ``p2p-co2 pause`` and ``resume`` write it, the peer looks.

    A wish is news once, whenever it was written, so that each command works again after a wish that came
    another way. Of what was written before the peer began only a pause counts: it outlives the process.
    Looking costs some microseconds.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "wish"
        self._seen: tuple[int, int] | None = None
        self._is_first = True

    def news(self) -> Wish | None:
        """The wish that was written since this was asked last; None if there is none."""
        is_first = self._is_first
        self._is_first = False
        with suppress(OSError, ValueError):  # there is none, or it is no wish
            found = os.stat(self._path)
            if (found.st_ino, found.st_mtime_ns) != self._seen:
                self._seen = found.st_ino, found.st_mtime_ns
                wish = Wish(self._path.read_text(encoding="ascii")[:64].strip())
                return None if is_first and wish is Wish.GO_ON else wish
        return None

    def write(self, wish: Wish) -> None:
        """Raises ``EnvironmentFault``."""
        new = self._path.with_name(f"wish.{os.getpid()}")
        try:
            new.write_text(f"{wish}\n", encoding="ascii")
            new.replace(self._path)
        except OSError as error:
            raise EnvironmentFault(f"cannot write {self._path}: {error.strerror}") from None


def wish_in(folder: Path, wish: Wish) -> None:
    """Have the peer whose ``folder`` it is see it. Raises ``EnvironmentFault``."""
    for place in (folder, folder / "tied"):  # of a stage with two groups
        if place.is_dir():
            WishFile(place).write(wish)


class Governor:
    """``hours``: as ``read_hours`` takes them, local time; "" for always. ``news``: what was wished elsewhere
    since it was asked last. ``using``: what the owner uses of the machine, as a reason to rest; "" if
    nothing."""

    def __init__(
        self, hours: str = "", news: Callable[[], Wish | None] = lambda: None,
        using: Callable[[], str] = lambda: "",
    ) -> None:  # fmt: skip
        self._hours = hours
        self._spans = read_hours(hours)
        self._news = news
        self._using = using
        self._wish: bool | None = None
        """What a person wants, True to rest; None to follow the hours."""
        self._is_let = False
        """To work in spite of what the owner uses now."""
        self._was_open: bool | None = None

    def pause(self) -> None:
        self._wish = True

    def go_on(self) -> None:
        self._is_let = True
        self._wish = False

    def resting(self, minute: int) -> str:
        """Why to rest at ``minute`` of the local day; "" to work."""
        if (wished := self._news()) is not None:
            (self.pause if wished is Wish.PAUSE else self.go_on)()
        is_open = not self._spans or any((minute - start) % _DAY < minutes for start, minutes in self._spans)
        if self._was_open is not None and is_open != self._was_open:
            self._wish = None
        self._was_open = is_open
        using = self._using()
        self._is_let = self._is_let and bool(using)
        if self._wish:
            return BY_HAND
        if self._wish is None and not is_open:
            return f"outside its hours ({self._hours})"
        return "" if self._is_let else using
