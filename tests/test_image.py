"""The Dockerfile, as it stands: what its images hold, who runs in them, and how they start and are stopped.

That an environment made of the wheel is whole is asked in ``test_packaging``; that the commands run on
variables alone in ``test_services``.
"""

from __future__ import annotations

import fnmatch
import json
import re
import socket
import subprocess

import pytest

from tests.installed import ENVIRONMENT, PACKAGES, ROOT

TEXT = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
LINES = [line.split(None, 1) for line in TEXT.splitlines() if line.strip()]


def of_stage(name: str) -> dict[str, list[str]]:
    """Verb -> what follows it, of a stage and those that it is made from."""
    found: dict[str, list[str]] = {}
    reading = False
    for verb, rest in LINES:
        if verb == "FROM":
            parent, _, stage = rest.partition(" AS ")
            reading = stage == name
            if reading and not parent.startswith("python:"):
                found = of_stage(parent)
        elif reading:
            found.setdefault(verb, []).append(rest)
    return found


def is_in_context(name: str) -> bool:
    """Whether ``.dockerignore`` lets it through: the last line that fits decides."""
    lines = [line.strip() for line in (ROOT / ".dockerignore").read_text().splitlines()]
    fits = [line for line in lines if line and fnmatch.fnmatch(name, line.removeprefix("!"))]
    return not fits or fits[-1].startswith("!")


def test_all_that_the_wheel_is_made_of_is_copied() -> None:
    copied = {word for rest in of_stage("build")["COPY"] for word in rest.split()[:-1]}
    assert copied >= {*PACKAGES, "pyproject.toml", "setup.py", "README.md", "constraints.txt"}
    assert all((ROOT / name).exists() and is_in_context(name) for name in copied)
    assert not is_in_context(".venv")


@pytest.mark.parametrize(("name", "command"), [("seed", "seed"), ("peer", "join")])
def test_the_images_carry_no_compiler_no_secret_and_no_root(name: str, command: str) -> None:
    image = of_stage(name)
    assert image["COPY"] == ["--from=build /opt/p2p-co2 /opt/p2p-co2"], (
        "nothing of the sources, nor a compiler"
    )
    assert image["USER"] == ["p2p-co2"]
    assert any("--uid 10001 p2p-co2" in line for line in image["RUN"])
    assert (image["STOPSIGNAL"], image["VOLUME"]) == (["SIGINT"], ["/data"])
    assert json.loads(image["ENTRYPOINT"][-1]) == ["p2p-co2", command]
    variables = " ".join(image["ENV"]).split()
    assert "XDG_DATA_HOME=/data" in variables
    assert any(variable.startswith("PATH=/opt/p2p-co2/bin:") for variable in variables)
    assert not re.search(r"(?i)p2pco2-|password|secret|token", TEXT)
    assert "ADD" not in {verb for verb, _ in LINES}, "nothing is fetched but packages"


def test_a_seed_is_well_while_its_port_is_open() -> None:
    (check,) = of_stage("seed")["HEALTHCHECK"]
    command = ["/bin/sh", "-c", check.partition("CMD ")[2]]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        variables = {**ENVIRONMENT, "P2P_CO2_PORT": str(listener.getsockname()[1])}
        assert subprocess.run(command, env=variables, check=False).returncode == 0
    assert subprocess.run(command, env=variables, stderr=subprocess.DEVNULL, check=False).returncode != 0
