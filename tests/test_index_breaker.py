"""The circuit breaker: opens after failures in a row, lets one probe through per pause, closes on success."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from index_worlds import FakeClock

from cacheservice.index.breaker import CircuitBreaker


def build(clock: FakeClock, jitter: float = 0.999) -> CircuitBreaker:
    return CircuitBreaker(
        clock=clock, max_failures=3, first_pause_s=1.0, longest_pause_s=4.0, jitter=lambda: jitter
    )


def test_it_stays_closed_while_failures_are_not_in_a_row() -> None:
    breaker = build(FakeClock())
    for _ in range(10):
        for succeeded in (False, False, True):
            assert breaker.permits()
            breaker.succeeded() if succeeded else breaker.failed()
    assert breaker.is_closed


def test_it_opens_probes_once_per_pause_and_waits_longer_each_time() -> None:
    clock = FakeClock()
    breaker = build(clock)
    for _ in range(3):
        assert breaker.permits()
        breaker.failed()
    for pause_s in (1.0, 2.0, 4.0, 4.0):
        assert not breaker.permits()
        clock.advance(pause_s * 0.99)
        assert not breaker.permits()
        clock.advance(pause_s * 0.01)
        assert breaker.permits()
        assert not breaker.permits(), "two probes at once"
        breaker.failed()
    clock.advance(4.0)
    assert breaker.permits()
    breaker.succeeded()
    assert breaker.is_closed
    assert breaker.permits()
    assert breaker.permits()


def test_pauses_are_spread_over_half_their_length() -> None:
    for jitter, is_over in ((0.0, True), (0.999, False)):
        clock = FakeClock()
        breaker = build(clock, jitter)
        for _ in range(3):
            breaker.failed()
        clock.advance(0.5)
        assert breaker.permits() is is_over


def test_calls_that_fail_after_it_opened_do_not_lengthen_the_pause() -> None:
    clock = FakeClock()
    breaker = build(clock)
    for _ in range(20):
        breaker.failed()
    clock.advance(1.0)
    assert breaker.permits()


def test_a_probe_that_never_reports_is_replaced() -> None:
    clock = FakeClock()
    breaker = build(clock)
    for _ in range(3):
        breaker.failed()
    clock.advance(1.0)
    assert breaker.permits()
    clock.advance(3.9)
    assert not breaker.permits()
    clock.advance(0.1)
    assert breaker.permits()


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 5))))
def test_open_is_exactly_failures_in_a_row_without_a_success_since(
    steps: list[tuple[bool, float]],
) -> None:
    clock = FakeClock()
    breaker = build(clock)
    in_a_row = 0
    for works, pause_s in steps:
        if breaker.permits():
            if works:
                breaker.succeeded()
                in_a_row = 0
            else:
                breaker.failed()
                in_a_row += 1
        else:
            assert in_a_row >= 3
        assert breaker.is_closed is (in_a_row < 3)
        clock.advance(pause_s)
