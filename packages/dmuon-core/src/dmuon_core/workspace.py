"""Newton-Schulz in half precision on a GPU: plans, their buffers, and replay as CUDA graphs.

Legend: B matrices, M rows, N columns, M <= N, both padded to multiples of 16 with zeros: padded rows and columns stay
zero in every product with X, so results are those of the logical matrices.

An arena has the plans of one stream, which run one after the other. A large plan takes memory from the allocator for as
long as it runs: between steps it serves activations, which need it most. In training it is in the same place in every
step, so that what the plan launches, captured once as a graph, can be replayed there. Small plans share a few MiB that
stay. Nothing of a step but the matrices themselves enters a graph; they are written by normalizing into the plan's
input.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_core.batching import SQUARES, least_room, padded, room, shared_room
from dmuon_core.coefficients import Triple
from dmuon_core.iteration import Backend, add_to_diagonal_, iterate
from dmuon_core.syrk.builtin import full_precision_reduction
from dmuon_core.syrk.discovery import describe_error
from dmuon_core.syrk.ladder import KernelChoice

_log = logging.getLogger("dmuon.newton_schulz")

Fill = Callable[[Sequence[Tensor]], None]
"""Writes normalized matrices into the inputs of a plan, one padded stack for each part, and zeros beyond them."""

GRAPH_CAP = 256 * 2**20
"""Bytes that capturing one plan may add to the memory of graphs. The buffers are outside; cuBLAS takes 32 MiB once."""

KEPT = 16 * 2**20
"""Bytes that an arena keeps for the plans that need no more: the allocator has small blocks in other places all the
time, and small plans, whose launches cost the host more than their products the device, are to be replayed."""

_PLANS = 64  # a stream's; beyond it the one that ran longest ago goes
_GRAPHS = 4  # of a plan, each for one place in memory
_CAPTURES = 16  # of a plan in all: products that split their sums keep counters for every captured launch
_BOUNDARY = 256  # bytes that a buffer starts at a multiple of


@dataclass(frozen=True)
class Part:
    """The matrices of a plan that lie in one stack, ``[count, m, n]``.

    Attributes:
        count, m, n: m ≤ n.
        row_major: whether a matrix's rows lie one after the other; else its columns do, as in a tall one transposed.
    """

    count: int
    m: int
    n: int
    row_major: bool

    @property
    def elements(self) -> int:
        return self.count * padded(self.m) * padded(self.n)

    def shaped(self, flat: Tensor) -> Tensor:
        """``flat`` as padded matrices of this part, in its layout."""
        m, n = padded(self.m), padded(self.n)
        return flat.view(self.count, m, n) if self.row_major else flat.view(self.count, n, m).mT

    def logical(self, padded_BMN: Tensor) -> Tensor:
        return padded_BMN[:, : self.m, : self.n]


@dataclass(frozen=True)
class Slot:
    """Where a stack of matrices is in a plan: ``[start:stop]`` of the part with the number ``part``."""

    part: int
    start: int
    stop: int


def part_of(x_BMN: Tensor) -> Part:
    """The stack ``[B, m, n]`` as a part of its own."""
    count, m, n = x_BMN.shape
    return Part(count, m, n, row_major=x_BMN.stride(2) == 1 or x_BMN.stride(1) != 1)


def arrange(stacks: Sequence[Part]) -> tuple[tuple[Part, ...], list[Slot]]:
    """Stacks of one m; those of equal n and layout joined to one part, and the slot of every stack."""
    counts: dict[tuple[int, bool], int] = {}
    starts = []
    for stack in stacks:
        key = stack.n, stack.row_major
        starts.append(counts.get(key, 0))
        counts[key] = starts[-1] + stack.count
    numbers = {key: i for i, key in enumerate(counts)}
    slots = [
        Slot(numbers[stack.n, stack.row_major], start, start + stack.count)
        for stack, start in zip(stacks, starts, strict=True)
    ]
    return tuple(Part(count, stacks[0].m, n, row_major) for (n, row_major), count in counts.items()), slots


@dataclass(frozen=True)
class Recipe:
    """What a plan computes: everything of it that does not change from step to step."""

    form: Backend
    segments: tuple[tuple[Triple, ...], ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    def products(self) -> Iterator[int]:
        """How many M×M results every Q takes, from R to itself."""
        for segment in self.segments:
            if self.form == "direct":
                yield from [2] * len(segment)
            else:
                yield 4 * len(segment) - 2

    @property
    def square_bytes(self) -> int:
        """Of one M×M buffer of the whole batch."""
        m = padded(self.parts[0].m)
        return _aligned(sum(part.count for part in self.parts) * m * m * self.dtype.itemsize)

    @property
    def stack_bytes(self) -> int:
        """Of all matrices X."""
        return sum(_aligned(part.elements * self.dtype.itemsize) for part in self.parts)

    @property
    def shares(self) -> bool:
        """Whether M×M buffers lie where X will be after the next product with Q: where that takes less memory."""
        sizes = self.form, self.stack_bytes, self.square_bytes
        return shared_room(*sizes) < room(*sizes)

    @property
    def nbytes(self) -> int:
        sizes = self.form, self.stack_bytes, self.square_bytes
        return least_room(*sizes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _BOUNDARY) * _BOUNDARY


class Buffers:
    """The buffers of a recipe, carved out of one piece of memory, and the products that write into them.

    X goes from one half of the memory to the other with every product with Q. Where the recipe shares, all M×M buffers
    but one lie in the half where X is not, and the last one, apart, takes the Q that the other half is written with.
    """

    def __init__(self, recipe: Recipe, memory: Tensor, kernel: KernelChoice) -> None:
        stack, square = recipe.stack_bytes, recipe.square_bytes
        count = SQUARES[recipe.form]
        self._recipe = recipe
        self._kernel = kernel
        half = max(stack, (count - 1) * square) if recipe.shares else stack
        starts = [0, half]
        self._stacks = [self._stacks_at(memory, start) for start in starts]
        if recipe.shares:
            # By the half that X is in: the squares of the other one.
            free = [[start + i * square for i in range(count - 1)] + [2 * half] for start in reversed(starts)]
        else:
            free = [[2 * half + i * square for i in range(count)]] * 2
        self._squares = [[self._square_at(memory, start) for start in each] for each in free]
        bounds = itertools.accumulate([0, *(part.count for part in recipe.parts)])
        self._slices = [slice(i, j) for i, j in itertools.pairwise(bounds)]
        self.rewind()

    def _stacks_at(self, memory: Tensor, start: int) -> list[Tensor]:
        dtype, stacks = self._recipe.dtype, []
        for part in self._recipe.parts:
            nbytes = part.elements * dtype.itemsize
            stacks.append(part.shaped(memory[start : start + nbytes].view(dtype)))
            start += _aligned(nbytes)
        return stacks

    def _square_at(self, memory: Tensor, start: int) -> Tensor:
        m, dtype = padded(self._recipe.parts[0].m), self._recipe.dtype
        nbytes = sum(part.count for part in self._recipe.parts) * m * m * dtype.itemsize
        return memory[start : start + nbytes].view(dtype).view(-1, m, m)

    @property
    def inputs(self) -> list[Tensor]:
        return self._stacks[0]

    def rewind(self) -> None:
        """Back to the first buffers, so that every run writes to the same addresses."""
        self._side = 0
        self._next = 0
        self._products = self._recipe.products()

    def _square(self) -> Tensor:
        self._next += 1
        return self._squares[self._side][(self._next - 1) % len(self._squares[self._side])]

    def gram(self, xs: Sequence[Tensor]) -> Tensor:
        # The last product before Q X is Q, which belongs into the last buffer.
        self._next = -next(self._products) % SQUARES[self._recipe.form]
        r_BMM = self._square()
        for x_BMN, at in zip(xs, self._slices, strict=True):
            if self._kernel.prefers_whole(x_BMN, None, x_BMN.mT):
                self._kernel.multiply(x_BMN, x_BMN.mT, out=r_BMM[at])
            else:
                self._kernel(x_BMN, out=r_BMM[at])
        return r_BMM

    def polynomial(self, r: Tensor, triple: Triple) -> Tensor:
        a, b, c = triple
        return add_to_diagonal_(self._kernel(r, None, r, alpha=c, beta=b, out=self._square(), exact=False), a)

    def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
        if self._kernel.prefers_whole(a, b, b):
            return self.whole(a, b)
        return self._kernel(a, b, out=self._square(), exact=False)

    def whole(self, a: Tensor, b: Tensor) -> Tensor:
        return self._kernel.multiply(a, b, out=self._square())

    def apply(self, q: Tensor, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._recipe.shares:
            assert q.data_ptr() == self._squares[self._side][-1].data_ptr(), "Q would be written over"
        self._side = 1 - self._side
        outs = self._stacks[self._side]
        for x_BMN, out_BMN, at in zip(xs, outs, self._slices, strict=True):
            self._kernel.multiply(q[at], x_BMN, out=out_BMN)
        return outs


class Plan:
    """A recipe, run eagerly where its memory was not of late, captured where it is again, and from then on replayed."""

    def __init__(
        self, recipe: Recipe, kernel: KernelChoice, capture: Capture | None, memory: Tensor, *, lent: bool
    ) -> None:
        self.recipe = recipe
        self.kernel = kernel
        self.normalize = kernel.normalizer(memory.device)
        self._memory = memory
        self._lent = lent
        self._buffers = Buffers(recipe, self._memory, kernel)
        self._capture = capture
        self._graphs: OrderedDict[int, torch.cuda.CUDAGraph] = OrderedDict()
        self._places: deque[int] = deque(maxlen=_GRAPHS)
        self._captures = 0
        self._launches: Counter[str] = Counter()
        self._results: Sequence[Tensor] = ()

    @property
    def place(self) -> int:
        """Where its memory is now."""
        return self._memory.data_ptr()

    def take_memory(self) -> None:
        """Before a run, on the current stream."""
        storage = self._memory.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self._memory.numel())

    def give_back(self) -> None:
        """Return lent memory to the allocator. The views of it stay, for wherever it will be."""
        if self._lent:
            self._memory.untyped_storage().resize_(0)

    def run(self, fill: Fill) -> list[Tensor]:
        """The factors of every part, in the plan's memory: to be read before it is given back."""
        fill(self._buffers.inputs)
        place = self.place
        if place in self._places and self._capture is not None and self._captures < _CAPTURES:
            self._try_capture(self._capture, place)
        if place in self._graphs:
            self._graphs.move_to_end(place)
            self._graphs[place].replay()
            self.kernel.launches.update(self._launches)
        else:
            self._results = self._iterate()
            self._places.append(place)
        return [part.logical(stack) for part, stack in zip(self.recipe.parts, self._results, strict=True)]

    def _iterate(self) -> Sequence[Tensor]:
        self._buffers.rewind()
        with full_precision_reduction():
            return iterate(self.recipe.form, self._buffers.inputs, self.recipe.segments, self._buffers)

    def _try_capture(self, capture: Capture, place: int) -> None:
        before = Counter(self.kernel.launches)
        self._places.remove(place)
        self._captures += 1
        try:
            self._graphs[place] = capture(self._iterate)
        except Exception as error:
            _log.warning("Newton-Schulz of %s stays without a CUDA graph: %s", self._describe(), describe_error(error))
            self._capture = None
            self.kernel.launches.subtract(self.kernel.launches - before)
            return
        self._launches = self.kernel.launches - before
        self.kernel.launches.subtract(self._launches)
        if len(self._graphs) > _GRAPHS:
            self._graphs.popitem(last=False)

    def _describe(self) -> str:
        return " + ".join(f"{part.count}×{part.m}×{part.n}" for part in self.recipe.parts)


class Capture:
    """Captures on a stream of its own, into memory that all graphs of an arena share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open()

    def _open(self) -> None:
        self._stream = torch.cuda.Stream(self._device)
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def __call__(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """The graph of what ``run`` launches.

        Raises:
            RuntimeError: the capture failed or took more memory than :data:`GRAPH_CAP`.
        """
        if not self._graphs:
            # A pool dies with the last graph in it, and torch asserts that a capture's pool is alive or new.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        reserved = torch.cuda.memory_reserved(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
        except BaseException:
            self._recover()
            raise
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        taken = torch.cuda.memory_reserved(self._device) - reserved
        if taken > GRAPH_CAP:
            graph.reset()
            raise RuntimeError(f"the graph took {taken / 2**20:.0f} MiB, {GRAPH_CAP / 2**20:.0f} are allowed")
        self._graphs.add(graph)
        return graph

    def _recover(self) -> None:
        """After a capture that broke off, torch holds the generator and the pool for capturing still.

        The next random number would raise: the generator goes on with a copy of its state, which is not.
        """
        generator = torch.cuda.default_generators[self._device.index]
        generator.graphsafe_set_state(generator.clone_state())
        self._open()


class Arena:
    """The plans of one stream, which run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self._device = device
        self._plans: OrderedDict[object, Plan] = OrderedDict()
        self._capture: Capture | None = None
        self._kept: Tensor | None = None
        self._runs = False

    @contextlib.contextmanager
    def running(self, recipe: Recipe, kernel: KernelChoice, *, graphs: bool) -> Iterator[Plan]:
        """The plan of a recipe, with its memory.

        Raises:
            RuntimeError: inside the context of another one, whose factors would be written over.
        """
        with self.lock:
            if self._runs:
                raise RuntimeError("Newton-Schulz is running on this stream: leave its `factors` before the next ones")
            plan = self.plan(recipe, kernel, graphs=graphs)
            self._runs = True
            try:
                plan.take_memory()
                yield plan
            finally:
                plan.give_back()
                self._runs = False

    def plan(self, recipe: Recipe, kernel: KernelChoice, *, graphs: bool) -> Plan:
        """The plan of a recipe; the same one as long as it is in use."""
        key = (recipe, id(kernel), kernel.epoch, graphs)
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        if graphs and self._capture is None:
            self._capture = Capture(self._device)
        with torch.inference_mode(False):  # it outlives one that its first use may be in
            memory, lent = self._memory_for(recipe.nbytes)
            plan = Plan(recipe, kernel, self._capture if graphs else None, memory, lent=lent)
        self._plans[key] = plan
        if len(self._plans) > _PLANS:
            self._plans.popitem(last=False)
        return plan

    def _memory_for(self, nbytes: int) -> tuple[Tensor, bool]:
        """Memory for a plan, and whether it is lent."""
        if nbytes > KEPT:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device), True
        if self._kept is None:
            self._kept = torch.empty(KEPT, dtype=torch.uint8, device=self._device)
        return self._kept, False


_arenas: dict[tuple[torch.device, int], Arena] = {}
_opening = threading.Lock()


def _arena(device: torch.device) -> Arena:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    with _opening:
        if (device, stream) not in _arenas:
            _arenas[device, stream] = Arena(device)
        return _arenas[device, stream]


def forget() -> None:
    """Let go of all memory, plans and graphs; later calls make them anew. Not while a factor is in use."""
    with _opening:
        _arenas.clear()


@contextlib.contextmanager
def factors(
    matrices: Sequence[Tensor],
    *,
    form: Backend,
    segments: tuple[tuple[Triple, ...], ...],
    dtype: torch.dtype,
    kernel: KernelChoice,
    graphs: bool,
) -> Iterator[list[Tensor]]:
    """The orthogonal factors of stacks ``[B, m, n]`` with one m ≤ n, in memory that is theirs inside the context only.

    Args:
        matrices: on one device, any dtype and strides.
        form, segments: the iteration.
        dtype: of X, R and Q: float16 or bfloat16.
        kernel: of the symmetric products.
        graphs: whether to replay CUDA graphs.
    """
    parts, slots = arrange([part_of(x) for x in matrices])

    def in_place(stacks: Sequence[Tensor]) -> list[Tensor]:
        return [stacks[slot.part][slot.start : slot.stop] for slot in slots]

    with planned(Recipe(form, segments, dtype, parts), matrices[0].device, kernel=kernel, graphs=graphs) as plan:
        yield in_place(plan.run(lambda inputs: plan.normalize(matrices, in_place(inputs))))


@contextlib.contextmanager
def planned(recipe: Recipe, device: torch.device, *, kernel: KernelChoice, graphs: bool) -> Iterator[Plan]:
    """The plan of ``recipe`` on the current stream; what it computes may be read inside the context only."""
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # What the user captures must own its memory.
            memory = torch.empty(recipe.nbytes, dtype=torch.uint8, device=device)
            yield Plan(recipe, kernel, None, memory, lent=False)
            return
        with _arena(device).running(recipe, kernel, graphs=graphs and device.type == "cuda") as plan:
            yield plan
