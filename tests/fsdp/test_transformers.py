"""Models of the transformers library, built from configurations, train as they do in one process."""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import _common_utils, fully_shard

import dmuon
from fsdp.models import Twins, close, on_all_cells, tokens, world_mesh

STEPS = 20
LR = 0.005
LOSS_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 5e-3  # fp32: the order of reductions, which every step's Newton-Schulz amplifies
CLASSES = 5


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=2, tie_word_embeddings=True, **sizes))


def qwen3_moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=97, num_hidden_layers=2, **sizes, **experts))


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 16, "patch_size": 4}
    # A softmax does not change with the bias of its keys: AdamW would step that by the sign of rounding errors.
    return ViTForImageClassification(ViTConfig(num_hidden_layers=2, num_labels=CLASSES, qkv_bias=False, **sizes))


def convnextv2():
    from transformers import ConvNextV2Config, ConvNextV2ForImageClassification

    config = ConvNextV2Config(hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1], image_size=32, num_labels=CLASSES)
    return ConvNextV2ForImageClassification(config)


def text_loss(model, rank, step):
    batch = tokens(rank, step)
    return F.cross_entropy(model(input_ids=batch[:, :-1], use_cache=False).logits.flatten(0, 1), batch[:, 1:].flatten())


def image_loss(model, rank, step, *, size):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    labels = torch.randint(CLASSES, (4,), generator=generator)
    images = torch.randn(4, 3, size, size, generator=generator) + labels.view(-1, 1, 1, 1)
    return F.cross_entropy(model(pixel_values=images).logits, labels)


MODELS = {
    "llama": (llama, text_loss, lambda model: model.model.layers),
    "qwen3 moe": (qwen3_moe, text_loss, lambda model: model.model.layers),
    "vit": (vit, functools.partial(image_loss, size=16), lambda model: model.vit.layers),
    "convnextv2": (convnextv2, functools.partial(image_loss, size=32), lambda model: model.convnextv2.encoder.stages),
}
VIEWS = {
    "qwen3 moe": [dmuon.ParamPolicy("*.experts.*", view="batched")],
    "convnextv2": [dmuon.ParamPolicy("*downsampling_layer*", view="flattened")],
}


def is_matrix_of_a_block(name, parameter):
    """Every matrix and stack of a block; depthwise kernels, norms and vectors stay."""
    in_a_block = ".layers." in name or ".stages." in name
    return in_a_block and parameter.ndim >= 2 and min(parameter.shape[:2]) > 1


def wrap_blocks(model, *, kind):
    mesh = world_mesh()
    dmuon.dedicate_params(model, mesh, is_matrix_of_a_block, param_policy=VIEWS.get(kind, ()))
    for block in MODELS[kind][2](model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(kind):
    make, loss, _ = MODELS[kind]
    twins = Twins(make, wrapping=wrap_blocks, kind=kind)
    twins.optimizers(weight_decay=0.1, lr=LR)
    losses = []
    for step in range(STEPS):
        twins.zero_grad()
        mine = loss(twins.model, twins.rank, step)
        mine.backward()
        theirs = [loss(twins.reference, rank, step) for rank in range(twins.world_size)]
        (sum(theirs) / twins.world_size).backward()
        close(f"loss of step {step}", mine.detach(), theirs[twins.rank].detach(), LOSS_TOLERANCE)
        if step == 0:
            twins.check_gradients()
        twins.step()
        losses.append(sum(theirs).item())
    twins.check_weights(WEIGHT_TOLERANCE)
    twins.check_at_rest()
    assert sum(losses[-3:]) < sum(losses[:3]), "it learns nothing"
    assert len({member.owner for member in dmuon.dedicated_params(twins.model)}) == dist.get_world_size()


def train_all():
    on_all_cells(({"kind": kind} for kind in MODELS), train)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers, which the extra dev installs"
)
@pytest.mark.skipif(
    not hasattr(_common_utils, "collect_grad_tensors"), reason="FSDP2 before torch 2.13 looks into no ModelOutput"
)
def test_models_of_transformers_train_as_in_one_process(ranks):
    ranks(2, train_all)
