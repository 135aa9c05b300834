"""Text to train on: the corpus that every Python installation carries, or the user's own files.

The embedded corpus is the standard library's sources and pydoc's topics, so a first run downloads nothing.
Which documents are held out depends on their names alone (sha256). So no peer trains on what another with the
same installation evaluates on. Two Python versions carry slightly different texts: held-out losses compare
exactly only between peers with the same Python."""

from __future__ import annotations

import hashlib
import importlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from p2p_co2.errors import ConfigError

CAP_BYTES = 12_000_000
HELD_OUT_SHARE = 0.05
# Tests and packages are not the library; the encodings are tables of character names, not text.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
)


class Corpus(NamedTuple):
    """Token ids, ``train`` and ``held_out``: one-dimensional, uint8 or uint16, never overlapping."""

    train: Tensor
    held_out: Tensor


def embedded_corpus(cap_bytes: int = CAP_BYTES) -> Corpus:
    """The standard library's text as uint8 tokens, at most ``cap_bytes`` in all, in a fixed order.

    Raises ``ConfigError`` where the installation carries no sources (then a text file must be given).
    """
    train = bytearray()
    held_out = bytearray()
    for name, content in _stdlib_documents():
        if len(train) + len(held_out) + len(content) > cap_bytes:
            break
        (held_out if _is_held_out(name) else train).extend(content)
    if not train or not held_out:
        problem = "this Python carries no library sources to train on; name a text file or a folder"
        raise ConfigError.of_option("--text", problem)
    return Corpus(_bytes_tensor(train), _bytes_tensor(held_out))


def text_corpus(path: Path) -> Corpus:
    """A UTF-8 text file, or all ``*.txt``, ``*.md`` and ``*.py`` of a folder, as uint8 tokens.

    One file gives its last 5 % as held-out. In a folder whole files are held out by their name; where names
    choose none or all, the last 5 % of everything. Raises ``ConfigError`` for a path that does not exist,
    cannot be read, is not UTF-8 or is empty."""
    files = _text_files(path)
    train = bytearray()
    held_out = bytearray()
    for file in files:
        name = file.relative_to(path).as_posix()
        (held_out if len(files) > 1 and _is_held_out(name) else train).extend(_read_text(file))
    if not train or not held_out:
        return split_tail(_bytes_tensor(train or held_out), str(path))
    return Corpus(_bytes_tensor(train), _bytes_tensor(held_out))


def _text_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(
        file for file in path.rglob("*") if file.suffix in {".txt", ".md", ".py"} and file.is_file()
    )
    if not files:
        raise ConfigError.of_option("--text", f"{path} holds no .txt, .md or .py file")
    return files


def token_corpus(path: Path, vocab_size: int) -> Corpus:
    """A flat file of little-endian token ids, memory-mapped: uint8 where ``vocab_size`` <= 256, else uint16.

    The last 5 % are held out. Raises ``ConfigError`` for a missing or empty file, an odd size, or an id that
    is not below ``vocab_size``. The whole file is read for that, so training cannot fail on it later."""
    ids = _token_ids(path, 1 if vocab_size <= 256 else 2)
    for start in range(0, len(ids), 1 << 22):
        largest = int(ids[start : start + (1 << 22)].to(torch.int32).max())
        if largest >= vocab_size:
            problem = f"{path} holds the token id {largest}, so vocab_size must be at least {largest + 1}"
            raise ConfigError.of_option("--tokens", problem)
    return split_tail(ids, str(path))


def _token_ids(path: Path, item_bytes: int) -> Tensor:
    try:
        size_bytes = path.stat().st_size
        if size_bytes == 0 or size_bytes % item_bytes:
            problem = f"{path} has {size_bytes} bytes, not a positive multiple of {item_bytes} (one token id)"
            raise ConfigError.of_option("--tokens", problem)
        dtype = torch.uint8 if item_bytes == 1 else torch.uint16
        return torch.from_file(str(path), shared=False, size=size_bytes // item_bytes, dtype=dtype)
    except (OSError, RuntimeError) as error:
        raise ConfigError.of_option(
            "--tokens", f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
        ) from None


def split_tail(tokens: Tensor, where: str) -> Corpus:
    """Cut off the last 5 % of ``tokens`` as held-out. Raises ``ConfigError`` if there are fewer than 40."""
    held_out = int(len(tokens) * HELD_OUT_SHARE)
    if held_out < 2:
        problem = f"only {len(tokens)} tokens; give a text of a few thousand bytes or more"
        raise ConfigError(where, "", problem)
    return Corpus(tokens[:-held_out], tokens[-held_out:])


def _stdlib_documents() -> Iterator[tuple[str, bytes]]:
    # Topics first: they are English, and the cap cuts from the end.
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions ship it apart; the sources alone will do
        topics = {}
    for name in sorted(topics):
        yield f"topics/{name}", topics[name].encode()
    root = sysconfig.get_path("stdlib")
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(
            name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")
        )
        for file in sorted(files):
            if file.endswith(".py"):
                path = Path(folder, file)
                yield path.relative_to(root).as_posix(), path.read_bytes()


def _is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") < HELD_OUT_SHARE * 2**32


def _read_text(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        content.decode("utf-8")
    except UnicodeDecodeError:
        problem = f"{path} is not UTF-8 text; convert it, or give token ids with --tokens"
        raise ConfigError.of_option("--text", problem) from None
    except OSError as error:
        raise ConfigError.of_option("--text", f"cannot read {path}: {error.strerror}") from None
    if not content:
        raise ConfigError.of_option("--text", f"{path} is empty")
    return content


def _bytes_tensor(content: bytearray) -> Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(content, dtype=torch.uint8)


def option_error(option: str, problem: str) -> ConfigError:
    """What is wrong with an option of the built-in recipe."""
    return ConfigError("recipe byte-gpt", f"recipe_options.{option}", problem)
