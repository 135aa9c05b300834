"""The pages of the documentation that come from the code: ``python -m tools.reference_pages`` writes them
(``make docs``), ``--check`` says which are old.

Each page is made from what users meet: the command line from the tree of its options, the files from their
classes and the file that ``init`` prints, the library from signatures and docstrings, exit statuses from
``main`` itself, the HTTP API and the metrics from what a board serves. A thing without words is an error
here.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import json
import re
import sys
import textwrap
import tomllib
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import p2p_co2
from bootstrap.run_file import DEFAULT_RUN_FILE
from monitoring import facts
from monitoring.metrics import FactsCollector
from p2p_co2 import errors
from p2p_co2.cli import main as cli
from p2p_co2.cli.command import SERVICES, variable_of
from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.peer_options import PeerOption, peer_options
from p2p_co2.recipes import Recipe, Stages, TiedTable
from p2p_co2.swarm.joining import taken_by_name
from p2p_co2.telemetry.events import EVENT_TYPES

DOCS = Path(__file__).resolve().parent.parent / "docs"
MADE = "*Made by `make docs` from the code: change it there.*"
HIDDEN = {"help", "install_completion", "show_completion"}
FIRST = ("join", "Swarm", "Optimizer", "shard", "local_swarm", "PeerConfig", "RunConfig", "connect")
"""Of the library's names, as somebody meets them; the others follow."""
RUN_FILE = """A run file is what all peers of a run agree on (TOML). Any line may be left out. An unknown
key is an error. Two peers with different settings refuse each other.

`p2p-co2 init > run.toml` prints one with all defaults:

"""
PEER_FILE = """A peer file is one machine's own settings (TOML), for `join` and `doctor`:

```text
p2p-co2 join TICKET --config peer.toml
```

An option on the command line goes before the file. In a program, `PeerConfig` has the same fields.
"""
STUB = """# Made by `make docs` from the code: declare an option on PeerConfig, or in swarm.joining._join.
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict

import torch
from torch import nn

from p2p_co2.config import PeerConfig
from p2p_co2.swarm.joining import EventSink

class Options(TypedDict, total=False):
"""
EXIT_STATUS = """A command that cannot go on prints one line on stderr, `error: ...`, which says what to do.
A mistake on the command line, or in a variable that stands for an option, is told in a box there.

"""
STATUSES = [
    ("0", "All went well. `join`: this peer trained to the end of the run, or was asked to leave."),
    ("1", "This machine or the network is at fault, or what the command checks does not hold."),
    ("2", "What was typed, a file or a ticket is wrong."),
    (str(errors.RUN_OVER), "The run has had its last round."),
    ("130, 143", "Ended by a second Ctrl-C, or by a signal while nothing could be left cleanly."),
    ("a traceback", "A fault of this program: please report it."),
]
HTTP_API = """Each peer's board and `p2p-co2 board TICKET` answer these. All are read-only: nothing that is
sent reaches a peer. Only the button of a peer's own page does, with a token of that page.

On loopback no token is needed. Elsewhere give the token that was printed, as `?token=...` or in the header
`Authorization: Bearer ...`.

```text
curl http://127.0.0.1:PORT/api/swarm
```

"""
WHOSE_WORD = """
Fields say whose word they are. *Own word*: the peer said so, in a report that it signed. *Counted*:
certificates say so. *Observed*: the reader saw it. What is not known is `null`.
"""
ADDRESSES = {
    "/api/swarm": "The run at this moment, as JSON: [SwarmFacts](#swarmfacts).",
    "/api/swarm/schema": "The JSON schema of that.",
    "/metrics": "Text for Prometheus: [metrics](metrics.md).",
}
METRICS = """`/metrics` of a board is text for Prometheus. A peer's own page has that peer's figures. `p2p-co2
board TICKET` has all peers' and the run's. `monitoring/grafana.json` draws them in Grafana.

"""


EVENTS = """\
Every peer writes what happens to it to `events.jsonl` in its folder. It is one JSON object per line
(RFC 8259, ASCII), appended as it happens, never changed. A reader skips lines that it does not
know; fields may be added. `kind` says which event it is; `at` (unix seconds by the writer's clock)
and `peer` (the writer's id) are in every event. A number that is not a number is null. Units are in
the names: `_s` seconds, `_bytes`, `_at` unix seconds, `_steps` inner steps. In the names of events
and fields a `round` is one fragment's: what other pages call a fragment exchange.

Observers (`p2p-co2 board`, `watch`, `metrics`) get the same events in reports that each peer signs. There
`round_counted` comes from certificates alone, never from a peer's word.

"""


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown; cells are one line each."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = (" ".join(cell.split()).replace("|", "\\|").replace("<", "&lt;") for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def marked(doc: str) -> str:
    """A docstring as Markdown: ``code`` with one tick, paragraphs and indented code as they are."""
    return inspect.cleandoc(doc).replace("``", "`")


def code(value: object) -> str:
    return f"`{value}`" if str(value) else ""


# ---- command line


def commands() -> dict[str, Any]:
    """Each command's parser, by name, in the order of ``--help``."""
    return dict(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


def command_line() -> str:
    shown = {name: command for name, command in commands().items() if not command.hidden}
    rows, last = [], ""
    for name, one in shown.items():
        group = getattr(one, "rich_help_panel", None) or ""
        link = f"[`{name}`](#p2p-co2-{name})"
        rows.append(("" if group == last else f"**{group}**", link, _first_sentence(one.help or "")))
        last = group
    text = f"# Command line\n\n{MADE}\n\n`p2p-co2 COMMAND --help` shows the same.{_on_environment()}\n\n"
    text += table(("", "command", "what it does"), rows)
    for name, command in shown.items():
        words = " ".join((command.help or "").split())
        text += f"\n## p2p-co2 {name}\n\n{words}\n\n```text\n{_usage(name, command)}\n```\n\n"
        head, options = ("option", "default", "what it does", "environment"), list(_options(command))
        columns = 4 if any(option[3] for option in options) else 3
        rows = [option[:columns] for option in options]
        text += table(head[:columns], rows) if rows else "It has no options.\n"
    return text


def _on_environment() -> str:
    return " An option that is not given has the value of its environment variable, if that is set."


def _first_sentence(words: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(words.split()))[0]


def _shown(command: Any) -> Iterator[Any]:
    for option in command.params:
        if option.name not in HIDDEN and not getattr(option, "hidden", False):
            yield option


def _usage(name: str, command: Any) -> str:
    arguments = [_metavar(one) for one in _shown(command) if one.param_type_name == "argument"]
    return " ".join(["p2p-co2", name, "[OPTIONS]", *arguments])


def _metavar(option: Any) -> str:
    if option.metavar:
        return str(option.metavar)
    if getattr(option, "is_flag", False):
        return ""
    kind = option.type_descriptor.annotation
    return {int: "N", float: "NUMBER", Path: "PATH"}.get(kind, "TEXT")


def _options(command: Any) -> Iterator[tuple[str, ...]]:
    for option in _shown(command):
        if option.param_type_name == "argument":
            name, default = f"`{_metavar(option)}`", "required" if option.required else ""
        else:
            spelt = ", ".join(f"`{word}`" for word in (*option.opts, *option.secondary_opts))
            name, default = f"{spelt} {_metavar(option)}".strip(), _default_of(option)
        words = getattr(option, "help", "") or ""
        assert words, f"{command.name}: {option.name} has no help"
        yield name, default, words, code(_environment(command, option))


def _environment(command: Any, option: Any) -> str:
    if value := getattr(option, "envvar", None):
        return value if isinstance(value, str) else ", ".join(value)
    is_read = command.name in SERVICES and option.param_type_name == "option"
    return variable_of(option.name) if is_read else ""


def _default_of(option: Any) -> str:
    if option.required:
        return "required"
    value = option.default
    if value is None or value == "" or callable(value) or type(value).__name__ == "Sentinel":
        return ""
    if isinstance(value, bool):
        return ("on" if value else "off") if option.secondary_opts else ""
    return code(value)


# ---- run file, peer file


def run_file() -> str:
    """Tables of the tables of a run file, with the words that ``init`` prints beside each key."""
    words = _comments(DEFAULT_RUN_FILE)
    text = f"# Run file\n\n{MADE}\n\n{RUN_FILE}```toml\n{DEFAULT_RUN_FILE}```\n"
    text += _run_section("", RunConfig, words, "The run")
    for name, field in RunConfig.model_fields.items():
        if (table_of := _table(field)) is not None:
            text += _run_section(f"{name}.", table_of, words, f"`[{name}]`")
    return text


def _table(field: FieldInfo) -> type[BaseModel] | None:
    """The class of a field that is a table of its own."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _run_section(prefix: str, kind: type[BaseModel], words: dict[str, str], title: str) -> str:
    rows = [
        (code(name), _toml(field), _allowed(field), words.get(prefix + name, ""))
        for name, field in kind.model_fields.items()
        if _table(field) is None
    ]
    head = ("key", "default", "values", "")
    return f"\n## {title}\n\n{table(head, rows)}\n{marked(kind.__doc__ or '')}\n"


def _comments(toml: str) -> dict[str, str]:
    """What stands behind each key of the file, by dotted key."""
    section, found = "", {}
    for line in toml.splitlines():
        if head := re.match(r"\[(\w+)\]", line):
            section = head[1] + "."
        elif key := re.match(r"(\w+) = ", line):
            value, _, comment = line.partition("#")
            assert tomllib.loads(value)
            found[section + key[1]] = comment.strip()
    return found


def _toml(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    match default:
        case bool():
            return code(str(default).lower())
        case str() | Path():
            return code(f'"{default}"')
        case dict():
            return "empty"
    return code(default)


def _allowed(field: FieldInfo) -> str:
    """The values that a field takes, from its annotation and its bounds."""
    if typing.get_origin(field.annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(field.annotation))
    bounds = {
        name: getattr(one, name)
        for one in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if hasattr(one, name)
    }
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path"}
    kind = names.get(field.annotation, "table")  # type: ignore[arg-type]
    return ", ".join([kind, *(f"{signs[name]} {value}" for name, value in bounds.items())])


def peer_file(kind: type[PeerConfig] = PeerConfig) -> str:
    """Tables of the tables of a peer file, from what the fields of ``kind`` declare."""
    text = f"# Peer file\n\n{MADE}\n\n{PEER_FILE}"
    sections: dict[tuple[str, ...], list[PeerOption]] = {}
    for option in peer_options(kind).values():
        sections.setdefault(option.place[:-1], []).append(option)
    for tables, options in sections.items():
        rows = [
            (
                code(one.place[-1]), _toml(one.field), _allowed(one.field), _flag_of(one), one.declared.help,
            )
            for one in options
        ]  # fmt: skip
        title = f"`[{'.'.join(tables)}]`" if tables else "Settings"
        text += f"\n## {title}\n\n{table(('key', 'default', 'values', 'option', ''), rows)}"
    return text


def _flag_of(option: PeerOption) -> str:
    is_shown = option.declared.on_command_line and not option.declared.hidden
    return code(option.flag) if is_shown else ""


def field_words(kind: Any) -> dict[str, str]:
    """The string that stands below a field of a class, by the field's name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    found: dict[str, str] = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):  # type: ignore[attr-defined]
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                found[name] = " ".join(words.split()).replace("``", "`")
    return found


# ---- library


def python_api() -> str:
    text = f"# Python API\n\n{MADE}\n\n```text\nimport p2p_co2 as co2\n```\n\n"
    text += "These names are public; all others may change without notice.\n"
    named = [name for name in FIRST if name in p2p_co2.__all__]
    for name in [*named, *sorted({*p2p_co2.__all__} - {*named})]:
        if name in {"__version__", "integrations"}:
            continue
        thing = getattr(p2p_co2, name)
        text += f"\n## {name}\n\n"
        if not inspect.isclass(thing):
            text += _function(f"co2.{name}", thing) + (join_options() if name == "join" else "")
        elif issubclass(thing, BaseModel):
            kind = "run" if thing is RunConfig else "peer"
            text += f"{marked(thing.__doc__ or '')}\n\nIts fields: the [{kind} file]({kind}-file.md).\n"
        else:
            text += _class(name, thing)
    return text + _recipes() + _integrations() + _error_tree()


def _recipes() -> str:
    """What a recipe's file imports, and the ways to make and join stages."""
    text = "\n## Recipes and stages\n\n```text\nfrom p2p_co2.recipes import Recipe, Stages, TiedTable\n```\n"
    for kind in (Recipe, Stages, TiedTable):
        call = _signature(kind.__name__, kind)
        text += f"\n### {kind.__name__}\n\n```text\n{call}\n```\n\n{marked(kind.__doc__ or '')}\n"
    return text + f"\n### Stages.of_sequential()\n\n{_function('Stages.of_sequential', Stages.of_sequential)}"


def join_options(kind: type[PeerConfig] = PeerConfig) -> str:
    """What ``join`` and all that is built on it take by name."""
    rows = [
        (f"`{name}`", f"`{hint}`", words)
        for name, (hint, words) in ((one.name, one.annotation) for one in taken_by_name(kind).values())
    ]
    return f"\n### Options\n\n{table(('option', 'type', ''), rows)}"


def options_stub() -> str:
    """The same for type checkers and editors."""
    text = STUB
    for one in taken_by_name().values():
        hint, words = one.annotation
        text += f"    {one.name}: {hint}\n    {json.dumps(words)}\n"
    return text


def _integrations() -> str:
    """Public classes of ``p2p_co2.integrations``, read without importing what they integrate."""
    text = ""
    for path in sorted((DOCS.parent / "p2p_co2" / "integrations").glob("[a-z]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                name = f"integrations.{path.stem}.{node.name}"
                makers = [one for one in getattr(node, "body", []) if getattr(one, "name", "") == "__init__"]
                made = makers[0] if isinstance(node, ast.ClassDef) and makers else node
                given = ast.unparse(made.args) if isinstance(made, ast.FunctionDef) else ""
                call = f"co2.{name}({given.removeprefix('self, ').removeprefix('self')})"
                doc = marked(ast.get_docstring(node) or "")
                assert doc, f"{name} has no docstring"
                text += f"\n## {name}\n\n```text\n{call}\n```\n\n{doc}\n"
    return text


def _function(name: str, thing: Any) -> str:
    doc = inspect.getdoc(thing)
    assert doc, f"{name} has no docstring"
    ways = [_signature(name, way) for way in typing.get_overloads(thing) or [thing]]
    return f"```text\n{chr(10).join(ways)}\n```\n\n{marked(doc)}\n"


def _signature(name: str, thing: Any) -> str:
    signature = inspect.signature(thing)
    parts, star = [], False
    for one in signature.parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        hint = "" if one.annotation is one.empty else f": {_hint(one.annotation)}"
        named = getattr(one.default, "__name__", repr(one.default))
        default = "" if one.default is one.empty else f" = {named}"
        stars = "**" if one.kind is one.VAR_KEYWORD else ""
        parts.append(stars + one.name + hint + default)
    result = (
        "" if signature.return_annotation is signature.empty else f" -> {_hint(signature.return_annotation)}"
    )
    line = f"{name}({', '.join(parts)}){result}"
    return line if len(line) <= 100 else f"{name}(\n    " + ",\n    ".join(parts) + f",\n){result}"


def _hint(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _class(name: str, kind: type) -> str:
    text = f"{marked(kind.__doc__ or '')}\n"
    init = inspect.getdoc(vars(kind).get("__init__"))
    if init and "See help" not in init:
        text += f"\n```text\n{_signature(f'co2.{name}', kind)}\n```\n\n{marked(init)}\n"
    for member, value in vars(kind).items():
        if member.startswith("_"):
            continue
        if isinstance(value, property):
            text += f"\n### {name}.{member}\n\n{marked(value.__doc__ or _same(member))}\n"
        elif inspect.isfunction(value):
            text += f"\n### {name}.{member}()\n\n{_function(member, value)}"
    return text


def _same(member: str) -> str:
    return {
        "run": "What all peers of the run agree on: a `RunConfig`.",
        "inner_steps": "Inner steps so far.",
    }[member]


def _error_tree() -> str:
    tree = inspect.cleandoc(errors.__doc__ or "")
    return f"\n## Errors\n\nAll are in `p2p_co2.errors`.\n\n{marked(tree)}\n"


# ---- exit status

NO_STATUS = {errors.P2PCo2Error, errors.LocalProtocolError}
"""The root, and what is a bug and so a traceback."""


def exit_status() -> str:
    kinds = [
        kind
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, errors.P2PCo2Error) and kind not in NO_STATUS
    ]
    by_error = [
        (str(_status_of(_made(kind))), code(kind.__name__), _first_sentence(marked(kind.__doc__ or "")))
        for kind in kinds
    ]
    by_command = [
        (f"`{name}`", " ".join(command.help.split()))
        for name, command in commands().items()
        if "xit status" in (command.help or "")
    ]
    return (
        f"# Exit status\n\n{MADE}\n\n{EXIT_STATUS}{table(('status', 'when'), STATUSES)}"
        f"\n## By command\n\n{table(('command', 'what it says'), by_command)}"
        f"\n## By error\n\n{table(('status', 'error', 'when'), sorted(by_error))}"
    )


def _made(kind: type[errors.P2PCo2Error]) -> errors.P2PCo2Error:
    """One of that kind, whatever it needs."""
    init = kind.__init__
    if init is Exception.__init__ or not inspect.isfunction(init):
        return kind("")
    given = list(inspect.signature(init).parameters.values())[1:]
    return kind(*("" for one in given if one.default is one.empty))


def _status_of(error: errors.P2PCo2Error) -> int:
    with patch.object(cli, "app", side_effect=error), contextlib.redirect_stderr(io.StringIO()):
        return cli.main([])


# ---- what a board serves


def http_api() -> str:
    rows = [(f"`GET {path}`", ADDRESSES[path]) for path in served()]
    text = f"# HTTP API\n\n{MADE}\n\n{HTTP_API}{table(('address', 'answer'), rows)}{WHOSE_WORD}"
    for kind in _facts(facts.SwarmFacts):
        fields = [
            (code(name), _json(field.annotation), field.description or "")
            for name, field in kind.model_fields.items()
        ]
        text += (
            f"\n## {kind.__name__}\n\n{marked(kind.__doc__ or '')}\n\n{table(('field', 'JSON', ''), fields)}"
        )
    return text


def _facts(kind: type[BaseModel], found: dict[str, type[BaseModel]] | None = None) -> list[type[BaseModel]]:
    """``kind`` and all classes within it, each once."""
    found = {} if found is None else found
    found.setdefault(kind.__name__, kind)
    for field in kind.model_fields.values():
        inner = [field.annotation, *typing.get_args(field.annotation)]
        for one in inner:
            if isinstance(one, type) and issubclass(one, BaseModel) and one.__name__ not in found:
                _facts(one, found)
    return list(found.values())


def served() -> list[str]:
    """The addresses for programs that a board has."""
    from monitoring.board.server import make_app
    from monitoring.history import BoardHistory
    from monitoring.model import Model, Recorder
    from tests.made_swarm import MadeFeed, MadeSwarm

    model = Model(MadeFeed(MadeSwarm(1)))
    app = make_app(model, Recorder(model, BoardHistory.or_in_memory(None)))
    return [
        route.path for route in app.routes if getattr(route, "methods", None) and "_nicegui" not in route.path
    ]  # type: ignore[attr-defined]


def _json(annotation: Any) -> str:
    words = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}
    if annotation in words:
        return words[annotation]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return f"list of {_several(inner[0])}"
    if origin is dict:
        return f"table of {_several(inner[1])}"
    if inner:
        return " or ".join(_json(one) for one in inner)
    return f"[{annotation.__name__}](#{annotation.__name__.lower()})"


def _several(annotation: Any) -> str:
    one = _json(annotation)
    return one if " or " in one or "[" in one else f"{one}s"


def metrics() -> str:
    from monitoring.model import Model
    from tests.made_swarm import MadeFeed, MadeSwarm

    feed = MadeFeed(MadeSwarm(4, stages=2))
    feed.advance(60)
    model = Model(feed)
    for _ in model.moments(60.0):
        pass
    rows = []
    for family in FactsCollector(model.facts).collect():
        labels = sorted({label for sample in family.samples for label in sample.labels})
        name = family.name + ("_total" if family.type == "counter" else "")
        rows.append((code(name), family.type, ", ".join(labels), family.documentation))
    return f"# Metrics\n\n{MADE}\n\n{METRICS}{table(('name', 'kind', 'labels', 'what it is'), rows)}"


def event_pages() -> str:
    kinds, sections = [], ""
    for kind, event_type in EVENT_TYPES.items():
        doc = marked(event_type.__doc__ or "")
        first = " ".join(doc.split("\n\n")[0].split()).split(". ")[0].rstrip(".").split("; ")[0]
        kinds.append((f"[`{kind}`](#{kind})", first))
        hints, words = typing.get_type_hints(event_type), field_words(event_type)
        rows = []
        for field in dataclasses.fields(event_type):
            is_optional = not field.default is field.default_factory is dataclasses.MISSING
            note = f"{words.get(field.name, '')}{' (may be absent)' if is_optional else ''}"
            if field.name not in {"at", "peer"}:
                hint = hints[field.name]
                rows.append((code(field.name), "number or null" if hint is float else _json(hint), note))
        sections += f"\n## {kind}\n\n{doc}\n\n{table(('field', 'JSON', ''), rows)}"
    return f"# Events\n\n{MADE}\n\n{EVENTS}{table(('kind', 'what it tells'), kinds)}{sections}"


MAKERS: dict[str, Callable[[], str]] = {
    "reference/command-line.md": command_line, "reference/run-file.md": run_file,
    "reference/peer-file.md": peer_file, "reference/python-api.md": python_api,
    "reference/exit-status.md": exit_status, "reference/http-api.md": http_api,
    "reference/metrics.md": metrics, "events.md": event_pages, "../p2p_co2/swarm/options.pyi": options_stub,
}  # fmt: skip
"""What makes each page, and the types of what ``join`` takes, by the path from ``docs``."""


def pages() -> dict[str, str]:
    """The text of each page."""
    return {path: make().rstrip() + "\n" for path, make in MAKERS.items()}


def main() -> int:
    check, old = "--check" in sys.argv[1:], []
    for path, text in pages().items():
        place = DOCS / path
        if not place.exists() or place.read_text(encoding="utf-8") != text:
            old.append(path)
            if not check:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text, encoding="utf-8")
    print(f"{'old, run make docs' if check else 'written'}: {', '.join(old) or 'nothing'}")
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(main())
