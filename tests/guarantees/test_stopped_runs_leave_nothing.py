"""Runs in processes of their own, stopped, killed, from a script, without a vendor: one message, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest


def start(args, folder, code=None, **settings):
    """Start a command line, or Python code, in a process group of its own."""
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "truestep", *args]
    environ = {**os.environ, "COLUMNS": "80", **settings}
    return subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def pids_of(text):
    """Return the processes whose environment holds a text, apart from this one."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                marked = text.encode() in (folder / "environ").read_bytes()
                if marked and (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


STOPS = {
    "Ctrl-C": (signal.SIGINT, True, 130, "truestep: interrupted\n"),
    "SIGINT to the parent alone": (signal.SIGINT, False, 130, "truestep: interrupted\n"),
    "SIGTERM": (signal.SIGTERM, False, 143, "truestep: told to end\n"),
    "SIGKILL": (signal.SIGKILL, False, -9, ""),
}


@pytest.mark.parametrize("case", STOPS)
def test_a_run_that_is_stopped_leaves_no_process_and_says_so(case, recipe, tmp_path):
    number, to_group, status, message = STOPS[case]
    path = recipe(in_loss=f"open({str(tmp_path / 'at work')!r}, 'w').close(); time.sleep(1000)", after=3)
    marker = f"MARK={tmp_path}"
    (tmp_path / "tmp").mkdir()
    with start(["verify", str(path), "--backend", "ddp"], tmp_path, MARK=str(tmp_path), TMPDIR=str(tmp_path / "tmp")) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "at work").exists() and time.monotonic() < until and process.poll() is None:
            time.sleep(0.05)
        assert len(pids_of(marker)) >= 4  # the command line, the template, ranks, the reference
        (os.killpg if to_group else os.kill)(process.pid, number)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (status, "", message)
    until = time.monotonic() + 5
    while (left := pids_of(marker)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left
    assert not list((tmp_path / "tmp").glob("truestep-*"))


def test_a_vendor_that_is_not_installed_is_told_with_the_extra(recipe, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('deepspeed', 'accelerate'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
    )
    code = (
        "import sys\nfrom truestep.cli import run\n"
        f"sys.exit([run(['verify', {str(recipe())!r}, '--backend', name]) for name in ('zero2', 'accelerate-ddp')] != [2, 2])"
    )
    with start([], tmp_path, code, PYTHONPATH=str(tmp_path)) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert err.splitlines() == [
        f"truestep: error: backend {name!r} needs {vendor}, which is not installed. Run: pip install 'truestep[{vendor}]'."
        for name, vendor in (("zero2", "deepspeed"), ("accelerate-ddp", "accelerate"))
    ]


CALL = "import truestep as ts\nprint(ts.verify({recipe}, backend='ddp', steps=2).verdict)\n"


def test_a_recipe_of_the_script_itself_is_loaded_by_the_ranks_or_told_what_it_lacks(recipe, sound_pieces, tmp_path):
    mine = "import sys\nmine = sys.modules[__name__]\n"
    call = CALL.format(recipe="mine")
    guarded = recipe("guarded.py", tail=f"{mine}if __name__ == '__main__':\n" + textwrap.indent(call, "    "))
    bare = recipe("bare.py", tail=mine + call)
    typed = "\n".join(sound_pieces.values()) + mine + call
    done = [
        subprocess.run([sys.executable, *args], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        for args in ([guarded], [bare], ["-c", typed])
    ]
    assert (done[0].returncode, done[0].stdout) == (0, "equal\n")
    assert "Put the call under: if __name__ == '__main__':" in done[1].stderr.splitlines()[-1]
    assert "cannot be sent to rank processes: expected one that they can load by name" in done[2].stderr.splitlines()[-1]
