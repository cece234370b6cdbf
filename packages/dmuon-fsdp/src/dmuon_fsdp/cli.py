"""``dmuon``: the command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys


def main(arguments: list[str] | None = None) -> None:
    """``dmuon doctor``: what is installed, what runs, a self-test of a few seconds. Exit status 1 where that fails.

    ``dmuon plan``: owners, bytes and predicted step time of a published model on a mesh of any size, without GPUs.
    """
    parser = argparse.ArgumentParser(prog="dmuon", description="Muon under FSDP2, one owner per matrix.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="versions, devices, kernels with reasons, a self-test of a few seconds")
    plan = commands.add_parser(
        "plan", help="owners, bytes and predicted step time for a mesh of any size, without GPUs"
    )
    plan.add_argument("--model", nargs="+", required=True, help="published models by name, or all")
    plan.add_argument("--ranks", nargs="+", type=int, required=True, help="sizes of the mesh")
    plan.add_argument("--replicate", type=int, default=1, help="copies of the model (HSDP); ranks/replicate are shards")
    plan.add_argument("--json", action="store_true", help="every figure in bytes and seconds, with the assumptions")
    chosen = parser.parse_args(arguments)
    if chosen.command == "doctor":
        _doctor()
    else:
        _plan(chosen, plan)


def _doctor() -> None:
    from dmuon_fsdp.doctor import examine

    lines, passed = examine()
    print("\n".join(lines))
    sys.exit(0 if passed else 1)


def _plan(chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from dmuon_fsdp.planning.published import MODELS, model_shapes
    from dmuon_fsdp.planning.simulate import Assumptions, Mesh, simulate, table

    names = MODELS if chosen.model == ["all"] else chosen.model
    try:
        cases = [(model_shapes(name), Mesh.of(size, chosen.replicate)) for name in names for size in chosen.ranks]
    except ValueError as error:
        parser.error(str(error))
    assumptions = Assumptions()
    predictions = [simulate(model, mesh, assumptions) for model, mesh in cases]
    if chosen.json:
        found = {"assumptions": dataclasses.asdict(assumptions), "predictions": [one.as_dict() for one in predictions]}
        print(json.dumps(found, indent=2))
    else:
        print(table(predictions, assumptions))
