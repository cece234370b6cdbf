"""What a rank holds between forward and backward, when activations fill the memory."""

import pytest
import torch

import dmuon
from dmuon_fsdp.runtime import buckets, group, model_state
from fsdp.models import WIDTH, Toy, Twins, groups_of, next_token_loss, world_mesh, wrap


def own_bytes(model):
    """Storage of what this rank owns in the compute dtype, and what it is when all of it is there."""
    used = [each for each in groups_of(model).values() if each.has_buckets]
    own = [pair for each in used for pair in each._buckets._own_storages]
    return sum(storage.nbytes() for storage, _ in own), sum(nbytes for _, nbytes in own)


def is_of_a_block(name, parameter):
    return "blocks." in name


BY_ADAMW = [dmuon.ParamPolicy("*norm*", route="adamw")]


class Casts:
    """Counts what is copied, in bytes, while inside."""

    modules = buckets, group, model_state

    def __enter__(self):
        self.nbytes, self.copy_all = 0, buckets.copy_all
        for module in self.modules:
            module.copy_all = self
        return self

    def __exit__(self, *_):
        for module in self.modules:
            module.copy_all = self.copy_all

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
    with torch.no_grad():
        for member in written:
            places[member].copy_(member.owned.local.mul_(0.5))
    state.after_step(set(written))
    for member, place in places.items():
        assert torch.equal(place, member.owned.local), member.fqn
    assert next_token_loss(twins.model, twins.rank).isfinite()


def test_a_step_after_a_forward_alone(ranks):
    ranks(2, run_step_without_a_backward)


WRITTEN = "parameters of 'blocks.1' were written between a forward and its backward"


@torch.no_grad()
def scale_up(model, factor):
    model.blocks[1].up.weight.mul_(factor)


def after_the_forward(twins):
    loss = next_token_loss(twins.model, twins.rank)
    scale_up(twins.model, 0.5)
    return loss


def in_the_forward(twins):
    """When the weights are gathered, and before they are freed."""
    handle = twins.model.blocks[1].norm2.register_forward_hook(lambda *_: scale_up_at_rest(twins, 0.5))
    loss = next_token_loss(twins.model, twins.rank)
    handle.remove()
    return loss


@torch.no_grad()
def scale_up_at_rest(twins, factor):
    (member,) = (m for m in dmuon.dedicated_params(twins.model) if m.fqn == "blocks.1.up.weight")
    member.param.mul_(factor)


def between_two_forwards(twins):
    loss = next_token_loss(twins.model, twins.rank)
    scale_up(twins.model, 0.5)
    next_token_loss(twins.model, twins.rank)
    return loss


def run_writes_in_between():
    for write in (after_the_forward, in_the_forward, between_two_forwards):
        twins = Twins()
        loss = write(twins)
        with pytest.raises(RuntimeError, match=WRITTEN):
            loss.backward()
        dmuon.reset(twins.model)
        scale_up(twins.model, 2.0)
        twins.model.zero_grad()
        twins.backward()
        twins.check_gradients()


def test_weights_written_between_forward_and_backward_are_named_on_every_rank(ranks):
    """The owner no longer has what forward computed with."""
    ranks(2, run_writes_in_between)


def run_a_write_on_the_owner_alone():
    twins = Twins()
    loss = next_token_loss(twins.model, twins.rank)
    member = next(m for m in dmuon.dedicated_params(twins.model) if m.is_owner)
    member.owned.local.mul_(0.5)
    with pytest.raises(RuntimeError, match=f"rank 0: '{member.fqn}' was written on its owner alone"):
        loss.backward()


def test_a_write_that_the_owner_alone_knows_of_is_named_there(ranks):
    """Gradients of other weights than forward's, and nothing said so."""
    ranks(1, run_a_write_on_the_owner_alone)


def run_writes_that_do_no_harm():
    twins = Twins()
    # A forward that is thrown away, a write, and a backward in which its last block is prefetched in vain.
    next_token_loss(twins.model, twins.rank)
    scale_up(twins.model, 0.5)
    last = twins.model.blocks[1]
    twins.model.blocks[1] = torch.nn.Identity()
    next_token_loss(twins.model, twins.rank).backward()
    twins.model.blocks[1] = last
    scale_up(twins.model, 2.0)
    twins.model.zero_grad()
    twins.backward()
    twins.check_gradients()


def test_a_forward_without_a_backward_forbids_no_writes(ranks):
    """Evaluation without no_grad, then a swap of averaged weights."""
    ranks(2, run_writes_that_do_no_harm)


def run_steps_in_between():
    """Of an optimizer that has nothing to do in any block, and of one that has."""
    twins = Twins()
    twins.optimizers()
    twins.model.zero_grad()
    loss = next_token_loss(twins.model, twins.rank)
    twins.optimizer.step()
    loss.backward()
    twins.reference_backward()
    twins.check_gradients()
    loss = next_token_loss(twins.model, twins.rank)
    twins.optimizer.step()
    with pytest.raises(RuntimeError, match=WRITTEN):
        loss.backward()
    dmuon.reset(twins.model)
    next_token_loss(twins.model, twins.rank)
    assert own_bytes(twins.model)[0] == 0, "what the step wrote is nothing that a module wrote"


def run_steps_in_between_elsewhere():
    for options in ({"reshard_after_forward": False}, {"checkpoint": "non-reentrant"}, {"replicas": 2}):
        twins = Twins(**options)
        twins.optimizers()
        next_token_loss(twins.model, twins.rank).backward()
        loss = next_token_loss(twins.model, twins.rank)
        twins.optimizer.step()
        with pytest.raises(RuntimeError, match=WRITTEN):
            loss.backward()


def test_a_step_between_forward_and_backward(ranks):
    """One that changed the weights left the owner with autograd's error and the others waiting, or, with activation
    checkpoints, all of them with gradients of neither."""
    ranks(2, run_steps_in_between)
    ranks(2, run_steps_in_between_elsewhere)


def move(block):
    block.double()
    block.float()


def assign(block):
    block.up.load_state_dict({"weight": block.up.weight.full_tensor() * 0.5}, assign=True)


def run_moved_in_between():
    for replace in (move, assign):
        twins = Twins()
        loss = next_token_loss(twins.model, twins.rank)
        replace(twins.model.blocks[1])
        with pytest.raises(RuntimeError, match=WRITTEN):
            loss.backward()


def test_parameters_replaced_in_between_are_named_on_every_rank(ranks):
    """Owners alone saw other tensors, and nobody those that were assigned."""
    ranks(2, run_moved_in_between)


class Shorter(Toy):
    """Leaves its last two blocks out where it is told to."""

    def __init__(self):
        super().__init__(depth=4)

    def forward(self, tokens_BT, depth=4):
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks[:depth]:
            x_BTD = block(x_BTD)
        return self.lm_head(self.norm(x_BTD))


def run_prefetch_in_vain():
    twins = Twins(Shorter)
    next_token_loss(twins.model, twins.rank)
    for member in dmuon.owned_params(twins.model):
        member.param.local.mul_(0.5)
    next_token_loss(twins.model, twins.rank, depth=2).backward()


def test_what_is_gathered_in_vain_accuses_nobody(ranks):
    ranks(2, run_prefetch_in_vain)


def run_swapped_weights():
    """Averaged weights for an evaluation that leaves them resident, and back."""
    twins = Twins(reshard_after_forward=False)
    scale_up(twins.model, 0.5)
    with torch.no_grad():
        next_token_loss(twins.model, twins.rank)
    scale_up_at_rest(twins, 2.0)
    twins.backward()
    twins.check_gradients()


def test_weights_that_stay_gathered_follow_writes(ranks):
    """The next training step was one of the averaged weights."""
    ranks(2, run_swapped_weights)


def run_second_derivatives():
    twins = Twins()
    embedded = []
    twins.model.embed.register_forward_hook(lambda module, args, output: embedded.append(output))
    for differentiate in (
        lambda loss: torch.autograd.grad(loss, embedded[-1], create_graph=True),
        lambda loss: loss.backward(create_graph=True),
    ):
        with pytest.raises(NotImplementedError, match="create_graph=True: the weights of dedicated parameters"):
            differentiate(next_token_loss(twins.model, twins.rank))
    twins.model.zero_grad()
    twins.backward()
    twins.check_gradients()


def test_second_derivatives_are_refused(ranks):
    """They read weights that are freed by then, and the process died."""
    ranks(2, run_second_derivatives)


class Renormed(torch.nn.Module):
    """Writes its weight in forward, as an embedding with ``max_norm`` does, where it trains."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x_BTD):
        if self.training:
            with torch.no_grad():
                self.weight.copy_(torch.renorm(self.weight, 2, 0, 1.0))
        return x_BTD @ self.weight.T


class RenormedFirst(torch.nn.ModuleDict):
    """Without a forward: its children are called one by one."""

    def __init__(self):
        super().__init__({"first": Renormed(), "second": torch.nn.Linear(WIDTH, WIDTH, bias=False)})


class OfContainers(Toy):
    def __init__(self):
        super().__init__(RenormedFirst)

    def forward(self, tokens_BT):
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = x_BTD + block["second"](torch.tanh(block["first"](x_BTD)))
        return self.lm_head(self.norm(x_BTD))


def run_a_write_to_the_view():
    for make, evaluates in ((lambda: Toy(Renormed), False), (lambda: Toy(Renormed), True), (OfContainers, False)):
        twins = Twins(make)
        loss = next_token_loss(twins.model, twins.rank)
        if evaluates:
            twins.model.eval()
            with torch.no_grad():
                next_token_loss(twins.model, twins.rank)
            twins.model.train()
        loss.backward()
        twins.reference_backward()
        twins.check_gradients()


def test_what_a_module_writes_to_its_weight_in_forward_is_there_in_backward(ranks):
    """Cast again, the weight would be the one from before."""
    ranks(2, run_a_write_to_the_view)


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


def watch(model):
    """Notes after every block whether FSDP2 keeps the output of an all-gather."""
    kept = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: kept.append(model._get_fsdp_state()._comm_ctx.all_gather_state))
    return kept


def run_last_gather():
    for predicate, keeps in ((is_of_a_block, False), (None, True)):
        options = {} if predicate is None else {"predicate": predicate, "dedicate": {"param_policy": BY_ADAMW}}
        torch.manual_seed(0)
        model = wrap(Toy(), world_mesh(), **options)
        kept = watch(model)
        next_token_loss(model, 0).backward()
        assert [each is not None for each in kept] == [keeps] * 2, predicate


def test_the_roots_gather_is_let_go_where_owners_have_every_layer(ranks):
    """It is the root's whole embedding and head, which FSDP2 frees at its next gather, and then there is none."""
    ranks(2, run_last_gather)
