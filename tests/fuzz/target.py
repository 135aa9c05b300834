"""The same games under a coverage-guided fuzzer: what reaches new lines of the message rooms is kept and
changed further.

    pip install -e '.[fuzz]'
    python -m tests.fuzz.target CORPUS_FOLDER -max_total_time=600 -max_len=600 -rss_limit_mb=3000

The first byte of an input says who may lie and whether messages are lost, the rest is the tape. A game that
breaks a law ends the fuzzer with the input that did it; its last line says how many games there were.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(
    include=["p2p_co2.node", "p2p_co2.rounds", "p2p_co2.catchup", "p2p_co2.membership"]
):
    import torch

    from tests.fuzz.play import Game


def one_input(data: bytes) -> None:
    if len(data) < 3:
        return
    game = Game(data[1:], insiders=bool(data[0] & 1), losses=bool(data[0] & 2))
    game.play()
    if not data[0] & 3:
        game.check_agreement()


def main() -> None:
    torch.set_num_threads(1)
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
