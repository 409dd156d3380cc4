"""What every test shares: Hypothesis profiles that do not depend on how busy the machine is, and what runs only on
demand."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "larder",
    deadline=None,  # two shared cores: an absolute time would be noise
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "larder"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Many lives of the scheduler harness are for `make harness`, which asks for them by their marker."""
    if "harness" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("harness")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
