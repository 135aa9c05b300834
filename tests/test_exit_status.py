"""bootstrap.exit_status: what a run of several processes leaves its own with."""

from __future__ import annotations

import os
import signal

import pytest

from bootstrap.exit_status import exit_status_of


@pytest.mark.parametrize(("reasons", "status"), [([], 0), (["the loss did not fall"], 1)])
def test_reasons_are_told_and_make_it_a_failure(
    reasons: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status_of(lambda: reasons, "stopped") == status
    assert capsys.readouterr().err == "".join(f"error: {reason}\n" for reason in reasons)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_is_stopped_cleans_up_and_says_so(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned: list[bool] = []

    def run() -> list[str]:
        try:
            os.kill(os.getpid(), number)
            return ["it went on"]
        finally:
            cleaned.append(True)

    before = signal.getsignal(signal.SIGTERM)
    assert exit_status_of(run, "stopped; nothing is left") == 130
    assert capsys.readouterr().err == "stopped; nothing is left\n"
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGTERM) is before
