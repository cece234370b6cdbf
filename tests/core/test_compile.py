"""Newton-Schulz under torch.compile: one opaque operator, no more compilations than shapes."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from dmuon_core import KELLER, NewtonSchulz, ops


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_one_compilation_a_shape_and_none_for_the_learning_rate():
    torch._dynamo.reset()
    ns, counter = NewtonSchulz(), CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=False)
    def update(weight, grad, lr):
        return weight - lr * ns(grad)

    for shape in ((8, 16), (16, 8), (8, 8), (3, 5, 7)):
        weight, grad = gaussian(*shape), gaussian(*shape, seed=1)
        for lr in torch.linspace(0.01, 0.1, 10):
            assert torch.equal(update(weight, grad, lr), weight - lr * ns(grad))
    assert counter.frame_count <= 4
    assert ns.kernel.launches["torch"] == 2 * 4 * 10 * 14


@pytest.mark.parametrize(
    "ns", [NewtonSchulz("direct"), NewtonSchulz(coefficients=KELLER, dtype=torch.float32)], ids=str
)
def test_options_reach_the_operator(ns):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: ns(x, ns_steps=4), backend="aot_eager", fullgraph=True)
    x = gaussian(2, 12, 20)
    assert torch.equal(compiled(x), ns(x, ns_steps=4))


def test_operator_passes_opcheck():
    ns = NewtonSchulz()
    flat = [value for triple in ns.signature.coefficients for value in triple]
    arguments = (gaussian(2, 8, 12), "gram", "auto", flat, False, None, torch.float16, False, 5, 512, ns._number)
    torch.library.opcheck(torch.ops.dmuon.newton_schulz.default, arguments)


def test_number_of_another_object_is_not_trusted():
    """A cached graph carries the number of an object of the process that compiled it."""
    other, own = NewtonSchulz("direct"), NewtonSchulz()
    x = gaussian(8, 12)
    got = ops.call(x, own.signature, 5, other._number)
    assert torch.equal(got, own(x))
    assert not other.kernel.launches
    assert torch.equal(ops.call(x, own.signature, 5, 10**6), own(x))


def test_copies_have_numbers_of_their_own():
    ns = NewtonSchulz()
    copies = [copy.deepcopy(ns), pickle.loads(pickle.dumps(ns))]
    assert len({each._number for each in (ns, *copies)}) == 3
    for each in copies:
        assert each.signature == ns.signature
        assert ops._owners[each._number] is each
