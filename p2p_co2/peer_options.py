"""One peer's settings as the command line gives them to ``join`` and ``doctor``, and where a peer listens."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from p2p_co2.config import PeerConfig, problems_of, read_peer_config
from p2p_co2.errors import ConfigError
from p2p_co2.ticket import Ticket


def peer_config(
    path: Path | PeerConfig | None, given: dict[str, Any], ticket: str | None = None,
    default_folder: Callable[[], Path] | None = None,
) -> PeerConfig:  # fmt: skip
    """Defaults, then the file ``path`` (or what was read of one), then what is ``given`` (None: not), by
    dotted key; where to listen as ``listening`` says. ``default_folder`` is asked last, and where neither
    names a folder. Raises ``ConfigError`` by the option's name, ``TicketError``."""
    read = path if isinstance(path, PeerConfig) else read_peer_config(path) if path else PeerConfig()
    table = read.model_dump()
    has_folder = "folder" in read.model_fields_set
    for key, value in given.items():
        if value is not None:
            section, _, field = key.rpartition(".")
            (table[section] if section else table)[field] = value
    try:
        config = PeerConfig.model_validate(table)
    except ValidationError as error:
        wrong = [
            ConfigError.of_option(_option(place[-1]), problem)
            for place, problem in problems_of(PeerConfig, error).items()
        ]
        raise ConfigError.of_all(wrong) from None
    config = listening(config, None if ticket is None else Ticket.parse(ticket))
    if default_folder is None or has_folder or given.get("folder") is not None:
        return config
    return config.model_copy(update={"folder": default_folder()})


def bytes_per_s(option: str, text: str | None) -> float | None:
    """Of "2500000", "500k", "2.5M" or "20Mbit". Raises ``ConfigError``."""
    if text is None:
        return None
    found = re.fullmatch(r"(-?[0-9.]+) ?([kMG]?)(bit)?", text)
    try:
        value = float(found[1]) if found else math.nan
    except ValueError:
        value = math.nan
    if found is None or math.isnan(value):
        problem = f"{text!r} is no rate; write bytes per second (500k, 2M) or bits (20Mbit)"
        raise ConfigError.of_option(option, problem)
    return value * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[found[2]] / (8 if found[3] else 1)


def listening(config: PeerConfig, ticket: Ticket | None) -> PeerConfig:
    """``config`` with the address to listen on. Without a word about it: all of this machine's; the loopback
    if all seeds of the ticket are on this machine, or there is no ticket."""
    if config.host:
        return config
    is_local = ticket is None or ticket.is_local
    return config.model_copy(update={"host": "127.0.0.1" if is_local else "0.0.0.0"})


def _option(key: str) -> str:
    """The option that a key of a peer file is on the command line."""
    return "--" + key.replace("_", "-").removesuffix("-bytes-per-s").removesuffix("-s")
