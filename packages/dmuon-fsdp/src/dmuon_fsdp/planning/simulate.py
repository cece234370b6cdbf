"""Bytes and optimizer time of a model on a mesh of any size, predicted from shapes: no process group, no GPU.

Owners come from the planner itself and seconds from core's cost model, so a figure here is what the plan of a real run
would say. It is a prediction: bytes follow from the plan, seconds from :class:`Assumptions`.

Bytes of communication are those that a rank *receives* in a broadcast or all-gather and *sends* in a reduce,
reduce-scatter or all-reduce, by algorithms that move every byte over each rank once (rings): a rank takes part in a
broadcast or reduce with the whole buffer unless it is its owner.

Not counted: FSDP2's activations and gathered weights, gradients, the 256-byte alignment and presence flags of buckets,
and latency. A collective's latency grows with its ranks, so seconds of communication are a lower bound.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil, floor, log10, prod
from operator import add
from statistics import fmean
from typing import Any

from dmuon_core.cost import H200, DeviceModel, muon_seconds
from dmuon_fsdp.planning.assign import Item, assign
from dmuon_fsdp.planning.options import PlanningOptions
from dmuon_fsdp.planning.published import ModelShapes, Shape

_FP32_BYTES = 4


@dataclass(frozen=True)
class Mesh:
    """``replicate`` copies of ``shard`` ranks each; rank = replicate coordinate · shard + shard coordinate."""

    shard: int
    replicate: int = 1

    def __post_init__(self) -> None:
        if self.shard < 1 or self.replicate < 1:
            raise ValueError(f"a mesh needs positive sizes, got replicate={self.replicate}, shard={self.shard}")

    @classmethod
    def of(cls, ranks: int, replicate: int = 1) -> Mesh:
        """The mesh of ``ranks`` in ``replicate`` copies.

        Raises:
            ValueError: ``ranks`` is not a positive multiple of ``replicate``.
        """
        if ranks < 1 or replicate < 1 or ranks % replicate:
            raise ValueError(f"{ranks} ranks cannot be divided into {replicate} copies of equal size")
        return cls(ranks // replicate, replicate)

    @property
    def ranks(self) -> int:
        return self.shard * self.replicate


@dataclass(frozen=True)
class Assumptions:
    """What a prediction rests on beside the shapes. Bandwidths are bytes/s that a rank sends, and receives, at a time.

    A matrix is never split: its owner orthogonalizes it alone, and ranks beyond the number of matrices own none.

    Attributes:
        device: what core's cost model knows of a GPU; owners are always planned for core's default device.
        device_memory: bytes of memory of a rank; a mesh whose ranks hold more at rest is marked.
        compute_bytes: bytes an element of weights in forward and backward, and of what is broadcast.
        reduce_bytes: bytes an element of gradients in a reduction.
        master_bytes: bytes an element of the weight that the optimizer steps.
        momentum_bytes: bytes an element of Muon's momentum.
        adamw_state_bytes: bytes an element of AdamW's two moments.
        adamw_step_bytes: bytes of memory traffic an element of fused AdamW: 4 tensors read, 3 written, in fp32.
        ranks_per_node: consecutive ranks that share a node.
        node_bandwidth: within a node. On two H200s an all-gather reached 250 and a coalesced broadcast 333 GB/s.
        network_bandwidth: of one rank's network port. A group with k ranks in each node uses k ports, up to
            ``node_bandwidth``.
        free_after_forward: weights are gathered again for the backward (Z3), in both runtimes.
        planning: options of the planner.
    """

    device: DeviceModel = H200
    device_memory: float = 141e9
    compute_bytes: int = 2
    reduce_bytes: int = 2
    master_bytes: int = 4
    momentum_bytes: int = 4
    adamw_state_bytes: int = 8
    adamw_step_bytes: int = 28
    ranks_per_node: int = 8
    node_bandwidth: float = 300e9
    network_bandwidth: float = 45e9
    free_after_forward: bool = True
    planning: PlanningOptions = field(default_factory=PlanningOptions)

    @property
    def adamw_bytes(self) -> int:
        """Bytes at rest of an element that AdamW steps."""
        return self.master_bytes + self.adamw_state_bytes

    def adamw_seconds(self, elements: int) -> float:
        """Fused AdamW on ``elements`` of one rank."""
        return elements * self.adamw_step_bytes / self.device.bandwidth

    def bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes/s a rank of a group of ``ranks`` that stand ``stride`` apart."""
        if ranks * stride <= self.ranks_per_node:
            return self.node_bandwidth
        ports = min(ranks, max(1, self.ranks_per_node // stride))
        return min(self.node_bandwidth, ports * self.network_bandwidth)

    def lines(self) -> list[str]:
        """The assumptions as text, each with its unit."""
        gpu = self.device
        return [
            f"GPU: {gpu.flops / 1e12:g} TFLOP/s in matrix products, {gpu.bandwidth / 1e12:g} TB/s and "
            f"{self.device_memory / 1e9:g} GB of memory, {gpu.sms} SMs, {gpu.launch * 1e6:g} µs a launch",
            f"GB/s a rank: {self.node_bandwidth / 1e9:g} in a node of {self.ranks_per_node} ranks, "
            f"{self.network_bandwidth / 1e9:g} a network port, one port a rank; no latency, nothing overlaps",
            f"bytes an element: weights {self.compute_bytes} in compute and {self.master_bytes} at the optimizer, "
            f"gradients {self.reduce_bytes} in reductions",
            f"bytes an element: momentum {self.momentum_bytes}, AdamW's moments {self.adamw_state_bytes}, "
            f"memory traffic of fused AdamW {self.adamw_step_bytes}",
            "one micro-batch a step; "
            + ("weights are gathered again for the backward (Z3)" if self.free_after_forward else "weights stay (Z2)"),
            "a matrix is never split over ranks; data parallelism alone (no tensor, expert or pipeline parallelism)",
            "publishing new weights to replicas hides in the next forward, so it is no part of step or ms",
        ]


@dataclass(frozen=True)
class Spread:
    """A quantity over ranks."""

    low: float
    mean: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), fmean(values), max(values))


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank moves in a step, by stage.

    Attributes:
        forward: weights for the forward, within the shard group.
        backward: weights again for the backward (Z3).
        reduce_shard: gradients within the shard group.
        reduce_replica: gradients between replicas.
        publish: new weights from owners to their replicas.
    """

    forward: float = 0.0
    backward: float = 0.0
    reduce_shard: float = 0.0
    reduce_replica: float = 0.0
    publish: float = 0.0

    @property
    def stages(self) -> tuple[float, ...]:
        return self.forward, self.backward, self.reduce_shard, self.reduce_replica, self.publish

    @property
    def total(self) -> float:
        return sum(self.stages)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(add, self.stages, other.stages))

    @classmethod
    def each(cls, how: Callable[[Sequence[float]], float], ranks: Sequence[Traffic]) -> Traffic:
        """``how`` over ranks, stage by stage."""
        return cls(*map(how, zip(*(rank.stages for rank in ranks), strict=True)))

    def seconds(self, mesh: Mesh, assumptions: Assumptions) -> float:
        """Seconds at full bandwidth of everything but the publishing."""
        shard = assumptions.bandwidth(mesh.shard, 1)
        replica = assumptions.bandwidth(mesh.replicate, mesh.shard)
        return (self.forward + self.backward + self.reduce_shard) / shard + self.reduce_replica / replica


@dataclass(frozen=True)
class Prediction:
    """One model on one mesh. Bytes at rest and moved, and seconds, are a rank's.

    Attributes:
        matrices: matrices of an owner.
        idle_ranks: ranks that own none.
        rest_bytes: DMuon's master, momentum and own bucket, replicas' bucket, and FSDP2's shard of the other weights
            with AdamW's moments.
        fsdp2_rest_bytes: FSDP2's shard of all weights with AdamW's moments, on the fullest rank.
        traffic: under DMuon, other weights by FSDP2 included; every stage on the rank that moves most in it, which
            decides how long the stage takes.
        mean_traffic: the mean over ranks.
        fsdp2_traffic: with FSDP2 alone, equal on all ranks.
        muon_seconds: momentum, Newton-Schulz and apply of an owner.
        largest_matrix_seconds: of the costliest matrix alone, below which no plan gets the slowest owner.
        adamw_seconds: AdamW on the other weights, on the rank with the largest shards.
        fsdp2_step_seconds: fused AdamW on all weights, on the rank with the largest shards.
        communication_seconds: of ``traffic`` without the publishing.
        fsdp2_communication_seconds: of ``fsdp2_traffic``.
        publish_seconds: of the publishing, hidden in the next forward.
        device_memory: bytes of a rank's memory.
    """

    model: str
    mesh: Mesh
    parameters: int
    dedicated_parameters: int
    matrices: Spread
    idle_ranks: int
    rest_bytes: Spread
    fsdp2_rest_bytes: float
    traffic: Traffic
    mean_traffic: Traffic
    fsdp2_traffic: Traffic
    muon_seconds: Spread
    largest_matrix_seconds: float
    adamw_seconds: float
    fsdp2_step_seconds: float
    communication_seconds: float
    fsdp2_communication_seconds: float
    publish_seconds: float
    device_memory: float

    @property
    def imbalance(self) -> float:
        """The slowest owner over the mean of all ranks, less one."""
        return self.muon_seconds.high / self.muon_seconds.mean - 1 if self.muon_seconds.mean else 0.0

    @property
    def step_seconds(self) -> float:
        """Predicted optimizer step: the slowest owner, then AdamW."""
        return self.muon_seconds.high + self.adamw_seconds

    def at_rest(self, held: float) -> str:
        """``held`` bytes in GB, marked where the device has less."""
        return _giga(held) + ("!" if held > self.device_memory else "")

    def as_dict(self) -> dict[str, Any]:
        """Every field and derived figure, for JSON."""
        return asdict(self) | {"imbalance": self.imbalance, "step_seconds": self.step_seconds}


def simulate(model: ModelShapes, mesh: Mesh, assumptions: Assumptions | None = None) -> Prediction:
    """Plan ``model`` on ``mesh`` and predict what a step moves, holds and takes.

    Raises:
        ValueError: the model has no matrices, or the planner finds no plan under ``assumptions.planning``.
    """
    given = assumptions or Assumptions()
    owned = _owned_shapes(model.matrices, mesh, given.planning)
    # FSDP2's first rank has the largest shards: of every weight the others have as much or less.
    rest_shard = _chunk_numel(model.others.values(), mesh.shard)
    full_shard = rest_shard + _chunk_numel(model.matrices.values(), mesh.shard)
    seconds = _seconds_by_rank(owned, given.device)
    traffic = _traffic_by_rank(owned, rest_shard, mesh, given)
    fsdp2 = _fsdp2_traffic(full_shard, mesh, given)
    busiest = Traffic.each(max, traffic)
    return Prediction(
        model=model.name,
        mesh=mesh,
        parameters=model.parameters,
        dedicated_parameters=model.dedicated_parameters,
        matrices=Spread.of([sum(shapes.values()) for shapes in owned]),
        idle_ranks=sum(not shapes for shapes in owned),
        rest_bytes=Spread.of(_rest_bytes_by_rank(owned, rest_shard, mesh, given)),
        fsdp2_rest_bytes=full_shard * given.adamw_bytes,
        traffic=busiest,
        mean_traffic=Traffic.each(fmean, traffic),
        fsdp2_traffic=fsdp2,
        muon_seconds=Spread.of(seconds),
        largest_matrix_seconds=max(
            muon_seconds([(shape[0], shape[1])], device=given.device) for shape in set(model.matrices.values())
        ),
        adamw_seconds=given.adamw_seconds(rest_shard),
        fsdp2_step_seconds=given.adamw_seconds(full_shard),
        communication_seconds=busiest.seconds(mesh, given),
        fsdp2_communication_seconds=fsdp2.seconds(mesh, given),
        publish_seconds=busiest.publish / given.bandwidth(mesh.replicate, mesh.shard),
        device_memory=given.device_memory,
    )


def _owned_shapes(matrices: Mapping[str, Shape], mesh: Mesh, options: PlanningOptions) -> list[Counter[Shape]]:
    """How many matrices of each shape every rank owns, by the planner."""
    if not matrices:
        raise ValueError("a model without matrices has nothing to plan")
    items = [Item(name, shape, prod(shape) * _FP32_BYTES, _boundary(name)) for name, shape in matrices.items()]
    owned: list[Counter[Shape]] = [Counter() for _ in range(mesh.ranks)]
    for name, rank in assign(items, mesh.ranks, options).items():
        owned[rank][matrices[name]] += 1
    return owned


def _boundary(name: str) -> str:
    """``model.layers.3`` for a weight of that block, else the weight's own module."""
    block = re.match(r".*?\blayers\.\d+", name)
    return block.group() if block else name.rpartition(".")[0]


def _seconds_by_rank(owned: Sequence[Counter[Shape]], device: DeviceModel) -> list[float]:
    # Ranks with equal shapes take equal time, and at thousands of ranks most are alike.
    known: dict[frozenset[tuple[Shape, int]], float] = {}
    seconds = []
    for shapes in owned:
        key = frozenset(shapes.items())
        if key not in known:
            known[key] = muon_seconds([(shape[0], shape[1]) for shape in shapes.elements()], device=device)
        seconds.append(known[key])
    return seconds


def _traffic_by_rank(owned: Sequence[Counter[Shape]], rest_shard: int, mesh: Mesh, given: Assumptions) -> list[Traffic]:
    """Of the dedicated matrices under DMuon and the other weights under FSDP2."""
    own, columns = _elements(owned, mesh)
    others = _fsdp2_traffic(rest_shard, mesh, given)
    traffic = []
    for rank in range(mesh.ranks):
        column = columns[rank % mesh.shard]
        foreign, peers = sum(own) - column, column - own[rank]
        weights = foreign * given.compute_bytes
        dedicated = Traffic(
            forward=weights,
            backward=weights if given.free_after_forward else 0,
            reduce_shard=foreign * given.reduce_bytes,
            reduce_replica=peers * given.reduce_bytes,
            publish=peers * given.compute_bytes,
        )
        traffic.append(dedicated + others)
    return traffic


def _fsdp2_traffic(chunk: int, mesh: Mesh, given: Assumptions) -> Traffic:
    """All-gathers, reduce-scatter and all-reduce of weights whose shards have ``chunk`` elements together."""
    foreign = (mesh.shard - 1) * chunk
    weights = foreign * given.compute_bytes
    return Traffic(
        forward=weights,
        backward=weights if given.free_after_forward else 0,
        reduce_shard=foreign * given.reduce_bytes,
        reduce_replica=2 * (mesh.replicate - 1) / mesh.replicate * chunk * given.reduce_bytes,
    )


def _rest_bytes_by_rank(
    owned: Sequence[Counter[Shape]], rest_shard: int, mesh: Mesh, given: Assumptions
) -> list[float]:
    own, columns = _elements(owned, mesh)
    return [
        elements * (given.master_bytes + given.momentum_bytes)
        + columns[rank % mesh.shard] * given.compute_bytes
        + rest_shard * given.adamw_bytes
        for rank, elements in enumerate(own)
    ]


def _elements(owned: Sequence[Counter[Shape]], mesh: Mesh) -> tuple[list[int], list[int]]:
    """Elements that each rank owns, and that each shard coordinate owns over all replicas."""
    own = [sum(count * prod(shape) for shape, count in shapes.items()) for shapes in owned]
    return own, [sum(own[shard :: mesh.shard]) for shard in range(mesh.shard)]


def _chunk_numel(shapes: Iterable[Shape], shard: int) -> int:
    """Elements of FSDP2's largest shards together: it cuts rows, and pads every rank's shard to the largest."""
    return sum(count * ceil(shape[0] / shard) * prod(shape[1:]) for shape, count in Counter(shapes).items())


# --- text


def table(predictions: Sequence[Prediction], assumptions: Assumptions) -> str:
    """Three plain-text tables, the optimizer step, bytes moved and bytes at rest, under their assumptions."""
    lines = ["A prediction from shapes and a cost model, not a measurement. It assumes:"]
    lines += [f"  - {line}" for line in assumptions.lines()]
    lines += ["", "Optimizer step, ms: slowest, mean and largest are Muon's, the rest of DMuon's step is AdamW's"]
    lines += _rows(_STEP, predictions)
    lines += ["", "Moved in a step, GB a rank and ms: every stage on the rank that moves most in it"]
    lines += _rows(_MOVED, predictions)
    lines += ["", "At rest, GB a rank; ! does not fit the device"]
    lines += _rows(_AT_REST, predictions)
    return "\n".join(lines)


_Columns = Mapping[str, Callable[[Prediction], str]]

_CASE: _Columns = {
    "model": lambda one: one.model,
    "ranks": lambda one: str(one.mesh.ranks),
    "R×S": lambda one: f"{one.mesh.replicate}×{one.mesh.shard}",
}
_STEP: _Columns = {
    **_CASE,
    "matrices": lambda one: f"{one.matrices.low:.0f}–{one.matrices.high:.0f}",
    "slowest": lambda one: _milli(one.muon_seconds.high),
    "mean": lambda one: _milli(one.muon_seconds.mean),
    "imbalance": lambda one: f"{100 * one.imbalance:.1f} %",
    "largest": lambda one: _milli(one.largest_matrix_seconds),
    "AdamW part": lambda one: _milli(one.adamw_seconds),
    "step": lambda one: _milli(one.step_seconds),
    "fused AdamW": lambda one: _milli(one.fsdp2_step_seconds),
    "ratio": lambda one: f"{one.step_seconds / one.fsdp2_step_seconds:.2f}",
}
_MOVED: _Columns = {
    **_CASE,
    "forward": lambda one: _giga(one.traffic.forward),
    "backward": lambda one: _giga(one.traffic.backward),
    "reduce": lambda one: _giga(one.traffic.reduce_shard),
    "replicas": lambda one: _giga(one.traffic.reduce_replica),
    "publish": lambda one: _giga(one.traffic.publish),
    "total": lambda one: _giga(one.traffic.total),
    "FSDP2": lambda one: _giga(one.fsdp2_traffic.total),
    "ratio": lambda one: _ratio(one.traffic.total, one.fsdp2_traffic.total),
    "ms": lambda one: _milli(one.communication_seconds),
    "FSDP2 ms": lambda one: _milli(one.fsdp2_communication_seconds),
    "publish ms": lambda one: _milli(one.publish_seconds),
}
_AT_REST: _Columns = {
    **_CASE,
    "least": lambda one: one.at_rest(one.rest_bytes.low),
    "mean": lambda one: one.at_rest(one.rest_bytes.mean),
    "most": lambda one: one.at_rest(one.rest_bytes.high),
    "FSDP2": lambda one: one.at_rest(one.fsdp2_rest_bytes),
    "most/FSDP2": lambda one: _ratio(one.rest_bytes.high, one.fsdp2_rest_bytes),
    "own none": lambda one: str(one.idle_ranks),
}


def _rows(columns: _Columns, predictions: Sequence[Prediction]) -> list[str]:
    """Aligned rows under their heads, the first column to the left, the others to the right."""
    cells = [list(columns), *([cell(one) for cell in columns.values()] for one in predictions)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]


def _milli(seconds: float) -> str:
    return _short(seconds * 1e3)


def _giga(amount: float) -> str:
    return _short(amount / 1e9)


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}" if theirs else "–"


def _short(value: float) -> str:
    """Three digits, four decimals at most."""
    digits = 2 - floor(log10(value)) if value else 0
    return f"{value:.{min(max(digits, 0), 4)}f}"
