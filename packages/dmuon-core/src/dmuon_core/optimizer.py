"""Muon for one process: torch.optim.Muon's names and meaning, with AdamW for the parameters that are no matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT

from dmuon_core.coefficients import CoefficientsLike, as_coefficients
from dmuon_core.newton_schulz import Backend, NewtonSchulz
from dmuon_core.update import LearningRate, lr_scale, muon_update_
from dmuon_core.views import MatrixView

Group = MutableMapping[str, Any]

_ALGORITHMS = ("muon", "adamw")


class Muon(Optimizer):
    """Muon on whole matrices in one process; the oracle of every distributed test.

    Parameters that are no matrices go into groups with ``algorithm="adamw"``; stacks, convolutions and fused
    projections say how they are read with ``view=``::

        Muon([
            {"params": matrices},
            {"params": experts, "view": "batched"},
            {"params": the_rest, "algorithm": "adamw", "lr": 3e-4, "weight_decay": 0.01},
        ], lr=0.02)

    State dicts interchange with torch.optim.Muon's where ``ns_coefficients`` is a triple.

    Args:
        params: parameters, named parameters, or groups. A group may override every option below and add ``view``
            (:class:`MatrixView` or its text) and ``algorithm`` (``"muon"``, ``"adamw"``).
        lr: learning rate, number or one-element tensor.
        weight_decay: decoupled weight decay.
        momentum: μ.
        nesterov: look ahead by one gradient.
        ns_coefficients: as :func:`as_coefficients` takes them; None is what ``ns_backend`` carries, by default Polar
            Express (torch.optim.Muon's default is Keller's triple).
        ns_steps: Newton-Schulz steps.
        adjust_lr_fn: see :func:`dmuon_core.lr_scale`; None is ``"original"``.
        ns_backend: ``"gram"``, ``"direct"``, or a :class:`NewtonSchulz`, which carries kernel, coefficients and dtype.
        momentum_dtype: dtype of the momentum buffers; None is float32, float64 for float64 parameters.
        betas, eps: AdamW's, for its groups only.

    Raises:
        ValueError: an option out of range, a parameter that its group cannot take (named), coefficients that the Gram
            form cannot carry.
        RuntimeError: a named kernel that cannot run here.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: LearningRate = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        ns_coefficients: CoefficientsLike = None,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        ns_backend: Backend | NewtonSchulz = "gram",
        momentum_dtype: torch.dtype | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.newton_schulz = ns_backend if isinstance(ns_backend, NewtonSchulz) else NewtonSchulz(ns_backend)
        self.momentum_dtype = momentum_dtype
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "algorithm": "muon",
            "view": "matrix",
            "betas": betas,
            "eps": eps,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group after checking it whole, so that a refusal leaves the optimizer as it was."""
        count = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except Exception:
            del self.param_groups[count:]
            raise

    def _check_group(self, group: Group) -> None:
        check_options(group)
        if group["ns_coefficients"] is not None:
            group["ns_coefficients"] = as_coefficients(group["ns_coefficients"]).plain()
        group["view"] = str(MatrixView.parse(group["view"]))
        if group["algorithm"] == "muon":
            self.newton_schulz.schedule(group["ns_steps"], group["ns_coefficients"])
        for name, parameter in named(group):
            check_parameter(name, parameter)
            if group["algorithm"] == "muon":
                MatrixView.parse(group["view"]).check(parameter.shape, name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "newton_schulz": self.newton_schulz,
            "momentum_dtype": self.momentum_dtype,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, with two differences.

        Momentum keeps this optimizer's dtype: torch's cast to the parameter's would round it. Options that the saved
        groups lack, such as ``view`` in those of torch.optim.Muon, stay as they are.
        """
        before = self.param_groups
        loaded: list[dict[str, Any]] = []
        # After the user's pre-hooks, which may replace what is loaded, and before the user's post-hooks.
        with (
            self.register_load_state_dict_pre_hook(lambda _, final: loaded.append(final)),
            self.register_load_state_dict_post_hook(lambda _: self._keep_own(before, loaded[0]), prepend=True),
        ):
            super().load_state_dict(state_dict)

    def _keep_own(self, before: Sequence[Group], state_dict: dict[str, Any]) -> None:
        for group, own, saved in zip(self.param_groups, before, state_dict["param_groups"], strict=True):
            group.update({key: own[key] for key in self.defaults if key in own and key not in saved})
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                buffer = state_dict["state"].get(key, {}).get("momentum_buffer")
                if buffer is not None:
                    kept = buffer.detach().to(device=parameter.device, dtype=self._buffer_dtype(parameter), copy=True)
                    self.state[parameter]["momentum_buffer"] = kept

    def _buffer_dtype(self, parameter: Tensor) -> torch.dtype:
        if self.momentum_dtype is not None:
            return self.momentum_dtype
        return torch.float64 if parameter.dtype == torch.float64 else torch.float32

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step on every parameter that has a gradient.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in parameters):
                raise RuntimeError("Muon does not take sparse gradients; build the embedding with sparse=False")
            if group["algorithm"] == "adamw":
                adamw_step(parameters, group, self.state)
            elif parameters:
                self._muon_step(parameters, group)
        return loss

    def _muon_step(self, parameters: Sequence[Tensor], group: Group) -> None:
        muon_update_(
            parameters,
            [cast(Tensor, p.grad) for p in parameters],
            [self._momentum_buffer(p) for p in parameters],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            newton_schulz=self.newton_schulz,
            ns_steps=group["ns_steps"],
            ns_coefficients=group["ns_coefficients"],
            adjust_lr_fn=group["adjust_lr_fn"],
            views=[MatrixView.parse(group["view"])] * len(parameters),
        )

    def _momentum_buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=self._buffer_dtype(parameter))
        return cast(Tensor, state["momentum_buffer"])


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def adamw_step(
    parameters: Sequence[Tensor],
    group: Group,
    state: MutableMapping[Tensor, Any],
    *,
    local: Callable[[Tensor], Tensor] = _itself,
    fused: bool | None = None,
) -> None:
    """torch.optim.AdamW's update and state on ``parameters``, which have gradients.

    Args:
        local: what to compute on in place of a parameter, its gradient or its state: the shard of a sharded one. The
            update is elementwise, so shards alone give what the whole would.
        fused: as torch.optim.AdamW's; True needs every ``local(parameter)`` on one device.
    """
    for parameter in parameters:
        if not state[parameter]:
            device = local(parameter).device if fused else torch.device("cpu")
            state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
    beta1, beta2 = group["betas"]
    adamw(
        [local(p) for p in parameters],
        [local(cast(Tensor, p.grad)) for p in parameters],
        [local(state[p]["exp_avg"]) for p in parameters],
        [local(state[p]["exp_avg_sq"]) for p in parameters],
        [],
        [state[p]["step"] for p in parameters],
        fused=fused,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    if fused:
        increment_version([local(p) for p in parameters])  # torch does not


def named(group: Group) -> Iterable[tuple[str, Tensor]]:
    """(name, parameter) of a group; the position stands in where the user gave no names."""
    names = group.get("param_names") or [f"params[{i}]" for i in range(len(group["params"]))]
    return zip(names, group["params"], strict=True)


def check_parameter(name: str, parameter: Tensor) -> None:
    """Raise ValueError unless this is a whole, dense, real floating-point tensor."""
    if type(parameter.data) is not Tensor:
        raise ValueError(
            f"{name} is a {type(parameter.data).__name__}: dmuon_core.Muon takes whole plain tensors of one process; "
            f"for sharded models use dmuon.Muon (distribution dmuon-fsdp)"
        )
    if not parameter.dtype.is_floating_point or parameter.layout != torch.strided:
        raise ValueError(
            f"{name} is {parameter.dtype}, {parameter.layout}: Muon takes dense real floating-point parameters"
        )


def check_options(group: Group) -> None:
    """Raise ValueError naming the option that is out of range."""
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr as a tensor must have one element, got shape {tuple(lr.shape)}")
    for key in ("lr", "weight_decay", "momentum", "eps"):
        value = group[key]
        if not isinstance(value, Tensor) and not (isinstance(value, Real) and float(value) >= 0):
            raise ValueError(f"{key} must be >= 0, got {value!r}")
    if group["algorithm"] not in _ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(map(repr, _ALGORITHMS))}, got {group['algorithm']!r}")
    if not (isinstance(betas, Sequence) and len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
    lr_scale(group["adjust_lr_fn"], 1, 1)
