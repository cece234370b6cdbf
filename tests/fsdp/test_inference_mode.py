"""What saves, loads and initialises inside ``torch.inference_mode``: what it leaves trains on as if called outside."""

from __future__ import annotations

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions

import dmuon
from fsdp.models import Toy
from fsdp.resuming import Run, assert_same, whole

PARTS = StateDictOptions()
TO_ALL = StateDictOptions(full_state_dict=True)


def toy_on_meta():
    with torch.device("meta"):
        return Toy()


def from_a_folder(run, other, folder):
    dmuon.save_checkpoint(run.model, run.optimizer, f"{folder}/saved")
    dmuon.load_checkpoint(other.model, other.optimizer, f"{folder}/saved")


def from_state_dicts(run, other, options):
    weights = dmuon.get_model_state_dict(run.model, options=options)
    state = dmuon.get_optimizer_state_dict(run.model, run.optimizer, options=options)
    dmuon.set_model_state_dict(other.model, weights, options=options)
    dmuon.set_optimizer_state_dict(other.model, other.optimizer, state, options=options)


def from_files_on_meta(run, other, folder):
    dmuon.init_weights(other.model)
    whole_weights = dmuon.get_model_state_dict(run.model)
    if dist.get_rank() == 0:
        save_file(whole_weights, f"{folder}/model.safetensors")
    dist.barrier()
    dmuon.load_pretrained(other.model, folder)
    other.optimizer.load_state_dict(run.optimizer.state_dict())


def resume_every_way(folder):
    """As an evaluation does with its best model. DTensors cannot be detached there; what is made there never trains."""
    run, resumed = Run(), [Run(seed=7), Run(seed=8), Run(seed=9), Run(make=toy_on_meta)]
    run.train(range(2))
    with torch.inference_mode():
        from_a_folder(run, resumed[0], folder)
        from_state_dicts(run, resumed[1], PARTS)
        from_state_dicts(run, resumed[2], TO_ALL)
        from_files_on_meta(run, resumed[3], folder)
    for each in (run, *resumed):
        each.train(range(2, 4))
    for each in resumed:
        assert_same(each.everything(), run.everything())


def test_what_is_saved_and_loaded_there_trains_on(ranks, tmp_path):
    ranks(2, resume_every_way, str(tmp_path))


def hooks_without_gradients():
    """A hook that writes parameters, as one that restores an average: of a leaf only ``no_grad`` lets it."""
    run = Run()
    run.train(range(1))
    saved = run.optimizer.state_dict()
    weight = run.model.norm.weight
    run.optimizer.register_load_state_dict_post_hook(lambda optimizer: weight.mul_(2.0))
    for mode in (torch.no_grad, torch.inference_mode):
        before = whole(weight).clone()
        with mode():
            run.optimizer.load_state_dict(saved)
        assert torch.equal(whole(weight), 2.0 * before)
    run.train(range(1, 2))


def test_hooks_of_a_load_run_without_gradients_where_its_caller_does(ranks):
    ranks(2, hooks_without_gradients)
