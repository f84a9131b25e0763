"""What every test starts from: one thread, the CPU, and Hypothesis without a clock.

Torch-free, as the plugin is: a test that does not need torch does not pay for it.
"""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parents[1]

# Before torch or DeepSpeed are imported, here and in the processes that tests start; ./do exports the same.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch-extensions"))
os.environ.setdefault("TRUESTEP_CACHE", str(ROOT / ".cache" / "truestep"))  # not the user's own

# A shared machine is slow at times, which is no failure; the same examples every time, so that a red run can be run again.
settings.register_profile("truestep", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("truestep")
