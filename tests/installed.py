"""The program as a user has it: a wheel, made of the sdist, in a fresh environment with what it requires and
nothing else.

    wheel, sdist = built(folder)
    bin_folder = installed(wheel, folder / "venv", extras=("plot",))

The packages that it requires are those of this interpreter, by links, so it takes seconds and no network:
what the metadata does not name is not there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("p2p_co2", "peers", "bootstrap", "monitoring")
_NOT_SOURCE = shutil.ignore_patterns(
    ".*", "*.egg-info", "*.so", "__pycache__", "build", "dist", "runs", "site", "shared"
)
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"} and not name.startswith("P2P_CO2_")
} | {"OMP_NUM_THREADS": "1"}
"""Nothing that leads to the source tree."""


def source_copy(folder: Path) -> Path:
    """The source tree as somebody has it who has built nothing yet."""
    shutil.copytree(ROOT, folder, ignore=_NOT_SOURCE, symlinks=True)
    shutil.copy(ROOT / ".dockerignore", folder)
    return folder


def built(folder: Path) -> tuple[Path, Path]:
    """(wheel, sdist), the wheel built out of the sdist."""
    source = source_copy(folder / "source")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)])
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


def installed(wheel: Path, venv: Path, extras: tuple[str, ...] = ()) -> Path:
    """Make ``venv`` with the wheel and what it requires; returns its folder of programs."""
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)])
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python")]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)])
    link_required(venv, extras)
    return venv / "bin"


def link_required(venv: Path, extras: tuple[str, ...] = ()) -> None:
    """Give an environment that has p2p-co2 all that it requires."""
    (site,) = (venv / "lib").glob("python3*/site-packages")
    (ours,) = (one for one in metadata.distributions(path=[str(site)]) if one.name == "p2p-co2")
    for distribution in _closure(ours, extras):
        _link(distribution, site)
    run([sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "check"])


def run(command: list[str], folder: Path | None = None, timeout_s: float = 300) -> str:
    """What the command printed. It must succeed."""
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout


def _closure(ours: metadata.Distribution, extras: tuple[str, ...]) -> list[metadata.Distribution]:
    """What ``ours`` requires, and what that requires."""
    found: dict[str, metadata.Distribution] = {}
    seen = set[tuple[str, str]]()
    open_ends = [(ours, extra) for extra in ("", *extras)]
    while open_ends:
        distribution, extra = open_ends.pop()
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            name = canonicalize_name(requirement.name)
            needed = ours if name == canonicalize_name(ours.name) else metadata.distribution(name)
            if needed is not ours:
                found[name] = needed
            wanted = {(name, one) for one in ("", *requirement.extras)} - seen
            seen |= wanted
            open_ends += [(needed, one) for _, one in wanted]
    return list(found.values())


def _link(distribution: metadata.Distribution, site: Path) -> None:
    """Link all that a package has in its folder of packages."""
    home = Path(str(distribution.locate_file("")))
    names = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
    for about in home.glob(f"*-{distribution.version}.*-info"):  # old ones do not name it among their files
        name = about.name.partition(f"-{distribution.version}.")[0]
        if canonicalize_name(name) == canonicalize_name(distribution.name):
            names.add(about.name)
    for name in names:
        if (home / name).exists() and not (site / name).exists():
            (site / name).symlink_to(home / name)
