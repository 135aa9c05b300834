"""One peer's settings as the command line gives them: to ``join``, and to ``doctor``, which looks whether
they will do. On the floor below ``cli``, since two of its files ask here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2p_co2.errors import ConfigError

if TYPE_CHECKING:
    from p2p_co2.config import PeerConfig


def peer_config(path: Path | None, given: dict[str, Any], ticket: str = "") -> PeerConfig:
    """Defaults, then the file ``path``, then what is ``given`` (None: not), by dotted key. Without a word
    about ``host`` a peer listens on all addresses, unless all seeds of its ``ticket`` are on this machine.
    Raises ``ConfigError`` by the option's name, ``TicketError``."""
    from pydantic import ValidationError

    from p2p_co2.config import PeerConfig, read_peer_config
    from p2p_co2.ticket import Ticket

    read = read_peer_config(path) if path else PeerConfig()
    table = read.model_dump()
    for key, value in given.items():
        if value is not None:
            section, _, field = key.rpartition(".")
            (table[section] if section else table)[field] = value
    try:
        config = PeerConfig.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + str(first["loc"][-1]).replace("_", "-").removesuffix("-bytes-per-s")
        option = option.removesuffix("-s")
        problem = first["msg"].removeprefix("Value error, ")
        raise ConfigError("command line", option, f"{problem} (got {first['input']!r})") from None
    is_said = "host" in read.model_fields_set or given.get("host") is not None
    if ticket and not is_said and not Ticket.parse(ticket).is_local:
        config = config.model_copy(update={"host": "0.0.0.0"})
    return config
