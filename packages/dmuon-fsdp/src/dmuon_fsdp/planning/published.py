"""Shapes of published models: every weight by name, from the models' public configuration files.

A matrix of a block is dedicated (routers too); embedding, head, norms and biases stay with FSDP2. An expert is three
matrices of its own, as in the checkpoints. Weights that only a multi-token-prediction module has are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelShapes:
    """Every weight of a model.

    Attributes:
        name: what ``dmuon plan --model`` takes.
        matrices: shape of every dedicated matrix by name, in the order of the model.
        others: shape of every other weight by name.
        source: where the dimensions and the published total come from.
        published: the published total of parameters; 0 where there is none.
    """

    name: str
    matrices: Mapping[str, Shape]
    others: Mapping[str, Shape]
    source: str = ""
    published: int = 0

    @property
    def dedicated_parameters(self) -> int:
        return sum(prod(shape) for shape in self.matrices.values())

    @property
    def parameters(self) -> int:
        return self.dedicated_parameters + sum(prod(shape) for shape in self.others.values())


@dataclass(frozen=True)
class _Decoder:
    """What a configuration file says, beyond the attention of one layer.

    Attributes:
        attention: matrices of one layer's attention, [out, in].
        vectors: lengths of one layer's norms.
        dense_layers: layers from the first whose MLP is one of ``dense_width``; the others have experts.
        shared_width: width of the shared experts together; 0 for none.
        router_bias: the router has one bias an expert.
    """

    hidden: int
    layers: int
    vocabulary: int
    attention: Mapping[str, Shape]
    vectors: Mapping[str, int]
    dense_layers: int
    dense_width: int
    experts: int = 0
    expert_width: int = 0
    shared_width: int = 0
    router_bias: bool = False

    def matrices(self) -> Iterator[tuple[str, Shape]]:
        for layer in range(self.layers):
            block = f"model.layers.{layer}"
            for name, shape in self.attention.items():
                yield f"{block}.self_attn.{name}.weight", shape
            if layer < self.dense_layers:
                yield from _mlp(f"{block}.mlp", self.hidden, self.dense_width)
            else:
                yield from self._experts(f"{block}.mlp")

    def _experts(self, mlp: str) -> Iterator[tuple[str, Shape]]:
        yield f"{mlp}.gate.weight", (self.experts, self.hidden)
        for expert in range(self.experts):
            yield from _mlp(f"{mlp}.experts.{expert}", self.hidden, self.expert_width)
        if self.shared_width:
            yield from _mlp(f"{mlp}.shared_experts", self.hidden, self.shared_width)

    def others(self) -> Iterator[tuple[str, Shape]]:
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            for name, length in self.vectors.items():
                yield f"model.layers.{layer}.{name}.weight", (length,)
            if self.router_bias and layer >= self.dense_layers:
                yield f"model.layers.{layer}.mlp.gate.e_score_correction_bias", (self.experts,)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def _grouped_query(hidden: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Shape]:
    return {
        "q_proj": (heads * head_dim, hidden),
        "k_proj": (kv_heads * head_dim, hidden),
        "v_proj": (kv_heads * head_dim, hidden),
        "o_proj": (hidden, heads * head_dim),
    }


def _latent(hidden: int, heads: int, q_rank: int, kv_rank: int, nope: int, rope: int, value: int) -> dict[str, Shape]:
    """Multi-head latent attention: low-rank queries, keys and values; ``rope`` columns shared by the heads."""
    return {
        "q_a_proj": (q_rank, hidden),
        "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, hidden),
        "kv_b_proj": (heads * (nope + value), kv_rank),
        "o_proj": (hidden, heads * value),
    }


def _llama(hidden: int, layers: int, heads: int, width: int) -> _Decoder:
    return _Decoder(
        hidden=hidden,
        layers=layers,
        vocabulary=128_256,
        attention=_grouped_query(hidden, heads, kv_heads=8, head_dim=128),
        vectors={"input_layernorm": hidden, "post_attention_layernorm": hidden},
        dense_layers=layers,
        dense_width=width,
    )


def _qwen3_30b_a3b() -> _Decoder:
    return _Decoder(
        hidden=2048,
        layers=48,
        vocabulary=151_936,
        attention=_grouped_query(2048, heads=32, kv_heads=4, head_dim=128),
        vectors={
            "self_attn.q_norm": 128,
            "self_attn.k_norm": 128,
            "input_layernorm": 2048,
            "post_attention_layernorm": 2048,
        },
        dense_layers=0,
        dense_width=6144,
        experts=128,
        expert_width=768,
    )


def _deepseek_v3() -> _Decoder:
    return _Decoder(
        hidden=7168,
        layers=61,
        vocabulary=129_280,
        attention=_latent(7168, heads=128, q_rank=1536, kv_rank=512, nope=128, rope=64, value=128),
        vectors={
            "self_attn.q_a_layernorm": 1536,
            "self_attn.kv_a_layernorm": 512,
            "input_layernorm": 7168,
            "post_attention_layernorm": 7168,
        },
        dense_layers=3,
        dense_width=18_432,
        experts=256,
        expert_width=2048,
        shared_width=2048,
        router_bias=True,
    )


# Name → (configuration, published total of parameters, source). A total of a checkpoint in bf16 is half its size.
_PUBLISHED: dict[str, tuple[Callable[[], _Decoder], int, str]] = {
    "llama3-8b": (
        lambda: _llama(hidden=4096, layers=32, heads=32, width=14_336),
        8_030_261_248,
        "meta-llama/Meta-Llama-3-8B: config.json; total_size 16060522496 of its safetensors index",
    ),
    "llama3-70b": (
        lambda: _llama(hidden=8192, layers=80, heads=64, width=28_672),
        70_553_706_496,
        "meta-llama/Meta-Llama-3-70B: config.json; total_size 141107412992 of its safetensors index",
    ),
    "qwen3-30b-a3b": (
        _qwen3_30b_a3b,
        30_532_122_624,
        "Qwen/Qwen3-30B-A3B: config.json; model card, 30.5B in total; the checkpoint's tensors count 30532122624",
    ),
    "deepseek-v3": (
        _deepseek_v3,
        671_026_419_200,
        "deepseek-ai/DeepSeek-V3: inference/configs/config_671B.json; README_WEIGHTS.md, 671B without the 14B of its "
        "multi-token-prediction module; the checkpoint's tensors of the main model count 671026419200",
    ),
}

MODELS = tuple(_PUBLISHED)
"""Names that :func:`model_shapes` knows."""


@cache
def model_shapes(name: str) -> ModelShapes:
    """The shapes of a published model.

    Raises:
        ValueError: an unknown name.
    """
    if name not in _PUBLISHED:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    configuration, published, source = _PUBLISHED[name]
    decoder = configuration()
    return ModelShapes(name, dict(decoder.matrices()), dict(decoder.others()), source, published)
