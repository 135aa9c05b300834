"""What the documentation says is so: links lead somewhere, code compiles or runs, commands and options exist,
files are valid, quoted messages are in the code, generated pages are fresh, the README is short."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import yaml
from markdown.extensions.toc import slugify_unicode
from pydantic import ValidationError

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.swarm.joining import taken_by_name
from p2p_co2.testing import local_swarm
from p2p_co2.wire.limits import PROTOCOL_VERSION
from tools import house
from tools.prose import MOST_WORDS, long_ones, sentences, words_of
from tools.reference_pages import MAKERS, commands, pages

ROOT = house.ROOT
DOCS = ROOT / "docs"
README = ROOT / "README.md"
GENERATED = {DOCS / path for path in MAKERS}
LOG = DOCS / "LOG.md"
PAGES = sorted({*DOCS.rglob("*.md")} - {LOG})
WRITTEN = [README, *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md")), *PAGES]
EVERY = [*WRITTEN, ROOT / "CHANGELOG.md", LOG]
LONG_SHARE = 0.01
"""Of the sentences of the pages: so many may be long."""
SHELL = {"bash", "sh", "text", "console"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path) -> Iterator[tuple[str, str, str]]:
    """(language, code, the comment before it) of each fenced block."""
    text = path.read_text(encoding="utf-8")
    for found in re.finditer(
        r"(?:<!-- ?([^\n]*?) ?-->\n+)?^( *)```(\w*)\n(.*?)^\2```", text, re.MULTILINE | re.DOTALL
    ):
        lines = [line.removeprefix(found[2]) for line in found[4].splitlines()]
        yield found[3], "\n".join(lines) + "\n", found[1] or ""


# ---- links


@cache
def anchors(path: Path) -> frozenset[str]:
    text = re.sub(r"^( *)```.*?^\1```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.append(slugify_unicode(re.sub(r"[`*]", "", plain), "-"))
    return frozenset(found)


@pytest.mark.parametrize("path", EVERY, ids=name_of)
def test_links_and_anchors_resolve(path: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_every_page_is_in_the_nav() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def leaves(node: object) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        else:
            for inner in node.values() if isinstance(node, dict) else node:  # type: ignore[attr-defined]
                yield from leaves(inner)

    assert sorted(leaves(settings["nav"])) == sorted(
        ["changes.md", *(str(path.relative_to(DOCS)) for path in PAGES)]
    )


def test_the_site_builds_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    fetched = r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//"
    made = list(tmp_path.rglob("*.html"))
    assert len(made) >= len(PAGES)
    assert not [path for path in made if re.search(fetched, path.read_text(encoding="utf-8"))]
    assert not (tmp_path / "LOG.html").exists()


# ---- code


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_python_blocks_compile(path: Path) -> None:
    for language, text, _ in blocks(path):
        if language == "python":
            compile(text, name_of(path), "exec")


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_toml_blocks_are_run_files_or_peer_files(path: Path) -> None:
    for language, text, _ in blocks(path):
        if language == "toml":
            table = tomllib.loads(text)
            try:
                RunConfig.model_validate(table)
            except ValidationError:
                PeerConfig.model_validate(table)


RUN_IN_A_SWARM = [
    (path, code) for path in WRITTEN for _, code, mark in blocks(path) if mark == "runs in a swarm"
]


@pytest.mark.swarm
@pytest.mark.parametrize("program", RUN_IN_A_SWARM, ids=lambda found: name_of(found[0]))
def test_what_is_said_to_run_runs_in_a_swarm(program: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program[1])
    with local_swarm(peers=2, rounds=5, folder=tmp_path / "swarm") as running:
        told = running.run([sys.executable, str(tmp_path / "program.py")])
    assert all("inner steps" in text for text in told), told


def commands_in(path: Path) -> Iterator[list[str]]:
    """The words of each call of ``p2p-co2``, ``make`` and ``python`` in blocks and in running text."""
    text = path.read_text(encoding="utf-8")
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [line for language, block, _ in blocks(path) if language in SHELL for line in block.splitlines()]
    for line in [*spans, *lines]:
        for part in re.split(r"\s(?:&&|\||>|&)(?:\s|$)", re.sub(r"\s#.*", "", line)):
            try:
                words = shlex.split(part)
            except ValueError:
                continue
            while words and ("=" in words[0] or words[0] in {"sudo", "nice", "$"}):
                words = words[1:]
            if words and Path(words[0]).name in {"p2p-co2", "make", "python"}:
                yield [Path(words[0]).name, *words[1:]]


def wrong_with(words: list[str]) -> str:
    """What does not exist in a command line, or ""."""
    program, rest = words[0], words[1:]
    if program == "make":
        targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        return " ".join(word for word in rest if "=" not in word and word not in targets)
    if program == "python":
        files = [word for word in rest if re.match(r"(examples|benchmarks)/\w+\.py$", word)]
        return " ".join(file for file in files if not (ROOT / file).exists())
    known = commands()
    if not rest or rest[0] in {"COMMAND", "--version", "--help", "-h"}:
        return ""
    if rest[0] not in known:
        return rest[0]
    options = {word for one in known[rest[0]].params for word in (*one.opts, *one.secondary_opts)}
    given = {word.partition("=")[0] for word in rest[1:] if word.startswith("-")}
    return " ".join(sorted(given - options - {"--help", "-h", "-v", "-q", "-"}))


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_commands_and_options_exist(path: Path) -> None:
    assert not [(words, wrong) for words in commands_in(path) if (wrong := wrong_with(words))]


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_files_of_the_repository_exist(path: Path) -> None:
    folders = "examples|benchmarks|monitoring|packaging|tests|docs|p2p_co2"
    spans = re.findall(rf"`((?:{folders})/[\w./-]*\w\.\w+)", path.read_text())
    assert not [span for span in spans if not (ROOT / span).exists()]


def test_help_says_what_an_option_does_as_an_order() -> None:
    options = chain.from_iterable(one.params for one in commands().values())
    helps = {one.help for one in options if one.param_type_name == "option" and one.help}
    others = r"[^A-Z]|(A|All|Another|Address|For|Of|Or|Only|The|What|Where|Whether|With|\w+[^s]s)\b"
    assert not [words for words in helps if re.match(others, words)]


def test_the_check_of_commands_sees_what_is_wrong() -> None:
    assert wrong_with(["p2p-co2", "jion", "TICKET"]) == "jion"
    assert wrong_with(["p2p-co2", "join", "TICKET", "--uplaod", "2M"]) == "--uplaod"
    assert wrong_with(["make", "demos"]) == "demos"
    assert wrong_with(["python", "examples/no_such.py"]) == "examples/no_such.py"
    assert not wrong_with(["p2p-co2", "join", "TICKET", "--no-board"])


# ---- messages


@cache
def texts_of_the_code() -> tuple[str, ...]:
    """Each text of the product's code; what an f-string puts in is a NUL."""

    def text_of(node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.JoinedStr):
            return "".join(text_of(part) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        return ""

    nodes = chain.from_iterable(map(house.nodes_of, house.sources()))
    return tuple({text for node in nodes if isinstance(node, ast.expr) and (text := text_of(node))})


def is_in_the_code(message: str) -> bool:
    """Whether one text has all that stands between the dots, in this order."""
    parts = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
    wanted = re.compile(".*".join(parts), re.DOTALL)
    return any(wanted.search(text) for text in texts_of_the_code())


def quoted_in(path: Path) -> list[str]:
    """What stands in the first column of tables that are headed "message"."""
    found: list[str] = []
    for table in re.findall(r"^\| message \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", path.read_text(), re.MULTILINE):
        found += re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    return found


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_quoted_messages_are_in_the_code(path: Path) -> None:
    assert not [message for message in quoted_in(path) if not is_in_the_code(message)]


def test_the_check_of_messages_sees_what_is_wrong() -> None:
    assert len(quoted_in(DOCS / "operate" / "troubleshooting.md")) > 20
    assert not is_in_the_code("the ticket is damaged by the dog")


# ---- generated pages


def test_the_generated_pages_are_those_of_the_code() -> None:
    old = [path for path, text in pages().items() if (DOCS / path).read_text() != text]
    assert not old, "run: make docs"


# ---- prose


def test_the_protocol_page_tells_of_the_version_that_is_spoken() -> None:
    told = rf"The protocol's version is {PROTOCOL_VERSION};[^|]*\|.*\n\|---\|---\|\n\| {PROTOCOL_VERSION} \|"
    assert re.search(told, (DOCS / "protocol.md").read_text())


def test_every_option_of_join_is_in_the_reference() -> None:
    told = pages()["reference/python-api.md"]
    rows = dict(re.findall(r"^\| `(\w+)` \| `.+?` \| (.*) \|$", told, re.MULTILINE))
    assert set(rows) == set(taken_by_name())
    assert all(rows.values())


def test_sentences_are_counted_as_they_are_read() -> None:
    page = (
        "# Two words\n\nOne two. Three `four five`\nsix! See [seven](x.md).\n\n```\nno\n```\n\n- eight\n- 9\n"
    )
    assert [words_of(sentence) for sentence in sentences(page)] == [2, 2, 4, 2, 1, 1]
    assert long_ones("word " * (MOST_WORDS + 1))
    assert not long_ones("word " * MOST_WORDS)


def test_the_readme_is_short_and_so_are_its_sentences() -> None:
    text = README.read_text()
    assert len(text) <= 5000
    assert not long_ones(text)


def test_from_a_clone_to_a_first_round_in_two_commands() -> None:
    """As the README's first block has them: the second one sets all up by itself."""
    shell = next(code for language, code, _ in blocks(README) if language == "bash")
    lines = shell.splitlines()
    assert lines[0].startswith("git clone ")
    assert lines[1] == "make demo"
    assert len(lines) <= 3


def test_the_pages_have_few_long_sentences() -> None:
    every, long = [], []
    for path in WRITTEN:
        every += sentences(path.read_text())
        long += [f"{name_of(path)}: {one}" for one in long_ones(path.read_text())]
    assert len(long) <= LONG_SHARE * len(every), "\n".join(long)
