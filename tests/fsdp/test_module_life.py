"""From one step to the next: accumulation, several backwards, forwards without one, and exceptions in the middle."""

from __future__ import annotations

import contextlib
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon
from dmuon_fsdp.runtime import reduction
from fsdp.models import WIDTH, Block, Toy, Twins, close, next_token_loss, on_all_cells, tokens, world_mesh, wrap
from fsdp.test_unused import Experts

# --- accumulation


@contextlib.contextmanager
def by_fsdp_switch(model):
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


@contextlib.contextmanager
def nested(model):
    with dmuon.no_sync(model), dmuon.no_sync(model):
        pass
    with dmuon.no_sync(model):
        with dmuon.no_sync(model):
            pass
        yield


WITHOUT_SYNC = {"no_sync": dmuon.no_sync, "switch": by_fsdp_switch, "nested": nested}
# Which of the two experts each of four micro-batches uses: one only in the first, one only in the last.
EXPERTS_USED = [(True, False), (False, False), (False, False), (False, True)]


def micro_batch(model, rank, index):
    return next_token_loss(model, rank, index, use=EXPERTS_USED[index])


def check_accumulation(*, how, reshard, checkpoint, **mesh):
    twins = Twins(Experts, reshard_after_forward=reshard, checkpoint=checkpoint, **mesh)
    twins.optimizers()
    for _ in range(2):
        twins.zero_grad()
        before = twins.traffic()[1]
        with WITHOUT_SYNC[how](twins.model):
            for index in range(3):
                twins.backward(lambda model, rank, index=index: micro_batch(model, rank, index))
        assert twins.traffic()[1] == before
        with pytest.raises(RuntimeError, match=r"blocks\.0.*no_sync"):
            twins.optimizer.step()
        twins.backward(lambda model, rank: micro_batch(model, rank, 3))
        assert twins.traffic()[1] - before == len(twins.registration.state.groups)
        twins.check_gradients()
        twins.step()
    twins.check_weights()


def run_accumulation():
    cells = [{"how": how, "reshard": True, "checkpoint": "none"} for how in WITHOUT_SYNC]
    cells += [{"how": "no_sync", "reshard": r, "checkpoint": "non-reentrant"} for r in (True, False)]
    on_all_cells(cells, check_accumulation)


def test_accumulation_without_sync(ranks):
    """What one micro-batch alone used is neither lost nor counted twice; a step before the reduction is refused."""
    ranks(2, run_accumulation)


def run_accumulation_with_sync(**options):
    twins = Twins(Experts, **options)
    twins.optimizers()
    for index in range(4):
        twins.backward(lambda model, rank, index=index: micro_batch(model, rank, index))
    twins.check_gradients()
    twins.step()
    twins.optimizer.zero_grad()
    twins.optimizer.step()  # nothing to do
    twins.check_weights()


def test_accumulation_with_sync(ranks):
    ranks(2, run_accumulation_with_sync)


class Scaled(nn.Module):
    """The gradient of its matrix is the scale that its forward is given, everywhere."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, scale):
        return (self.weight * scale).sum()


class ScaledToy(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Scaled()])

    def forward(self, scale):
        return self.blocks[0](scale)


def accumulate_256_and_1(sync):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = wrap(ScaledToy(), mp_policy=policy)
    context = contextlib.nullcontext if sync else functools.partial(dmuon.no_sync, model)
    with context():
        model(torch.tensor(256.0)).backward()
    model(torch.tensor(1.0)).backward()
    return model.blocks[0].weight.grad.full_tensor()


@pytest.mark.parametrize("sync", [True, False])
def test_gradients_accumulate_in_fp32(ranks, sync):
    """256 + 1 is 256 in bf16."""
    for grad in ranks(2, accumulate_256_and_1, sync):
        assert grad.dtype == torch.float32
        assert (grad == 257).all()


def run_gradients_hold_no_more_than_their_own_memory():
    """Reduced in the parameters' dtype and in another, in one buffer or one by one."""
    for dtype, direct_from in itertools.product((torch.float32, torch.bfloat16), (0, 1 << 20)):
        reduction.DIRECT_FROM = direct_from
        twins = Twins(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype))
        next_token_loss(twins.model, twins.rank).backward()
        grads = [member.owned.grad.local for member in dmuon.owned_params(twins.model)]
        storages = {grad.untyped_storage().data_ptr(): grad.untyped_storage().nbytes() for grad in grads}
        slack = 512 * len(grads)  # alignment, and what says whether a gradient was there
        assert sum(storages.values()) <= sum(grad.nbytes for grad in grads) + slack


def test_gradients_hold_no_more_than_their_own_memory(ranks):
    """As views of a buffer that has everybody's gradients, an owner's would keep a whole layer's alive."""
    ranks(2, run_gradients_hold_no_more_than_their_own_memory)


def run_in_bf16():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    twins = Twins(mp_policy=policy)
    twins.optimizers()
    seen = []
    twins.model.blocks[0].q.register_forward_hook(lambda module, args, output: seen.append(module.weight.dtype))
    twins.train(3)
    assert set(seen) == {torch.bfloat16}
    assert all(member.param.grad.dtype == torch.float32 for member in twins.registration.params.values())
    for name, parameter, reference in twins.pairs():
        if name in twins.registration.params:
            close(name, parameter.full_tensor(), reference, 3e-2)  # bf16 compute


def test_mixed_precision(ranks):
    ranks(2, run_in_bf16)


def run_resident_between_micro_batches(**options):
    """``set_reshard_after_backward(False)``: weights are broadcast once for all micro-batches of a step."""
    twins = Twins(reshard_after_forward=False, **options)
    twins.optimizers()
    for _ in range(2):
        before = twins.traffic()[0]
        twins.zero_grad()
        for index in range(3):
            twins.model.set_reshard_after_backward(index == 2)
            twins.backward(lambda model, rank, index=index: next_token_loss(model, rank, index))
        assert twins.traffic()[0] - before == len(twins.registration.state.groups)
        twins.check_gradients()
        twins.step()
        twins.check_at_rest()
    twins.check_weights()


def test_weights_stay_resident_between_micro_batches(ranks):
    ranks(2, run_resident_between_micro_batches)


# --- backwards


def two_losses(model, rank):
    logits = model(tokens(rank))
    return logits.square().mean(), logits.exp().mean()


def check_two_backwards(*, losses, reshard, checkpoint, **mesh):
    twins = Twins(reshard_after_forward=reshard, checkpoint=checkpoint, **mesh)
    for _ in range(2):
        for model in (twins.model, twins.reference):
            model.zero_grad()
        first, second = losses(twins.model, twins.rank)
        first.backward(retain_graph=True)
        second.backward()
        twins.reference_backward(lambda model, rank: sum(losses(model, rank)))
        twins.check_gradients()
        twins.check_at_rest()
        assert all(not conductor.open_passes for conductor in twins.registration.state.conductors)


def two_forwards(model, rank):
    return next_token_loss(model, rank, 1), next_token_loss(model, rank, 2)


def run_two_backwards():
    cells = [
        {"losses": losses, "reshard": reshard, "checkpoint": checkpoint}
        for losses in (two_losses, two_forwards)
        for reshard in (True, False)
        for checkpoint in ("none", "non-reentrant")
    ]
    on_all_cells(cells, check_two_backwards)


def test_two_backwards(ranks):
    """Through one forward, and through two that were both made before."""
    ranks(2, run_two_backwards)


def run_forward_without_backward():
    twins = Twins()
    twins.optimizers()
    for step in range(3):
        unused = twins.model(tokens(twins.rank, 7))
        if step == 1:
            unused = None
        twins.zero_grad()
        before = twins.traffic()[1]
        twins.backward(lambda model, rank, step=step: next_token_loss(model, rank, step))
        assert twins.traffic()[1] - before == len(twins.registration.state.groups)
        twins.check_gradients()
        twins.check_at_rest()
        twins.step()
        assert unused is None or unused.requires_grad
    twins.check_weights()


def test_a_forward_without_backward(ranks):
    """It must not be waited for."""
    ranks(2, run_forward_without_backward)


def run_gradient_hooks():
    twins = Twins()
    seen = {}

    def note(parameter):
        seen.setdefault(parameter.home.name, []).append(parameter.grad.local.clone())

    for member in twins.registration.params.values():
        member.param.register_post_accumulate_grad_hook(note)
    with dmuon.no_sync(twins.model):
        twins.backward()
    assert not seen
    twins.backward()
    twins.check_gradients()
    for member in twins.registration.params.values():
        (grad,) = seen[member.fqn]
        assert torch.equal(grad, member.param.grad.local)


def test_post_accumulate_hooks_see_the_reduced_gradient(ranks):
    ranks(2, run_gradient_hooks)


# --- exceptions


class Tripwire(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("tripped")


class Fragile(Block):
    """Raises in its forward or in its backward when told to."""

    fails_in = None

    def attend(self, h_BTD):
        out_BTD = super().attend(h_BTD)
        if self.fails_in == "forward":
            raise ArithmeticError("tripped")
        return Tripwire.apply(out_BTD) if self.fails_in == "backward" else out_BTD


def check_failure(*, where, block, checkpoint, reshard, **mesh):
    make = functools.partial(Toy, Fragile)
    twins = Twins(make, checkpoint=checkpoint, reshard_after_forward=reshard, **mesh)
    twins.optimizers()
    twins.train(1)
    twins.zero_grad()
    broken = twins.model.blocks[block] if checkpoint == "none" else twins.model.blocks[block]._checkpoint_wrapped_module
    broken.fails_in = where
    with pytest.raises(ArithmeticError, match="tripped"):
        next_token_loss(twins.model, twins.rank).backward()
    broken.fails_in = None
    with pytest.raises(RuntimeError, match=r"dmuon\.reset\(model\)"):
        next_token_loss(twins.model, twins.rank)
    dmuon.reset(twins.model)
    twins.check_at_rest()
    twins.train(2)
    twins.check_weights(1e-5)


def run_failures():
    cells = [
        {"where": where, "block": block, "checkpoint": checkpoint, "reshard": reshard}
        for where in ("forward", "backward")
        for block in (0, 1)
        for checkpoint, reshard in (("none", True), ("none", False), ("non-reentrant", True))
    ]
    on_all_cells(cells, check_failure)


def test_an_exception_on_every_rank(ranks):
    """The next step must neither train on half a gradient nor go on without a word; after a reset nothing is left."""
    ranks(2, run_failures)


def run_reset_of_a_clean_model():
    twins = Twins()
    twins.optimizers()
    dmuon.reset(twins.model)
    twins.train(1)
    dmuon.reset(twins.model)
    twins.train(1)
    twins.check_weights()


def test_reset_of_a_clean_model_changes_nothing(ranks):
    ranks(2, run_reset_of_a_clean_model)


# --- without FSDP2


def alone(model):
    dmuon.dedicate_params(model, world_mesh(), lambda name, parameter: parameter.ndim == 2).bind()
    return model


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def matrices_loss(model, rank, step=0):
    return model(torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


def run_alone():
    twins = Twins(Matrices, wrapping=alone)
    twins.optimizer = dmuon.Muon(twins.model, ns_backend=dmuon.NewtonSchulz(dtype=torch.float32))
    for step in range(3):
        twins.optimizer.zero_grad()
        twins.reference.zero_grad()
        twins.backward(functools.partial(matrices_loss, step=step))
        twins.check_gradients()
        twins.check_at_rest()


def test_a_model_without_fsdp(ranks):
    """The end of backward is ours to find where no FSDP2 root announces it."""
    ranks(2, run_alone)


# --- inference


def run_inference_first():
    twins = Twins(Matrices, wrapping=alone)
    with torch.inference_mode():
        close("output", twins.model(torch.ones(2, WIDTH)), twins.reference(torch.ones(2, WIDTH)), 1e-6)
    for _ in range(2):
        twins.backward(matrices_loss)
        twins.check_gradients()
        with torch.inference_mode():
            matrices_loss(twins.model, twins.rank)


def test_inference_mode_before_training(ranks):
    """Validation before the first step made buffers that autograd refuses."""
    ranks(2, run_inference_first)


def run_moved():
    twins = Twins(Toy)
    member = next(m for m in dmuon.dedicated_params(twins.model) if m.is_owner)
    values = member.owned.full_tensor().detach().numpy()
    losses = []
    for scale in (1.0, 0.5):
        values *= scale
        member.owned._local_tensor = torch.from_numpy(values)  # the same address, a version counter of its own
        losses.append((next_token_loss(twins.model, 0).item(), member.owned.stamp))
    (before, stamp), (after, stamp_after) = losses
    assert stamp == stamp_after, "what this test is about"
    assert before != after
    group = next(g for g in twins.registration.state.groups if member in g.members)
    assert not group._buckets.stale, "an unchanged parameter is not copied again"


def test_a_parameter_moved_away_and_back_is_noticed(ranks):
    """``model.to("cpu")`` and back between steps gave the weights their old address and version 0 again."""
    ranks(1, run_moved)
