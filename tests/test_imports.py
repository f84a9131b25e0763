"""What importing costs, told by ``sys.modules``: the face, ``--help`` and the pytest plugin load neither torch nor a vendor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "deepspeed", "accelerate", "transformers", "lightning")

WAYS = {
    "import truestep": "import truestep",
    "a name from words": "import truestep; truestep.Finding; truestep.VerifyError",
    "truestep --help": """
import sys
from truestep.cli import main
sys.argv = ["truestep", "--help"]
try:
    status = main()
except SystemExit as stop:
    status = stop.code
assert not status, status
""",
    "truestep verify --help": """
import sys
from truestep.cli import main
sys.argv = ["truestep", "verify", "--help"]
try:
    status = main()
except SystemExit as stop:
    status = stop.code
assert not status, status
""",
    "import pytest_truestep": "import pytest_truestep",
    "pytest with the plugin": """
import pytest
status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"])
assert status == pytest.ExitCode.OK, status
import sys
assert "pytest_truestep" in sys.modules
""",
}
TELL = f"""
import sys
loaded = [name for name in {HEAVY!r} if name in sys.modules]
if loaded:
    raise SystemExit("loaded: " + " ".join(loaded))
"""


@pytest.mark.parametrize("way", WAYS)
def test_this_loads_neither_torch_nor_a_vendor(way: str, tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("def test_nothing() -> None: ...\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", WAYS[way] + TELL], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_module_and_the_script_show_the_same_help() -> None:
    outputs = []
    for command in ([sys.executable, "-m", "truestep"], [str(Path(sys.executable).with_name("truestep"))]):
        done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.replace("python -m truestep", "truestep"))
    assert outputs[0] == outputs[1]
