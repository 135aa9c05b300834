"""What a checkpoint lacks to become a model that others load: kept beside it, in the folder ``model``, when a
peer joins.

    keep_layout(model, plan, Path("runs/peer/checkpoint"))          # at join; small
    write_kept(load_agreed(Path("runs/peer/checkpoint")), Path("out"))        # later, without the model

``tensors.json`` says where each value of a fragment belongs: names, shapes, dtypes, and which file of the
model's library holds a tensor under which name. A model that saves itself (transformers, PEFT) is asked to,
once, with a number in the place of each tensor. So files and names are its library's own, and none is
imported here. What is frozen is in no checkpoint. A little of it (position tables, scales) is kept here, the
base of adapters is not: that is the user's to bring.

Laws: nothing is written to the model. What was kept carries the plan whose digest the checkpoint names, so it
fits or is refused. The folder may be a stranger's: no link is followed, and nothing is
larger than what the checkpoint holds.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import math
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.tensors.checkpoint.folder import Checkpoint
from p2p_co2.tensors.checkpoint.parts import DTYPES
from p2p_co2.tensors.fragments import FragmentPlan, named_values, plan_of_table, plan_table
from p2p_co2.tensors.names import named_buffers, named_parameters, shared_names, unwrapped
from p2p_co2.tensors.pretrained import (
    CONFIG,
    WEIGHTS,
    config_text,
    saves_itself,
    takes_state,
    undistributed,
    written_whole,
)

KEPT = "model"
_TENSORS = "tensors.json"
_FROZEN = "frozen.safetensors"
_FORMAT = "p2p-co2 layout 1"
_MOST_BYTES = 4 << 20
"""Of a file that is kept beside the tensors: settings and code are far below."""
_MOST_FROZEN_BYTES = 16 << 20
_IN_LOOP = "write it in the loop: swarm.save_pretrained, or name a recipe of the same model with --recipe"


def keep_layout(model: nn.Module, plan: FragmentPlan, folder: Path) -> None:
    """Write the layout of ``model``, which ``plan`` cuts, into the folder ``model`` of ``folder``, in the
    place of an earlier one. Raises ``OSError``, and whatever the model's own ``save_pretrained`` raises."""
    inner = unwrapped(model)
    own = {**named_parameters(inner), **named_buffers(inner, persistent=True)}
    tensors = {
        name: [str(one.dtype).removeprefix("torch."), list(one.shape), one.requires_grad]
        for name, one in own.items()
    }
    shapes = {name: tuple(one.shape) for name, one in own.items()}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="model-", dir=folder) as made:
        place = Path(made)
        files = _ask_library(inner, own, place) if saves_itself(inner) and takes_state(inner) else {}
        if not files:
            files = {WEIGHTS: _File({name: name for name in own}, {"format": "pt", **shared_names(inner)})}
            if text := config_text(inner):
                (place / CONFIG).write_text(text, encoding="utf-8")
        said = {
            "format": _FORMAT,
            "plan": plan_table(plan.fragments, shapes),
            "tensors": tensors,
            "files": {path: [file.names, file.metadata] for path, file in files.items()},
        }
        (place / _TENSORS).write_text(json.dumps(said), encoding="utf-8")
        if frozen := _little_frozen(own, files):
            save_file(frozen, place / _FROZEN)
        shutil.rmtree(folder / KEPT, ignore_errors=True)
        shutil.copytree(place, folder / KEPT)


@dataclass(frozen=True)
class _File:
    """``names``: of its tensors, each with the model's plain name."""

    names: Mapping[str, str]
    metadata: Mapping[str, str]


def _little_frozen(own: Mapping[str, Tensor], files: Mapping[str, _File]) -> dict[str, Tensor]:
    """The frozen parameters that belong into ``files``, each a copy, if all are small; else none."""
    placed = {plain for file in files.values() for plain in file.names.values()}
    frozen = {
        name: one.detach()
        for name, one in own.items()
        if name in placed and isinstance(one, nn.Parameter) and not one.requires_grad
    }
    is_plain = all(type(one) is Tensor and one.layout == torch.strided for one in frozen.values())
    if not is_plain or sum(one.nbytes for one in frozen.values()) > _MOST_FROZEN_BYTES:
        return {}
    return {name: one.cpu().clone(memory_format=torch.contiguous_format) for name, one in frozen.items()}


def _ask_library(model: Any, own: Mapping[str, Tensor], place: Path) -> dict[str, _File]:
    """What the model's ``save_pretrained`` writes into ``place``, by path in it; its other files stay there.
    Raises as ``_meant``.

    Each tensor's stand-in holds its number alone. Names are kept as the model has them
    (``save_original_format``), and PEFT does not ask its hub about embeddings."""
    stands = {
        name: torch.tensor([float(number)], dtype=torch.float32, device="cpu")
        for number, name in enumerate(own)
    }
    given: dict[str, Any] = {
        "state_dict": stands | {to: stands[of] for to, of in shared_names(model).items()}
    }
    known = inspect.signature(model.save_pretrained).parameters
    given |= {what: False for what in ("save_original_format", "save_embedding_layers") if what in known}
    quiet = contextlib.redirect_stderr(io.StringIO())  # its bar, at 0 s
    with warnings.catch_warnings(), quiet, undistributed(model):
        warnings.simplefilter("ignore")
        model.save_pretrained(place, **given)
    files = dict[str, _File]()
    for path in sorted(place.rglob("*")):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
            found = {name: _meant(values, own) for name, values in load_file(path).items()}
            files[str(path.relative_to(place))] = _File(found, metadata)
        if path.is_file() and (
            path.suffix == ".safetensors" or path.stat().st_size > _MOST_BYTES or b"\0" in path.read_bytes()
        ):  # stand-ins in another format are no model
            path.unlink()
    return files


def _meant(values: Tensor, own: Mapping[str, Tensor]) -> str:
    """The model's name for what its library wrote: by the stand-in's number, or by the values where the
    library writes the model's own all the same (prompts of PEFT). Raises ``ValueError`` if it computed
    them."""
    if values.numel() == 1:
        return list(own)[int(values.item())]
    for name, one in own.items():
        if one.shape == values.shape and torch.equal(one.detach().cpu(), values):
            return name
    raise ValueError("its library computes what it writes")


def write_kept(checkpoint: Checkpoint, out: Path, base: Path | None = None) -> list[str]:
    """Write the model of a whole checkpoint into ``out`` by the layout that lies beside it; what to know
    about it, in words.

    ``base``: a folder with the safetensors of the model that training began with, under the same names: what
    was frozen is taken from there. Raises ``ConfigError`` if there is no layout, it is of another model, or
    frozen tensors are lacking; ``EnvironmentFault`` if the disk refuses.
    """
    kept = checkpoint.path.parent / KEPT
    plan, tensors, files = _read(kept, checkpoint)
    values: dict[str, Tensor] = {name: one for name, one in checkpoint.buffers.items() if name in tensors}
    shapes = {name: shape for name, (_, shape, _) in tensors.items()}
    values |= _kept_frozen(kept, shapes)
    values |= named_values(plan, shapes, [state.params for state in checkpoint.states])
    lacking = {
        name: plain for file in files.values() for name, plain in file.names.items() if plain not in values
    }
    if lacking:
        values |= _from_base(lacking, shapes, base)
    placed = {plain for file in files.values() for plain in file.names.values()}
    left_out = [name for name, (_, _, is_trained) in tensors.items() if is_trained and name not in placed]
    with written_whole(out) as place:
        shutil.copytree(kept, place, ignore=shutil.ignore_patterns(_TENSORS, _FROZEN), dirs_exist_ok=True)
        for path, file in files.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            save_file(_named(file, values, tensors), place / path, dict(file.metadata))
    if not left_out:
        return []
    return [f"its library writes {len(left_out)} trained tensors into no file, such as {left_out[0]}"]


_Tensors = dict[str, tuple[torch.dtype, tuple[int, ...], bool]]


def _named(file: _File, values: Mapping[str, Tensor], tensors: _Tensors) -> dict[str, Tensor]:
    """What is in ``file``, each tensor with memory of its own."""
    named = dict[str, Tensor]()
    taken = set[str]()
    for name, plain in file.names.items():
        one = values[plain].to(tensors[plain][0]).contiguous()
        named[name] = one.clone() if plain in taken else one
        taken.add(plain)
    return named


def _read(kept: Path, checkpoint: Checkpoint) -> tuple[FragmentPlan, _Tensors, dict[str, _File]]:
    where = str(kept / _TENSORS)
    try:
        said = json.loads((kept / _TENSORS).read_text(encoding="utf-8"))
        if said["format"] != _FORMAT:
            raise ConfigError(where, "", f"was written by another version of p2p-co2; {_IN_LOOP}")
        plan = plan_of_table(said["plan"])
        tensors = {
            name: (_dtype(str(dtype)), tuple(map(int, shape)), bool(is_trained))
            for name, (dtype, shape, is_trained) in said["tensors"].items()
        }
        files = {
            path: _File(dict(map(_texts, names.items())), dict(map(_texts, more.items())))
            for path, (names, more) in said["files"].items()
        }
        if plan.digest != checkpoint.plan_digest:
            raise ConfigError(where, "", f"is of another model than the checkpoint; {_IN_LOOP}")
        _check_cut(plan, tensors, checkpoint)
    except FileNotFoundError:
        problem = (
            "is not there: written by an older version, moved without its folder, or a model that cannot"
        )
        raise ConfigError(where, "", f"{problem} be laid out, of which join warned; {_IN_LOOP}") from None
    except OSError as error:
        raise EnvironmentFault(f"cannot read {where}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(where, "", f"is damaged ({error}); {_IN_LOOP}") from None
    if link := next((one for one in kept.rglob("*") if one.is_symlink()), None):
        raise ConfigError(str(link), "", "is a link; put a copy of the file there, or remove it")
    unknown = {plain for file in files.values() for plain in file.names.values()} - tensors.keys()
    if unknown or any(Path(path).is_absolute() or ".." in Path(path).parts for path in files):
        raise ConfigError(where, "", f"is damaged; {_IN_LOOP}")
    return plan, tensors, files


def _texts(item: tuple[object, object]) -> tuple[str, str]:
    return str(item[0]), str(item[1])


def _check_cut(plan: FragmentPlan, tensors: _Tensors, checkpoint: Checkpoint) -> None:
    """Raises ``ValueError`` or ``KeyError`` unless ``plan`` cuts the trained tensors as the checkpoint has
    them."""
    if [one.numel for one in plan.fragments] != [state.params.numel() for state in checkpoint.states]:
        raise ValueError("its fragments are not the checkpoint's")
    sizes = dict[str, int]()
    for part in (part for fragment in plan.fragments for part in fragment.slices):
        shape = tensors[part.name][1]
        if min(shape, default=0) < 0 or not 0 <= part.start <= part.stop <= math.prod(shape):
            raise ValueError(f"{part.name} is {shape}")
        sizes[part.name] = sizes.get(part.name, 0) + part.stop - part.start
    if wrong := [name for name, size in sizes.items() if size != math.prod(tensors[name][1])]:
        raise ValueError(f"{wrong[0]} is {tensors[wrong[0]][1]}, and the fragments have {sizes[wrong[0]]}")


def _kept_frozen(kept: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    if not (kept / _FROZEN).exists():
        return {}
    try:
        frozen = load_file(kept / _FROZEN)
    except (OSError, SafetensorError) as error:
        raise ConfigError(str(kept / _FROZEN), "", f"cannot be read ({error}); {_IN_LOOP}") from None
    return {name: values for name, values in frozen.items() if shapes.get(name) == values.shape}


def _from_base(
    lacking: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], base: Path | None
) -> dict[str, Tensor]:
    """The values of ``lacking`` (names in files, and the model's) out of the folder ``base``."""
    if base is None:
        first = next(iter(lacking.values()))
        problem = f"a checkpoint has no frozen parameters, and {len(lacking)} are missing, such as {first}"
        cure = "name a folder with the model that training began with"
        raise ConfigError.of_option("--base", f"{problem}; {cure}, or {_IN_LOOP}")
    found = dict[str, Tensor]()
    for name, values in _tensors_in(base, set(lacking)):
        plain = lacking[name]
        if values.shape != shapes[plain]:
            problem = f"{name} is {tuple(values.shape)} in {base} and {shapes[plain]} in the model"
            raise ConfigError.of_option("--base", f"{problem}; name the model that training began with")
        found[plain] = values
    if missing := [name for name, plain in lacking.items() if plain not in found]:
        problem = f"{base} has no {missing[0]}" + (f", nor {len(missing) - 1} more" if missing[1:] else "")
        raise ConfigError.of_option("--base", f"{problem}; name the model that training began with")
    return found


def _tensors_in(folder: Path, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError.of_option("--base", f"{folder} has no safetensors file; name another folder")
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                for name in wanted & set(file.keys()):
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError.of_option("--base", f"{path} cannot be read: {error}") from None


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        raise ValueError(f"{name} is no dtype of a file")
    return dtype
