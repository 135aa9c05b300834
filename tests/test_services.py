"""The systemd units: what they promise, what systemd itself says of them, and their commands as they run."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from p2p_co2.errors import RUN_OVER
from p2p_co2.telemetry.events import Progress
from p2p_co2.telemetry.journal import read_events
from tests.installed import ROOT
from tests.programs import started

UNITS = ROOT / "packaging" / "systemd"
NAMES = ("p2p-co2-seed", "p2p-co2-peer")
PROGRAM = "/opt/p2p-co2/bin/p2p-co2"
RUN = """
recipe_options = { layers = 1, width = 32, heads = 2, batch = 2 }
[clock]
round_s = 1.0
"""


def unit(name: str) -> dict[str, dict[str, list[str]]]:
    """Section, key, values: as systemd.syntax(7) reads a unit; a line may not go on here."""
    sections: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    section = ""
    for line in (UNITS / f"{name}.service").read_text(encoding="utf-8").splitlines():
        assert not line.endswith("\\"), line
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith(("#", ";")):
            key, sign, value = line.partition("=")
            assert section, line
            assert sign, line
            sections[section][key].append(value)
    return sections


@pytest.mark.parametrize("name", NAMES)
def test_a_unit_leaves_cleanly_starts_again_and_is_shut_in(name: str) -> None:
    of_unit = unit(name)
    service = {key: values[-1] for key, values in of_unit["Service"].items()}
    assert of_unit.keys() == {"Unit", "Service", "Install"}
    assert (service["KillSignal"], service["KillMode"]) == ("SIGINT", "mixed"), (
        "the program asks its children"
    )
    assert int(service["TimeoutStopSec"]) >= 30
    assert service["Restart"] == "on-failure"
    assert "2" in service["RestartPreventExitStatus"].split(), "no restart mends a mistake"
    assert service["DynamicUser"] == "yes"
    assert "P2P_CO2_TICKET" not in " ".join(
        value for values in of_unit["Service"].values() for value in values
    )
    for key in (
        "NoNewPrivileges", "PrivateTmp", "ProtectControlGroups", "ProtectHome", "ProtectKernelModules",
        "ProtectKernelTunables", "RestrictNamespaces", "RestrictSUIDSGID", "LockPersonality",
    ):  # fmt: skip
        assert service[key] == "yes", key
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    folder = f"%S/{service['StateDirectory']}"
    assert service["WorkingDirectory"] == folder
    assert service["ExecStart"].split()[0] == PROGRAM


def test_a_peers_unit_knows_the_end_of_a_run_and_lets_it_have_a_gpu() -> None:
    service = unit("p2p-co2-peer")["Service"]
    assert service["RestartPreventExitStatus"] == [f"2 {RUN_OVER}"]
    assert service["SuccessExitStatus"] == [str(RUN_OVER)]
    assert service["EnvironmentFile"] == ["/etc/p2p-co2/peer.env"], "there must be one: it has the ticket"
    assert "char-nvidia* rw" in service["DeviceAllow"]
    assert "PrivateDevices" not in service
    assert unit("p2p-co2-seed")["Service"]["PrivateDevices"] == ["yes"]


@pytest.mark.parametrize("name", NAMES)
def test_systemd_finds_no_fault(name: str, tmp_path: Path) -> None:
    """Where systemd is installed it is asked; where not, its keys are held against those that it knows."""
    if shutil.which("systemd-analyze") is None:
        print("systemd-analyze is not installed here: only the names of the keys are looked at")
        wrong = [
            key for keys in unit(name).values() for key in keys if not re.fullmatch(r"([A-Z]+[a-z]*)+", key)
        ]
        assert not wrong
        return
    copy = tmp_path / f"{name}.service"
    text = (UNITS / copy.name).read_text(encoding="utf-8")
    copy.write_text(text.replace(PROGRAM, shutil.which("true") or ""), encoding="utf-8")
    asked = ["systemd-analyze", "verify", str(copy)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    asked = ["systemd-analyze", "security", "--offline=true", "--threshold=25", str(copy)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def command_of(name: str, etc: Path, state: Path) -> tuple[list[str], dict[str, str]]:
    """(its command, its variables) on a machine with these folders for /etc and /var/lib."""
    service = unit(name)["Service"]
    (line,) = service["ExecStart"]
    command = line.replace("/etc", str(etc)).replace("%S", str(state)).split()
    assert command[0] == PROGRAM
    variables = dict(pair.replace("%S", str(state)).split("=", 1) for pair in service["Environment"])
    (state / service["StateDirectory"][0]).mkdir(parents=True)
    return [sys.executable, "-m", "p2p_co2.cli", *command[1:]], variables


def has_trained(state: Path) -> bool:
    events = [e for path in state.glob("p2p-co2/runs/*/peer/events.jsonl") for e in read_events(path)]
    return any(isinstance(event, Progress) and event.inner_steps > 0 for event in events)


@pytest.mark.swarm
def test_the_commands_of_the_units_run_and_stop_as_the_units_say(tmp_path: Path) -> None:
    etc, state, here = tmp_path / "etc", tmp_path / "state", {"P2P_CO2_HOST": "127.0.0.1"}
    (etc / "p2p-co2").mkdir(parents=True)
    (etc / "p2p-co2" / "run.toml").write_text(RUN)
    source = {"PYTHONPATH": str(ROOT)}
    command, variables = command_of("p2p-co2-seed", etc, state)
    with started(command, tmp_path, {**variables, **here, **source, "P2P_CO2_PORT": "0"}) as seed:
        ticket = seed.wait_for(r"p2pco2-\w+")
        command, variables = command_of("p2p-co2-peer", etc, state)
        variables |= {**here, **source, "P2P_CO2_TICKET": ticket, "P2P_CO2_THREADS": "1"}
        with started(command, tmp_path, variables) as peer:
            peer.wait_until(lambda: has_trained(state))
            began_at = time.monotonic()
            assert peer.ends(signal.SIGINT) == 0, peer.said()
            stop_s = int(unit("p2p-co2-peer")["Service"]["TimeoutStopSec"][0])
            assert time.monotonic() - began_at < stop_s
        (checkpoint,) = (state / "p2p-co2" / "runs").glob("*/peer/checkpoint")
        assert checkpoint.is_dir()
        with started(command, tmp_path, {**variables, "P2P_CO2_TICKET": ticket[:-4]}) as lost:
            assert lost.ends() == 2, "systemd does not start it again"
        assert seed.ends(signal.SIGINT) == 0, seed.said()
    assert (state / "p2p-co2-seed" / "ticket").read_text().strip() == ticket
