#!/usr/bin/env python3
r"""Every kernel of dmuon-kernels once on small odd shapes, for a memory checker to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        python tools/check_memory.py

Without torch's cache every tensor is an allocation of its own, exactly as long as it is: what reads or writes beyond
one is found. Prints what was launched and compares it with fp32; exits with 1 where a result is wrong or nothing ran.
``--device cpu`` under ``TRITON_INTERPRET=1`` tries the script itself.

Legend: B matrices, M rows, K or N columns. No size is a multiple of a tile.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dmuon_core.normalize import normalize_into
from dmuon_core.syrk.contract import Scalar
from dmuon_core.syrk.updates import UpdateStacks
from dmuon_kernels import routes
from dmuon_kernels.mirror_kernel import mirror_kernel
from dmuon_kernels.normalize import triton_normalize_into
from dmuon_kernels.probes import has_tma, probe_quack
from dmuon_kernels.quack_config import PRODUCT_CANDIDATES, SM90_CANDIDATES
from dmuon_kernels.triton_config import CONFIGS, TmaConfig, tma_candidates
from dmuon_kernels.triton_syrk import triton_syrk
from dmuon_kernels.update import TRITON_UPDATE

BATCH = 2
ALLOWED = 5e-3  # of the norm; rounding to half precision is a tenth of it, an entry that was not written more
Syrk = Callable[..., Tensor]
Check = tuple[str, Callable[[], float]]
"""What is launched, and the launch, which returns its relative error."""


def product_checks(name: str, syrk: Syrk, m: int, k: int, device: torch.device, *, columns: bool = True) -> list[Check]:
    """``plain``: A alone; ``full``: B, C and scalars on the device; ``columns``: A and B column-major."""
    forms = ["plain", "full", *(["columns"] if columns else [])]
    return [(f"{name} {form} {BATCH}x{m}x{k}", functools.partial(_product, syrk, form, m, k, device)) for form in forms]


def _product(syrk: Syrk, form: str, m: int, k: int, device: torch.device) -> float:
    a = torch.randn(BATCH, m, k).to(device, torch.float16)
    b, c = None, None
    alpha: Scalar = 1.0
    beta: Scalar = 0.0
    if form == "columns":
        a = a.mT.contiguous().mT
        b = a.clone(memory_format=torch.preserve_format)
    if form == "full":
        half = torch.randn(BATCH, m, m)
        b, c = a.clone(), (half + half.mT).to(device, torch.float16)
        alpha, beta = (torch.rand(BATCH).to(device) + 0.5 for _ in range(2))
    want = a.float() @ a.float().mT
    if c is not None:
        want = alpha.view(-1, 1, 1) * want + beta.view(-1, 1, 1) * c.float()
    return _error(syrk(a, b, c, alpha=alpha, beta=beta), want)


def triton_checks(device: torch.device) -> Iterator[Check]:
    """Pointers with and without vectors of eight; descriptors, also persistent, split and split at the tail."""
    for name, config in CONFIGS.items():
        syrk = functools.partial(triton_syrk, config=config)
        yield from product_checks(f"pointers {name}", syrk, 67, 45, device)
        yield from product_checks(f"pointers {name}", syrk, 136, 72, device)
    if not (has_tma(device) or device.type == "cpu"):
        return
    split = TmaConfig(64, 64, 64, warps=4, stages=4, split=4)
    found = {c.label: c for m, batch in ((512, 1), (512, 16), (2048, 1), (2048, 8)) for c in tma_candidates(m, batch)}
    for config in (split, *found.values()):
        yield from product_checks(config.label, functools.partial(triton_syrk, config=config), 264, 328, device)


def mirror_checks(device: torch.device) -> Iterator[Check]:
    for side in (64, 192):
        yield f"mirror of squares of {side} {BATCH}x331", functools.partial(_mirror, side, 331, device)


def _mirror(side: int, m: int, device: torch.device) -> float:
    d = torch.randn(BATCH, m, m).to(device, torch.float16)
    want = d.float().clone()
    for start in range(0, m, side):
        square = want[:, start : start + side, start : start + side]
        square.copy_(torch.tril(square) + torch.tril(square, -1).mT)
    squares, rows = -(-m // side), -(-side // 64)
    programs = BATCH * squares * (rows * (rows + 1) // 2)
    mirror_kernel[(programs,)](d, m, squares, d.stride(0), d.stride(1), SIDE=side, TILE=64, num_warps=4)
    return _error(d, want)


def normalize_checks(device: torch.device) -> Iterator[Check]:
    """Many columns and few, with padding and without, rows and columns one after the other."""
    for m, n, padded in ((13, 1031, False), (67, 131, False), (67, 131, True)):
        for columns in (False, True):
            name = f"norm and cast {BATCH}x{m}x{n}{' padded' if padded else ''}{' columns' if columns else ''}"
            yield name, functools.partial(_normalize, m, n, padded, columns, device)


def _normalize(m: int, n: int, padded: bool, columns: bool, device: torch.device) -> float:
    x = torch.randn(BATCH, m, n).to(device)
    rows, width = (80, 144) if padded else (m, n)
    got, want = (torch.empty(BATCH, rows, width, dtype=torch.float16, device=device) for _ in range(2))
    if columns:
        x = x.mT.contiguous().mT
        got = got.mT.contiguous().mT
    triton_normalize_into([x], [got])
    normalize_into([x], [want])
    return _error(got, want.float())


def update_checks(device: torch.device) -> Iterator[Check]:
    """Many columns and few, rows and columns one after the other; of each a tensor that ends with its last entry."""
    for m, n in ((13, 1031), (67, 131)):
        for columns in (False, True):
            name = f"{BATCH}x{m}x{n}{' columns' if columns else ''}"
            yield f"momentum and direction {name}", functools.partial(_direct, m, n, columns, device)
            yield f"step and copy {name}", functools.partial(_step, m, n, columns, device)


def _direct(m: int, n: int, columns: bool, device: torch.device) -> float:
    grad, buffer = (_matrices(m, n, columns, device) for _ in range(2))
    out = torch.empty_like(grad, dtype=torch.float16)
    want = grad + 0.5 * (buffer + 0.5 * (grad - buffer) - grad)
    present = torch.ones((), device=device)
    stacks = UpdateStacks(grad, buffer, buffer, presence=present)
    stacks.direct(TRITON_UPDATE, out, momentum=0.5, nesterov=True)
    return _error(out, want / want.norm(dim=(1, 2), keepdim=True))


def _step(m: int, n: int, columns: bool, device: torch.device) -> float:
    weight = _matrices(m, n, columns, device)
    factor, copy = weight.half(), weight.bfloat16()
    want = weight * 0.75 - factor.float()
    lr = torch.full((1,), 0.5, device=device)
    stacks = UpdateStacks(weight, weight, weight, copy, lr[0], scale=2.0)
    stacks.apply(TRITON_UPDATE, factor, lr=lr, weight_decay=0.5)
    return max(_error(weight, want), _error(copy, want))


def _matrices(m: int, n: int, columns: bool, device: torch.device) -> Tensor:
    shape = (BATCH, n, m) if columns else (BATCH, m, n)
    x = torch.randn(shape).to(device)
    return x.mT if columns else x


def quack_checks(device: torch.device) -> Iterator[Check]:
    """The smallest tiles and the largest: CUTLASS compiles every form of each."""
    if probe_quack(device) is not None:
        return
    from dmuon_kernels.quack_product import quack_product
    from dmuon_kernels.quack_syrk import quack_syrk

    for config in (SM90_CANDIDATES[0], SM90_CANDIDATES[-1]):
        syrk = functools.partial(quack_syrk, config=config)
        yield from product_checks(config.label, syrk, 136, 72, device, columns=config.takes_m_major)
    label = PRODUCT_CANDIDATES[0].label
    yield f"{label} {BATCH}x136x136x72", functools.partial(_whole, quack_product, label, device)


def _whole(product: Callable[..., Tensor], config: str, device: torch.device) -> float:
    q, x = (torch.randn(BATCH, 136, columns).to(device, torch.float16) for columns in (136, 72))
    return _error(product(q, x, out=torch.empty_like(x), config=config), q.float() @ x.float())


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    torch.manual_seed(0)
    wrong = count = 0
    for checks in (triton_checks, mirror_checks, normalize_checks, update_checks, quack_checks):
        for name, launch in checks(device):
            error = launch()
            right = error <= ALLOWED
            print(f"{name}: {'right' if right else f'WRONG, relative error {error:.2e}'}", flush=True)
            wrong, count = wrong + (not right), count + 1
    ways = ", ".join(f"{number} {way}" for way, number in sorted(routes.launched.items()))
    print(f"{count} checks, {wrong} wrong; symmetric products by Triton's kernels: {ways}")
    refusal = probe_quack(device)
    if refusal is not None:
        print(f"quack did not run: {refusal}")
    return int(wrong > 0 or count == 0)


if __name__ == "__main__":
    sys.exit(main())
