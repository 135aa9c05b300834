"""One safetensors file, with a sha256 over all of it inside.

Laws: a file appears under its name whole or not at all (temporary name, fsync, rename, fsync of the
folder); a file whose bytes changed in any place is refused; reading never runs code. Any safetensors reader
opens these files: 8 bytes of header length, a JSON header (dtype, shape and offsets per tensor, strings
under ``__metadata__``), then the values.

Why our own writer and reader of a public format: the library's writer gives neither the digest of what it
writes nor an fsync before the rename, and in older versions holds a second copy of everything in memory;
its reader would be a second pass after the digest, over bytes that may have changed since. Here one tensor
at a time is in flight, once.

A file is written in any order (``Writing``): what must not change meanwhile goes in first, at the speed of
memory, into pages that belong to the kernel and not to this process; the digest, which reads them again, and
the disk come later, on whatever thread has the time.

The digest stands in the header, so it covers the header with 64 zeros in its own place. Price: sha256 of
everything on both ways, about 0.5 to 2 GB/s.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from p2p_co2.errors import ConfigError, EnvironmentFault

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_DIGEST_KEY = "sha256"
_NO_DIGEST = "0" * 64
_MAX_HEADER_BYTES = 100_000_000
"""The bound of the safetensors format."""
_MAX_DIMENSIONS = 64
_MAX_EXTENT = 1 << 48
"""A dimension's size: beside a dimension of 0 the file's size does not bound it."""
_SCRATCH_BYTES = 1 << 20
_STAGED_BYTES = 32 << 20
"""What comes from an accelerator at once."""
_IOV_MOST = 1000
"""Pieces in one call; Linux takes 1024."""
TEMPORARY = "state.part"


class Damaged(Exception):
    """The file is not what was written: torn, changed, or not ours. The text says how we know."""


class _Entry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int


class Writing:
    """A file on its way to ``path``: every tensor once by ``put`` or ``put_piece``, then ``finish``; or
    ``give_up``. One thread at a time.

    ``tensors`` (any device, layout) gives dtypes and shapes; it is not kept. What is left under the temporary
    name is written over, page by page: pages that are there already cost a tenth of fresh ones.

    Raises ``ConfigError`` for a tensor that the format cannot hold, ``EnvironmentFault``, as every method, if
    this machine refuses; the temporary file is gone then, and what was there before is untouched.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        # Widest dtypes first, as the format asks, so that every tensor lies aligned.
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        self._header = _header(order, tensors, metadata)
        self._path, self._temporary = path, path.parent / TEMPORARY
        self._dtypes = {name: tensors[name].dtype for name in order}
        self._places: dict[str, tuple[int, int]] = {}
        """Of each tensor that is still to come, or came: where it begins and ends in the file."""
        at = len(self._header)
        for name in order:
            stop = at + tensors[name].numel() * tensors[name].element_size()
            self._places[name] = (at, stop)
            at = stop
        self.size_bytes = at
        with self._faults():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with self._faults():
            os.ftruncate(self._file, self.size_bytes)
            _write_at(self._file, [memoryview(self._header)], 0)

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Their values, as they are now; neighbours in the file go in one call."""
        names = sorted(tensors, key=lambda name: self._places[name])
        run: list[memoryview] = []
        begins = ends = 0
        with self._faults():
            for name in names:
                start, stop = self._places[name]
                for piece in _pieces(tensors[name]):
                    if start != ends or len(run) == _IOV_MOST:
                        _write_at(self._file, run, begins)
                        run, begins = [], start
                    run.append(piece)
                    start = ends = start + len(piece)
                    if _is_staged(tensors[name]):  # the next piece takes this one's memory
                        _write_at(self._file, run, begins)
                        run, begins = [], start
                assert start == stop
            _write_at(self._file, run, begins)

    def put_piece(self, name: str, start: int, values: Tensor) -> None:
        """Some values of a tensor (host memory, of its dtype), from its element ``start`` on."""
        with self._faults():
            at = self._places[name][0] + start * values.element_size()
            _write_at(self._file, list(_pieces(values)), at)

    def change(self, name: str, start: int, stop: int, new: Callable[[Tensor], Tensor]) -> None:
        """Replace the values [start, stop) of a floating-point tensor that was ``put``: ``new`` maps fp32
        values to as many."""
        dtype = self._dtypes[name]
        values = torch.empty(stop - start, dtype=dtype, device="cpu")
        view, at = _view(values), self._places[name][0] + start * dtype.itemsize
        with self._faults():
            _read_at(self._file, view, at)
            _write_at(self._file, [_view(new(values.float()).to(dtype))], at)

    def finish(self) -> None:
        """Seal what was ``put``, and let it appear under its name."""
        with self._faults():
            digest = hashlib.sha256(self._header)
            scratch = memoryview(bytearray(_SCRATCH_BYTES))
            for at in range(len(self._header), self.size_bytes, _SCRATCH_BYTES):
                piece = scratch[: min(_SCRATCH_BYTES, self.size_bytes - at)]
                _read_at(self._file, piece, at)
                digest.update(piece)
            sealed = memoryview(digest.hexdigest().encode())
            _write_at(self._file, [sealed], self._header.index(_NO_DIGEST.encode()))
            os.fsync(self._file)
            self._temporary.replace(self._path)
            _sync_folder(self._path.parent)
            self._close()

    def give_up(self) -> None:
        """Leave nothing behind. May be called twice, and after ``finish``."""
        if self._file >= 0:
            self._close()
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        file, self._file = self._file, -1
        os.close(file)

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if getattr(self, "_file", -1) >= 0:
                self._close()
            raise _write_fault(self._path, self._temporary, error) from error


def write(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write ``tensors`` and ``metadata`` as ``path``, replacing what was there, all or nothing. ``tensors``
    is emptied: each is let go once it is written. Raises as ``Writing``."""
    writing = Writing(path, tensors, metadata)
    for name in list(tensors):
        writing.put({name: tensors.pop(name)})
    writing.finish()


def reserve(folder: Path, size_bytes: int) -> None:
    """Have pages ready for the next file in ``folder``, unless there are; what the disk refuses is left."""
    spare = folder / TEMPORARY
    zeros = memoryview(bytes(_SCRATCH_BYTES))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(spare, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError:
        return
    try:
        for at in range(0, size_bytes, _SCRATCH_BYTES):
            _write_at(file, [zeros[: min(_SCRATCH_BYTES, size_bytes - at)]], at)
    except OSError:
        with contextlib.suppress(OSError):
            spare.unlink()
    finally:
        os.close(file)


def reuse(path: Path) -> None:
    """Have the next file in its folder written over ``path``, which is needed no more. Where somebody still
    reads it, or has it under another name (a hard link), it is only removed. Raises ``OSError``."""
    spare = path.parent / TEMPORARY
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        path.replace(spare)  # from here on nobody finds it
        if os.fstat(file).st_nlink > 1 or not _is_unread(file):
            spare.unlink()
    finally:
        os.close(file)


def _is_unread(file: int) -> bool:
    """Whether nobody else has it open or, as the format's own readers do, mapped: only then the kernel grants
    a lease for writing (fcntl(2)). False, too, where the file system does not know."""
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # not SIGIO, which would end us
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True


def read(path: Path, wanted: Callable[[str], bool]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors whose name is ``wanted`` (host memory), and the metadata. The whole file is checked in
    any case.

    Raises ``Damaged`` if the file is not what was written, ``EnvironmentFault`` if this machine refuses to
    read it.
    """
    try:
        with path.open("rb") as file:
            return _read(file, os.fstat(file.fileno()).st_size, wanted)
    except OSError as error:
        raise EnvironmentFault(f"cannot read {path}: {error.strerror}; check its permissions") from error


def _header(order: list[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    # The digest goes first, so that its place is the first run of zeros whatever the rest says.
    table: dict[str, Any] = {"__metadata__": {_DIGEST_KEY: _NO_DIGEST, **metadata}}
    at = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
            raise ConfigError(
                "checkpoint", name, f"a {tensor.layout} tensor of {tensor.dtype} cannot be saved"
            )
        stop = at + tensor.numel() * tensor.element_size()
        table[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _is_staged(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of ``tensor``. From an accelerator they come piece by piece, each through the same pinned
    memory, so that neither the host nor the device holds a second copy."""
    flat = tensor.detach().contiguous().reshape(-1)
    if not _is_staged(flat):
        yield _view(flat)
        return
    count = max(1, _STAGED_BYTES // flat.element_size())
    staged = torch.empty(
        min(count, flat.numel()), dtype=flat.dtype, device="cpu", pin_memory=flat.device.type == "cuda"
    )
    for piece in torch.split(flat, count):
        yield _view(staged[: piece.numel()].copy_(piece))


def _view(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _write_at(file: int, pieces: list[memoryview], at: int) -> None:
    """All of ``pieces``, one after the other; a call may take less than it was given."""
    while pieces:
        taken = os.pwritev(file, pieces, at)
        at += taken
        while pieces and taken >= len(pieces[0]):
            taken -= len(pieces.pop(0))
        if pieces:
            pieces[0] = pieces[0][taken:]


def _read_at(file: int, into: memoryview, at: int) -> None:
    while into:
        taken = os.preadv(file, [into], at)
        if not taken:
            raise OSError(errno.EIO, "the file was cut while it was written")
        into, at = into[taken:], at + taken


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_fault(path: Path, temporary: Path, error: OSError) -> EnvironmentFault:
    try:
        temporary.unlink(missing_ok=True)
    except OSError:
        left = f"; {temporary} could not be removed"
    else:
        left = ""
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        problem = "the disk is full; free some space or give another folder"
    elif error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        problem = "no permission to write there; change the folder's owner or mode, or give another folder"
    else:
        problem = f"{error.strerror or error}; check the folder or give another one"
    return EnvironmentFault(
        f"cannot write the checkpoint {path}: {problem} (earlier checkpoints are whole){left}"
    )


def _read(
    file: BufferedReader, size: int, wanted: Callable[[str], bool]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    length_bytes = file.read(8)
    length = int.from_bytes(length_bytes, "little")
    if len(length_bytes) < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
        raise Damaged("shorter than its header")
    text = file.read(length)
    entries, metadata = _parse(text)
    promised = 8 + length + sum(entry.numel * entry.dtype.itemsize for entry in entries)
    if size != promised:
        raise Damaged(f"{size} bytes, not {promised}")
    expected = metadata.pop(_DIGEST_KEY)
    digest = hashlib.sha256(length_bytes + text.replace(expected.encode(), _NO_DIGEST.encode(), 1))
    tensors: dict[str, Tensor] = {}
    scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8, device="cpu")
    for entry in entries:
        if wanted(entry.name):
            tensors[entry.name] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            pieces: Iterator[Tensor] = iter((tensors[entry.name].reshape(-1).view(torch.uint8),))
        else:
            pieces = _scratches(scratch, entry.numel * entry.dtype.itemsize)
        for piece in pieces:
            view = piece.numpy().data
            if piece.numel() and file.readinto(view) != len(view):
                raise Damaged("shorter than its header says")
            digest.update(view if piece.numel() else b"")
    if digest.hexdigest() != expected:
        raise Damaged("its sha256 is not the one written in it")
    return tensors, metadata


def _scratches(scratch: Tensor, count: int) -> Iterator[Tensor]:
    for start in range(0, count, _SCRATCH_BYTES):
        yield scratch[: min(_SCRATCH_BYTES, count - start)]


def _parse(text: bytes) -> tuple[list[_Entry], dict[str, str]]:
    """The header's entries in file order. It may be anybody's file, so nothing in it is believed before it
    is checked."""
    try:
        table = json.loads(text)
        metadata = table.pop("__metadata__")
        if not all(isinstance(value, str) for value in metadata.values()) or len(metadata[_DIGEST_KEY]) != 64:
            raise Damaged("its metadata is not ours")
        entries, at = [], 0
        for name, row in table.items():
            dtype, shape = _DTYPES[row["dtype"]], tuple(row["shape"])
            if len(shape) > _MAX_DIMENSIONS or not all(
                type(extent) is int and 0 <= extent <= _MAX_EXTENT for extent in shape
            ):
                raise Damaged(f"{name} has an impossible shape")
            numel = math.prod(shape)
            if row["data_offsets"] != [at, at + numel * dtype.itemsize]:
                raise Damaged(f"{name} does not follow the tensor before it")
            at += numel * dtype.itemsize
            entries.append(_Entry(name, dtype, shape, numel))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"its header is not readable ({type(error).__name__})") from error
    return entries, metadata
