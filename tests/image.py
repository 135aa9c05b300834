"""The Dockerfile carried out without a container: each stage is a folder that stands for its ``/``.

    image = Image(ROOT, folder)
    image.build("seed")
    image.started(["run.toml"])      # (its program with arguments, its variables), as it would be started

COPY takes files from the context as ``.dockerignore`` leaves it; RUN runs in a shell, with the paths of the
image led into its folder, this interpreter for the image's, and nothing of the host's that an image has of
its own: ``apt-get`` and ``useradd`` are only noted. A step that names another path of the host is an error.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.installed import ENVIRONMENT

OWN_PATHS = ("/src", "/wheels", "/opt/p2p-co2", "/data")
NOTED = ("apt-get", "useradd", "install")


@dataclass
class Stage:
    """What the instructions of a stage, and of those it is made from, have come to."""

    root: Path
    folder: str = "/"
    variables: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    settings: dict[str, str] = field(default_factory=dict)
    """STOPSIGNAL, HEALTHCHECK, ENTRYPOINT and others, as they stand."""


class Image:
    """``context``: the Dockerfile's folder. ``folder``: for the stages. ``variables``: of every RUN."""

    def __init__(self, context: Path, folder: Path, variables: dict[str, str]) -> None:
        self._context, self._folder, self._variables = context, folder, variables
        self.stages: dict[str, Stage] = {}
        self.arguments: dict[str, str] = {}
        self._tools = folder / "tools"
        self._tools.mkdir()
        for name in ("python", "pip"):
            module = " -m pip" if name == "pip" else ""
            _program(self._tools / name, f'exec {shlex.quote(sys.executable)}{module} "$@"\n')
        self.noted = folder / "noted"
        for name in NOTED:
            _program(self._tools / name, f'echo {name} "$@" >> {shlex.quote(str(self.noted))}\n')

    def build(self) -> None:
        """All stages."""
        stage: Stage | None = None
        for verb, rest in instructions((self._context / "Dockerfile").read_text()):
            if verb == "FROM":
                parent, name = re.fullmatch(r"(\S+) AS (\w+)", rest).groups()  # type: ignore[union-attr]
                stage = self._begun(parent, name)
            elif verb == "ARG":
                name, _, default = rest.partition("=")
                self.arguments.setdefault(name, default)
            else:
                assert stage is not None, f"{verb} before FROM"
                self._do(stage, verb, rest)

    def led(self, stage: Stage, text: str) -> str:
        """``text`` with the paths of the image led into its folder."""
        own = "|".join(map(re.escape, OWN_PATHS))
        return re.sub(rf"(?<![\w./])({own})(?![\w-])", lambda found: f"{stage.root}{found[1]}", text)

    def _begun(self, parent: str, name: str) -> Stage:
        root = self._folder / name
        root.mkdir()
        self.stages[name] = stage = Stage(root)
        if parent in self.stages:
            before = self.stages[parent]
            shutil.copytree(before.root, root, symlinks=True, dirs_exist_ok=True)
            stage.folder, stage.user = before.folder, before.user
            stage.variables, stage.settings = dict(before.variables), dict(before.settings)
        else:
            assert re.fullmatch(r"python:\$\{PYTHON\}-slim", parent), parent
        return stage

    def _do(self, stage: Stage, verb: str, rest: str) -> None:
        if verb == "RUN":
            self._run(stage, rest)
        elif verb == "COPY":
            self._copy(stage, rest.split())
        elif verb == "ENV":
            stage.variables |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        elif verb == "WORKDIR":
            stage.folder = rest
            (stage.root / rest[1:]).mkdir(parents=True, exist_ok=True)
        elif verb == "USER":
            stage.user = rest
        else:
            assert verb in {"VOLUME", "STOPSIGNAL", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}, verb
            stage.settings[verb] = rest

    def _run(self, stage: Stage, command: str) -> None:
        led = self.led(stage, command)
        host = re.findall(r"(?<![\w.:/}\"-])/(?!/)[\w./-]+", command)
        assert all(path.startswith(OWN_PATHS) for path in host), f"{command}: {host}"
        done = subprocess.run(
            ["/bin/sh", "-euc", led], cwd=stage.root / stage.folder[1:], stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
            env={**ENVIRONMENT, **self.arguments, **self._variables,
                 "PATH": f"{self._tools}{os.pathsep}{ENVIRONMENT['PATH']}"},
        )  # fmt: skip
        assert done.returncode == 0, f"RUN {command}\n{done.stdout[-4000:]}"

    def _copy(self, stage: Stage, words: list[str]) -> None:
        from_stage = ""
        if words[0].startswith("--from="):
            from_stage = words.pop(0).removeprefix("--from=")
        *sources, target = words
        for source in sources:
            if from_stage:
                there = self.stages[from_stage].root / source[1:]
            else:
                there = self._context / source
                assert is_in_context(self._context, source), f".dockerignore leaves out {source}"
            place = Path(target) if target.startswith("/") else Path(stage.folder) / target
            goal = stage.root / str(place)[1:]
            if there.is_dir():
                shutil.copytree(
                    there, goal, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so*")
                )
            else:
                shutil.copy2(there, goal / there.name if goal.is_dir() else goal)


def instructions(text: str) -> list[tuple[str, str]]:
    """(verb, the rest) of each; lines that go on are put together."""
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    parts = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(verb, " ".join(rest.split()) if verb != "RUN" else rest) for verb, rest in parts]


def is_in_context(context: Path, name: str) -> bool:
    """Whether ``.dockerignore`` lets a file or folder of the context's top through: the last line that fits
    decides."""
    is_in = True
    for line in (context / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if pattern and not pattern.startswith("#") and fnmatch.fnmatch(name, pattern.removeprefix("!")):
            is_in = pattern.startswith("!")
    return is_in


def as_list(setting: str) -> list[str]:
    """ENTRYPOINT ["a", "b"]."""
    found: list[str] = json.loads(setting)
    return found


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
