"""Makes what these tests share importable: pytest imports tests by path, not their neighbours."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
