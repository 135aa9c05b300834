"""Parts that are installed only where somebody wants them: ``pip install '.[board]'`` in a
clone of p2p-co2.

    if words := missing("board"):
        say(f"board: {words}")          # board: needs an extra: pip install ...
    require("plot", "--plot")           # or raises, with such a line

Looks for the libraries without importing them. The names are those of ``pyproject.toml``. p2p-co2 is not
published: whoever takes its name on the index of packages could run code on those who are told to ask for it.
"""

from __future__ import annotations

from importlib.util import find_spec

from p2p_co2.errors import EnvironmentFault

LIBRARIES = {
    "board": ("nicegui", "prometheus_client"),
    "plot": ("matplotlib",),
    "tensorboard": ("tensorboardX",),
    "wandb": ("wandb",),
    "transformers": ("transformers", "accelerate"),
    "lightning": ("lightning",),
}
"""What each extra is imported as."""


def missing(extra: str) -> str:
    """ "" if all libraries of ``extra`` are installed, else what to do, as the end of a sentence."""
    is_there = all(_is_there(library) for library in LIBRARIES[extra])
    return "" if is_there else f"needs an extra: pip install '.[{extra}]' in a clone of p2p-co2"


def require(extra: str, what: str) -> None:
    """Raise ``EnvironmentFault`` if ``what`` cannot be had because ``extra`` is missing."""
    if words := missing(extra):
        raise EnvironmentFault(f"{what} {words}")


def _is_there(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ImportError:  # an import hook forbids it
        return False
