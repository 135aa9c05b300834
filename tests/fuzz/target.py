"""Under a coverage-guided fuzzer: what reaches new lines of the message rooms is kept and changed further.

    pip install -e '.[fuzz]'
    python -m tests.fuzz.target CORPUS_FOLDER -max_total_time=600 -max_len=600 -rss_limit_mb=3000
    python -m tests.fuzz.target --games CORPUS_FOLDER ...
    python -m tests.fuzz.target --stages CORPUS_FOLDER ...

An input is a tape for ``scenes`` (some ten a second: three simulated peers), with ``--games`` for ``play``
(some a second: three real nodes that train), with ``--stages`` for ``stages`` (three stages of a model). One
that breaks a law ends the fuzzer with the input that did it; the last line says how many there were.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["p2p_co2.node", "p2p_co2.protocol"]):
    import torch

    from tests.fuzz.play import Game
    from tests.fuzz.scenes import Scene, examples
    from tests.fuzz.stages import StageGame


def one_scene(data: bytes) -> None:
    if len(data) > 2:
        Scene(data).play()


def one_game(data: bytes) -> None:
    """The first byte says who may lie and whether messages are lost."""
    if len(data) < 3:
        return
    game = Game(data[1:], insiders=bool(data[0] & 1), losses=bool(data[0] & 2))
    game.play()
    if not data[0] & 3:
        game.check_agreement()


def one_stage_game(data: bytes) -> None:
    """As ``one_game``."""
    if len(data) > 2:
        StageGame(data[1:], insiders=bool(data[0] & 1), losses=bool(data[0] & 2)).play()


PLAYS = {"--games": one_game, "--stages": one_stage_game}


def main() -> None:
    torch.set_num_threads(1)
    play = next((PLAYS[word] for word in sys.argv if word in PLAYS), one_scene)
    examples()
    atheris.Setup([word for word in sys.argv if word not in PLAYS], play)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
