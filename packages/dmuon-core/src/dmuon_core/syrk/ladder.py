"""Which kernel runs: the automatic ladder, the explicit choice, and the count of what really ran.

A :class:`KernelChoice` belongs to one Newton-Schulz object, so two optimizers with different kernels do not meet.
Shared between them is only what cannot differ: the outcome of loading one backend on one device.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dmuon_core.env import NS_KERNEL, read_settings
from dmuon_core.notices import warn_once
from dmuon_core.syrk import verdicts
from dmuon_core.syrk.builtin import TORCH, torch_syrk
from dmuon_core.syrk.contract import NormalizeFn, Scalar, SyrkFn, SyrkSpec, UpdateFns, with_config
from dmuon_core.syrk.discovery import Found, describe_error, discover
from dmuon_core.syrk.loose import loose_kernel
from dmuon_core.syrk.normalizers import normalizer_of
from dmuon_core.syrk.products import checked_product
from dmuon_core.syrk.updates import update_of

LAST_RESORT = "torch"
_FALLBACK = "cublas"
_EXTRAS = "dmuon-core[kernels], on SM90 and up also dmuon-kernels[quack]"


@dataclass(frozen=True)
class Rung:
    """A backend as seen from one device: usable, or the reason why not."""

    name: str
    distribution: str
    spec: SyrkSpec | None
    reason: str


def survey(device: torch.device) -> tuple[Rung, ...]:
    """Every backend on ``device``, in the ladder's order, each with its reason when it cannot run. Loads nothing."""
    return tuple(_probe(found, device) for found in discover())


def _probe(found: Found, device: torch.device) -> Rung:
    if found.spec is None:
        return Rung(found.name, found.distribution, None, found.reason)
    try:
        reason = found.spec.probe(device)
    except Exception as error:
        reason = f"its probe failed: {describe_error(error)}"
    if reason is None:
        outcome = _loaded.get((found.spec, str(device)))
        reason = outcome if isinstance(outcome, str) else None
    if reason is not None:
        return Rung(found.name, found.distribution, None, reason)
    return Rung(found.name, found.distribution, found.spec, "")


class KernelUnavailableError(RuntimeError):
    """An explicit kernel, or ``DMUON_NS_KERNEL``, that cannot run: the text lists every backend with its reason."""


def unavailable(name: str, device: torch.device, why: str) -> KernelUnavailableError:
    source = f" (from {NS_KERNEL})" if read_settings().ns_kernel == name else ""
    rows = "\n".join(f"  {rung.name}: {rung.reason or 'available'}" for rung in survey(device))
    return KernelUnavailableError(
        f"kernel={name!r}{source} cannot run on {device}: {why}\nBackends here:\n{rows}\n"
        f'Take one that is available, or kernel="auto". Kernels for SM80 and up come with the extra {_EXTRAS}.'
    )


_loaded: dict[tuple[SyrkSpec, str], SyrkFn | str] = {}
_loading = threading.Lock()


def load_checked(spec: SyrkSpec, device: torch.device) -> SyrkFn | str:
    """The backend's function after one checked call on ``device``, or the reason why it cannot be used."""
    key = (spec, str(device))
    with _loading:
        if key not in _loaded:
            _loaded[key] = _load_and_check(spec, device)
        return _loaded[key]


def _load_and_check(spec: SyrkSpec, device: torch.device) -> SyrkFn | str:
    reason = None
    try:
        fn = spec.load()
    except Exception as error:
        reason = f"it failed to load: {describe_error(error)}"
    else:
        try:
            reason = _accuracy_complaint(fn, device)
        except Exception as error:
            reason = f"its first call failed: {describe_error(error)}"
    if reason is None:
        return fn
    warn_once(f"dmuon: kernel {spec.name!r} is left out on {device}: {reason}")
    return reason


def _accuracy_complaint(fn: SyrkFn, device: torch.device) -> str | None:
    """A product that any right kernel gets: small integers, exact in every dtype, two tiles of 128 a side."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-2, 3, (2, 144, 64), device="cpu", generator=generator).to(device, torch.float16)
    c = torch.tril(torch.randint(-2, 3, (2, 144, 144), device="cpu", generator=generator)).to(device, torch.float16)
    want = a.cpu().float() @ a.cpu().float().mT + 2 * (c + torch.tril(c, -1).mT).cpu().float()
    got = fn(a, None, c, alpha=1.0, beta=2.0).cpu().float()
    wrong = int((got != want).sum())
    return f"it computes wrong values ({wrong} of {want.numel()} in the check at load)" if wrong else None


class Loaded(NamedTuple):
    """A backend that passed its checks on one device."""

    spec: SyrkSpec
    fn: SyrkFn


@dataclass
class KernelChoice:
    """The kernel of one Newton-Schulz object.

    Attributes:
        name: what the user chose, ``"auto"`` or a backend.
        launches: how often each backend ran so far, in this process and by this object.
        ran: what ran under each name, and where it did last.
        deterministic: take the ladder's order for every shape, whatever was measured.
    """

    name: str
    launches: Counter[str] = field(default_factory=Counter)
    ran: dict[str, tuple[SyrkSpec, torch.device]] = field(default_factory=dict)
    deterministic: bool = False
    _ladders: dict[torch.device, tuple[Loaded, ...]] = field(default_factory=dict)
    _loose: dict[torch.device, tuple[Loaded, ...]] = field(default_factory=dict)
    _orders: dict[tuple[torch.device, int, str], tuple[Loaded, ...]] = field(default_factory=dict)
    _wholes: dict[tuple[torch.device, int, str], bool] = field(default_factory=dict)
    _products: dict[tuple[torch.device, int, str], Callable[..., Tensor] | None] = field(default_factory=dict)

    @classmethod
    def of(cls, kernel: str, *, deterministic: bool = False) -> KernelChoice:
        """``kernel``, or what ``DMUON_NS_KERNEL`` says where it is ``"auto"``.

        Raises:
            KernelUnavailableError: no backend has that name, or it cannot run on the default device.
        """
        choice = cls(read_settings().ns_kernel if kernel == "auto" else kernel, deterministic=deterministic)
        if choice.name != "auto":
            choice.ladder(default_device())
        return choice

    def ladder(self, device: torch.device, *, exact: bool = True) -> tuple[Loaded, ...]:
        """The backends to try on ``device``, best first; never empty. One only where the user named it.

        Args:
            exact: False takes kernels whose result may differ from its transpose by a rounding, where they are faster.

        Raises:
            KernelUnavailableError: the named backend cannot run there.
        """
        if device not in self._ladders:
            if not computes(device):
                return (Loaded(TORCH, torch_syrk),)
            self._ladders[device] = _climb(device) if self.name == "auto" else (_named(self.name, device),)
        if exact:
            return self._ladders[device]
        if device not in self._loose:
            self._loose[device] = tuple(_loosened(each, device) for each in self._ladders[device])
        return self._loose[device]

    def __call__(
        self,
        a: Tensor,
        b: Tensor | None = None,
        c: Tensor | None = None,
        *,
        alpha: Scalar = 1.0,
        beta: Scalar = 0.0,
        out: Tensor | None = None,
        sms: int | None = None,
        exact: bool = True,
    ) -> Tensor:
        """One symmetric product by the best backend that takes these operands (``dmuon_core.syrk.contract``).

        Args:
            exact: False allows D to differ from its transpose by a rounding; then all of C counts.
        """
        refusals: list[str] = []
        for spec, fn in self.order(a, b, c, exact=exact):
            refusal = refusal_of(spec, a, b, c)
            if refusal is None:
                self.ran[spec.name] = spec, a.device
                self.launches[spec.name] += 1
                return fn(a, b, c, alpha=alpha, beta=beta, out=out, sms=sms)
            refusals.append(f"{spec.name}: {refusal}")
        raise unavailable(self.name, a.device, "it does not take these operands: " + "; ".join(refusals))

    def order(self, a: Tensor, b: Tensor | None, c: Tensor | None, *, exact: bool = True) -> tuple[Loaded, ...]:
        """The backends to try for these operands: the fastest known, then the ladder."""
        ladder = self.ladder(a.device, exact=exact)
        if self.deterministic or a.device.type != "cuda" or not computes(a.device):
            return ladder
        key = (a.device, verdicts.epoch(), verdicts.operands_key(a, b, c, exact=exact))
        if key not in self._orders:
            self._orders[key] = _ranked(ladder, a, b, c, key[2])
        return self._orders[key]

    def prefers_whole(self, a: Tensor, b: Tensor | None, whole: Tensor) -> bool:
        """Whether A · ``whole``, every entry computed, was measured to be faster than the symmetric product A Bᵀ.

        It is where a launch costs more than the work.
        """
        if not self._measures(a.device):
            return False
        key = (a.device, verdicts.epoch(), verdicts.operands_key(a, b, None, exact=False))
        if key not in self._wholes:
            names = {each.spec.name for each in self.ladder(a.device)}
            halves = _microseconds(a.device, key[2], names)
            wholes = _microseconds(a.device, verdicts.product_key(a, whole), {*names, verdicts.BMM})
            self._wholes[key] = halves is not None and wholes is not None and wholes < halves
        return self._wholes[key]

    def multiply(self, a_BMK: Tensor, b_BKN: Tensor, *, out: Tensor) -> Tensor:
        """A B, every entry computed: by ``torch.bmm``, or by what was measured to be faster."""
        if self._measures(out.device):
            key = (out.device, verdicts.epoch(), verdicts.product_key(a_BMK, b_BKN))
            if key not in self._products:
                self._products[key] = _measured_product(self.ladder(out.device), a_BMK, b_BKN, out, key[2])
            fn = self._products[key]
            if fn is not None:
                return fn(a_BMK, b_BKN, out=out)
        return torch.bmm(a_BMK, b_BKN, out=out)

    def _measures(self, device: torch.device) -> bool:
        """Whether measured times may decide: not where the user named the kernel, nor where bits must not change."""
        return self.name == "auto" and not self.deterministic and device.type == "cuda"

    def normalizer(self, device: torch.device) -> NormalizeFn:
        """The norm and cast for ``device``: a fused one that a backend of the ladder brings, else core's own."""
        return normalizer_of((each.spec for each in self.ladder(device)), device)

    def update(self, device: torch.device) -> UpdateFns | None:
        """An update's fused passes for ``device``, where a backend of the ladder brings some."""
        return update_of((each.spec for each in self.ladder(device)), device)

    def __getstate__(self) -> dict[str, object]:
        # Loaded kernels belong to a process: a copy or an unpickled object climbs its ladder and counts anew.
        fresh: dict[str, object] = {
            "launches": Counter(),
            "ran": {},
            "_ladders": {},
            "_loose": {},
            "_orders": {},
            "_wholes": {},
            "_products": {},
        }
        return {"name": self.name, "deterministic": self.deterministic, **fresh}

    @property
    def epoch(self) -> int:
        """Changes where the same operands may now go to another kernel."""
        return verdicts.epoch()

    def expected(self, device: torch.device) -> SyrkSpec:
        """The backend at the top of the ladder on ``device``."""
        return self.ladder(device)[0].spec


def refusal_of(spec: SyrkSpec, a: Tensor, b: Tensor | None, c: Tensor | None) -> str | None:
    """Why the backend does not take these operands, None where it does."""
    try:
        return spec.rejects(a, b, c)
    except Exception as error:
        return f"its check of operands failed: {describe_error(error)}"


def _ranked(ladder: tuple[Loaded, ...], a: Tensor, b: Tensor | None, c: Tensor | None, key: str) -> tuple[Loaded, ...]:
    """The measured fastest first, in its configuration; of shapes nobody measured, the fastest by prediction."""
    for verdict in verdicts.find(a.device, key):
        for i, (spec, fn) in enumerate(ladder):
            # A verdict may be older than the backend.
            if spec.name == verdict.kernel and _offers(spec, verdict.config, a, b, c):
                return (Loaded(spec, with_config(fn, verdict.config)), *ladder[:i], *ladder[i + 1 :])
    return _predicted(ladder, a)


def _loosened(each: Loaded, device: torch.device) -> Loaded:
    loose = loose_kernel(each.spec, device)
    return each if loose is None else Loaded(each.spec, loose)


def _microseconds(device: torch.device, key: str, names: set[str]) -> float | None:
    """Of the first of ``names`` in the verdicts."""
    return next((verdict.microseconds for verdict in verdicts.find(device, key) if verdict.kernel in names), None)


def _measured_product(
    ladder: tuple[Loaded, ...], a_BMK: Tensor, b_BKN: Tensor, out: Tensor, key: str
) -> Callable[..., Tensor] | None:
    """The backend's product that was measured to be the fastest, None for ``torch.bmm``."""
    specs = {each.spec.name: each.spec for each in ladder}
    for verdict in verdicts.find(out.device, key):
        if verdict.kernel == verdicts.BMM:
            return None
        product = specs[verdict.kernel].product if verdict.kernel in specs else None
        if product is None or verdict.config is None or verdict.config not in product.configs(a_BMK, b_BKN, out):
            continue
        fn = checked_product(
            verdict.kernel,
            product,
            verdict.config,
            dtype=out.dtype,
            columns=(b_BKN.stride(-1) != 1, out.stride(-1) != 1),
            device=out.device,
        )
        if fn is not None:
            return fn
    return None


def _offers(spec: SyrkSpec, config: str | None, a: Tensor, b: Tensor | None, c: Tensor | None) -> bool:
    return config is None or (refusal_of(spec, a, b, c) is None and config in spec.configs(a, b, c))


def _predicted(ladder: tuple[Loaded, ...], a: Tensor) -> tuple[Loaded, ...]:
    """The ladder, its backends with a prediction sorted by it among themselves."""
    batch, (m, k) = a.shape[:-2].numel(), a.shape[-2:]
    times = {each.spec.name: each.spec.predict(batch, m, k, a.device) for each in ladder}
    known = sorted(
        (each for each in ladder if times[each.spec.name] is not None), key=lambda each: times[each.spec.name] or 0.0
    )
    rest = iter(known)
    return tuple(each if times[each.spec.name] is None else next(rest) for each in ladder)


def computes(device: torch.device) -> bool:
    """Whether tensors there have values now, so that a kernel can be checked and run: not on meta, not faked."""
    return device.type != "meta" and type(torch.empty(0)) is Tensor


def _climb(device: torch.device) -> tuple[Loaded, ...]:
    """Every backend that probes, loads and computes right on ``device``; at least one.

    Raises:
        KernelUnavailableError: there is none.
    """
    loaded = []
    for rung in survey(device):
        # Under Triton's interpreter its kernel accepts CPU tensors too; nobody wants that unasked.
        if rung.spec is None or (device.type == "cpu" and rung.name != LAST_RESORT):
            continue
        outcome = load_checked(rung.spec, device)
        if not isinstance(outcome, str):
            loaded.append(Loaded(rung.spec, outcome))
    if not loaded:
        raise unavailable("auto", device, "no backend passes its check")
    if loaded[0].spec.name == _FALLBACK and torch.cuda.get_device_capability(device) >= (8, 0):
        warn_once(
            f"dmuon: Newton-Schulz runs on cuBLAS on {device}, which does twice the work of a symmetric kernel; "
            f"what is missing: {_missing(device)}. Kernels come with the extra {_EXTRAS}."
        )
    return tuple(loaded)


def _missing(device: torch.device) -> str:
    reasons = [f"{rung.name} ({rung.reason})" for rung in survey(device) if rung.reason]
    return ", ".join(reasons) or "no kernel package is installed"


def _named(name: str, device: torch.device) -> Loaded:
    rung = next((rung for rung in survey(device) if rung.name == name), None)
    if rung is None:
        raise unavailable(name, device, "no backend has this name")
    if rung.spec is None:
        raise unavailable(name, device, rung.reason)
    outcome = load_checked(rung.spec, device)
    if isinstance(outcome, str):
        raise unavailable(name, device, outcome)
    return Loaded(rung.spec, outcome)


def default_device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
