"""``python -m dmuon_kernels status``: every kernel here, and why the others do not run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dmuon_kernels import __version__, status


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dmuon_kernels", description="Kernels for symmetric products.")
    parser.add_argument("--version", action="version", version=f"dmuon-kernels {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("status", help="one line per backend: available, or the reason why not")
    command.add_argument("--device", help='such as "cuda:1"; the current CUDA device, else the CPU, when left out')
    arguments = parser.parse_args(argv)
    for name, backend in status(arguments.device).items():
        how = f", {backend['notes']}" if backend["notes"] else ""
        print(f"{name}: {backend['reason'] or 'available'}{how} ({backend['distribution']})")


if __name__ == "__main__":
    main()
