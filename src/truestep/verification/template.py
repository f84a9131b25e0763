"""The process that rank processes are forked from: it has imported torch, and then forks, signals and reaps as the parent asks.

So torch is imported once, however many processes a run uses up, and a new crew is a matter of tenths of a second. No code of a
user runs in it. It ends, with all it has forked, when its socket to the parent closes or its parent is no longer the same.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from typing import Any, Final

from truestep.verification import worker

# What training code imports at the latest in its first step (optimizers and DDP import dynamo): what is forked has it already.
PRELOADED: Final = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
)
WATCH_S: Final = 0.5
KILL_S: Final = 10.0  # for the system to end a killed process; it stays unreaped if even that is not enough


def main() -> None:
    """Answer one JSON request after another; arguments: the handle of the socket, the parent's process id, the folder of logs."""
    control = socket.socket(fileno=int(sys.argv[1]))
    parent = int(sys.argv[2])
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    statuses_by_pid: dict[int, int | None] = {}
    while os.getppid() == parent:
        if not select.select([control], [], [], WATCH_S)[0]:
            continue
        data, handles, _, _ = socket.recv_fds(control, 1 << 20, 1)
        if not data:
            break
        answer = _answer(json.loads(data), handles, statuses_by_pid, control)
        control.sendall(json.dumps(answer).encode())
    _end([pid for pid, status in statuses_by_pid.items() if status is None], 0.0, statuses_by_pid)
    shutil.rmtree(sys.argv[3], ignore_errors=True)  # a parent that was killed could not
    os._exit(0)


def _answer(request: dict[str, Any], handles: list[int], statuses_by_pid: dict[int, int | None], control: socket.socket) -> Any:
    if request["do"] == "fork":
        pid = os.fork()
        if pid == 0:
            control.close()
            worker.live(handles[0], request)
        os.close(handles[0])
        statuses_by_pid[pid] = None
        return pid
    _reap(statuses_by_pid)
    if request["do"] == "end":
        _end(request["pids"], request["grace_s"], statuses_by_pid)
    return [statuses_by_pid.get(pid) for pid in request["pids"]]


def _reap(statuses_by_pid: dict[int, int | None]) -> None:
    for pid in [pid for pid, status in statuses_by_pid.items() if status is None]:
        gone, status = os.waitpid(pid, os.WNOHANG)
        if gone:
            statuses_by_pid[pid] = os.waitstatus_to_exitcode(status)


def _end(pids: list[int], grace_s: float, statuses_by_pid: dict[int, int | None]) -> None:
    """End processes and what they started: SIGTERM, `grace_s`, SIGKILL; reaped."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
        for pid in pids:
            # Also for one that is gone: its session may hold processes that it started.
            try:
                os.killpg(pid, number)
            except (ProcessLookupError, PermissionError):
                continue
        until = time.monotonic() + wait_s
        while any(statuses_by_pid.get(pid, 0) is None for pid in pids):
            _reap(statuses_by_pid)
            if time.monotonic() > until:
                break
            time.sleep(0.005)


if __name__ == "__main__":
    main()
