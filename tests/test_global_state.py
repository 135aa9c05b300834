"""What belongs to the whole process is the user's: our code neither depends on it nor changes it.

Torch's default dtype and device, and the global random generators, are set by whoever trains. So every tensor
of ours names its dtype and device, and every draw comes from a generator of our own.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from p2p_co2.net.transport.libp2p.hivemind import DHTID
from tests.test_architecture import ROOT
from tools.house import sources

FLOATS = {"empty", "zeros", "ones", "full", "eye", "linspace", "logspace", "scalar_tensor", "empty_strided"}
WHOLE = {"arange", "tensor", "as_tensor", "asarray", "randint", "randperm"}
"""Torch takes their dtype from the values, the default one among them."""
RANDOM = {"rand", "randn", "normal", "bernoulli", "multinomial", "randint", "randperm"}
LAYERS = {"Linear", "Embedding", "LayerNorm", "RMSNorm", "Conv1d", "Conv2d", "BatchNorm1d", "BatchNorm2d"}
OWN_GENERATORS = {"Random", "SystemRandom"}
MAY_SEED = {ROOT / "p2p_co2" / name for name in ("recipes/drawing.py", "tensors/device.py")}
"""Seeds a recipe's draws, and puts the user's state back."""


@cache
def tree_of(path: Path) -> ast.Module:
    text = path.read_text()
    return ast.parse(text if re.search("torch|random", text) else "")


def calls(path: Path) -> Iterator[tuple[ast.Call, list[str], set[str]]]:
    """Each call: (node, its dotted name, the names of its keyword arguments)."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).split(".")
            yield node, name, {keyword.arg or "**" for keyword in node.keywords}


def test_every_tensor_names_its_dtype_and_device() -> None:
    unnamed = []
    for path in sources():
        for node, name, given in calls(path):
            lacks = _wanted(name) - given
            if lacks:
                unnamed.append(f"{path}:{node.lineno}: {ast.unparse(node)} lacks {sorted(lacks)}")
        unnamed += [f"{path}:{line}: torch.{name} is handed on" for line, name in handed_on(path)]
    assert not unnamed, "\n".join(unnamed)


def _wanted(name: list[str]) -> set[str]:
    """The keyword arguments that a call must have."""
    of_torch = name[1] if name[0] == "torch" and len(name) == 2 else ""
    if of_torch in FLOATS | WHOLE | {"rand", "randn"}:
        return {"dtype", "device"}
    if name[-1] in {"new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"}:
        return {"dtype"}
    if of_torch == "frombuffer" or (name[0] == "nn" and name[-1] in LAYERS):
        return {"dtype"}
    return {"another call"} if of_torch in {"Tensor", "FloatTensor", "get_default_dtype"} else set()


def handed_on(path: Path) -> Iterator[tuple[int, str]]:
    """Where a function that makes tensors is named and not called: whoever calls it names nothing."""
    tree = tree_of(path)
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in called and node.attr in FLOATS | WHOLE:
            yield from [(node.lineno, node.attr)] if ast.unparse(node.value) == "torch" else []


def test_every_draw_is_from_a_generator_of_its_own() -> None:
    global_draws = []
    for path in sources():
        for node, name, given in calls(path):
            is_pythons = name[0] == "random" and len(name) == 2 and name[1] not in OWN_GENERATORS
            is_numpys = name[:2] in (["np", "random"], ["numpy", "random"]) and name[-1] != "default_rng"
            is_torchs = name[0] == "torch" and name[-1] in RANDOM and "generator" not in given
            seeds = name in (["torch", "manual_seed"], ["torch", "cuda", "manual_seed_all"])
            if is_pythons or is_numpys or is_torchs or (seeds and path not in MAY_SEED):
                global_draws.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert not global_draws, "\n".join(global_draws)


def test_hivemind_draws_from_a_generator_of_its_own() -> None:
    random.seed(7)
    before = random.getstate()
    first, second = DHTID.generate(), DHTID.generate()
    assert random.getstate() == before
    random.seed(7)
    assert len({first, second, DHTID.generate()}) == 3, "peers that seed alike would have one id"
