"""Compile a few of the kernels that ship, and print their names, hashes and complaints as JSON.

Run by ``test_aot.py`` in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import build_cubins
import triton

from dmuon_kernels.aot.table import tabled_launches


def main() -> None:
    rows = []
    for architecture, places in ((80, (0,)), (90, (-1, 0))):
        launches = list(tabled_launches(architecture).items())
        for place in places:
            variant, launch = launches[place]
            built = build_cubins.compile_variant(variant, launch, architecture)
            digest = hashlib.sha256(built.cubin).hexdigest()
            rows.append([architecture, place, digest, build_cubins.complaint_of(built, architecture)])
    json.dump({"triton": triton.__version__, "kernels": rows}, sys.stdout)


if __name__ == "__main__":
    main()
