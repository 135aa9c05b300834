"""The bandwidth simulator behind Streaming DiLoCo's table of required bandwidths: how busy the processors are
when training waits for the network.

Source: arXiv 2501.18512, section 3.1 and table 4. A step is 3 L - 1 equal pieces of work for L layers
(forward, backward by activations but for the first layer, backward by parameters). A layer's reduction can
start when its last piece is done; reductions pass one channel, first come first served; the layer's forward
pass ``delay_steps`` later waits for the answer. No latency, no loss, equal layers: it compares methods."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained and how it is sent.

    ``parameters``: values in all. ``layers``: equal layers they are in. ``step_s``: pure compute of one inner
    step. ``bits_per_value``: on the wire. ``round_steps``: inner steps between two sends of a layer (1 is
    data-parallel). ``fragments``: groups of layers that are sent apart. ``delay_steps``: inner steps that
    training goes on before it waits for an answer. ``peers``: each sends ``2 (1 - 1 / peers)`` payloads.
    """

    parameters: float
    layers: int
    step_s: float
    bits_per_value: float
    round_steps: int = 1
    fragments: int = 1
    delay_steps: int = 0
    peers: int = 2


def utilisation(job: Job, bits_per_s: float, rounds: int = 2) -> float:
    """Share of the time that is computation (0 to 1), over ``rounds`` of every fragment on a channel of
    ``bits_per_s``."""
    piece_s = job.step_s / (3 * job.layers - 1)
    factor = 2 * (1 - 1 / job.peers)
    reduction_s = factor * job.parameters * job.bits_per_value / job.layers / bits_per_s
    every = max(1, round(job.round_steps / job.fragments))
    steps = rounds * every * job.fragments
    now = free_at = 0.0
    awaited: dict[int, dict[int, float]] = {}
    for step in range(1, steps + 1):
        # The layers whose gradients are sent after this step: one fragment at a time, strided.
        sent = set(range((step // every - 1) % job.fragments, job.layers, job.fragments))
        sent = set() if step % every else sent
        waits = awaited.pop(step, {})
        if not sent and not waits:
            now += job.step_s
            continue
        for layer in range(job.layers):
            now = max(now, waits.get(layer, now)) + piece_s
        for layer in reversed(range(job.layers)):
            now += 2 * piece_s if layer else piece_s  # the first layer needs no gradient of its input
            if layer in sent:
                free_at = max(free_at, now) + reduction_s
                awaited.setdefault(step + 1 + job.delay_steps, {})[layer] = free_at
    return steps * job.step_s / max(now, free_at)
