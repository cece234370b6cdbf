#!/usr/bin/env python3
"""Measure which kernel is fastest for which product, and write what dmuon-core ships for this GPU.

    python tools/measure_verdicts.py FILE [--shapes 16x1024x4096 ...] [--dtypes float16]

FILE is ``packages/dmuon-core/src/dmuon_core/syrk/shipped_verdicts.json`` or a copy: entries of other GPUs, and those of
this one that are not measured again, stay. Wants a GPU that nothing else uses, with Triton and quack installed.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch

from dmuon_core.syrk import tuning, verdicts

BATCHES = (1, 2, 4, 8, 16)
SQUARES = [(batch, m, m) for m in (256, 512, 1024, 2048) for batch in BATCHES]
LARGE_SQUARES = [(1, 4096, 4096), (2, 4096, 4096), (4, 4096, 4096), (1, 8192, 8192)]
WIDE = [
    (1, 256, 1024), (16, 256, 1024), (1, 512, 2048), (16, 512, 2048), *((batch, 1024, 4096) for batch in BATCHES),
    *((batch, 2048, 8192) for batch in BATCHES[:4]), *((batch, 4096, 14336) for batch in BATCHES[:3]),
    (1, 8192, 28672), (1, 4096, 11008), (1, 2048, 5632), (4, 2048, 5632),
]  # fmt: skip
SHIPPED = ("quack", "triton", verdicts.BMM)
"""The others come last on the ladder anyway."""


def measured(shapes: list[tuple[int, ...]], dtypes: list[str]) -> dict[str, list[list[object]]]:
    device = torch.device("cuda", torch.cuda.current_device())
    page: dict[str, list[list[object]]] = {}
    for dtype in dtypes:
        for shape in shapes:
            for key, ranking in tuning.rankings(*shape, getattr(torch, dtype), device).items():
                rows = [[each.kernel, each.config, each.microseconds] for each in ranking if each.kernel in SHIPPED]
                if rows:
                    page[key] = rows
                    print(key, rows, flush=True)
    return page


def written(content: dict) -> str:
    """JSON with a line for every product."""
    pages = []
    for hardware, page in sorted(content["hardware"].items()):
        lines = [f"   {json.dumps(key, ensure_ascii=False)}: {json.dumps(page[key])}" for key in sorted(page)]
        pages.append(f"  {json.dumps(hardware, ensure_ascii=False)}: {{\n" + ",\n".join(lines) + "\n  }")
    return f'{{"format": {content["format"]},\n "hardware": {{\n' + ",\n".join(pages) + "\n }\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--shapes", nargs="+", help="BATCHxMxK; all that ship where left out")
    parser.add_argument("--dtypes", nargs="+", default=["float16"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    shapes: list[tuple[int, ...]] = [*SQUARES, *LARGE_SQUARES, *WIDE]
    if options.shapes:
        shapes = [tuple(map(int, re.split("[x×]", shape))) for shape in options.shapes]
    content = json.loads(options.file.read_text(encoding="utf-8"))
    hardware = verdicts.hardware(torch.device("cuda", torch.cuda.current_device()))
    content["hardware"].setdefault(hardware, {}).update(measured(shapes, options.dtypes))
    options.file.write_text(written(content), encoding="utf-8")


if __name__ == "__main__":
    main()
