"""Models of transformers in bf16 on two GPUs against one: python -m pytest tests/gpu on a machine with GPUs."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon
from dmuon_core import Muon as ReferenceMuon
from fsdp.models import Twins, device_type, on_all_cells
from fsdp.transformer_models import LR, MODELS, STEPS, needs_transformers, wrap_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    needs_transformers,
]

# Two ranks' sum is rounded to bf16, which one process that adds in fp32 does not do: by 2^-9 of an entry, and by as
# much again where the collective divides first. As much for kernels that add in any order.
GRADIENT_TOLERANCE = 2**-7
# Newton-Schulz brings what rounding left in the small singular values up to the size of all others, so two runs part
# from the first step on, as far as bf16 is from fp32 each: √2 of that where they round independently, √3 with the
# rounding of the reduction, which one process does not have. The largest of twenty losses wants some room.
APART = 3.0
WEIGHT_DECAY = 0.1


class InBfloat16:
    """A model of fp32 parameters that computes as FSDP2's mixed precision does: from parameters and inputs in bf16."""

    def __init__(self, model):
        self.model = model

    def __call__(self, **inputs):
        parameters = {name: parameter.bfloat16() for name, parameter in self.model.named_parameters()}
        inputs = {key: _rounded(value) for key, value in inputs.items()}
        return torch.func.functional_call(self.model, parameters, (), inputs)


def _rounded(value):
    return value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def train(kind, attention="sdpa"):
    """One distributed run in bf16, and in one process one in bf16 and one in fp32, from the same weights."""
    make, loss, _ = MODELS[kind]
    if attention != "sdpa":
        make = functools.partial(make, attn_implementation=attention)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    twins = Twins(functools.partial(_on_device, make), wrapping=wrap_blocks, kind=kind, mp_policy=policy)
    assert kind == "convnextv2" or twins.model.config._attn_implementation == attention
    wide = copy.deepcopy(twins.reference)
    twins.optimizer = dmuon.Muon(twins.model, lr=LR, weight_decay=WEIGHT_DECAY)
    twins.reference_optimizer, wide_optimizer = (
        ReferenceMuon(twins.reference_groups(model, LR, WEIGHT_DECAY)) for model in (twins.reference, wide)
    )
    start = copy.deepcopy(wide)
    losses = []
    for step in range(STEPS):
        wide_optimizer.zero_grad()
        twins.zero_grad()
        mine = loss(twins.model, twins.rank, step)
        mine.backward()
        rounded, exact = (_backward(model, loss, step) for model in (InBfloat16(twins.reference), wide))
        losses.append((mine.item(), rounded[twins.rank], exact[twins.rank], sum(exact)))
        if step == 0:
            twins.check_gradients(GRADIENT_TOLERANCE)
        twins.step()
        wide_optimizer.step()
    twins.check_at_rest()
    _check_losses(losses)
    dedicated = {member.fqn for member in dmuon.dedicated_params(twins.model)}
    found = {name: parameter.full_tensor() for name, parameter, _ in twins.pairs()}
    for chosen in (dedicated, found.keys() - dedicated):
        _check_weights(chosen, found, *(dict(m.named_parameters()) for m in (twins.reference, wide, start)))
    assert len({member.owner for member in dmuon.dedicated_params(twins.model)}) == dist.get_world_size()


def _on_device(make):
    return make().to(device_type())


def _backward(model, loss, step):
    """Every rank's loss, after the backward of their mean."""
    losses = [loss(model, rank, step) for rank in range(dist.get_world_size())]
    (sum(losses) / len(losses)).backward()
    return [each.item() for each in losses]


def _check_losses(losses):
    """No further from bf16 in one process than bf16 itself is from fp32; the first differ by no step yet."""
    mine, rounded, exact, sums = zip(*losses, strict=True)
    assert abs(mine[0] - rounded[0]) <= 2**-8 * rounded[0], f"the first loss is {mine[0]}, not {rounded[0]}"
    apart, own = (max(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in ((mine, rounded), (rounded, exact)))
    assert apart <= APART * own, f"losses {apart:.2e} apart, bf16 alone is {own:.2e} from fp32"
    assert sum(sums[-3:]) < sum(sums[:3]), "it learns nothing"


def _check_weights(names, found, rounded, exact, start):
    apart, own, moved = (_distance(names, *pair) for pair in ((found, rounded), (rounded, exact), (exact, start)))
    assert apart <= APART * own, f"weights {apart:.2e} apart, bf16 alone is {own:.2e} from fp32"
    assert APART * own <= moved, f"bf16 is {own:.2e} from fp32 after a way of {moved:.2e}: this compares nothing"


def _distance(names, one, other):
    return sum((one[name].detach() - other[name].detach()).double().square().sum().item() for name in names) ** 0.5


def train_all(cells):
    on_all_cells(cells, train)


def test_language_models_in_bf16_train_as_on_one_gpu(ranks):
    cells = [{"kind": "llama"}, {"kind": "llama", "attention": "eager"}, {"kind": "qwen3 moe"}]
    ranks(2, train_all, cells, backend="nccl")


def test_image_models_in_bf16_train_as_on_one_gpu(ranks):
    ranks(2, train_all, [{"kind": "vit"}, {"kind": "convnextv2"}], backend="nccl")
