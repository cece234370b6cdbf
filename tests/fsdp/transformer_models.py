"""Small models of the transformers library, built from configurations, and how they are wrapped and trained."""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import _common_utils, fully_shard

import dmuon
from fsdp.models import device_type, tokens, world_mesh

STEPS = 20
LR = 0.005
CLASSES = 5
SEES_MODEL_OUTPUTS = hasattr(_common_utils, "collect_grad_tensors")
"""FSDP2 before torch 2.13 looks into no ModelOutput: models return tuples there."""

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers, which the extra dev installs"
)


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=97, num_hidden_layers=2, tie_word_embeddings=True, **sizes, **options)
    return LlamaForCausalLM(config)


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
    batch = tokens(rank, step).to(device_type())
    logits = model(input_ids=batch[:, :-1], use_cache=False, return_dict=SEES_MODEL_OUTPUTS)[0]
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def image_loss(model, rank, step, *, size):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    labels = torch.randint(CLASSES, (4,), generator=generator)
    images = torch.randn(4, 3, size, size, generator=generator) + labels.view(-1, 1, 1, 1)
    logits = model(pixel_values=images.to(device_type()), return_dict=SEES_MODEL_OUTPUTS)[0]
    return F.cross_entropy(logits.float(), labels.to(device_type()))


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


def wrap_blocks(model, *, kind, **shard):
    mesh = world_mesh()
    dmuon.dedicate_params(model, mesh, is_matrix_of_a_block, param_policy=VIEWS.get(kind, ()))
    for block in MODELS[kind][2](model):
        fully_shard(block, mesh=mesh, **shard)
    return fully_shard(model, mesh=mesh, **shard)
