"""peers.doctor, this machine's part: each check in each outcome; faults are real where a process can have
them (limits of files, a full disk, an occupied port), figures elsewhere."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from p2p_co2.config import OWN_LOOP, LimitsConfig, PeerConfig, RunConfig
from p2p_co2.errors import EnvironmentFault
from p2p_co2.recipes import load_recipe
from p2p_co2.system import machine as kernel
from peers.doctor import machine
from peers.doctor.findings import Diagnosis, Finding, Grade, MeasuredLink, NetworkLook, PeerRole, line_of
from peers.doctor.network import nat_finding

ROOT = Path(__file__).resolve().parent.parent
OK, LIMITED, CANNOT, UNKNOWN = Grade.OK, Grade.LIMITED, Grade.CANNOT, Grade.UNKNOWN


def doctor(*arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "p2p_co2.cli", "doctor", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, **settings,  # type: ignore[call-overload]
    )  # fmt: skip


def findings_of(result: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    return {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}


# ---- what findings mean


@pytest.mark.parametrize(
    ("states", "is_reachable", "asked", "status", "role"),
    [
        ([OK, OK], True, True, 0, PeerRole.DIRECT),
        ([OK], False, True, 1, PeerRole.DIAL_OUT),
        ([OK, LIMITED], True, True, 1, PeerRole.DIRECT),
        ([OK, UNKNOWN], True, True, 1, PeerRole.DIRECT),
        ([OK, UNKNOWN], None, True, 1, PeerRole.DIAL_OUT),
        ([OK, UNKNOWN], None, False, 0, PeerRole.UNKNOWN),
        ([LIMITED, UNKNOWN], None, False, 1, PeerRole.UNKNOWN),
        ([OK, CANNOT, LIMITED], True, True, 2, PeerRole.NONE),
    ],
)
def test_status_and_role_follow_from_the_findings(
    states: list[Grade], is_reachable: bool | None, asked: bool, status: int, role: PeerRole
) -> None:
    found = tuple(Finding(str(number), state, "x", "y") for number, state in enumerate(states))
    diagnosis = Diagnosis(found, NetworkLook(is_reachable=is_reachable), asked)
    assert (diagnosis.exit_status, diagnosis.role) == (status, role)
    assert diagnosis.table()["exit_status"] == status


def test_a_finding_is_a_line_and_its_advice_another() -> None:
    assert line_of(Finding("disk", OK, "9 GB")).count("\n") == 0
    shown = line_of(Finding("disk", LIMITED, "1 MB \x1b[2J", "free\nsome"))
    assert "\x1b" not in shown
    assert shown.count("\n") == 1
    assert shown.endswith("-> free?some")


def test_another_package_with_a_name_of_ours_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert machine.names_of_others() == []
    for name, brings in (
        ("p2p-co2", "peers"), ("a-monitor", "monitoring"), ("peers", "peers"), ("torch", "torch/peers"),
    ):  # fmt: skip
        about = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (about / "RECORD").write_text(f"x.py,sha256=0,1\n{brings}/__init__.py,sha256=0,1\n")
    monkeypatch.setattr(machine, "distributions", lambda: metadata.distributions(path=[str(tmp_path)]))
    assert machine.names_of_others() == ["a-monitor", "peers"]
    found = {finding.name: finding for finding in machine.look_at_machine(PeerConfig())}
    assert found["packages"].state == LIMITED
    assert "a-monitor, peers" in found["packages"].measured


def test_what_this_machine_cannot_tell_of_its_owner_limits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    wanted = PeerConfig(limits=LimitsConfig(rest_while="load, input"))
    found = [one for one in machine.look_at_machine(wanted) if one.name == "rest-while"]
    assert [one.state for one in found] == [LIMITED]
    assert "no rest while input: logind does not tell" in found[0].measured
    assert found[0].advice == "leave input out"


def test_platforms_that_nobody_tried_and_wsl_limit() -> None:
    assert (kernel.wsl("6.1.0-13-amd64"), kernel.wsl("5.15.167.4-microsoft-standard-WSL2")) == ("", "unknown")
    with pytest.raises(EnvironmentFault, match="container"):
        kernel.require_supported_platform("linux on riscv64")
    for here, network, state, advice in (
        ("linux on x86_64", "mirrored", OK, "nothing"),
        ("linux on x86_64", "nat", LIMITED, "networkingMode=mirrored"),
        ("linux on aarch64", "", LIMITED, "nobody has tried it"),
    ):
        found = machine.check_platform(here, network)
        assert (found.state, advice in found.advice) == (state, True)


# ---- kernels


@pytest.mark.parametrize(
    ("found", "state", "words"),
    [
        ((True, True), OK, "compiled"),
        ((True, False), LIMITED, "AVX2"),
        ((False, False), LIMITED, "no C compiler"),
    ],
)
def test_kernels(found: tuple[bool, bool], state: Grade, words: str) -> None:
    finding = machine.check_kernels(*found)
    assert finding.state == state
    assert words in finding.measured
    assert ("install gcc" in finding.advice) == (state == LIMITED)


# ---- threads, memory, disk, files, ports


@pytest.mark.parametrize(
    ("wanted", "cores", "quota", "state", "words"),
    [
        (0, 8, float("inf"), OK, "nothing"),
        (4, 8, float("inf"), OK, "nothing"),
        (9, 8, float("inf"), LIMITED, "--threads 8"),
        (0, 1, float("inf"), LIMITED, "one core"),
        (0, 8, 2.0, LIMITED, "--threads 2"),
        (2, 8, 2.0, OK, "nothing"),
    ],
)  # fmt: skip
def test_threads(wanted: int, cores: int, quota: float, state: Grade, words: str) -> None:
    found = machine.check_threads(wanted, cores, quota)
    assert found.state == state
    assert words in found.advice


def test_memory_is_read_from_the_kernel_and_the_control_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel, "_CGROUP", tmp_path)
    whole = machine.available_memory_bytes()
    assert whole > 1e8
    assert machine.cpu_quota() == float("inf")
    (tmp_path / "memory.max").write_text("50000000\n")
    (tmp_path / "memory.current").write_text("20000000\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert machine.available_memory_bytes() == 30e6
    assert machine.cpu_quota() == 1.5
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.available_memory_bytes() > 30e6
    assert machine.cpu_quota() == float("inf")


@pytest.mark.parametrize(
    ("limit", "used", "stat", "lines"),
    [
        ("memory.max", "memory.current", "memory.stat", "active_file 3000000\ninactive_file 20000000\n"),
        (
            "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat",
            "active_file 7\ninactive_file 7\ntotal_active_file 3000000\ntotal_inactive_file 20000000\n",
        ),
    ],
)  # fmt: skip
def test_files_that_were_read_are_no_memory_that_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, used: str, stat: str, lines: str
) -> None:
    monkeypatch.setattr(kernel, "_CGROUP", tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("50000000\n")
    (tmp_path / used).write_text("45000000\n")
    (tmp_path / stat).write_text(f"anon 22000000\nfile 23000000\n{lines}")
    assert machine.available_memory_bytes() == 28e6
    (tmp_path / limit).write_text("9223372036854771712\n")  # none, in version 1
    assert machine.available_memory_bytes() > 1e8


def test_disk_room_and_rights(tmp_path: Path) -> None:
    assert machine.check_disk(tmp_path / "not" / "there", 1.0).state == OK
    assert not (tmp_path / "not").exists()
    assert not list(tmp_path.iterdir())
    assert machine.check_disk(tmp_path, 1e18).state == LIMITED
    (tmp_path / "file").write_text("")
    assert machine.check_disk(tmp_path / "file" / "under", 1.0).state == CANNOT
    assert machine.check_disk(Path("/proc/no-such-folder"), 1.0).state == CANNOT


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_disk_that_is_full(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True)
    try:
        assert machine.check_disk(tmp_path, 1e3).state == OK
        with pytest.raises(OSError, match="space"):
            (tmp_path / "all of it").write_bytes(bytes(2 << 20))
        found = machine.check_disk(tmp_path, 1e3)
        assert found.state == CANNOT
        assert "No space left" in found.measured
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_ports(tmp_path: Path) -> None:
    assert machine.check_ports(PeerConfig()).state == OK
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        found = machine.check_ports(PeerConfig(grpc_port=taken))
        assert (found.state, "--grpc-port" in found.advice) == (CANNOT, True)
        assert machine.check_ports(PeerConfig(libp2p_port=taken)).state == CANNOT
        assert machine.check_ports(PeerConfig(grpc_port=taken, carrier="libp2p")).state == OK
    assert machine.check_ports(PeerConfig(grpc_port=taken)).state == OK
    assert "another --host" in machine.check_ports(PeerConfig(host="192.0.2.1")).advice


# ---- nat

SEEN = ("203.0.113.7", 4001)


@pytest.mark.parametrize(
    ("seen", "state", "words"),
    [
        ([("127.0.0.1", 9)], OK, "none, seen at 127.0.0.1"),
        ([SEEN], LIMITED, "some, of unknown kind"),
        ([SEEN, SEEN], LIMITED, "one mapping for all"),
        ([SEEN, ("203.0.113.7", 10)], LIMITED, "a mapping of its own"),
        ([], UNKNOWN, "unknown"),
    ],
)
def test_nat_kinds(seen: list[tuple[str, int]], state: Grade, words: str) -> None:
    found = nat_finding(seen, PeerConfig())
    assert found.state == state
    assert found.measured.startswith(words)
    assert ("router forward TCP ports" in found.advice) == (state == LIMITED)


# ---- what a run needs


def test_the_built_in_model_is_counted_without_making_it() -> None:
    run = RunConfig(recipe_options={"layers": 2, "width": 32, "batch": 3})
    model = load_recipe("byte-gpt", run.recipe_options, 0).model
    assert machine.parameters_of(run) == sum(parameter.numel() for parameter in model.parameters())
    assert machine.parameters_of(RunConfig(recipe="file.py:make")) is None


ENORMOUS: dict[str, str | int | float | bool] = {"layers": 800, "width": 1 << 16, "heads": 2}  # 500 TB


def test_a_runs_needs_in_each_outcome(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config, link = PeerConfig(folder=tmp_path), MeasuredLink(up_bytes_per_s=1e6, down_bytes_per_s=1e6)
    for run, available, states in (
        (RunConfig(), 1e12, {"run's memory": OK, "run's disk": OK, "run's link": OK}),
        (RunConfig(), 1e8, {"run's memory": CANNOT}),
        (RunConfig(recipe_options=ENORMOUS), 1e18, {"run's disk": LIMITED}),
        (RunConfig(clock={"round_s": 0.1}), 1e12, {"run's link": LIMITED}),  # type: ignore[arg-type]
        (RunConfig(recipe="file.py:make"), 1e12, {"this run": UNKNOWN}),
    ):
        monkeypatch.setattr(machine, "available_memory_bytes", lambda available=available: available)
        found = {f.name: f.state for f in machine.look_at_needs(run, config, 3, link)}
        assert states.items() <= found.items()
    for recipe, advice in (("file.py:make", "the recipe's file"), (OWN_LOOP, "--parameters N --step-s S")):
        (found_one,) = machine.look_at_needs(RunConfig(recipe=recipe), config, 3, link)
        assert advice in found_one.advice, "plan takes an own loop's model in figures alone"
    assert "run's link" not in {f.name for f in machine.look_at_needs(RunConfig(), config, 3, MeasuredLink())}


# ---- the command


def test_a_machine_alone_is_looked_at_as_a_whole() -> None:
    result = doctor("--json", "--threads", "1")
    found = findings_of(result)
    for name in (
        "platform", "torch", "device", "threads", "memory", "disk", "open files", "ports", "libp2p daemon",
    ):  # fmt: skip
        assert found[name]["state"] in {"ok", "limited"}, found[name]
        assert found[name]["measured"]
        assert found[name]["advice"]
    for name in ("seeds", "clock", "nat", "reachability", "upload", "download"):
        assert found[name]["state"] == "unknown"
    assert json.loads(result.stdout)["role"] == "unknown"
    limited = any(finding["state"] == "limited" for finding in found.values())
    assert result.returncode == int(limited)


def test_too_few_files_and_a_taken_port_are_found_for_real() -> None:
    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        result = doctor("--json", "--libp2p-port", port, "--threads", "1", preexec_fn=few_files)
    found = findings_of(result)
    assert (found["open files"]["state"], found["open files"]["measured"]) == ("cannot", "limit 100")
    assert found["ports"]["state"] == "cannot"
    assert found["libp2p daemon"]["state"] == "ok"  # on another port
    assert (result.returncode, json.loads(result.stdout)["role"]) == (2, "none")


def test_a_wrong_ticket_is_refused_before_anything_is_looked_at() -> None:
    result = doctor("p2pco2-AAAA")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
