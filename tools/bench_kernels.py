#!/usr/bin/env python3
"""The kernels' tables in one call on a GPU machine: products first, then Newton-Schulz, as Markdown and JSON.

    python tools/bench_kernels.py OUT [--quick]

OUT is a folder; ``kernels.md``, ``syrk.json`` and ``newton_schulz.json`` are written there as they are done. Whatever
is timed was checked in the same process. --quick leaves out bfloat16 products and the peers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import bench_newton_schulz
import bench_syrk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    page = options.out / "kernels.md"
    dtypes = ["float16"] if options.quick else ["float16", "bfloat16"]
    products = bench_syrk.main(["--out", str(options.out), "--dtypes", *dtypes])
    page.write_text(f"## Products, µs\n\n{products}\n", encoding="utf-8")
    peers = [] if options.quick else ["--peers"]
    whole = bench_newton_schulz.main(["--json", str(options.out / "newton_schulz.json"), *peers])
    with page.open("a", encoding="utf-8") as file:
        file.write(f"\n## Newton-Schulz, ms\n\n{whole}\n")
    print(page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
