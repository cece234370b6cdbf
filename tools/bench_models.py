"""The models that bench_step.py and bench_checkpoint.py train: Llama-like, dense or with stacks of experts.

Legend: N tokens, D width, F width of the feed-forward layer, E experts, G tokens an expert and choice, B×T a batch.
Every matrix that Muon is to have has ``_proj`` in its name, and nothing else has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Of a model; ``experts`` 0 is a dense one, else two of them see every token."""

    d: int
    ff: int
    heads: int
    layers: int
    key_heads: int | None = None
    experts: int = 0
    vocabulary: int = 32_000
    sequence: int = 4096


MODELS = {
    "dense-1b": Sizes(2048, 8192, 16, 12),
    "dense-3b": Sizes(3072, 8192, 24, 28, key_heads=8),
    "moe": Sizes(2048, 1024, 16, 12, experts=16),
}

TINY = {
    "dense-1b": Sizes(32, 96, 2, 2, vocabulary=64, sequence=16),
    "dense-3b": Sizes(48, 96, 4, 2, key_heads=2, vocabulary=64, sequence=16),
    "moe": Sizes(32, 48, 2, 2, experts=4, vocabulary=64, sequence=16),
}
"""The same models for a CPU."""


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.key_heads = sizes.heads, sizes.key_heads or sizes.heads
        d, keys = sizes.d, sizes.d // sizes.heads * self.key_heads
        self.q_proj, self.o_proj = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.k_proj, self.v_proj = nn.Linear(d, keys, bias=False), nn.Linear(d, keys, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, length, _ = x_BTD.shape
        q, k, v = (
            projection(x_BTD).view(batch, length, heads, -1).transpose(1, 2)
            for projection, heads in (
                (self.q_proj, self.heads),
                (self.k_proj, self.key_heads),
                (self.v_proj, self.key_heads),
            )
        )
        grouped = self.heads != self.key_heads
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, d: int, ff: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False)
        self.down_proj = nn.Linear(ff, d, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Experts(nn.Module):
    """Stacks of matrices, one a expert, in three parameters."""

    def __init__(self, experts: int, d: int, ff: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Parameter(torch.randn(experts, ff, d) * d**-0.5) for _ in range(2))
        self.down_proj = nn.Parameter(torch.randn(experts, d, ff) * ff**-0.5)

    def forward(self, x_EGD: Tensor) -> Tensor:
        hidden_EGF = F.silu(x_EGD @ self.gate_proj.mT) * (x_EGD @ self.up_proj.mT)
        return hidden_EGF @ self.down_proj.mT


class MixtureOfExperts(nn.Module):
    """Two experts a token, weighed by a router but chosen by its position, so that shapes are static and loads equal.

    Position e of every E tokens goes to the experts e and e + 1.
    """

    def __init__(self, experts: int, d: int, ff: int) -> None:
        super().__init__()
        self.router = nn.Linear(d, experts, bias=False)
        self.experts = Experts(experts, d, ff)

    def forward(self, x_BTD: Tensor) -> Tensor:
        weights_GEE = self.router(x_BTD).softmax(-1).view(-1, self.router.out_features, self.router.out_features)
        x_GED = x_BTD.reshape(-1, self.router.out_features, x_BTD.shape[-1])
        both_EGD = torch.cat([x_GED, x_GED.roll(1, 1)]).transpose(0, 1)
        first_GED, second_GED = self.experts(both_EGD).transpose(0, 1).chunk(2)
        first_weight_GE, second_weight_GE = (w.diagonal(0, 1, 2) for w in (weights_GEE, weights_GEE.roll(-1, 2)))
        mixed_GED = first_GED * first_weight_GE.unsqueeze(-1)
        mixed_GED = mixed_GED + second_GED.roll(-1, 1) * second_weight_GE.unsqueeze(-1)
        return mixed_GED.reshape(x_BTD.shape)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(sizes.d), nn.RMSNorm(sizes.d)
        self.attention = Attention(sizes)
        self.mlp = (
            MixtureOfExperts(sizes.experts, sizes.d, sizes.ff) if sizes.experts else FeedForward(sizes.d, sizes.ff)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class LanguageModel(nn.Module):
    """Token ids [B, T] in, the mean cross entropy of every next token out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.d)
        self.layers = nn.ModuleList([Block(sizes) for _ in range(sizes.layers)])
        self.norm = nn.RMSNorm(sizes.d)
        self.lm_head = nn.Linear(sizes.d, sizes.vocabulary, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embed(ids_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        logits_BTV = self.lm_head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon is to have it: a matrix of a layer, or a stack of them."""
    return "_proj" in name and parameter.ndim >= 2
