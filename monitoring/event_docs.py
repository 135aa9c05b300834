"""``docs/events.md``, made from the event types themselves: ``python -m monitoring.event_docs >
docs/events.md``. A test holds the file against this, so it cannot grow old."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing

from p2p_co2.telemetry.events import EVENT_TYPES, Event

_JSON = {
    float: "number or null", int: "whole number", bool: "true or false", str: "text",
    tuple[int, ...]: "list of whole numbers", tuple[float, ...]: "list of numbers",
    tuple[str, ...]: "list of texts", dict[str, str]: "table of texts",
    dict[str, int]: "table of whole numbers", dict[str, float]: "table of numbers",
}  # fmt: skip
HEAD = """# Events

*Made by `make docs` from `p2p_co2/telemetry/events.py`; edit the types there.*

Every peer writes what happens to it to `events.jsonl` in its folder. It is one JSON object per line
(RFC 8259, ASCII), appended as it happens, never changed. A reader skips lines that it does not
know; fields may be added. `kind` says which event it is; `at` (unix seconds by the writer's clock)
and `peer` (the writer's id) are in every event. A number that is not a number is null. Units are in
the names: `_s` seconds, `_bytes`, `_at` unix seconds, `_steps` inner steps. In the names of events
and fields a `round` is one fragment's: what other pages call a fragment exchange.

Observers (`p2p-co2 board`, `watch`, `metrics`) get the same events in reports that each peer signs. There
`round_counted` comes from certificates alone, never from a peer's word.

| kind | what it tells |
|---|---|
"""


def event_docs() -> str:
    """The text of ``docs/events.md``."""
    table = ""
    sections = ""
    for kind, event_type in EVENT_TYPES.items():
        doc = inspect.cleandoc(event_type.__doc__ or "").replace("``", "`")
        first = " ".join(doc.split("\n\n")[0].split()).split(". ")[0].rstrip(".").split("; ")[0]
        table += f"| [`{kind}`](#{kind}) | {first} |\n"
        sections += f"\n## {kind}\n\n{doc}\n\n| field | JSON | |\n|---|---|---|\n{_rows(event_type)}"
    return HEAD + table + sections


def _rows(event_type: type[Event]) -> str:
    hints = typing.get_type_hints(event_type)
    words = _field_words(event_type)
    rows = ""
    for field in dataclasses.fields(event_type):
        if field.name not in {"at", "peer"}:
            optional = not field.default is field.default_factory is dataclasses.MISSING
            note = f"{words.get(field.name, '')} {'(may be absent)' if optional else ''}".strip()
            rows += f"| `{field.name}` | {_JSON[hints[field.name]]} | {note} |\n"
    return rows


def _field_words(event_type: type[Event]) -> dict[str, str]:
    """The string that stands below a field, by the field's name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(event_type))).body[0]
    found: dict[str, str] = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):  # type: ignore[attr-defined]
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                found[name] = " ".join(words.split()).replace("``", "`")
    return found


if __name__ == "__main__":
    print(event_docs(), end="")
