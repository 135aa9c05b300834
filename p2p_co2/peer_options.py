"""A peer's settings as ``join``, ``doctor`` and ``co2.join`` are given them, and where a peer listens.

The options are those that the fields of ``PeerConfig`` declare (``config.Option``); nothing here names one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic.fields import FieldInfo

from p2p_co2.config import Option, PeerConfig, problems_of, read_peer_config
from p2p_co2.errors import ConfigError
from p2p_co2.ticket import Ticket

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class PeerOption:
    """A setting by the ``name`` of its option; ``place``: of its key in a peer file."""

    place: tuple[str, ...]
    declared: Option
    field: FieldInfo

    @property
    def name(self) -> str:
        return self.declared.name or self.place[-1]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def kind(self) -> Any:
        """The type that a word of the command line is read as: text, where pydantic reads it further."""
        annotation = self.field.annotation
        return annotation if isinstance(annotation, type) and not self._is_read_from_text else str

    @property
    def hint(self) -> str:
        """What a program may give for it, as a type in Python's words."""
        names = [self.kind.__name__, "None"]
        if self.kind is Path or self._is_read_from_text:
            names.insert(0, "str" if self.kind is Path else "float")
        return " | ".join(names)

    @property
    def _is_read_from_text(self) -> bool:
        return any(isinstance(one, BeforeValidator) for one in self.field.metadata)


def peer_options(kind: type[BaseModel] = PeerConfig) -> dict[str, PeerOption]:
    """Every setting of ``kind``, by the name of its option."""
    return {option.name: option for option in _options(kind, ())}


def _options(kind: type[BaseModel], place: tuple[str, ...]) -> Iterator[PeerOption]:
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _options(field.annotation, (*place, name))
        for declared in field.metadata:
            if isinstance(declared, Option):
                yield PeerOption((*place, name), declared, field)


def peer_config(
    path: Path | PeerConfig | None, given: Mapping[str, Any], ticket: str | None = None,
    default_folder: Callable[[], Path] | None = None, where: str = COMMAND_LINE,
    kind: type[PeerConfig] = PeerConfig,
) -> PeerConfig:  # fmt: skip
    """Defaults, then the file ``path`` (or what was read of one), then what is ``given`` by the options'
    names; None is not given. Where to listen is as ``listening`` says. ``default_folder`` is asked last, and
    where neither names a folder. Raises ``ConfigError`` of ``where`` and the option, ``TicketError``."""
    read = path if isinstance(path, PeerConfig) else read_peer_config(path) if path else kind()
    table = read.model_dump()
    has_folder = "folder" in read.model_fields_set
    options = peer_options(kind)
    for name, value in given.items():
        if value is not None:
            *tables, key = options[name].place
            (table[tables[0]] if tables else table)[key] = value
    try:
        config = kind.model_validate(table)
    except ValidationError as error:
        spelt = {
            one.place: one.flag if where == COMMAND_LINE else one.name for one in peer_options(kind).values()
        }
        wrong = [
            ConfigError(where, spelt.get(place, ".".join(place)), problem)
            for place, problem in problems_of(kind, error).items()
        ]
        raise ConfigError.of_all(wrong) from None
    config = listening(config, None if ticket is None else Ticket.parse(ticket))
    if default_folder is None or has_folder or given.get("folder") is not None:
        return config
    return config.model_copy(update={"folder": default_folder()})


def listening(config: PeerConfig, ticket: Ticket | None) -> PeerConfig:
    """``config`` with the address to listen on. Without a word about it: all of this machine's. The loopback
    where all seeds of the ticket are on this machine, or there is no ticket."""
    if config.host:
        return config
    is_local = ticket is None or ticket.is_local
    return config.model_copy(update={"host": "127.0.0.1" if is_local else "0.0.0.0"})
