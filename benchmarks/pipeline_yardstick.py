"""What one optimizer step of a 204M-parameter model in 8 stages costs on links of 200 Mbit/s and 50 ms.

    python benchmarks/pipeline_yardstick.py [--tflops 16 60] [--window 0] [--steps 2]

By the planner's formula and by stages on virtual time; prints JSON. A step is 512 sequences of 1,024 tokens:
512 microbatches of one sequence in a chain of 8 stages, one replica each. Published elsewhere for such a
step: 100.5 s in bf16, 19.9 s in a subspace of 160 dimensions, which needs 3.1 times the steps.

Width: the two published times lie on a line of so many seconds a dimension that crosses: 80.6 s for those
beyond 160. At a width of 768 all would take 101.8 s, more than the 100.5. At 1,024 it is 95.5 s: 1.11 times
the 85.9 s in which a middle stage's uplink carries activations forward and gradients back. So the width is
1,024: 16 blocks of 12 x 1,024^2 are 201 million, and 2.7 million for token tables make 204.

Computing: that line leaves 5.0 s for all else. If they were all computing, 6 FLOPs a parameter and token
(attention left out), a stage would do 16 TFLOP/s: the slow case. The quick one is 60 TFLOP/s achieved, half
of what an accelerator of the A10 class has on paper.

Links: 50 ms are one way, 200 Mbit/s up; what comes down never waits. No targets travel, no rounds are made.
Price: mean values, no TCP and no TLS (the formula adds 4 % for what they put on the wire, virtual time does
not).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from p2p_co2.planning.exchange import link_of
from p2p_co2.planning.pipeline import StageCost, StagedSetting, StageMember, forecast_stages, loads_of
from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.simnet.microbatches import Layout, StagePeer, VirtualStages

STAGES, WIDTH, TOKENS, SEQUENCES, PARAMETERS = 8, 1024, 1024, 512, 204e6
LINE = LinkProfile("yardstick", 200_000_000, 2_000_000_000, 50.0, 0.0, 0.0, "open")
CODECS = (("bf16", "bf16"), ("int8", "int8"), ("int8", "int4"))
PUBLISHED_S = {"bf16": 100.5, "subspace of 160, 3.1 times the steps": 19.9}


def costs_of(tflops: float) -> list[StageCost]:
    """Of a microbatch of one sequence in each stage."""
    forward_s = 2 * PARAMETERS / STAGES * TOKENS / (tflops * 1e12)
    return [
        StageCost(
            forward_s=forward_s,
            backward_s=2 * forward_s,
            values=WIDTH * TOKENS if stage + 1 < STAGES else 0,
            parameters=int(PARAMETERS / STAGES),
        )
        for stage in range(STAGES)
    ]


def measure(forward: str, backward: str, tflops: float, window: int, steps: int) -> dict[str, Any]:
    loads = loads_of(costs_of(tflops), forward, backward)
    peers = tuple((StageMember(link_of(LINE)),) for _ in loads)
    setting = StagedSetting(loads=loads, peers=peers, microbatches=SEQUENCES, tokens=TOKENS, window=window)
    shown = forecast_stages(setting)
    layout = Layout(stages=loads, microbatches=SEQUENCES, window=window, tokens=TOKENS, cap_s=600.0)
    world = VirtualStages(layout, [[StagePeer(LINE)] for _ in loads])
    ends: list[float] = []
    while len(ends) < steps + 1:  # the first one also meets the others
        done = world.books.steps[0].total()
        world.run(0.05)
        ends += [world.now] * (world.books.steps[0].total() - done)
    assert not world.books.violations
    middle = loads[1]
    return {
        "forward": forward,
        "backward": backward,
        "tflops": tflops,
        "window": window or "product's",
        "hop_bytes": middle.ahead_bytes,
        "uplink_alone_s": round(SEQUENCES * 8 * (middle.ahead_bytes + middle.back_bytes) / 200e6, 1),
        "computing_alone_s": round(SEQUENCES * middle.compute_s, 2),
        "plan_s": round(shown.step_s, 1),
        "plan_binding": f"{shown.binding} of stage {shown.bottleneck}",
        "virtual_s": round((ends[-1] - ends[0]) / steps, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tflops", nargs="+", type=float, default=[16.0, 60.0])
    parser.add_argument("--window", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    rows = [
        measure(*codecs, tflops, window, options.steps)
        for window in options.window
        for tflops in options.tflops
        for codecs in CODECS
    ]
    print(json.dumps({"published_s": PUBLISHED_S, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
