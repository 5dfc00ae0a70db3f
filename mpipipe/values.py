"""Every value that crosses a room: frozen, plain, comparable, JSON.

    Graph -> Costs -> Plan -> Schedule -> Program -> Timeline -> Report

Units: seconds (`_s`), bytes (`_bytes`). Indices: `stage`, `rank`, `micro` (micro-batch).
No torch, no MPI, no files: a value made on a cluster can be read and compared on a laptop.

Invariants
  1. Bits are a function of `Numerics` alone; a `Layout` never changes them, but where `Numerics.reduce` is
     fast: then its replicas do, and with unlike numbers of them its cuts and its schedule.
  2. A `Schedule` is order only: no times, no messages. A `Program` is a schedule with its
     messages written in. A `Timeline` is a program with times, predicted or measured alike.
  3. `from_json(type, to_json(value)) == value` for every value that is saved.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter

from mpipipe.errors import PlanError

T = TypeVar("T")

DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


class Value:
    """Base of the saved values: an unknown or missing key in their JSON is an error."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


def to_json(value: object, indent: int | None = 1) -> str:
    """Text form of any value below; floats keep every bit."""
    kind: Any = type(value)
    return _adapter(kind).dump_json(value, indent=indent).decode()


def from_json(kind: type[T], text: str | bytes) -> T:
    """Inverse of `to_json`. Raises pydantic.ValidationError that names the exact place."""
    wanted: Any = kind
    found: T = _adapter(wanted).validate_json(text)
    return found


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Making one takes a hundred times as long as using it."""
    return TypeAdapter(kind)


def digest(*parts: str) -> str:
    """sha256 of some texts, as hex; what ranks compare before the first message."""
    h = hashlib.sha256()
    for part in parts:
        h.update(f"{len(part)}:".encode() + part.encode())
    return h.hexdigest()


# -- what the model is ------------------------------------------------------------------------


Split = Literal["train", "val"]


@dataclass(frozen=True)
class TensorSpec(Value):
    shape: tuple[int, ...]
    dtype: str  # a key of DTYPE_BYTES

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def text(self) -> str:
        """For people: float32[8, 16]; of a number float32[]."""
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Node(Value):
    """One operator of the captured graph. Its name is canonical: module path, operator and
    ordinal, so it does not change with the machine, the mode or the batch size."""

    name: str  # "blocks.0.attn/linear.1"
    op: str  # "aten.linear.default"
    settings: str  # its other arguments; "('%0', 0.1)": %i is the i-th distinct tensor that it reads
    inputs: tuple[str, ...]  # names of nodes and of batch inputs
    outputs: tuple[TensorSpec, ...]
    params: tuple[str, ...]  # canonical names of the parameters and buffers it reads
    group: int  # index of its atomic group; -1 = replicated on every stage that needs it
    module_path: str


@dataclass(frozen=True)
class Tie(Value):
    """A parameter that several groups use. Its owner is the stage of the first use."""

    param: str
    nbytes: int
    groups: tuple[int, ...]  # one entry per use, ascending


@dataclass(frozen=True)
class Graph(Value):
    """The model with its loss, for ONE micro-batch, in topological order."""

    nodes: tuple[Node, ...]
    groups: tuple[str, ...]  # name of each atomic group; a cut falls between groups only
    inputs: dict[str, TensorSpec]  # the batch, by key
    params: dict[str, TensorSpec]  # canonical order: the order of registration
    buffers: dict[str, TensorSpec]
    ties: tuple[Tie, ...]

    @property
    def hash(self) -> str:
        return digest(to_json(self, indent=None))


# -- what the machine is, and what the model costs on it ---------------------------------------


@dataclass(frozen=True)
class Link(Value):
    """latency_s and bytes_per_s are those of one message while no other is on its way (Hockney 1994)."""

    latency_s: float
    bytes_per_s: float
    contention: float = 1.0  # times as long for the bytes of each while all of a node talk at this level

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bytes_per_s if nbytes else 0.0

    def shared(self, talking: float) -> Link:
        """While this share of the ranks of a node talks."""
        return Link(self.latency_s, self.bytes_per_s / max(1.0, self.contention * talking))


@dataclass(frozen=True)
class Device(Value):
    """What one rank computes on."""

    kind: str  # "AMD EPYC 9654, AVX512"
    speed: float  # relative to the device on which the costs were taken; 1.0 = the same
    memory_bytes: int  # this rank's share
    threads: int
    base_bytes: int = 0  # of it resident before any weight: code and buffers of the libraries, the graph
    alone: float = 1.0  # how many times as fast it is while others with which it shares cores wait


LEVELS = ("core", "numa", "node", "switch")  # what two ranks share at the finest


@dataclass(frozen=True)
class Cluster(Value):
    """Nodes, NUMA domains and cores are numbered through, and lie one in the other. Where no two ranks share
    a core, or a domain is a whole node, or nobody knows, their numbers are left out."""

    devices: tuple[Device, ...]  # by rank
    node_of_rank: tuple[int, ...]
    links: dict[str, Link]  # of the levels that occur, by name
    numa_of_rank: tuple[int, ...] = ()
    core_of_rank: tuple[int, ...] = ()

    @property
    def spanned(self) -> tuple[str, ...]:
        """The levels at which two of its ranks are linked, the finest first."""
        finer: Sequence[int] = range(len(self.devices))
        found = []
        units = (self.core_of_rank, self.numa_of_rank, self.node_of_rank, (0,) * len(self.devices))
        for level, unit in zip(LEVELS, units, strict=True):
            if unit:
                if len(set(zip(unit, finer, strict=True))) > len(set(unit)):
                    found.append(level)
                finer = unit
        return tuple(found)

    def level(self, a: int, b: int) -> str:
        """The finest that holds both ranks; "switch": they are on two nodes."""
        if self.node_of_rank[a] != self.node_of_rank[b]:
            return "switch"
        if self.core_of_rank and self.core_of_rank[a] == self.core_of_rank[b]:
            return "core"
        return "numa" if self.numa_of_rank and self.numa_of_rank[a] == self.numa_of_rank[b] else "node"

    def link(self, a: int, b: int) -> Link:
        """The link between ranks `a` and `b`; free within one rank. Raises PlanError where there is none."""
        return Link(0.0, math.inf) if a == b else self.link_at(self.level(a, b))

    def link_at(self, level: str) -> Link:
        """The link of a level. Where it is not given: of the next coarser one, as for a rank that is thought
        of, or of the coarsest there is. Raises PlanError where there is none."""
        known = [level for level in LEVELS if level in self.links]
        at = LEVELS.index(level)
        if not known:
            raise PlanError(
                f"ranks are linked at the level '{level}', but the cluster has no links; give links.{level}"
            )
        return self.links[next((level for level in known if LEVELS.index(level) >= at), known[-1])]

    def in_order(self, order: Sequence[int]) -> Cluster:
        """Of the ranks `order` alone, which are numbered anew: 0 is the one that comes first."""

        def picked(x: tuple[T, ...]) -> tuple[T, ...]:
            return tuple(x[rank] for rank in order) if x else x

        node, numa, core = map(picked, (self.node_of_rank, self.numa_of_rank, self.core_of_rank))
        return Cluster(picked(self.devices), node, self.links, numa, core)

    def slowed(self, factors: Mapping[int, float]) -> Cluster:
        """With ranks that take so many times as long as now."""
        found = list(self.devices)
        for rank, factor in factors.items():
            found[rank] = replace(found[rank], speed=found[rank].speed / factor)
        return replace(self, devices=tuple(found))

    def loaded(self, *orders: Sequence[int]) -> Cluster:
        """With links as slow as they are while all neighbours in each of `orders` talk at once: contention
        counts by the share of a node's ranks that have a neighbour at this level, on the node where it is
        largest."""
        if all(link.contention == 1.0 for link in self.links.values()):
            return self
        talking: dict[str, set[int]] = {level: set() for level in LEVELS}
        for order in orders:
            for a, b in itertools.pairwise(order):
                if a != b:
                    talking[self.level(a, b)] |= {a, b}
        there = Counter(self.node_of_rank[rank] for rank in set().union(*orders))

        def share(ranks: set[int]) -> float:
            found = Counter(self.node_of_rank[rank] for rank in ranks)
            return max((n / there[node] for node, n in found.items()), default=0.0)

        links = {level: link.shared(share(talking[level])) for level, link in self.links.items()}
        return replace(self, links=links)


@dataclass(frozen=True)
class GroupCost(Value):
    """One atomic group, for one micro-batch, on a device of speed 1."""

    name: str
    fwd_s: float
    bwd_input_s: float
    bwd_weight_s: float
    param_bytes: int  # its parameters alone; gradients and state follow from `Costs`
    stash_bytes: int  # kept from F to B, not counting parameters
    workspace_bytes: int  # live only while the group runs
    act_bytes: int  # crosses forward when the cut is after this group
    grad_bytes: int  # crosses backward there
    update_s: float = 0.0  # once per step, beside what `Costs` says of each byte of its parameters
    spread: float = 0.0  # relative, of its repeated timings; 0 = that of all groups
    selective_share: float = 0.0  # of fwd_s: what selective recomputation takes
    selective_bytes: int = 0  # of stash_bytes: what it makes again
    split_s: float = 0.0  # beside these seconds, by a backward in two; counted with W
    at_work_bytes: int = 0  # of workspace_bytes what is tensors, without the gradients that come to it
    received_bytes: int = 0  # of stash_bytes: what earlier groups have made, and not kept themselves
    kept_bytes: int = 0  # of act_bytes: what is in the stash of this group or of an earlier one
    act_parts: tuple[int, ...] = ()  # act_bytes tensor by tensor, where there are several
    grad_parts: tuple[int, ...] = ()
    waiting_bytes: int = -1  # kept from I to W of a backward in two; -1: the whole stash
    waiting_received_bytes: int = 0  # of waiting_bytes: what earlier groups have made, and not kept so long
    waiting_grad_bytes: int = 0  # of waiting_bytes: gradients that come, but for copies of those of messages
    at_once_bytes: int = 0  # of param_bytes: trained, and their gradients come with I of a backward in two
    cast_bytes: int = 0  # copies of its parameters for products in a shorter dtype, once for a whole step

    def __post_init__(self) -> None:
        if self.waiting_bytes < 0:
            object.__setattr__(self, "waiting_bytes", self.stash_bytes)
            object.__setattr__(self, "waiting_received_bytes", self.received_bytes)

    @property
    def seconds(self) -> float:
        return self.fwd_s + self.bwd_input_s + self.bwd_weight_s


# what changes with the samples of a micro-batch; `act_parts` and `grad_parts` are shares of two of them
OF_SAMPLES_S = ("fwd_s", "bwd_input_s", "bwd_weight_s", "split_s")
OF_SAMPLES_BYTES = tuple(
    f.name
    for f in fields(GroupCost)
    if f.name.endswith("_bytes") and f.name not in ("param_bytes", "at_once_bytes", "cast_bytes")
)


class BatchBytes(NamedTuple):
    """Of the batch, what the rank of the first stage holds, and that of the last: micro-batches that are
    loaded ahead, and of whole steps what the weight of the loss is made of."""

    first: int = 0
    last: int = 0
    weighing: int = 0

    @property
    def of_last(self) -> int:
        return self.last + self.weighing


@dataclass(frozen=True)
class Costs(Value):
    groups: tuple[GroupCost, ...]
    cluster: Cluster
    ties: tuple[Tie, ...]
    bytes_per_param_byte: float  # weight + gradient (+ block sums) + optimizer state, per weight byte
    step_s_per_byte: float  # clip, update and zero, per byte of weights
    source: Literal["measured", "modelled"]
    spread: float  # relative spread of the repeated timings
    state_bytes_per_param_byte: float = 0.0  # of it optimizer state, which only a parameter's owner has
    blocks: int = 1  # of additions (`Numerics`), whose sums are counted in it
    copies: int = 1  # of the pipeline, each of which updates an even share of the weights
    call_s: float = 0.0  # of each F, B, I and W, and of each of its messages: Python, on the rank itself
    rows_bytes: dict[str, int] = field(default_factory=dict)  # of a step: see `Variants.rows_bytes`
    batch_bytes: BatchBytes = BatchBytes()  # noqa: RUF009 - a tuple

    @property
    def held_per_param_byte(self) -> float:
        """What one of the copies holds: the whole of weight and gradient, the sums of its own blocks, and its
        share of the optimizer's state."""
        if self.copies == 1:
            return self.bytes_per_param_byte
        state = self.state_bytes_per_param_byte * (1.0 - 1.0 / self.copies)
        if self.blocks == 1:  # `reduce` is fast: there are no sums of blocks
            return self.bytes_per_param_byte - state
        levels = self.blocks.bit_length() - (self.blocks // self.copies).bit_length() + 1
        return self.bytes_per_param_byte - state - levels

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the groups."""
        return tuple(group.name for group in self.groups)

    @cached_property
    def columns(self) -> dict[str, NDArray[Any]]:
        """Each number of the groups as an array (n_groups,): bytes int64, the others float64."""
        names = [f.name for f in fields(GroupCost) if f.name not in ("name", "act_parts", "grad_parts")]
        return {n: np.array([getattr(g, n) for g in self.groups], np.int64 if n.endswith("_bytes") else float)
                for n in names}  # fmt: skip

    def but(self, **changed: Any) -> Costs:
        """With other fields and the same groups, whose columns need not be made again."""
        other = replace(self, **changed)
        other.__dict__["columns"] = self.columns
        if all(name == "cluster" or value == getattr(self, name) for name, value in changed.items()):
            other.__dict__["stages"] = self.stages
        return other

    @cached_property
    def stages(self) -> dict[tuple[int, int, Recompute, float], StageCost]:
        """Those that `planner.stages.stage_costs` has made, by first group, end, recomputation and speed: a
        search for cuts asks for most of them again. Costs on another cluster have them, too."""
        return {}


@dataclass(frozen=True)
class StageCost(Value):
    """What `simulate` needs to know of one stage on its rank."""

    fwd_s: float
    bwd_input_s: float
    bwd_weight_s: float
    step_s: float
    fixed_bytes: int  # weights, their casts, gradients, optimizer state
    stash_bytes: int  # per live micro-batch, the received inputs included
    workspace_bytes: int
    act_bytes: int  # sent to the next stage per micro-batch
    grad_bytes: int  # sent to the previous stage per micro-batch
    shard_bytes: int = 0  # of the weights that each copy of it updates
    remade_bytes: int = 0  # let go after F, made again by B or I and kept to the end of B or W
    at_work_bytes: int = 0  # of tensors, the most that a micro-batch at work takes beside its whole stash
    split_s: float = 0.0  # that I and W take longer than B; counted with W
    call_s: float = 0.0  # as in `Costs`
    kept_bytes: int = 0  # of act_bytes what stays here anyway, in the stash or as received
    act_parts: tuple[int, ...] = ()  # as of `GroupCost`
    grad_parts: tuple[int, ...] = ()
    waiting_bytes: int = -1  # kept from I to W, but for gradients that the stage is given; -1: the stash
    waiting_received_bytes: int = 0  # of it the received inputs
    in_two_bytes: int = 0  # as at_work_bytes, while I has the one in place of the other
    at_once_bytes: int = 0  # of each block that I is ahead of W in: sums of gradients that do not wait
    blocks: int = 1  # of additions, of the micro-batches of its rank

    def __post_init__(self) -> None:
        if self.waiting_bytes < 0:
            object.__setattr__(self, "waiting_bytes", self.stash_bytes)

    @property
    def seconds(self) -> float:
        """Forward and backward of one micro-batch, with what backward makes again."""
        return self.fwd_s + self.bwd_input_s + self.bwd_weight_s


# -- what to do --------------------------------------------------------------------------------


Gemm = Literal["mkl", "onednn"]  # library of fp32 matrix products


@dataclass(frozen=True)
class Numerics(Value):
    """All that decides the bits of losses and weights. Resolved once, before step 0."""

    batch: int  # samples per step
    micro_batch: int  # samples per micro-batch; the last one may be smaller
    micro_batches: int
    blocks: int  # accumulation: micro-batches in order inside a block, blocks by a fixed tree
    threads: int  # per rank
    bits: Literal["torch", "fast"]  # torch: its own operators; fast: kernels, by op_table
    gemm: Gemm
    precision: Literal["fp32", "bf16"]
    tied: Literal["per_use", "eager"]
    op_table: dict[str, str]  # of bits = fast: "op shape dtype" -> "torch", else the kernels' set
    torch: str
    instruction_set: str
    seed: int
    reduce: Literal["exact", "fast"] = "exact"  # of replicas' sums; fast: their bits depend on the layout
    kernels: str = ""  # of bits = fast: which bits ours give; "" = none compute, or an older mpipipe wrote it

    @property
    def fill(self) -> float:
        """Samples of the mean micro-batch / those of the largest, which is the one that is captured."""
        return self.batch / (self.micro_batch * self.micro_batches)

    @property
    def split(self) -> str:
        return split_text(self.batch, self.micro_batches)


def split_text(batch: int, micro_batches: int) -> str:
    """For people, of samples that are shared out evenly.

    >>> split_text(32, 4), split_text(32, 5)
    ('4 micro-batches of 8', '5 micro-batches of 6 or 7')
    """
    least, larger = divmod(batch, micro_batches)
    plural = "es" if micro_batches > 1 else ""
    return f"{micro_batches} micro-batch{plural} of {f'{least} or {least + 1}' if larger else least}"


# What backward makes again of a stage's forward. selective: what is cheap to make, such as norms and
# activations (Chen et al. 2016; Korthikanti et al. 2022); full: all, from the received tensors.
Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)  # the one that takes least time first
MOST_RECEIVES = 1 << 16  # that a rank posts ahead: tags are numbered by them, and are C ints
Window = Annotated[int, Field(ge=1, le=MOST_RECEIVES)]


@dataclass(frozen=True)
class Layout(Value):
    """Where and in which order. Never changes the bits, but see the invariants."""

    cuts: tuple[str, ...]  # the first group of each stage but stage 0
    ranks: tuple[tuple[int, ...], ...]  # stage -> the ranks that hold a copy of it, the first copy first
    schedule: str
    receive_window: Window  # receives posted ahead, per rank
    recompute: tuple[Recompute, ...] = ()  # by stage; () = none anywhere
    actions: tuple[str, ...] = ()  # by rank of copy 0, where the order follows from costs: "0F0,0F1,0I0,0W0"
    mirror_every: Annotated[int, Field(ge=0)] = 0  # steps between two copies on other ranks; 0 = none
    nodes: tuple[int, ...] = ()  # of each rank, where sums of copies are added node by node; decides bits

    @property
    def n_stages(self) -> int:
        return len(self.ranks)

    @property
    def n_ranks(self) -> int:
        return len({rank for on in self.ranks for rank in on})

    def stages_on(self, rank: int) -> list[int]:
        return [stage for stage, on in enumerate(self.ranks) if rank in on]

    @property
    def n_copies(self) -> int:
        """Of the pipeline, each a way of micro-batches through it: the fewest that the copies of each stage
        share evenly. As many as some stage has, where their numbers divide each other."""
        return math.lcm(*map(len, self.ranks))

    @property
    def is_even(self) -> bool:
        """Each stage has as many copies."""
        return len({len(on) for on in self.ranks}) == 1

    @property
    def turns(self) -> tuple[int, ...]:
        """By stage, of how many copies of the pipeline one of its ranks does the micro-batches."""
        return tuple(self.n_copies // len(on) for on in self.ranks)

    @property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """By copy of the pipeline, the rank of each stage. Of a stage that has fewer copies than the
        pipeline, each belongs to several that follow each other."""
        n = self.n_copies
        return tuple(tuple(on[copy * len(on) // n] for on in self.ranks) for copy in range(n))

    @property
    def ranks_per_copy(self) -> int:
        return len(set(self.order))

    @property
    def order(self) -> tuple[int, ...]:
        """The rank of each stage in copy 0; a rank comes as often as it has stages."""
        return tuple(ranks[0] for ranks in self.ranks)

    @property
    def modes(self) -> tuple[Recompute, ...]:
        """`recompute` of each stage."""
        none: Recompute = "none"
        return self.recompute or (none,) * self.n_stages


@dataclass(frozen=True)
class Prediction(Value):
    step_s: float
    bubble: float  # idle share of the makespan, first to last instruction of a step
    bubble_rank: float  # idle share of a rank's own span, mean over ranks
    peak_bytes: tuple[int, ...]  # per rank, above what is resident after the imports
    lower_bound_s: float  # no layout of the stated problem has a shorter step
    gap: float  # step_s / lower_bound_s - 1


@dataclass(frozen=True)
class Plan(Value):
    numerics: Numerics
    layout: Layout
    prediction: Prediction
    costs: Costs | None = None  # what it was planned on; with them an edited plan is predicted anew

    @property
    def hash(self) -> str:
        """Of what is executed; a prediction may differ."""
        return digest(to_json(self.numerics, None), to_json(self.layout, None))


# -- in what order -----------------------------------------------------------------------------


class Op(IntEnum):
    """F forward, B full backward, I input gradient, W weight gradient (Qi et al. 2023); the rest
    is written in by `lower`. ACT and GRAD pass the cut, TIED carries the gradient of a tied
    parameter to its owner, COPY the updated weight back, NORM is the one collective of a step.
    Between the copies of a stage, SHARD carries gradients to the copy that updates their weights,
    UPDATE these weights back (Rajbhandari et al. 2020)."""

    F = 0
    B = 1
    I = 2  # noqa: E741 - the field's letter
    W = 3
    SEND_ACT = 4
    RECV_ACT = 5
    SEND_GRAD = 6
    RECV_GRAD = 7
    SEND_TIED = 8
    RECV_TIED = 9
    SEND_COPY = 10
    RECV_COPY = 11
    NORM = 12
    STEP = 13
    SEND_SHARD = 14
    RECV_SHARD = 15
    SEND_UPDATE = 16
    RECV_UPDATE = 17


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W, Op.STEP})
SENDS = frozenset(op for op in Op if op.name.startswith("SEND"))
RECVS = frozenset(op for op in Op if op.name.startswith("RECV"))
_COMPUTES = np.isin(range(len(Op)), sorted(COMPUTE))  # by op


class Action(NamedTuple):
    kind: Op  # F, B, I or W
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.micro}"


class Instr(NamedTuple):
    op: Op
    stage: int  # -1: of the whole rank (NORM)
    micro: int  # -1: once per step
    other: int = -1  # the stage at the other end of a message
    peer: int = -1  # its rank
    tag: int = -1

    def __str__(self) -> str:
        micro = "" if self.micro < 0 else str(self.micro)
        to = "" if self.peer < 0 else f"{'->' if self.op in SENDS else '<-'}r{self.peer}"
        return f"{self.stage if self.stage >= 0 else ''}{self.op.name}{micro}{to}"


Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


def share_of(copy: int, n_copies: int, n_micro: int) -> range:
    """The micro-batches of a copy of the pipeline: equally many, or some have one more, copy 0 among them."""
    return range(-(-copy * n_micro // n_copies), -(-(copy + 1) * n_micro // n_copies))


class Placed:
    """What schedules and programs have in common. Copy c of the pipeline does the micro-batches of its
    `share`, on the ranks `copies[c]`. A rank is in one of them; in several that follow each other where its
    stages have fewer copies than the pipeline."""

    rank_of_stage: tuple[int, ...]  # in copy 0
    other_copies: tuple[tuple[int, ...], ...]  # likewise
    n_micro: int
    nodes: tuple[int, ...]  # as of `Layout`

    @property
    def n_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """By copy, the rank of each stage."""
        return (self.rank_of_stage, *self.other_copies)

    def share(self, copy: int) -> range:
        return share_of(copy, len(self.copies), self.n_micro)

    @cached_property
    def _served(self) -> dict[int, range]:
        found: dict[int, range] = {}
        for copy, ranks in enumerate(self.copies):
            for rank in ranks:
                found[rank] = range(found[rank].start if rank in found else copy, copy + 1)
        return found

    def copies_on(self, rank: int) -> range:
        """The copies of the pipeline that it is in."""
        return self._served[rank]

    def copy_on(self, rank: int) -> int:
        """Which of the copies of its stages it holds."""
        served = self._served[rank]
        return served.start // len(served)

    def share_on(self, rank: int) -> range:
        """The micro-batches that it does."""
        served = self._served[rank]
        return range(self.share(served.start).start, self.share(served[-1]).stop)

    def holders(self, stage: int) -> tuple[int, ...]:
        """The ranks of its copies."""
        return tuple(dict.fromkeys(ranks[stage] for ranks in self.copies))

    def nodes_of(self, stage: int) -> tuple[int, ...]:
        """Of its copies; those of which nothing is said count as one."""
        return tuple(self.nodes[rank] if self.nodes else 0 for rank in self.holders(stage))

    def chain_of(self, micro: int) -> tuple[int, ...]:
        """The rank of each stage for a micro-batch."""
        return next(ranks for c, ranks in enumerate(self.copies) if micro in self.share(c))


@dataclass(frozen=True, eq=False)
class Schedule(Placed):
    """Per rank an (n, 3) array of kind, stage, micro: a thousand stages stay small."""

    rank_of_stage: tuple[int, ...]
    n_micro: int
    codes: tuple[Int32, ...]
    other_copies: tuple[tuple[int, ...], ...] = ()
    nodes: tuple[int, ...] = ()

    def actions(self, rank: int) -> Iterator[Action]:
        return (Action(Op(k), s, m) for k, s, m in self.codes[rank].tolist())


@dataclass(frozen=True, eq=False)
class Program(Placed):
    """Per rank an (n, 6) array: the fields of `Instr`. eager: gradients of tied parameters are merged in each
    micro-batch, which no message shows where all uses are on one rank."""

    rank_of_stage: tuple[int, ...]
    n_micro: int
    receive_window: int
    codes: tuple[Int32, ...]
    other_copies: tuple[tuple[int, ...], ...] = ()
    eager: bool = False
    nodes: tuple[int, ...] = ()

    def instrs(self, rank: int) -> list[Instr]:
        return [Instr(Op(row[0]), *row[1:]) for row in self.codes[rank].tolist()]

    @cached_property
    def memory(self) -> dict[Any, Int64]:
        """What `planner.simulate` has found that ranks hold, for cuts that leave a rank as it was."""
        return {}

    @cached_property
    def received(self) -> dict[Any, int]:
        """Likewise, of their receive buffers."""
        return {}

    @cached_property
    def shards(self) -> dict[int, Int64]:
        """Likewise, whose shards are in the messages of a rank."""
        return {}

    @property
    def hash(self) -> str:
        h = hashlib.sha256(repr((self.copies, self.n_micro, self.receive_window)).encode())
        for code in self.codes:
            h.update(np.ascontiguousarray(code).tobytes())
        return h.hexdigest()


# -- what happened -----------------------------------------------------------------------------


def makespan_s(times: Sequence[Float64]) -> float:
    """times: as of `Timeline`."""
    ends = [t[:, 1].max() for t in times if len(t)]
    starts = [t[:, 0].min() for t in times if len(t)]
    return float(max(ends) - min(starts)) if ends else 0.0


class Span(NamedTuple):
    rank: int
    instr: Instr
    start_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step: per rank an (n, 2) array of start and end, row i for instruction i, one after the other but
    for a SEND_SHARD that was begun before its turn; and an (n,) array of the bytes that the rank holds:
    predicted during it, measured at its end, or for a message at the end of what was computed before it
    (above the imports; 0 where the system does not say)."""

    program: Program
    times: tuple[Float64, ...]  # seconds since the first instruction of the step
    memory_bytes: tuple[Int64, ...]

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most that each rank holds."""
        return tuple(int(held.max(initial=0)) for held in self.memory_bytes)

    def spans(self, rank: int) -> list[Span]:
        pairs = zip(self.program.instrs(rank), self.times[rank].tolist(), strict=True)
        return [Span(rank, instr, start, end) for instr, (start, end) in pairs]

    @property
    def makespan_s(self) -> float:
        return makespan_s(self.times)

    def busy_s(self, rank: int) -> float:
        """Seconds of compute (F, B, I, W, STEP) of one rank."""
        t = self.times[rank][_COMPUTES[self.program.codes[rank][:, 0]]]
        return float((t[:, 1] - t[:, 0]).sum())

    @property
    def bubble(self) -> float:
        """Idle share of the makespan, mean over ranks."""
        n, span = len(self.times), self.makespan_s
        return max(0.0, 1.0 - sum(map(self.busy_s, range(n))) / (n * span)) if span else 0.0

    @property
    def bubble_rank(self) -> float:
        """Idle share of each rank's own span, from the first that it computes to the last, mean over ranks
        (as in Qi et al. 2023)."""
        shares = []
        for rank in range(len(self.times)):
            t = self.times[rank][_COMPUTES[self.program.codes[rank][:, 0]]]
            span = float(t[:, 1].max() - t[:, 0].min()) if len(t) else 0.0
            shares.append(max(0.0, 1.0 - self.busy_s(rank) / span) if span else 0.0)
        return float(np.mean(shares)) if shares else 0.0


@dataclass(frozen=True)
class RankReport(Value):
    """One step of one rank, with what it was given."""

    stages: tuple[int, ...]
    groups: int  # atomic groups of its stages
    parameters: int  # elements; a tied one counts at its owner
    predicted_compute_s: float  # F, B, I, W and STEP
    compute_s: float
    predicted_bubble: float  # share of the makespan in which it does not compute
    bubble: float
    exposed_s: float  # it waited while a message to it was on its way
    sent_bytes: int


@dataclass(frozen=True)
class Report(Value):
    """The end of a run: `summary.json`. Lists are per rank, in rank order."""

    val_loss: float | None
    unigram_entropy: float | None
    metrics: dict[str, float]  # of the last evaluation, without the loss
    step_s: float
    predicted_step_s: float
    peak_bytes: tuple[int, ...]
    predicted_peak_bytes: tuple[int, ...]
    bubble: float
    predicted_bubble: float
    ranks: tuple[RankReport, ...]
    per_s: float  # of `unit`: mean over the time of all steps since the run began or went on
    unit: str  # "tokens" or "samples"
    weights_sha256: str
    steps: int
    final_loss: float
    plan_hash: str
    stopped_by: str | None
    exact_resume: bool  # False: the data is a plain iterable, which a resumed run reads from its start
    lost_ranks: tuple[int, ...] = ()  # while it ran, by the numbers that they had at first
    replayed_steps: int = 0  # done again after these losses, in all
    spares: tuple[int, ...] = ()  # ranks that had no part in the end, likewise by their first numbers
    untimed: bool = False  # it went on behind its last step: `step_s` of before, the rest as predicted
    products: str = ""  # for people: by which library fp32 matrices were multiplied, and why
    blocks: str = ""  # for people: in how many blocks gradients were added, and why, where that was chosen
    messages: str = ""  # for people: who moved messages on while ranks computed, and why
    kernels: str = ""  # for people: which operators were our own, and which were torch's, or that none was
