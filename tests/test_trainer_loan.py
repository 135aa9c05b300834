"""Loan: who takes what, once, and who waits for whom."""

from __future__ import annotations

import threading

from p2p_co2.trainer.loan import Loan, Turns


def test_what_is_needed_is_taken_once_by_who_comes_first() -> None:
    taken: list[int] = []
    loan = Loan()
    loan.settle()  # they cannot take it yet
    assert not loan.has_ended
    loan.offer(lambda: taken.append(1))
    for _ in range(2):
        loan.settle()
    assert (taken, loan.has_ended) == ([1], True)
    other = Loan()
    other.offer(lambda: taken.append(2))
    other.end()
    other.settle()
    assert taken == [1]


def test_only_one_of_several_is_settled_at_a_time_and_nobody_waits_for_longer_than_said() -> None:
    busy, is_taking, go_on = Turns(), threading.Event(), threading.Event()
    slow, quick, taken = Loan(busy), Loan(busy), list[str]()

    def take_slowly() -> None:
        is_taking.set()
        go_on.wait()
        taken.append("slow")

    slow.offer(take_slowly)
    quick.offer(lambda: taken.append("quick"))
    thread = threading.Thread(target=slow.settle)
    thread.start()
    is_taking.wait()
    quick.settle(within_s=0.001)
    assert (taken, quick.has_ended) == ([], False)
    go_on.set()
    quick.settle()
    thread.join()
    assert taken == ["slow", "quick"]


def test_who_gives_a_turn_back_and_asks_again_comes_after_those_who_wait() -> None:
    """A checkpoint that puts one fragment after the other leaves a round that commits its turn."""
    turns, had = Turns(), list[str]()
    assert turns.acquire()

    def ask() -> None:
        turns.acquire()
        had.append("waited")
        turns.release()

    thread = threading.Thread(target=ask)
    thread.start()
    while not turns._waiting:
        thread.join(0.001)
    assert not turns.acquire(0.001)  # who gives up leaves nothing behind
    turns.release()
    assert turns.acquire()
    had.append("asked again")
    turns.release()
    thread.join()
    assert had == ["waited", "asked again"]
    assert turns.acquire(0.0)
