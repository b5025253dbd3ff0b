"""Settings of every test: one thread, no network, hypothesis with one seed and no deadline."""

import os

# Before torch is imported by any test: the machine is shared by several ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("NO_COLOR", "1")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "sirara",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "sirara"))
