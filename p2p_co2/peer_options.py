"""One peer's settings as the command line gives them: to ``join``, and to ``doctor``, which looks whether
they will do. On the floor below ``cli``, since two of its files ask here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2p_co2.errors import ConfigError

if TYPE_CHECKING:
    from p2p_co2.config import PeerConfig


def peer_config(path: Path | None, given: dict[str, Any]) -> PeerConfig:
    """Defaults, then the file ``path``, then what is ``given`` (None: not), by dotted key. Raises
    ``ConfigError`` by the option's name."""
    from pydantic import ValidationError

    from p2p_co2.config import PeerConfig, read_peer_config

    table = (read_peer_config(path) if path else PeerConfig()).model_dump()
    for key, value in given.items():
        if value is not None:
            section, _, field = key.rpartition(".")
            (table[section] if section else table)[field] = value
    try:
        return PeerConfig.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + str(first["loc"][-1]).replace("_", "-").removesuffix("-bytes-per-s")
        raise ConfigError("command line", option, f"{first['msg']} (got {first['input']!r})") from None
