"""The conformance suite and Newton-Schulz in a process that has neither Triton nor a C compiler.

Run by ``test_aot_gpu.py``; prints as JSON what ran, what was refused, and what the status says.
"""

from __future__ import annotations

import json
import sys

import torch

from dmuon_core import NewtonSchulz, get_ns_backend
from dmuon_core.testing import judge
from dmuon_core.testing.syrk import run_syrk_case, run_syrk_error_case, syrk_cases, syrk_error_cases
from dmuon_kernels import routes, specs, status
from dmuon_kernels.triton_syrk import triton_syrk


def orthogonalize() -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    ns, errors = NewtonSchulz(kernel="triton"), {}
    for shape in ((256, 768), (768, 256), (96, 96), (300, 100)):
        x = torch.randn(shape, generator=generator)
        runs = [ns(x.cuda()).cpu() for _ in range(3)]  # eager, captured, replayed
        assert all(torch.equal(run, runs[0]) for run in runs)
        verdict = judge(x, runs[0], ns.schedule().triples)
        assert verdict.sigma_max <= verdict.sigma_bound
        errors[str(shape)] = verdict.error
    return {"errors": errors, "line": get_ns_backend(ns)}


def main() -> None:
    device = torch.device("cuda")
    # Beside other tests' threads, more would only wait.
    torch.set_num_threads(2)
    refused = []
    for case in syrk_cases():
        refusal = run_syrk_case(triton_syrk, case, device, rejects=specs.TRITON.rejects)
        refused += [] if refusal is None else [[case.name, refusal]]
    for error_case in syrk_error_cases():
        run_syrk_error_case(triton_syrk, error_case, device)
    a = torch.randn(3, 64, 96, device=device).half()
    out = torch.empty(3, 64, 64, device=device).half().mT
    assert torch.equal(triton_syrk(a, out=out), triton_syrk(a))
    try:
        triton_syrk(a, config="pointer-16x16-w1-s2")
    except ValueError as error:
        complaint = str(error)
    report = {
        "cases": len(syrk_cases()),
        "refused": refused,
        "complaint": complaint,
        "newton_schulz": orthogonalize(),
        "launched": dict(routes.launched),
        "status": status(),
        "modules": sorted(name for name in sys.modules if name.split(".")[0] in ("triton", "quack", "cutlass")),
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
