"""``dmuon_kernels.syrk`` and its two torch operators."""

from __future__ import annotations

import pytest
import torch

from dmuon_core.syrk.builtin import torch_syrk
from dmuon_core.syrk.ladder import KernelUnavailableError
from dmuon_kernels import syrk
from dmuon_kernels.ops import choice_of


def _operands(batch=(2,), m=9, k=5, dtype=torch.float16):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(*batch, m, k, generator=generator).to(dtype)
    c = torch.randn(*batch, m, m, generator=generator).to(dtype)
    return a, c + c.mT


A, C = _operands()
CALLS = {
    "plain": ((A,), {}),
    "transposed": ((_operands(m=5, k=9)[0].mT, None, C), {"beta": 0.5}),
    "all operands": ((A, A.clone(), C), {"alpha": 2.0, "beta": 1.0}),
    "device scalars": ((A, None, C), {"alpha_tensor": torch.tensor([1.0, 2.0]), "beta_tensor": torch.tensor(0.5)}),
    "named": ((A,), {"kernel": "torch", "sms": 4}),
}


@pytest.mark.parametrize("call", CALLS)
def test_opcheck_functional(call):
    args, kwargs = CALLS[call]
    torch.library.opcheck(torch.ops.dmuon.syrk.default, args, kwargs)


@pytest.mark.parametrize("call", CALLS)
def test_opcheck_out(call):
    args, kwargs = CALLS[call]
    torch.library.opcheck(torch.ops.dmuon.syrk_out.default, args, {**kwargs, "out": torch.empty_like(C)})


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic):
    """``out=c`` reads and mutates one tensor, which functionalization must carry."""

    def recurrence(a, c):
        d = syrk(a, None, c, alpha=2.0, beta=0.5)
        e = torch.empty_like(c)
        syrk(d, out=e)
        syrk(a, None, e, beta=1.0, out=e)
        return d + e

    compiled = torch.compile(recurrence, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert torch.equal(compiled(A, C), recurrence(A, C))
    other = _operands((3,), 8, 6)
    assert torch.equal(compiled(*other), recurrence(*other))


def test_wrong_shapes_fail_while_compiling():
    with pytest.raises(Exception, match="c must have shape"):
        torch.compile(lambda a, c: syrk(a, None, c, beta=1.0), fullgraph=True, backend="aot_eager")(A, A)


@pytest.mark.parametrize("scalars", [(2.0, 0.5), (torch.tensor([1.0, 3.0]), torch.tensor(0.5)), (2, 1)])
def test_equals_the_backend(scalars):
    alpha, beta = scalars
    want = torch_syrk(A, None, C, alpha=alpha, beta=beta)
    assert torch.equal(syrk(A, None, C, alpha=alpha, beta=beta), want)
    out = torch.empty_like(C)
    assert syrk(A, None, C, alpha=alpha, beta=beta, out=out) is out
    assert torch.equal(out, want)


def test_result_is_contiguous():
    """As the operator's fake says, whatever layout a backend likes."""
    assert syrk(torch.randn(4, 3, 8, 5).half()[::2]).is_contiguous()


def test_launches_are_counted_by_what_ran():
    before = choice_of("torch").launches["torch"]
    syrk(A, kernel="torch")
    assert choice_of("torch").launches["torch"] == before + 1


def test_unknown_kernel_names_every_backend():
    with pytest.raises(KernelUnavailableError, match="no backend has this name") as error:
        syrk(A, kernel="cubals")
    assert "cublas" in str(error.value)


def test_overlap_is_an_error_through_the_operator():
    x = torch.zeros(8, 8).half()
    with pytest.raises(ValueError, match="out overlaps a"):
        syrk(x, out=x)


def test_scalars_that_are_not_one_per_item():
    """alpha of M values once came back as an [M, M, M] product."""
    with pytest.raises(ValueError, match=r"alpha must be 0-d or have one value per batch item, \[2\], got \[9\]"):
        syrk(A, alpha=torch.ones(9))
    with pytest.raises(Exception, match="alpha must be a float or a float32 tensor"):
        torch.compile(lambda a: syrk(a, alpha=a[0, 0, 0]), fullgraph=True, backend="aot_eager")(A)
