"""Routers with real packets, for tests: each machine behind a router of its own, all through one middle.

    machine --lan0-- router --wan0-- middle --wan0-- router --lan0-- machine

Machines and routers are network namespaces, named after this process; leaving the block removes them, and
those that a dead process left. Lines are as fast as the machine: what a line's rate and latency do is for
slowed carriers and ``benchmarks``. Addresses are of 192.0.0.0/24: no host's (RFC 6890), yet taken by libp2p
for public ones, without which it neither relays nor punches holes. Needs root, iproute2 and nftables."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import pytest

Nat = Literal["open", "cone", "symmetric"]
COMMAND_S = 20.0
_GATEWAY = "192.0.0.65"
_LAN_GATEWAY = "192.168.1.1"
_LAN_ADDRESS = "192.168.1.2"
_FORWARDS = {"ipv4/ip_forward": "1"} | {
    f"ipv4/conf/{which}/{option}": "0"
    for which in ("all", "default")
    for option in ("rp_filter", "send_redirects")
}
_NFT_RULES = """
table ip p2pco2 {{
  chain out {{ type nat hook postrouting priority 100; oifname "wan0" {how}; }}
  chain through {{ type filter hook forward priority 0; iifname "wan0" ct state new,invalid drop; }}
  chain in {{
    type filter hook input priority 0;
    iifname "wan0" meta l4proto {{ tcp, udp }} ct state new,invalid drop;
  }}
}}
"""


@dataclass(frozen=True)
class Machine:
    """``address``: its own; ``public_address``: the one that others see it under."""

    name: str
    namespace: str
    router: str
    port: str
    address: str
    public_address: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs ``arguments`` on this machine."""
        return inside(self.namespace, arguments)


class Routers:
    """Use as ``with Routers() as routers``; skips the test where namespaces or routers cannot be made."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self._namespaces: list[str] = []
        self._addresses = iter(range(66, 255))

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or not shutil.which("ip"):
            pytest.skip("network namespaces need root and iproute2")
        _sweep()
        try:
            self._middle = self.namespace("middle")
            set_kernel_options(self._middle, _FORWARDS)
        except subprocess.CalledProcessError as error:
            self.close()
            pytest.skip(f"this kernel has no network namespaces: {error.stderr}")
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def namespace(self, name: str) -> str:
        """A network without any device but its loopback."""
        full = f"p2pco2-{os.getpid()}-{name}"
        _run(["ip", "netns", "add", full])
        self._namespaces.append(full)
        set_kernel_options(full, {"ipv6/conf/all/disable_ipv6": "1"})
        ip(full, "link set lo up")
        return full

    def add(self, name: str, nat: Nat = "open") -> Machine:
        """A machine. Cone routers keep the port that it chose; symmetric ones draw another for each
        connection."""
        router, router_address = self.namespace(f"{name}-router"), self._address()
        address = self._address() if nat == "open" else _LAN_ADDRESS
        public = address if nat == "open" else router_address
        machine = Machine(name, self.namespace(name), router, f"port{len(self.machines)}", address, public)
        self.machines[name] = machine
        self._wire(machine, router_address)
        if nat != "open":
            how = "masquerade fully-random" if nat == "symmetric" else "masquerade"
            try:
                _run(inside(router, ["nft", "-f", "-"]), _NFT_RULES.format(how=how))
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"nft makes no router here: {error}")
        return machine

    def sent_bytes(self, machine: Machine) -> int:
        """What its line has carried upwards."""
        told = _run(inside(self._middle, ["cat", "/proc/net/dev"]))
        found = re.search(rf"{machine.port}: *(\d+)", told)
        assert found, told
        return int(found[1])

    def close(self) -> None:
        while self._namespaces:
            remove(self._namespaces.pop())

    def _address(self) -> str:
        return f"192.0.0.{next(self._addresses)}"

    def _wire(self, machine: Machine, router_address: str) -> None:
        """Devices, addresses and routes of one line."""
        router, port = machine.router, machine.port
        set_kernel_options(router, _FORWARDS)
        ip(
            machine.namespace,
            f"link add lan0 type veth peer name lan0 netns {router}",
            f"addr add {machine.address}/32 dev lan0",
            "link set lan0 up",
            f"route add {_LAN_GATEWAY} dev lan0",
            f"route add default via {_LAN_GATEWAY} dev lan0",
        )
        ip(
            router,
            f"link add wan0 type veth peer name {port} netns {self._middle}",
            f"addr add {_LAN_GATEWAY}/32 dev lan0",
            "link set lan0 up",
            f"addr add {router_address}/32 dev wan0",
            "link set wan0 up",
            f"route add {machine.address} dev lan0",
            f"route add {_GATEWAY} dev wan0",
            f"route add default via {_GATEWAY} dev wan0",
        )
        lines = [
            f"addr add {_GATEWAY}/32 dev {port}",
            f"link set {port} up",
            f"route add {router_address} dev {port}",
        ]
        if machine.public_address != router_address:
            lines.append(f"route add {machine.public_address} via {router_address} dev {port} onlink")
        ip(self._middle, *lines)


def inside(namespace: str, arguments: Sequence[str]) -> list[str]:
    """The command line that runs ``arguments`` in the namespace; its process id is that of the program."""
    return ["ip", "netns", "exec", namespace, *arguments]


def ip(namespace: str, *lines: str) -> None:
    """Commands of ip(8), each without the word ``ip``, run inside."""
    _run(["ip", "-n", namespace, "-batch", "-"], "\n".join(lines))


def set_kernel_options(namespace: str, options: dict[str, str]) -> None:
    """sysctl(8) options of the namespace, by path below /proc/sys/net."""
    lines = [f"echo {value} > /proc/sys/net/{path}" for path, value in options.items()]
    _run(inside(namespace, ["sh", "-c", " && ".join(lines)]))


def remove(namespace: str) -> None:
    """End every process inside and take the namespace away."""
    ends_at = time.monotonic() + COMMAND_S
    while time.monotonic() < ends_at:
        pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, check=False).stdout
        if not pids:
            break
        for pid in pids.split():
            with suppress(ProcessLookupError):  # it was faster
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=COMMAND_S, check=False)


def _sweep() -> None:
    for path in Path("/run/netns").glob("p2pco2-*"):
        owner = re.match(r"p2pco2-(\d+)-", path.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            remove(path.name)


def _run(command: list[str], text: str = "") -> str:
    return subprocess.run(
        command, input=text, text=True, capture_output=True, timeout=COMMAND_S, check=True
    ).stdout
