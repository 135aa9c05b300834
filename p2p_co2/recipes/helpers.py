"""The modules that a recipe imports from its own folder. They are found without running anything, are part of
its digest, and are loaded from the bytes found.

    helpers = helpers_of(Path("my/recipe.py"), source)      # {"blocks": Helper(...), "blocks.mlp": ...}
    serve(helpers, "my/recipe.py")                          # ``import blocks`` finds them from now on

Found are ``import`` statements anywhere in the file, and in what they lead to: NAME.py and NAME/__init__.py
beside the recipe, and modules in such packages. What is imported by a computed name is not found, and cannot
be imported. A name that the folder does not have is somebody else's: torch, the standard library.

Laws: what the digest covers is what runs. A helper is a plain file in the recipe's folder: a symlink, or a
name of the standard library, is refused.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

from p2p_co2.errors import ConfigError


@dataclass(frozen=True)
class Helper:
    """``place``: below the recipe's folder, with "/". ``is_package``: an ``__init__.py``."""

    path: Path
    place: str
    source: bytes
    is_package: bool


def helpers_of(recipe: Path, source: bytes) -> dict[str, Helper]:
    """The helpers of the recipe file, which has ``source``, by the name that it imports them by, sorted by
    place.

    Raises ``ConfigError`` for one that is a symlink, lies elsewhere, has a name of the standard library, or
    cannot be read."""
    found = dict[str, Helper]()
    waiting = list(_imported(source, ""))
    while waiting:
        name = waiting.pop()
        is_ours = name.partition(".")[0] == "p2p_co2"  # a recipe may lie beside the product's own folder
        if is_ours or name in found or (helper := _look(recipe.parent, name)) is None:
            continue
        found[name] = helper
        waiting += _imported(helper.source, name if helper.is_package else name.rpartition(".")[0])
    return dict(sorted(found.items(), key=lambda item: item[1].place))


def _imported(source: bytes, package: str) -> Iterator[str]:
    """Dotted names that a file of ``package`` ("" for none) may import, packages before what is in them."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # said when it is run
    for node in ast.walk(tree):
        names = list[str]()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".") if package else []
                if node.level > len(parts):
                    continue
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


def _look(folder: Path, name: str) -> Helper | None:
    """The file in ``folder`` that ``import name`` would run; None if there is none. A package wins."""
    parts = name.split(".")
    inits = [folder.joinpath(*parts[:end], "__init__.py") for end in range(1, len(parts))]
    if not all(map(Path.is_file, inits)):
        return None
    for path in (folder.joinpath(*parts, "__init__.py"), folder.joinpath(*parts).with_suffix(".py")):
        if not path.is_file():
            continue
        place = path.relative_to(folder)
        steps = [folder.joinpath(*place.parts[:end]) for end in range(1, len(place.parts) + 1)]
        if any(map(Path.is_symlink, steps)) or not path.resolve().is_relative_to(folder.resolve()):
            problem = "is a symlink, or leads out of the recipe's folder; put a copy of the file there"
            raise ConfigError(str(path), "", problem)
        if parts[0] in sys.stdlib_module_names:
            problem = f"has the name of Python's own module {parts[0]!r}; rename it"
            raise ConfigError(str(path), "", problem)
        return Helper(path, place.as_posix(), _read(path), path.name == "__init__.py")
    return None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(str(path), "", f"cannot be read: {error.strerror}") from None


def serve(helpers: Mapping[str, Helper], recipe: str) -> None:
    """Let this process import ``helpers`` by their names, in the place of those of a recipe before. Raises
    ``ConfigError`` if another module has such a name and is loaded."""
    finder = next((one for one in sys.meta_path if isinstance(one, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    for name in finder.take_back():
        sys.modules.pop(name, None)
    if taken := [name for name in helpers if name in sys.modules]:
        problem = f"its helper {helpers[taken[0]].place} has the name of a module that is loaded already"
        raise ConfigError(recipe, "", f"{problem}; rename it")
    finder.give(helpers)


class _Finder(MetaPathFinder, Loader):
    """Imports helpers from the bytes that were read; writes no .pyc."""

    def __init__(self) -> None:
        self._helpers = dict[str, Helper]()

    def give(self, helpers: Mapping[str, Helper]) -> None:
        self._helpers = dict(helpers)

    def take_back(self) -> list[str]:
        """The names that were served so far."""
        served = list(self._helpers)
        self._helpers = {}
        return served

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        helper = self._helpers.get(fullname)
        if helper is None:
            return None
        spec = importlib.machinery.ModuleSpec(
            fullname, self, origin=str(helper.path), is_package=helper.is_package
        )
        spec.has_location = True
        return spec

    def exec_module(self, module: ModuleType) -> None:
        helper = self._helpers[module.__name__]
        code: CodeType = compile(helper.source, str(helper.path), "exec")
        exec(code, module.__dict__)
