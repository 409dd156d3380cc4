"""What every test shares: Hypothesis profiles that do not depend on how busy the machine is."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "larder",
    deadline=None,  # two shared cores: an absolute time would be noise
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "larder"))
