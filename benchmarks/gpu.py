"""Training on a card, alone and in a swarm: speed, where the time goes, memory.

    python benchmarks/gpu.py                               # 124 M and 1 B parameters, some four minutes
    python benchmarks/gpu.py --sizes small --device cpu    # seconds; the default where there is no card

Two processes train byte-gpt with bf16 autocast and AdamW on one card: first one of them (``alone``), then
both with nothing between them (``beside``), then both as peers that exchange int4 gradients (``swarm``, after
a round of every fragment). Each window begins and ends with nothing queued on the card. ``swarm_by_beside``
is what exchange costs, since two processes share the card in both.

- ``tokens_per_s``: of all processes. ``tflops``: 6 times parameters and tokens, attention not counted.
- ``work``: of functions of the product, seconds by seconds of the window, and milliseconds a call. ``step``,
  ``snapshot`` and ``merge_`` are of the training thread, and hold ``await_computed``, which waits for queued
  training. ``offer`` (encodes), ``reduce_slices``, ``commit`` (outer step) and ``state_chunk_digests`` run
  beside it. ``encode``: GB/s of fp32, and on which device.
- ``utilisation``, ``exposed_share``: as peers report them; the wait for queued training is training.
- ``card_gb``, ``host_gb``: the most within a window, of torch's allocator and of the resident set.

Until the peers join, their learning rate is 0, so that they begin with the same parameters. They write no
checkpoint and end without leaving: of 1 B parameters each would write 16 GB.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from common import Clocks, Figures, against, bench, joined, note, parser_of, peak_bytes, run, say, spread

from p2p_co2.config import OWN_LOOP, ClockConfig, RunConfig
from p2p_co2.recipes import BYTE_GPT, InnerStep, load_recipe
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors.device import await_computed, is_accelerator, training_device
from p2p_co2.tensors.fragments import LiveParameters
from p2p_co2.trainer import Peer
from p2p_co2.trainer.ledger import worker
from p2p_co2.trainer.ledger.fragment_state import FragmentState
from p2p_co2.trainer.saver import Saver

PEERS, FRAGMENTS, WARM_STEPS, FIRST_ROUNDS_S = 2, 4, 3, 120.0
LARGE = {"context": 1024, "vocab_size": 50304}


class Size(NamedTuple):
    """``model``: options of byte-gpt. ``plain_s``, ``swarm_s``: of a window without and with exchange."""

    model: dict[str, int]
    batch: int
    round_s: float
    plain_s: float
    swarm_s: float


SIZES = {
    "small": Size({"layers": 2, "width": 32, "heads": 2, "context": 32}, 4, 1.0, 0.2, 2.2),
    "124M": Size({"layers": 12, "width": 768, "heads": 12} | LARGE, 16, 8.0, 6.0, 16.0),
    "1B": Size({"layers": 18, "width": 2048, "heads": 16} | LARGE, 8, 40.0, 8.0, 40.0),
}


def measure(options: argparse.Namespace) -> Figures:
    device = training_device(options.device)
    is_card = is_accelerator(device.name)
    answer: Figures = {"device": device.words, "torch": torch.__version__}
    for name in options.sizes or (["124M", "1B"] if is_card else ["small"]):
        answer[name] = _measured(name, device.name)
        note(name, answer[name])
    return answer


def _measured(name: str, device: str) -> Figures:
    size, clock = SIZES[name], ClockConfig(mode="time", round_s=SIZES[name].round_s)
    with bench(RunConfig(name="gpu", recipe=OWN_LOOP, fragments=FRAGMENTS, clock=clock)) as swarm:
        told = (name, device, swarm.ticket)
        peers = [swarm.ask(__file__, "peer", *told, swarm.folder / str(index)) for index in range(PEERS)]
        parameters = max([peer.answer()["parameters"] for peer in peers])

        def window(count: int, what: str, seconds: float) -> Figures:
            for peer in peers[:count]:
                peer.tell(f"{what} {seconds}")
            each = [peer.answer() for peer in peers[:count]]
            rate = sum(one["tokens_per_s"] for one in each)
            tflops = round(6e-12 * parameters * rate, 4)
            return {"tokens_per_s": round(rate, 1), "tflops": tflops, "peers": each}

        found = {
            "alone": window(1, "train", size.plain_s), "beside": window(PEERS, "train", size.plain_s),
            "joining": window(PEERS, "join", 0.0), "swarm": window(PEERS, "train", size.swarm_s),
        }  # fmt: skip
    ratio = found["swarm"]["tokens_per_s"] / found["beside"]["tokens_per_s"]
    return {"parameters": parameters, "swarm_by_beside": against(ratio, 0.95), **found}


def _peer(name: str, device: str, ticket: str, folder: str) -> None:
    """Answers once it is ready, and after each line: "train SECONDS", "join 0"."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // PEERS))
    size, heard, in_swarm = SIZES[name], list[ev.Event](), ExitStack()
    clocks = Clocks(
        (Peer, "step"), (LiveParameters, "await_computed"), (LiveParameters, "snapshot"),
        (LiveParameters, "merge_"), (FragmentState, "offer"), (FragmentState, "commit"),
        (worker, "reduce_slices"), (worker, "state_chunk_digests"),
    )  # fmt: skip
    recipe = replace(load_recipe(BYTE_GPT, dict(size.model), 0), autocast="bf16")
    model, batches = recipe.model.to(device), recipe.batches(1 + int(Path(folder).name), size.batch)
    optimizer, peer = recipe.optimizer(model.parameters()), None
    inner, (group,) = InnerStep(recipe, model, optimizer), optimizer.param_groups
    rate, group["lr"] = group["lr"], 0.0

    def train(seconds: float, steps: int = 1, fragments: int = 0) -> Figures:
        """For so long, at least so many steps, and until so many fragments have had a round."""
        _peaks(device, begin=True)
        heard.clear()
        clocks.clear()
        await_computed(device)
        began_at, done, tokens = time.monotonic(), 0, 0
        while done < steps or time.monotonic() < began_at + seconds or len(_applied(heard)) < fragments:
            if fragments and time.monotonic() > began_at + FIRST_ROUNDS_S:
                raise SystemExit(f"only fragments {_applied(heard)} had a round in {FIRST_ROUNDS_S} s")
            taken = inner.take(batches)
            assert taken is not None
            done, tokens = done + 1, tokens + int(taken.tokens)
            if peer is not None:
                peer.step(taken.tokens, taken.loss)
        await_computed(device)
        wall_s = time.monotonic() - began_at
        figures = {"wall_s": wall_s, "steps": done, "tokens_per_s": tokens / wall_s} | _peaks(device)
        return figures if peer is None else figures | _exchange(tuple(heard), clocks, wall_s)

    Saver.keep_up = lambda self: None  # type: ignore[method-assign]
    train(0.0, WARM_STEPS)
    say({"parameters": sum(one.numel() for one in model.parameters())})
    for what, seconds in map(str.split, sys.stdin):
        if what == "join":
            group["lr"] = rate
            config = {"min_peers": PEERS, "carrier": "grpc"}
            made = joined(ticket, Path(folder), model, optimizer, heard.append, **config)
            peer = in_swarm.enter_context(made)
        say(train(float(seconds), fragments=FRAGMENTS if what == "join" else 0))
    os._exit(0)


def _applied(heard: list[ev.Event]) -> set[int]:
    return {one.fragment for one in tuple(heard) if isinstance(one, ev.FragmentApplied)}


def _peaks(device: str, begin: bool = False) -> dict[str, float]:
    """Since they were begun anew."""
    is_card = is_accelerator(device)
    card_gb = torch.cuda.max_memory_allocated(device) / 1e9 if is_card else 0.0
    host_gb = peak_bytes() / 1e9
    if begin:
        with suppress(OSError):  # where that is forbidden: since the process began
            Path("/proc/self/clear_refs").write_text("5")
        if is_card:
            torch.cuda.reset_peak_memory_stats(device)
    return {"card_gb": card_gb, "host_gb": host_gb}


def _exchange(events: tuple[ev.Event, ...], clocks: Clocks, wall_s: float) -> Figures:
    """What events and clocks say of a window."""
    offer, counts = clocks["offer"], Counter(one.kind for one in events)
    reports = [one for one in events if isinstance(one, ev.Progress) and one.phase == "training"]
    rounds = [one for one in events if isinstance(one, ev.RoundCommitted)]
    figures: Figures = {
        "work": {
            name: {"share": one.took_s / wall_s, "ms_a_call": 1e3 * one.took_s / max(1, one.calls)}
            for name, one in sorted(clocks.items())
        },
        "encode": {"gb_per_s": 4e-9 * offer.values / max(1e-9, offer.took_s), "device": offer.device},
        "exchange_s": spread([one.duration_s for one in rounds]),
        "rounds_of": [one.contributors for one in rounds],
        "trouble": {kind: counts[kind] for kind in ("round_aborted", "send_skipped", "warned")},
    }  # fmt: skip
    if len(reports) > 1:
        first, last = reports[0], reports[-1]
        figures["utilisation"] = (last.train_s - first.train_s) / (last.wall_s - first.wall_s)
        figures["exposed_share"] = (last.exposed_s - first.exposed_s) / (last.wall_s - first.wall_s)
    return figures


def main() -> None:
    parser = parser_of(__doc__)
    parser.set_defaults(run_it=measure)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), help="124M 1B on a card, else small")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    run(parser, {"peer": _peer})


if __name__ == "__main__":
    main()
