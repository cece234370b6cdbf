"""Where hooks sit, what they do to a forward's inputs and outputs, and forwards that are no call of the module."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import _common_utils, register_fsdp_forward_method

from fsdp.models import WIDTH, Block, Toy, Twins, next_token_loss, on_all_cells, tokens, wrap

# --- outputs


@dataclasses.dataclass
class Record:
    hidden: torch.Tensor
    count: int
    nothing: torch.Tensor | None = None


class ModelOutput(OrderedDict):
    """As transformers has it: a dict whose entries are attributes too."""

    def __init__(self, **entries):
        super().__init__(entries)
        self.__dict__.update(entries)


PACKINGS = {
    "tensor": (lambda x: x, lambda out: out),
    "tuple": (lambda x: (x, x.detach()), lambda out: out[0]),
    "dict": (lambda x: {"hidden": x}, lambda out: out["hidden"]),
    "nested": (lambda x: {"layers": [(x, 3)], "none": None}, lambda out: out["layers"][0][0]),
    "dataclass": (lambda x: Record(x, 3), lambda out: out.hidden),
    "model output": (lambda x: ModelOutput(hidden=x), lambda out: out.hidden),
    "with None and ints": (lambda x: ModelOutput(cache=None, layers=2, hidden=x), lambda out: out["hidden"]),
}


if not hasattr(_common_utils, "collect_grad_tensors"):
    # FSDP2 before 2.13, alone too, looks into neither dataclasses nor OrderedDicts and frees its weights too early.
    for name in ("dataclass", "model output", "with None and ints"):
        del PACKINGS[name]


class PackingBlock(Block):
    """Returns its output in one of the forms above; remembers what it was, to be compared with what arrives."""

    packing = "tensor"

    def forward(self, x_BTD):
        self.made = PACKINGS[self.packing][0](super().forward(x_BTD))
        return self.made


class PackingToy(Toy):
    def __init__(self, packing):
        super().__init__(PackingBlock)
        for block in self.blocks:
            block.packing = packing

    def forward(self, tokens_BT):
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            output = block(x_BTD)
            assert type(output) is type(block.made)
            if isinstance(output, ModelOutput):
                assert vars(output).keys() == vars(block.made).keys()
                assert list(output) == list(block.made)
            x_BTD = PACKINGS[block.packing][1](output)
        return self.lm_head(self.norm(x_BTD))


def check_packing(*, packing, reshard, **mesh):
    twins = Twins(functools.partial(PackingToy, packing), reshard_after_forward=reshard, **mesh)
    check_one_backward(twins)


def check_one_backward(twins, loss=next_token_loss):
    """Right gradients, every group reduced once, everything at rest."""
    twins.backward(loss)
    twins.check_gradients()
    assert twins.traffic()[1] == len(twins.registration.state.groups)
    twins.check_at_rest()


def run_packings():
    on_all_cells(({"packing": p, "reshard": r} for p in PACKINGS for r in (True, False)), check_packing)


def test_forms_of_output(ranks):
    """Hooks on tensors of tuples and dicts alone miss a dataclass, and rebuilding an output loses its type."""
    ranks(2, run_packings)


# --- inputs


class OneHot(Toy):
    """Nothing that enters the first block requires a gradient."""

    def forward(self, tokens_BT):
        x_BTD = F.one_hot(tokens_BT % WIDTH, WIDTH).float()
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.lm_head(self.norm(x_BTD)) + self.embed.weight.sum()


class KeywordBlock(Block):
    def forward(self, *, hidden, scale):
        return super().forward(hidden) * scale


class Keywords(Toy):
    def __init__(self):
        super().__init__(KeywordBlock)

    def forward(self, tokens_BT):
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(hidden=x_BTD, scale=0.5)
        return self.lm_head(self.norm(x_BTD))


class DetachedPath(Toy):
    """The first block's output goes on both with and without its gradient, the second's input without."""

    def forward(self, tokens_BT):
        x_BTD = self.blocks[0](self.embed(tokens_BT))
        y_BTD = self.blocks[1](x_BTD.detach())
        return self.lm_head(self.norm(y_BTD + x_BTD))


class DetachedOutput(Toy):
    """The second block's output is not used at all: no gradient reaches it, on any rank."""

    def forward(self, tokens_BT):
        x_BTD = self.blocks[0](self.embed(tokens_BT))
        return self.lm_head(self.norm(x_BTD + self.blocks[1](x_BTD).detach()))


def check_model(*, model, reshard, **mesh):
    check_one_backward(Twins(model, reshard_after_forward=reshard, **mesh))


UNUSUAL_INPUTS = (OneHot, Keywords, DetachedPath, DetachedOutput)


def run_inputs():
    on_all_cells(({"model": m, "reshard": r} for m in UNUSUAL_INPUTS for r in (True, False)), check_model)


def test_inputs_without_gradient(ranks):
    """Post-backward hung on inputs that require a gradient never comes for token ids, or keywords, or a cut graph."""
    ranks(2, run_inputs)


# --- forwards that are no call of the module


class Encoder(Toy):
    """Has forwards of other names."""

    def encode(self, x_BTD):
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD

    def mix(self, x_BTD):
        for block in self.blocks:
            x_BTD = block.mix(x_BTD)
        return x_BTD


class MixingBlock(Block):
    def mix(self, x_BTD):
        return x_BTD + self.down(self.gate(x_BTD) * self.up(x_BTD))


def continuous(rank):
    return torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(rank))


def encode_loss(model, rank):
    return model.encode(continuous(rank)).square().mean()


def mix_loss(model, rank):
    return model.mix(continuous(rank)).square().mean()


def check_method(*, loss, root_method, block_method, forward_first, **options):
    twins = Twins(functools.partial(Encoder, MixingBlock), **options)
    if forward_first:
        twins.backward()
    if root_method is not None:
        register_fsdp_forward_method(twins.model, root_method)
    if block_method is not None:
        for block in twins.model.blocks:
            register_fsdp_forward_method(block, block_method)
    for _ in range(2):
        twins.backward(loss)
        twins.check_gradients()
        twins.check_at_rest()


METHODS = [
    {"loss": encode_loss, "root_method": None, "block_method": None, "forward_first": True},
    {"loss": encode_loss, "root_method": "encode", "block_method": None, "forward_first": False},
    {"loss": mix_loss, "root_method": None, "block_method": "mix", "forward_first": True},
    {"loss": mix_loss, "root_method": "mix", "block_method": "mix", "forward_first": False},
]


def run_methods():
    on_all_cells(METHODS, check_method)


def test_methods_other_than_forward(ranks):
    """A gather tied to ``__call__`` leaves placeholders in the modules for every other method."""
    ranks(2, run_methods)


@torch.no_grad()
def generate(model, rank, count, forwards=0):
    """Greedy; with more ``forwards`` than tokens to make, the last results are thrown away."""
    model.eval()
    sequence = tokens(rank)
    for index in range(max(count, forwards)):
        following = model(sequence)[:, -1:].argmax(-1)
        if index < count:
            sequence = torch.cat([sequence, following], dim=1)
    return sequence


def run_generation(counts, forwards=0, **options):
    twins = Twins(**options)
    got = generate(twins.model, twins.rank, counts[twins.rank], forwards)
    assert torch.equal(got, generate(twins.reference, twins.rank, counts[twins.rank]))
    twins.check_at_rest()
    assert twins.traffic()[1] == 0


def test_greedy_generation(ranks):
    ranks(2, run_generation, [5, 5])
    ranks(2, run_generation, [2, 3], forwards=3)


def test_unequal_numbers_of_forwards_end(ranks):
    """A rank that forwards alone must not wait forever."""
    with pytest.raises(AssertionError, match="Timed out"):
        ranks(2, run_generation, [2, 3], group_timeout_s=2)


class Slicing(Block):
    """Reads a projection's weight and never calls its module."""

    def attend(self, h_BTD):
        return self.o(F.pad(F.linear(h_BTD, self.q.weight[:8]), (0, WIDTH - 8)))


def run_weights_read_directly():
    on_all_cells(({"model": functools.partial(Toy, Slicing), "reshard": r} for r in (True, False)), check_model)
    twins = Twins()
    weight = twins.model.blocks[0].q.weight
    for read in (lambda: F.linear(continuous(0), weight), lambda: weight[:8], lambda: weight @ weight):
        with pytest.raises(ValueError, match=r"'blocks\.0\.q\.weight'.*full_tensor"):
            read()


def test_weights_read_directly(ranks):
    """Inside its boundary's forward a weight is whole; outside it is an error on every rank, not an empty tensor."""
    ranks(2, run_weights_read_directly)


def run_evaluation_between(evaluate, **options):
    twins = Twins(**options)
    twins.optimizers()
    for _ in range(2):
        twins.train(1)
        if evaluate:
            generate(twins.model, twins.rank, 2)
            twins.model.train()
    twins.model.reshard()  # FSDP2 leaves its root as it is after forward
    return [parameter.full_tensor() for parameter in twins.model.parameters()]


def test_evaluation_between_steps_changes_nothing(ranks):
    runs = (ranks(2, run_evaluation_between, evaluate) for evaluate in (True, False))
    for with_it, without in zip(*runs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


# --- what is sent, and when


COLLECTIVES = [
    *("all_reduce", "all_gather", "all_gather_object", "all_to_all", "barrier"),
    *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"),
]


def count_collectives(patch):
    """Names of torch's collectives as they are called from now on."""
    log = []
    places = [(dist, name) for name in COLLECTIVES if name in vars(dist)]  # newer torch has more names
    # What dist.broadcast and dist.reduce call too.
    places += [(dist.ProcessGroup, name) for name in ("broadcast", "reduce")]
    for place, name in places:
        original = getattr(place, name)
        patch.setattr(place, name, lambda *a, _f=original, _n=name, **k: (log.append(_n), _f(*a, **k))[1])
    return log


def run_counts(reshard):
    twins = Twins(reshard_after_forward=reshard)
    twins.optimizers()
    twins.train(1)
    groups = twins.registration.state.groups
    buckets = sum(len({member.owner for member in group.members}) for group in groups)
    gathers = 2 if reshard else 1
    before = twins.traffic()
    with pytest.MonkeyPatch.context() as patch:
        log = count_collectives(patch)
        next_token_loss(twins.model, twins.rank).backward()
        assert (log.count("broadcast"), log.count("reduce")) == (gathers * buckets, buckets)
        log.clear()
        twins.optimizer.step()
        assert log == [], "a step on one mesh communicates nothing"
    broadcasts, reduces = (now - then for now, then in zip(twins.traffic(), before, strict=True))
    assert (broadcasts, reduces) == (gathers * len(groups), len(groups))


@pytest.mark.parametrize("reshard", [True, False])
def test_collectives_of_one_step(ranks, reshard):
    """One coalesced call per group and direction, and none in the step."""
    ranks(2, run_counts, reshard)


def hooks_of(module):
    return len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)


def run_hook_places():
    model = wrap(Toy())
    blocks = set(model.blocks)
    for name, module in model.named_modules():
        if module not in blocks and module is not model:
            assert hooks_of(module) == 0, name
    assert all(hooks_of(block) for block in blocks)


def test_hooks_sit_at_boundaries_alone(ranks):
    """A hook on every Linear costs more host time than the Linear."""
    ranks(1, run_hook_places)
