"""Matrix views: what forms a matrix, exact inverses, and refusals that name the parameter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon_core import MatrixView

SIZES = st.integers(1, 5)


@st.composite
def view_and_shape(draw):
    kind = draw(st.sampled_from(["matrix", "batched", "flattened", "split", "heads"]))
    m, n = draw(SIZES), draw(SIZES)
    if kind == "matrix":
        return MatrixView.matrix(), (m, n)
    if kind == "batched":
        return MatrixView.batched(), (*draw(st.lists(SIZES, min_size=1, max_size=2)), m, n)
    if kind == "flattened":
        return MatrixView.flattened(), (m, n + 1, *draw(st.lists(SIZES, min_size=1, max_size=3)))
    if kind == "split":
        parts = draw(st.lists(SIZES, min_size=1, max_size=4))
        return MatrixView.split(*parts), (sum(parts), n)
    heads = draw(SIZES)
    return MatrixView.heads(heads), (heads * m, n)


@given(view_and_shape(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_inverse_is_exact(case, transposed):
    view, shape = case
    x = torch.randn(shape)
    if transposed:
        x = x.mT.contiguous().mT
    view.check(shape, "w")
    blocks = view.to_matrices(x)
    assert all(block.ndim == 3 for block in blocks)
    assert torch.equal(view.from_matrices(blocks, shape), x)
    assert tuple(tuple(block.shape) for block in blocks) == view.matrix_shapes(shape)
    assert sum(block.numel() for block in blocks) == x.numel()
    assert MatrixView.parse(str(view)) == view


def test_which_axes_form_the_matrix():
    experts = torch.arange(24.0).reshape(2, 3, 4)
    assert torch.equal(MatrixView.batched().to_matrices(experts)[0][1], experts[1])
    convolution = torch.arange(48.0).reshape(2, 3, 2, 4)
    assert torch.equal(MatrixView.flattened().to_matrices(convolution)[0][0], convolution.reshape(2, 24))
    fused = torch.arange(24.0).reshape(6, 4)
    q, k, v = MatrixView.split(3, 2, 1).to_matrices(fused)
    assert torch.equal(q[0], fused[:3])
    assert torch.equal(k[0], fused[3:5])
    assert torch.equal(v[0], fused[5:])
    assert torch.equal(MatrixView.heads(3).to_matrices(fused)[0][1], fused[2:4])


@pytest.mark.parametrize(
    ("view", "shape", "message"),
    [
        ("matrix", (3,), r'layer\.w, shape \(3,\).*1 dimension, not 2.*view="batched"'),
        ("matrix", (2, 3, 4), "3 dimensions, not 2"),
        ("batched", (3, 4), "3 dimensions or more"),
        ("flattened", (3, 4), "3 dimensions or more"),
        ("flattened", (64, 1, 4), 'depthwise.*algorithm="adamw"'),
        ("split(2, 3)", (6, 4), "add up to 5 rows, not 6"),
        ("heads(4)", (6, 4), "do not divide into 4 heads"),
    ],
)
def test_refusals_name_the_parameter(view, shape, message):
    with pytest.raises(ValueError, match=message):
        MatrixView.parse(view).check(shape, "layer.w")


@pytest.mark.parametrize(
    "text", ["", "rows", "split", "split()", "split(0)", "split(a)", "heads", "heads(1, 2)", "batched(3)"]
)
def test_texts_that_are_no_view(text):
    with pytest.raises(ValueError, match="view"):
        MatrixView.parse(text)
