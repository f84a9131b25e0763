"""What the probe finds of every class of torch.optim, pytorch-optimizer, schedulefree and lion-pytorch, and what it costs.

    python benchmarks/probe.py [NAME..]

Prints a line a class and the CPU seconds together. The issue asks for 180 s of pytorch-optimizer's 120 or so.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator

PACKAGES = ("torch.optim", "pytorch_optimizer", "schedulefree", "lion_pytorch")


def classes(package: str) -> Iterator[tuple[str, type]]:
    """Yield the optimizer classes that a package offers as its own."""
    module = importlib.import_module(package)
    base = importlib.import_module("torch.optim").Optimizer
    for name, value in sorted(vars(module).items()):
        own = isinstance(value, type) and value is not base and value.__module__.partition(".")[0] == package.partition(".")[0]
        if own and callable(getattr(value, "step", None)) and "scheduler" not in value.__module__:
            yield name, value


def main() -> None:
    """Probe them all."""
    os.environ["TRUESTEP_CACHE"] = "off"
    from truestep.optimizers.probe import probe

    wanted, total_s = sys.argv[1:], 0.0
    for package in PACKAGES:
        package_s, count = 0.0, 0
        for name, cls in classes(package):
            if wanted and name not in wanted:
                continue
            began = time.process_time()
            found = probe(cls)
            seconds = time.process_time() - began
            package_s, count = package_s + seconds, count + 1
            scopes = " ".join(f"{ndim}-D {scope}" for ndim, scope in found.scope_by_ndim.items())
            traits = [trait for trait in ("draws", "shape_sensitive", "none_sensitive") if getattr(found, trait)]
            text = f"{found.scope:8} {scopes}; {' '.join([*traits, *found.needs])}" if found.checked else f"-        {found.why}"
            print(f"{package:18} {name:26} {seconds:6.2f} s  {text}", flush=True)
        total_s += package_s
        print(f"{package:18} {count} classes, {package_s:.1f} s of CPU time", flush=True)
    print(f"together {total_s:.1f} s")


if __name__ == "__main__":
    main()
