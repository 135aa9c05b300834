"""How the ranks of a ``torchrun`` group find that they hold one model together.

Laws: every rank raises the same ``ConfigError``, or none does; nothing is changed. What each rank holds whole
has the same values on all of them, read once, when they join; some of each are compared again after the first
step, which finds ranks that train apart.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import nn
from torch.optim import Optimizer

from p2p_co2.errors import ConfigError
from p2p_co2.tensors.names import named_parameters
from p2p_co2.tensors.sharding import held, is_sharded
from p2p_co2.trainer.exchanged_model import check_model, trained_parameters
from p2p_co2.trainer.model_summary import values_digest
from p2p_co2.trainer.ranked_parameters import Division, Group
from p2p_co2.trainer.ranks import Call, Command, Ranks
from p2p_co2.trainer.rates import Rates
from p2p_co2.trainer.resuming import inner_of

_COMPARED_VALUES = 1024
"""Of each parameter, after the first step."""
_EVERY_RANK = "every rank makes the same calls in the same order"


def form_group(model: nn.Module, optimizer: Optimizer) -> Group | None:
    """This process's place in the group that ``torch.distributed`` was initialised for; None outside one.

    Looks at model and optimizer as ``check_model`` does. Raises ``ConfigError``, in a group on every rank,
    for what a swarm cannot train and where the ranks hold different models.
    """
    ranks = Ranks.of_this_process()
    if ranks is None:
        check_model(model, optimizer)
        return None
    with ranks.together():
        facts, problem = dict[str, Any](), None
        try:
            check_model(model, optimizer, in_group=True)
            Rates(optimizer, None, print)  # for its errors
            facts = _facts(model, optimizer)
        except ConfigError as error:
            if not ranks.leads:
                raise
            problem = error
        if ranks.leads:
            division = _gathered(ranks, facts, problem, model)
        else:
            ranks.word(0, Call.JOIN)
            ranks.say(0, json.dumps(facts))
            ranks.next_word(0)
            division = _division(json.loads(ranks.hear(0)))
    return Group(ranks, division)


def _facts(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What ranks compare, as JSON has it: rows of parameters, and the inner optimizer's groups."""
    parameters = named_parameters(model)
    inner = inner_of(optimizer, model)
    return {
        "rows": [
            [name, str(one.dtype), list(one.shape), one.requires_grad, is_sharded(one), one.device.type]
            for name, one in parameters.items()
        ],
        "inner": [inner.kind, [[list(map(str, vars(owned).values())) for owned in g] for g in inner.groups]],
        "held": {name: list(held(one)) for name, one in trained_parameters(model).items()},
        "values": {
            name: values_digest(one).hex() for name, one in parameters.items() if not is_sharded(one)
        },
    }


def _division(told: list[dict[str, list[int]]]) -> Division:
    return Division(tuple({name: (start, stop) for name, (start, stop) in one.items()} for one in told))


def _gathered(
    ranks: Ranks, mine: dict[str, Any], problem: ConfigError | None, model: nn.Module
) -> Division:
    """Rank 0: hear what the others hold, and let all know if it fits together."""
    heard = list[dict[str, Any]]()
    for rank in ranks.others:
        ranks.next_word(rank)
        heard.append(json.loads(ranks.hear(rank)))
    if problem is not None:
        raise problem
    for rank, theirs in enumerate(heard, 1):
        _compare(mine, theirs, rank)
    every = [one["held"] for one in (mine, *heard)]
    division = _division(every)
    sizes = {name: one.numel() for name, one in trained_parameters(model).items()}
    if name := division.missing(sizes):
        problem_text = "is not whole on the ranks of this group together; shard it over all of them"
        raise ConfigError("model", name, problem_text)
    ranks.tell(Command.GO)
    for rank in ranks.others:
        ranks.say(rank, json.dumps(every))
    return division


def _compare(mine: dict[str, Any], theirs: dict[str, Any], rank: int) -> None:
    """Raises ``ConfigError`` with the first difference between rank 0's model and another rank's."""
    for ours, other in zip(mine["rows"], theirs["rows"], strict=False):
        if ours != other:
            raise ConfigError("model", ours[0], f"is {ours[1:]} on rank 0, and {other} on rank {rank}")
    if len(mine["rows"]) != len(theirs["rows"]):
        counts = f"has {len(mine['rows'])} parameters on rank 0, {len(theirs['rows'])} on rank {rank}"
        raise ConfigError("model", "", counts)
    if mine["inner"] != theirs["inner"]:
        raise ConfigError("optimizer", "", f"is another one on rank {rank} than on rank 0; {_EVERY_RANK}")
    for name, digest in mine["values"].items():
        if theirs["values"].get(name) != digest:
            raise ConfigError(
                "model", name,
                f"has other values on rank {rank} than on rank 0; build it from one seed on every rank, and "
                "wrap it (DistributedDataParallel) before join",
            )  # fmt: skip


def sample_digest(model: nn.Module) -> str:
    """Of some values of each parameter that every rank holds whole."""
    hasher = hashlib.sha256()
    for one in trained_parameters(model).values():
        if not is_sharded(one):
            hasher.update(values_digest(one.detach().reshape(-1)[:_COMPARED_VALUES]))
    return hasher.hexdigest()
