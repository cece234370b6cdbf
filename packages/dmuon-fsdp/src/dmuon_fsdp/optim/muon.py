"""Muon under FSDP2: owners orthogonalize whole matrices, everything else is AdamW on FSDP2's shards.

A step on one mesh makes no collective: gradients are on their owners when backward ends, and the next forward's
broadcast carries the new weights. Under HSDP a step sends them to the other replicas first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from dmuon_core import NewtonSchulz, muon_update_
from dmuon_core.newton_schulz import Backend
from dmuon_core.optimizer import check_options
from dmuon_core.update import LearningRate
from dmuon_fsdp.comm.agree import agree_on
from dmuon_fsdp.optim.adamw import adamw_on_parts
from dmuon_fsdp.optim.average import averages_of
from dmuon_fsdp.optim.clipping import Gradients, check_limit, clip_, refuse_unreduced
from dmuon_fsdp.optim.groups import Entry, build_groups, describe_group, digest_lines, entries_of
from dmuon_fsdp.optim.masters import Masters, master_dtypes
from dmuon_fsdp.optim.state import Loaded, StateRules, create_missing, read_state_dict, refresh
from dmuon_fsdp.planning.names import bare
from dmuon_fsdp.runtime import registry
from dmuon_fsdp.runtime.binding import Registration
from dmuon_fsdp.runtime.inference import outside_inference_mode
from dmuon_fsdp.runtime.owned_tensor import OwnedTensor
from dmuon_fsdp.runtime.parameter import DedicatedParam
from dmuon_fsdp.runtime.timings import Timings

# A group has its own algorithm's options; the check in core wants both.
_OPTIONS_OF_THE_OTHER = {"momentum": 0.0, "adjust_lr_fn": None, "betas": (0.0, 0.0), "eps": 0.0}


class Muon(Optimizer):
    """Muon for a model whose matrices ``dmuon.dedicate_params`` gave to owners.

    With ``adjust_lr_fn="match_rms_adamw"``, the default, take the learning rate you would give AdamW.

    Args:
        model: the model, or a list of models (pipeline stages), after ``fully_shard``.
        lr: Muon's learning rate, number or one-element tensor.
        momentum, weight_decay, nesterov, ns_steps: Muon's.
        ns_backend: ``"gram"``, ``"direct"``, or a :class:`NewtonSchulz`, which carries kernel, coefficients and dtype.
        adjust_lr_fn: see :func:`dmuon_core.lr_scale`.
        momentum_dtype: of the momentum buffers.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: AdamW's, for every parameter without an owner.
        param_groups: see :func:`dmuon_fsdp.optim.groups.build_groups`.
        replicate_async: under HSDP the new weights reach the other replicas while the next forward runs; False waits
            for that inside :meth:`step`. The same bits either way; without effect on one mesh.
        max_grad_norm: clip the norm of all gradients together to this, inside every step, as
            :func:`dmuon.clip_grad_norm_` does; for trainers whose own clipping must be off. None clips nothing.
        unsynchronized: what to do with trainable parameters that are neither dedicated nor FSDP2's: None refuses them,
            ``"average"`` averages their gradients in the step.

    Raises:
        ValueError: nothing was dedicated, an option out of range, a parameter that nobody synchronizes (named).
        RuntimeError: a named kernel that cannot run here.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        lr: LearningRate = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_backend: Backend | NewtonSchulz = "gram",
        *,
        adjust_lr_fn: str | None = "match_rms_adamw",
        momentum_dtype: torch.dtype = torch.float32,
        adamw_lr: LearningRate = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.01,
        param_groups: Sequence[Mapping[str, Any]] | None = None,
        replicate_async: bool = True,
        max_grad_norm: float | None = None,
        unsynchronized: Literal["average"] | None = None,
    ) -> None:
        models = [model] if isinstance(model, nn.Module) else list(model)
        if not models:
            raise ValueError("dmuon.Muon was given no model: give the model, or a list of at least one")
        self.newton_schulz = ns_backend if isinstance(ns_backend, NewtonSchulz) else NewtonSchulz(ns_backend)
        if not isinstance(momentum_dtype, torch.dtype) or not momentum_dtype.is_floating_point:
            raise ValueError(f"momentum_dtype must be a floating torch.dtype, got {momentum_dtype!r}")
        self.momentum_dtype = momentum_dtype
        if max_grad_norm is not None:
            check_limit("max_grad_norm", max_grad_norm)
        self.max_grad_norm = max_grad_norm
        self.replicate_async = replicate_async
        self._timings: Timings | None = None
        self._registrations = [_bound(each) for each in models]
        entries = entries_of(self._registrations)
        self._averages = averages_of(entries, unsynchronized, self._registrations)
        muon = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        adamw_options = {"lr": adamw_lr, "weight_decay": adamw_weight_decay, "betas": adamw_betas, "eps": adamw_eps}
        groups = build_groups(entries, param_groups, muon, adamw_options)
        for group in groups:
            self._check_options(group)
        _agree_on_groups(groups, entries, self._registrations, f"{max_grad_norm=} {momentum_dtype=} {unsynchronized=}")
        self._defaults_of: dict[str, dict[str, Any]] = {"muon": muon, "adamw": adamw_options}
        super().__init__(groups, {**adamw_options, **muon, "algorithm": "muon"})
        for registration in self._registrations:
            registration.optimizers.add(self)
        self._begun = False
        self._masters = Masters()
        self.create_state()

    @outside_inference_mode
    def create_state(self) -> None:
        """State for every trained parameter that has none, zeros, without a step and without communication.

        The constructor does it, and ``dmuon.init_weights`` for a model that was on meta.
        """
        create_missing(self.state, self.param_groups, self._rules)

    @property
    def _rules(self) -> StateRules:
        return StateRules(self.momentum_dtype, master_dtypes(list(self._dedicated().values())))

    @outside_inference_mode
    def state_dict(self) -> dict[str, Any]:
        """As torch's: state by position, here with ``param_names`` in the groups, the same keys on every rank.

        Its tensors are this rank's part: dedicated ones are whole on their owner and have no rows elsewhere, and
        ``torch.save`` of them raises. For a file use :func:`dmuon.get_optimizer_state_dict`, or
        ``torch.distributed.checkpoint``.
        """
        self.create_state()
        return super().state_dict()

    @outside_inference_mode
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, with these differences.

        Parameters are found by name where the dict has names, else by position. Momentum keeps this optimizer's dtype
        and everything its layout and device, whatever the saved tensors': parts of this or another layout, or whole
        tensors, equal on all ranks. A parameter without an entry begins anew; a frozen one keeps what it has. Tensors
        of this optimizer's own state that are given back stay its own, as torch's do: later steps write to them.
        Nothing changes where the dict does not fit; running out of memory half way leaves the state of some parameters
        new and of others old. Call it on all ranks.

        Raises:
            ValueError: other parameters, groups, keys or shapes; named.
        """
        read: list[Loaded] = []

        def take(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            read.append(read_state_dict(given, self.state, self.param_groups, self._rules))
            return {"state": {}, "param_groups": read[0].groups}

        def put(_: Optimizer) -> None:
            self._masters.forget()
            read[0].put(self.state, self._rules)
            self.create_state()
            self._begun = True

        # After the user's pre-hooks, which may replace what is loaded, and before the user's post-hooks.
        with (
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(put, prepend=True),
        ):
            super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters that are not in the model: AdamW, with this optimizer's defaults.

        The model's own are in a group from the start; ``param_groups`` of the constructor divides them.

        Raises:
            ValueError: a parameter that is in a group already, or a dedicated one of a model that was not given.
        """
        group = dict(param_group)
        group.setdefault("algorithm", "adamw")
        if group["algorithm"] not in self._defaults_of:
            raise ValueError(f"algorithm must be 'muon' or 'adamw', got {group['algorithm']!r}")
        group = {**self._defaults_of[group["algorithm"]], **group}
        group.setdefault("group_name", f"group{len(self.param_groups)}/{group['algorithm']}")
        group["params"] = _with_names(group["params"], group["group_name"])
        if not group["params"]:
            group["param_names"] = []  # torch takes them from the parameters, and no names for none at all
        self._check_options(group)
        super().add_param_group(group)
        try:
            if group["algorithm"] == "muon":
                _members(self.param_groups[-1], self._dedicated())
        except RuntimeError as error:
            self.param_groups.pop()
            raise ValueError(str(error)) from None

    def __repr__(self) -> str:
        rows = [f"    {describe_group(group)}" for group in self.param_groups]
        return "\n".join([f"{type(self).__name__} (", *rows, ")"])

    def __getstate__(self) -> dict[str, Any]:
        raise ValueError(
            "dmuon.Muon cannot be pickled or copied: it holds process groups, and of the state what this rank owns. "
            "Save optimizer.state_dict() and model.state_dict() with torch.distributed.checkpoint, or make another "
            "dmuon.Muon for another model"
        )

    def _check_options(self, group: Mapping[str, Any]) -> None:
        try:
            check_options({**_OPTIONS_OF_THE_OTHER, **group})
        except ValueError as error:
            raise ValueError(f"group {group['group_name']!r}: {error}") from None
        if group["algorithm"] == "muon":
            self.newton_schulz.schedule(group["ns_steps"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step on every parameter that has a gradient.

        Raises:
            RuntimeError: gradients accumulated under ``no_sync`` were never reduced.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refuse_unreduced(self._registrations, "step")
        if not self._begun:
            refresh(self.state, self.param_groups, self._rules)
            self._begun = True
        self.create_state()  # of what was thawed
        for average in self._averages:
            average.reduce()
        if self.max_grad_norm is not None:
            clip_(replace(self._gradients(), averages=()), self.max_grad_norm, 2.0)
        places: dict[DedicatedParam, Tensor] = {}
        for registration in self._registrations:
            places |= registration.state.before_step()
        known = self._dedicated()
        placed: set[DedicatedParam] = set()
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                with self._timed("muon"):
                    members = [member for member in _members(group, known) if member.param.grad is not None]
                    placed |= self._muon_step(members, group, places)
            else:
                with self._timed("adamw"):
                    _refuse_gone(group, [isinstance(p, OwnedTensor) and p not in known for p in group["params"]])
                    parameters = [p for p in group["params"] if p.grad is not None]
                    adamw_on_parts(parameters, group, self.state, known, self._masters)
        for registration in self._registrations:
            with self._timed("publish"):
                registration.state.after_step(placed)
            if not self.replicate_async:
                registration.state.settle_publishes()
        if self._timings is not None:
            self._timings.end_step()
        return loss

    def record_timings(self, enabled: bool = True) -> None:
        """From now on record what :meth:`last_step_timings` returns: two events a span, no synchronization.

        What is recorded is kept until the next step: turn it off for a long evaluation.
        """
        traffics = [traffic for registration in self._registrations for traffic in registration.state.traffics]
        device = traffics[0].device if traffics else torch.device("cpu")
        self._timings = Timings(device) if enabled else None
        for traffic in traffics:
            traffic.timings = self._timings

    def last_step_timings(self) -> dict[str, float]:
        """Milliseconds of the last step on this rank by name; waits for the device.

        ``wait for gather``, ``wait for reduce`` and ``wait for publish`` are exposed communication of dedicated
        parameters, from the step before to this one: the time in which the compute stream waited. ``muon``, ``adamw``
        and ``publish`` (what the step left to be written for the next forward) are the parts of :meth:`step`. What took
        no time at all may be missing.

        Raises:
            RuntimeError: recording is off, the default.
        """
        if self._timings is None:
            raise RuntimeError("no timings are recorded: call optimizer.record_timings() before the step")
        return self._timings.milliseconds()

    def _timed(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self._timings is None else self._timings.span(name)

    def _dedicated(self) -> dict[nn.Parameter, DedicatedParam]:
        return {member.param: member for each in self._registrations for member in each.params.values()}

    def _gradients(self) -> Gradients:
        """What ``clip_grad_norm_`` of this optimizer is about."""
        groups = self.param_groups
        labelled = [(p, (group["group_name"], group["algorithm"])) for group in groups for p in group["params"]]
        return Gradients(self._registrations, labelled, self._averages)

    def _muon_step(
        self, members: Sequence[DedicatedParam], group: dict[str, Any], places: Mapping[DedicatedParam, Tensor]
    ) -> set[DedicatedParam]:
        """Step what this rank owns of ``members``; return those that are in their ``places`` now as well."""
        owned = [member for member in members if member.is_owner]
        if not owned:
            return set()
        masters = self._masters.of(owned, self.state)
        muon_update_(
            [masters.get(member, member.owned.local) for member in owned],
            [cast(OwnedTensor, member.param.grad).local for member in owned],
            [self.state[member.param]["momentum_buffer"].local for member in owned],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            newton_schulz=self.newton_schulz,
            ns_steps=group["ns_steps"],
            adjust_lr_fn=group["adjust_lr_fn"],
            views=[member.view for member in owned],
            presence=[member.presence for member in owned],
            copies=[None if member in masters else places.get(member) for member in owned],
        )
        self._masters.write_back(masters)
        return {member for member in owned if member in places and member not in masters}


def _members(group: Mapping[str, Any], known: Mapping[nn.Parameter, DedicatedParam]) -> list[DedicatedParam]:
    _refuse_gone(group, [parameter not in known for parameter in group["params"]])
    return [known[parameter] for parameter in group["params"]]


def _refuse_gone(group: Mapping[str, Any], gone: Sequence[bool]) -> None:
    if any(gone):
        raise RuntimeError(
            f"{group['param_names'][gone.index(True)]!r} in group {group['group_name']!r} is no dedicated parameter of "
            f"the model (any more): where load_state_dict(assign=True) or to() replaced it, make dmuon.Muon(model) "
            f"after that"
        )


def _bound(model: nn.Module) -> Registration:
    if not isinstance(model, nn.Module):
        raise TypeError(f"dmuon.Muon takes the model, or a list of models, not parameters; got {type(model).__name__}")
    registration = registry.find(model)
    if registration is None:
        raise ValueError(
            f"dmuon.Muon: this {type(model).__name__} has no dedicated parameters: call dmuon.dedicate_params(model, "
            f"mesh, predicate) before fully_shard, and dmuon.Muon(model) last; it takes the model, not its parameters"
        )
    if bare(registration.model) is not bare(model):
        raise ValueError(
            f"dmuon.Muon was given a {type(bare(model)).__name__}, dmuon.dedicate_params a "
            f"{type(bare(registration.model)).__name__}: give both the same module, so that none of its parameters is "
            f"left out"
        )
    registration.bind()
    registration.rest()
    return registration


def _with_names(parameters: Any, group_name: str) -> list[tuple[str, Tensor]]:
    """torch wants names in all groups or in none."""
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return [p if isinstance(p, tuple) else (f"{group_name}[{i}]", p) for i, p in enumerate(listed)]


def _agree_on_groups(
    groups: Sequence[Mapping[str, Any]], entries: Sequence[Entry], registrations: Sequence[Registration], options: str
) -> None:
    """Raise on all ranks alike where they were given different groups or options."""
    homes = {entry.parameter: entry.home for entry in entries}
    for registration in registrations:
        own = [
            {**group, "params": [(n, p) for n, p in group["params"] if homes[p] is registration]} for group in groups
        ]
        lines = [options, *digest_lines(own)]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        agree_on(digest, lines, registration.ranks.groups, what="the optimizer's options or groups")
