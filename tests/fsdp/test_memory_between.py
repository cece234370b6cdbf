"""What a rank holds between forward and backward, when activations fill the memory."""

import pytest
import torch

import dmuon
from dmuon_fsdp.runtime import buckets
from fsdp.models import Toy, Twins, groups_of, next_token_loss, world_mesh, wrap


def own_bytes(model):
    """Storage of what this rank owns in the compute dtype, and what it is when all of it is there."""
    kept = [pair for group in groups_of(model).values() if group.has_buckets for pair in group._buckets._kept]
    return sum(storage.nbytes() for storage, _ in kept), sum(nbytes for _, nbytes in kept)


def is_of_a_block(name, parameter):
    return "blocks." in name


BY_ADAMW = [dmuon.ParamPolicy("*norm*", route="adamw")]


class Casts:
    """Counts what is copied, in bytes, while inside."""

    def __enter__(self):
        self.nbytes, self.copy_all = 0, buckets.copy_all
        buckets.copy_all = self
        return self

    def __exit__(self, *_):
        buckets.copy_all = self.copy_all

    def __call__(self, into, sources):
        self.nbytes += sum(tensor.nbytes for tensor in into)
        self.copy_all(into, sources)


def run_steps(reshard, checkpoint):
    twins = Twins(reshard_after_forward=reshard, checkpoint=checkpoint)
    twins.optimizers()
    for step in range(3):
        twins.zero_grad()
        for _ in range(2):
            loss = next_token_loss(twins.model, twins.rank, step)
            held, whole = own_bytes(twins.model)
            assert whole > 0
            assert held == (0 if reshard else whole)
            with Casts() as casts:
                loss.backward()
            assert own_bytes(twins.model) == (whole, whole)
            assert casts.nbytes <= (whole if reshard else 0)
            twins.reference_backward(lambda model, rank, step=step: next_token_loss(model, rank, step))
        twins.check_gradients()
        twins.step()
        twins.check_weights()
        with Casts() as casts, torch.no_grad():
            next_token_loss(twins.model, twins.rank, step)
        assert casts.nbytes == 0, "validation needs no other memory than before and casts nothing"
        assert own_bytes(twins.model) == (whole, whole)


@pytest.mark.parametrize("checkpoint", ["none", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("reshard", [True, False])
def test_copies_of_owned_parameters_make_room_for_activations(ranks, reshard, checkpoint):
    """FSDP2 casts in every gather; a copy that stays is 2 bytes of every owned parameter at the peak."""
    ranks(2, run_steps, reshard, checkpoint)


def run_step_without_a_backward():
    """The step finds copies without memory, writes some of them, and leaves out others."""
    twins = Twins()
    state = twins.registration.state
    next_token_loss(twins.model, twins.rank).backward()
    twins.model.zero_grad()
    next_token_loss(twins.model, twins.rank)
    assert own_bytes(twins.model)[0] == 0
    places = state.before_step()
    assert own_bytes(twins.model)[0] == own_bytes(twins.model)[1]
    written = list(places)[::2]
    for place in places.values():
        place.fill_(float("nan"))
    with torch.no_grad():
        for member in written:
            places[member].copy_(member.owned.local.mul_(0.5))
    state.after_step(set(written))
    for member, place in places.items():
        assert torch.equal(place, member.owned.local), member.fqn
    assert next_token_loss(twins.model, twins.rank).isfinite()


def test_a_step_after_a_forward_alone(ranks):
    ranks(2, run_step_without_a_backward)


def run_writes_in_between():
    twins = Twins()
    expected = "parameters of 'blocks.1' were written between a forward and its backward"
    loss = next_token_loss(twins.model, twins.rank)
    with torch.no_grad():
        twins.model.blocks[1].up.weight.mul_(0.5)
    with pytest.raises(RuntimeError, match=expected):
        loss.backward()
    dmuon.reset(twins.model)
    with torch.no_grad():
        twins.model.blocks[1].up.weight.mul_(2.0)
    twins.zero_grad = twins.model.zero_grad
    twins.backward()
    twins.check_gradients()


def test_weights_written_between_forward_and_backward_are_named_on_every_rank(ranks):
    """The owner no longer has what forward computed with; torch alone refuses the same."""
    ranks(2, run_writes_in_between)


def run_with_replicas():
    twins = Twins(replicas=2)
    loss = next_token_loss(twins.model, twins.rank)
    held, whole = own_bytes(twins.model)
    assert held == whole > 0
    loss.backward()
    twins.reference_backward()
    twins.check_gradients()


def test_what_another_replica_published_stays(ranks):
    """Only its owner could make it again."""
    ranks(2, run_with_replicas)


class Watching(Toy):
    """Notes before every block whether FSDP2 keeps the output of an all-gather."""

    def forward(self, tokens_BT, **options):
        self.kept = []
        for block in self.blocks:
            block.register_forward_hook(lambda *_: self.kept.append(self._get_fsdp_state()._comm_ctx.all_gather_state))
        return super().forward(tokens_BT, **options)


def run_last_gather():
    for predicate, keeps in ((is_of_a_block, False), (None, True)):
        options = {} if predicate is None else {"predicate": predicate, "dedicate": {"param_policy": BY_ADAMW}}
        torch.manual_seed(0)
        model = wrap(Watching(), world_mesh(), **options)
        next_token_loss(model, 0).backward()
        assert len(model.kept) == 2
        assert [each is not None for each in model.kept] == [keeps] * 2, predicate


def test_the_roots_gather_is_let_go_where_owners_have_every_layer(ranks):
    """It is the root's whole embedding and head, which FSDP2 frees at its next gather, and then there is none."""
    ranks(2, run_last_gather)
