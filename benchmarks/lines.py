"""Emulated lines: machines of one wire, each a network namespace behind a line shaped by the kernel.

    with Lines(swarm, {"seed": FAST, "peer0": PROFILES["dsl"]}) as lines:
        swarm.start("peer0", lines.command("peer0", [sys.executable, ...]))

The machine's device is shaped at the upload rate, the wire's port to it at the download rate. ``netem`` adds
the latency and the loss, on the way up. A kernel without it has rates alone, by ``tbf``. ``words`` says
which. Jitter and routers are not emulated. Needs root and iproute2; raises ``EnvironmentFault`` without.

All that is made carries this process's id in its name and goes with the block. What a killed process left is
swept up by the next. Nothing else of the machine is changed, and no namespace is connected with the outside.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bootstrap.local_swarm import LocalSwarm
from p2p_co2.errors import EnvironmentFault
from p2p_co2.planning.profiles import LinkProfile

_NAMES = re.compile(r"p2pco2bench-(\d+)-\w+")
_NETWORK = "192.0.0"
"""Of 192.0.0.0/24, no host's (RFC 6890), yet taken by libp2p for public ones."""
_DEVICE = "lan0"
_FAST_BITS_PER_S = 50e6
"""From here on TCP hands over ``_PIECE_BYTES`` at once, below it a packet, so that a loss is one packet's."""
_PIECE_BYTES = 16_000
_QUEUE_S = 0.1
"""What a full line holds beside what is on its way."""
SAMPLE_S = 0.1


class Lines:
    """See above. ``samples``: (unix time, bytes sent so far by machine), ten times a second."""

    def __init__(self, swarm: LocalSwarm, profiles: Mapping[str, LinkProfile]) -> None:
        self._swarm = swarm
        self._profiles = profiles
        self._made: list[str] = []
        self.samples: list[tuple[float, dict[str, int]]] = []
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="line counters")

    @property
    def words(self) -> str:
        """What is emulated, for the answer."""
        return (
            "rate, latency, loss (netem)" if self._has_netem else "rate alone (tbf): no netem in this kernel"
        )

    def address(self, machine: str) -> str:
        return f"{_NETWORK}.{1 + list(self._profiles).index(machine)}"

    def command(self, machine: str, arguments: Sequence[str]) -> list[str]:
        """The command line that runs ``arguments`` on the machine."""
        return ["ip", "netns", "exec", _name(machine), *arguments]

    def used(self, since: float, until: float) -> float:
        """Share of their upload rate that the machines but the seed used between two moments, mean."""
        inside = [sample for sample in self.samples if since <= sample[0] <= until]
        (first_at, first), (last_at, last) = inside[0], inside[-1]
        shares = [
            8 * (last[name] - first[name]) / (last_at - first_at) / profile.up_bits_per_s
            for name, profile in self._profiles.items() if name != "seed"
        ]  # fmt: skip
        return round(statistics.fmean(shares), 3)

    def __enter__(self) -> Lines:
        if os.geteuid() != 0 or not shutil.which("tc"):
            raise EnvironmentFault("emulated lines need root and iproute2 (ip, tc): run this with sudo")
        _sweep()
        try:
            self._add("wire")
            _ip("wire", "link add wire0 type bridge", "link set wire0 up")
            self._has_netem = _knows_netem()
            for number, (machine, profile) in enumerate(self._profiles.items()):
                self._wire(machine, f"port{number}", profile)
            self._watcher = self._swarm.start("wire", self.command("wire", ["sleep", "infinity"]))
            self._sampler.start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._sampler.join()
        self._swarm.kill(self._watcher)
        self._remove()

    def _add(self, machine: str) -> None:
        _run(["ip", "netns", "add", _name(machine)])
        self._made.append(_name(machine))
        _ip(machine, "link set lo up")

    def _remove(self) -> None:
        while self._made:
            _remove(self._made.pop())

    def _wire(self, machine: str, port: str, profile: LinkProfile) -> None:
        self._add(machine)
        pieces = (
            f"gso_max_size {_PIECE_BYTES}" if profile.up_bits_per_s >= _FAST_BITS_PER_S else "gso_max_segs 1"
        )
        _ip(
            machine,
            f"link add {_DEVICE} type veth peer name {port} netns {_name('wire')}",
            f"addr add {self.address(machine)}/24 dev {_DEVICE}",
            f"link set {_DEVICE} {pieces} up",
            f"route add default dev {_DEVICE}",
        )
        _ip("wire", f"link set {port} master wire0 up")
        self._shape(machine, _DEVICE, profile.up_bits_per_s, profile.latency_ms, profile.loss)
        self._shape("wire", port, profile.down_bits_per_s)

    def _shape(
        self, machine: str, device: str, rate: float, latency_ms: float = 0.0, loss: float = 0.0
    ) -> None:
        if self._has_netem:
            packets = round(rate / 8 / 1500 * (latency_ms / 1e3 + _QUEUE_S)) + 100
            how = f"netem delay {latency_ms}ms loss {100 * loss}% rate {rate:.0f}bit limit {packets}"
        else:
            burst = max(2 * _PIECE_BYTES, round(rate / 8 / 500))
            how = f"tbf rate {rate:.0f}bit burst {burst} latency {_QUEUE_S}s"
        _run(["tc", "-n", _name(machine), "qdisc", "add", "dev", device, "root", *how.split()])

    def _sample(self) -> None:
        machines = {f"port{number}": name for number, name in enumerate(self._profiles)}
        counters = Path(f"/proc/{self._watcher.pid}/net/dev")
        while not self._over.wait(SAMPLE_S):
            devices = dict(line.split(":", 1) for line in counters.read_text().splitlines()[2:])
            sent = {name.strip(): int(told.split()[0]) for name, told in devices.items()}
            self.samples.append((time.time(), {machine: sent[port] for port, machine in machines.items()}))


def _name(machine: str) -> str:
    return f"p2pco2bench-{os.getpid()}-{machine}"


def _knows_netem() -> bool:
    with suppress(EnvironmentFault):
        _run(["tc", "-n", _name("wire"), "qdisc", "add", "dev", "wire0", "root", "netem", "delay", "1ms"])
        _run(["tc", "-n", _name("wire"), "qdisc", "del", "dev", "wire0", "root"])
        return True
    return False


def _ip(machine: str, *lines: str) -> None:
    _run(["ip", "-n", _name(machine), "-batch", "-"], "\n".join(lines))


def _run(command: list[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, text=True, capture_output=True, timeout=20.0, check=False)
    if done.returncode:
        raise EnvironmentFault(f"{' '.join(command)}: {' '.join(done.stderr.split())}")


def _remove(namespace: str) -> None:
    """End every process inside, and take the namespace away."""
    for _ in range(100):
        told = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, check=False).stdout
        if not told:
            break
        for pid in told.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _sweep() -> None:
    for path in Path("/run/netns").glob("p2pco2bench-*"):
        found = _NAMES.fullmatch(path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            _remove(path.name)
