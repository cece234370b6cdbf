"""``dmuon``: the command line."""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> None:
    """``dmuon doctor``: what is installed, what runs, a self-test of a few seconds. Exit status 1 where that fails."""
    parser = argparse.ArgumentParser(prog="dmuon", description="Muon under FSDP2, one owner per matrix.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="versions, devices, kernels with reasons, a self-test of a few seconds")
    parser.parse_args(arguments)

    from dmuon_fsdp.doctor import examine

    lines, passed = examine()
    print("\n".join(lines))
    sys.exit(0 if passed else 1)
