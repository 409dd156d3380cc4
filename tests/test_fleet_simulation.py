"""Agents, index and engines under seeded faults on virtual time: right bytes or none, and nothing left over."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import pytest
from fleet_simulation import simulate

from cacheservice.core.store import SessionId, Store

SEEDS = range(int(os.environ.get("LARDER_SIMULATIONS", "24")))


def test_fleet_serves_right_bytes_or_none_under_faults() -> None:
    """A failing seed is named by the assertion; `simulate(seed)` replays it."""
    happened: Counter[str] = Counter()
    for seed in SEEDS:
        try:
            happened += simulate(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    # The simulation must have met what it is for, or it proves nothing.
    for what in ("hits", "pulled", "crashes", "erased", "index_unavailable", "writer_died", "writer_stopped",
                 "lease_lost", "late", "late_states", "state_hits", "spread",
                 "flips", "checksum_misses", "pull_aborted", "pull_lost"):  # fmt: skip
        assert happened[what], f"never happened: {what} in {happened}"


def _simulate_all() -> None:
    for seed in SEEDS:
        simulate(seed)


def test_simulation_notices_extents_reused_while_a_writer_may_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutation: no quarantine. The stale writer then lands in somebody else's shard."""
    original = Store._end_reservation

    def without_quarantine(self: Store, reservation: object, *, may_be_written: bool) -> None:
        original(self, reservation, may_be_written=False)  # type: ignore[arg-type]

    def freed(self: Store, reservation: object) -> None:
        owner = reservation.session  # type: ignore[attr-defined]
        owner.retired.pop(reservation.reservation_id, None)  # type: ignore[attr-defined]
        self._free(reservation.extent)  # type: ignore[attr-defined]

    monkeypatch.setattr(Store, "_end_reservation", without_quarantine)
    monkeypatch.setattr(Store, "_free_retired", freed)
    monkeypatch.setattr(Store, "check_invariants", lambda self: None)
    with pytest.raises(AssertionError, match=r"wrong bytes|overwritten"):
        _simulate_all()


def test_simulation_notices_leases_that_are_said_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: Release answers that every lease held. A slow reader then takes what was overwritten meanwhile."""
    original = Store.release

    def always_held(
        self: Store, session: SessionId, leases: Sequence[int], now_s: float
    ) -> list[bool]:
        return [True for _ in original(self, session, leases, now_s)]

    monkeypatch.setattr(Store, "release", always_held)
    with pytest.raises(AssertionError, match=r"wrong bytes|overwritten"):
        _simulate_all()
