"""Network namespaces: made for one rehearsal, named after its process, removed with it.

All that is made on a machine is a namespace whose name carries the id and the start time of its owner, or
lies inside one. ``remove`` ends what runs in it; ``sweep`` removes those whose owner is dead. Nothing else of
the machine is changed. Needs root and iproute2. Source: ip-netns(8).
"""

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

from p2p_co2.errors import EnvironmentFault

_PREFIX = "p2pco2"
_OURS = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-\S+")
_MOUNTED = Path("/run/netns")
COMMAND_S = 20.0


@dataclass(frozen=True)
class Kernel:
    """What this machine lets us emulate. ``problem``: why there are no lines, "" if there are.
    ``masquerade``: whether nft can make a router that hides what is behind it."""

    problem: str = ""
    masquerade: bool = False


def examine() -> Kernel:
    """Find out by trying, in a namespace that is removed again."""
    for lacks, problem in (
        (os.geteuid() != 0, "network namespaces need root; run it with sudo to rehearse with real packets"),
        (not shutil.which("ip"), "the program ip is missing; install iproute2 (apt-get install iproute2)"),
        (not os.access("/dev/net/tun", os.R_OK | os.W_OK), "this kernel has no /dev/net/tun"),
    ):
        if lacks:
            return Kernel(problem)
    try:
        trial = add("trial")
    except EnvironmentFault as error:
        return Kernel(str(error))
    try:
        ip(trial, "link add trial0 type veth peer name trial1")
        with suppress(EnvironmentFault):
            masquerade(trial, "trial0", symmetric=False)
            return Kernel(masquerade=True)
        return Kernel()
    except EnvironmentFault as error:
        return Kernel(f"this kernel has no pairs of virtual devices ({error})")
    finally:
        remove(trial)


def add(name: str) -> str:
    """Make a namespace of ours; returns its full name. Raises ``EnvironmentFault``."""
    full = f"{_PREFIX}-{os.getpid()}-{_started_at_ticks(os.getpid())}-{name}"
    _run(["ip", "netns", "add", full])
    return full


def remove(namespace: str) -> None:
    """End every process inside and take the namespace away; nothing happens if it is gone already."""
    if not (_MOUNTED / namespace).exists():
        return
    for _ in range(100):
        pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, check=False).stdout
        if not pids:
            break
        for pid in pids.split():
            with suppress(ProcessLookupError):  # it was faster
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=COMMAND_S, check=False)


def sweep() -> list[str]:
    """Remove the namespaces of processes that are no more; returns their names."""
    dead = []
    for path in _MOUNTED.glob(f"{_PREFIX}-*"):
        found = _OURS.fullmatch(path.name)
        if found and _started_at_ticks(int(found[1])) != int(found[2]):
            remove(path.name)
            dead.append(path.name)
    return dead


def ip(namespace: str, *lines: str) -> None:
    """Commands of ip(8), each without the word ``ip``, run inside. Raises ``EnvironmentFault``."""
    _run(["ip", "-n", namespace, "-batch", "-"], "\n".join(lines))


def inside(namespace: str, arguments: Sequence[str]) -> list[str]:
    """The command line that runs ``arguments`` in the namespace; its process id is that of the program."""
    return ["ip", "netns", "exec", namespace, *arguments]


def set_kernel_options(namespace: str, options: dict[str, str]) -> None:
    """Set sysctl(8) options of the namespace, by path below /proc/sys/net. Raises ``EnvironmentFault``."""
    lines = [f"echo {value} > /proc/sys/net/{path}" for path, value in options.items()]
    _run(inside(namespace, ["sh", "-c", " && ".join(lines)]))


def masquerade(router: str, outside: str, symmetric: bool) -> None:
    """Make ``router`` hide what is behind it, and drop what was not asked for.

    ``outside``: its device towards the internet. Cone routers keep the port that the machine behind them
    chose; ``symmetric`` ones draw another for each connection. Raises ``EnvironmentFault``.
    """
    chosen = "masquerade fully-random" if symmetric else "masquerade"
    _run(inside(router, ["nft", "-f", "-"]), _NFT_RULES.format(outside=outside, how=chosen))


_NFT_RULES = """
table ip p2pco2 {{
  chain out {{ type nat hook postrouting priority 100; oifname "{outside}" {how}; }}
  chain through {{ type filter hook forward priority 0; iifname "{outside}" ct state new,invalid drop; }}
  chain in {{
    type filter hook input priority 0;
    iifname "{outside}" meta l4proto {{ tcp, udp }} ct state new,invalid drop;
  }}
}}
"""


def _run(command: list[str], text: str = "") -> None:
    try:
        done = subprocess.run(
            command, input=text, text=True, capture_output=True, timeout=COMMAND_S, check=False
        )
    except OSError as error:
        raise EnvironmentFault(f"cannot run {command[0]}: {error.strerror}") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise EnvironmentFault(f"{' '.join(command[:5])}: {said}")


def _started_at_ticks(pid: int) -> int:
    """When process ``pid`` began, in clock ticks since the machine's start; 0 if there is none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return 0
    return int(after_name.split()[19])  # field 22 of proc(5), the state being field 3
