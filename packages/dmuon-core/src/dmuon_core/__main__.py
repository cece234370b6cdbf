"""``python -m dmuon_core status``: what Newton-Schulz runs on here, and why the other kernels do not."""

from __future__ import annotations

import argparse

from dmuon_core.report import get_backend_status, get_ns_backend
from dmuon_core.syrk.ladder import KernelUnavailableError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dmuon_core", description=__doc__)
    parser.add_argument("command", choices=["status"])
    parser.add_argument("--device", help="such as cuda:1; default: the current CUDA device, else the CPU")
    arguments = parser.parse_args()
    try:
        print(get_ns_backend())
    except KernelUnavailableError as error:
        parser.exit(1, f"{error}\n")
    for name, status in get_backend_status(arguments.device).items():
        how = f", {status['notes']}" if status["notes"] else ""
        print(f"  {name:<10} {status['reason'] or 'available'}{how}  [{status['distribution']}]")


if __name__ == "__main__":
    main()
