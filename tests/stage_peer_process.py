"""A peer that holds a stage for so many inner steps, and leaves its live parameters in a file.

python tests/stage_peer_process.py TICKET FOLDER STAGE STEPS
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from p2p_co2.config import PeerConfig
from p2p_co2.recipes import load_run_recipe
from p2p_co2.trainer.connection import connect, print_warnings
from p2p_co2.trainer.stages.peer import StagePeer


def main() -> None:
    ticket, folder, stage, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    connection = connect(ticket, PeerConfig(folder=folder, stage=stage, board=False), print_warnings)
    try:
        recipe = load_run_recipe(connection.run)
        peer = connection.start_stage(recipe)

        def after_step(me: StagePeer) -> None:
            if me.peer.inner_steps == steps:
                values = {name: one.detach().clone() for name, one in me.module.named_parameters()}
                save_file(values, folder / "live.safetensors")
                print(f"peer: {me.peer.peer_id}", flush=True)
                me.stop()

        peer.train(after_step)
    finally:
        connection.close()


if __name__ == "__main__":
    main()
