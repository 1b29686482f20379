"""RehearsedRank: the place of one rank, its samples, what it holds and sends, and the files that it would write."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from torch import Tensor, nn
from torch.utils.data import DataLoader

from ...callbacks.callback import Callback
from ...callbacks.run import Run
from ...strategies import Strategy
from ...strategies.distributed.nested import iterate_tensors
from ...strategies.estimate.live_memory import storages_bytes
from ...strategies.launch.signal_handlers import end_handling
from ...strategies.state.dtensor import is_dtensor, local_shard
from ..checkpoint.manifest import read_manifest
from ..data.index_stream import DataRanks
from ..data.stream import Cut
from .epoch_shares import EpochShares, shares_of_epoch
from .rehearsal import RehearsedStrategy

_STEPS: Final = 2
"""In the second one the optimizer's state exists."""
_NODE_AXES: Final = ("tp",)
"""Axes along which ranks exchange activations in every layer."""


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, as this rank sees it."""

    name: str
    degree: int
    place: int
    """The position of this rank along the axis."""
    ranks: Sequence[int]
    """The ranks along the axis, including this one."""


@dataclass(frozen=True)
class Group:
    """A group of parameters of an optimizer."""

    optimizer: str
    num_parameters: int
    num_elements: int
    """The elements that this rank updates."""
    settings: Mapping[str, float]


@dataclass
class RehearsedRank:
    """What one rank would be and do; fields that a failed rehearsal did not reach are empty."""

    rank: int
    world_size: int
    node_rank: int = 0
    strategy: str = ""
    axes: list[Axis] = field(default_factory=list)
    data_rank: int = 0
    data_size: int = 1
    shares: EpochShares | None = None
    first_samples: list[int] = field(default_factory=list)
    """The indices of its first micro-batch."""
    num_elements: int = 0
    """Of the whole module's parameters."""
    num_elements_here: int = 0
    empty: list[str] = field(default_factory=list)
    """The sharded parameters of which this rank holds no element."""
    groups: list[Group] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes of parameters, gradients and optimizer state, and the peak."""
    sent: list[tuple[Sequence[int], int, int]] = field(default_factory=list)
    """For each group of ranks, how often a step communicates and how many bytes this rank sends."""
    files: dict[str, int] = field(default_factory=dict)
    """The sizes of this rank's files in a checkpoint."""
    seconds: dict[str, float] = field(default_factory=dict)
    process_bytes: int = 0
    """The most memory that the process took in which the rank was rehearsed."""
    num_steps: int = 0
    """Those that were made; the numbers are of the last one."""
    problems: list[str] = field(default_factory=list)
    """What would end the run."""
    is_known: bool = True
    """Whether they would; False if the step asks for values, which a rehearsal has none of."""
    warnings: list[str] = field(default_factory=list)


class TakeNotes(Callback):
    """Fills in a `RehearsedRank` while its steps run, and ends training after the second."""

    def __init__(
        self, noted: RehearsedRank, strategy: RehearsedStrategy, settings: Mapping[str, Any], seed: int
    ) -> None:
        self._noted, self._strategy, self._settings, self._seed = noted, strategy, settings, seed

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        noted, strategy = self._noted, self._strategy
        noted.node_rank, noted.data_rank, noted.data_size = strategy.node_rank, strategy.data_rank, strategy.data_size
        noted.axes = list(axes_of(strategy))
        noted.warnings += far_axes(noted.axes, strategy.ranks.environment.local_world_size)
        self._note_parameters(module)
        self._note_samples(trainer)
        own = set(held_parameters(module.parameters()))
        noted.groups = [
            Group(
                type(optimizer).__name__,
                len(group["params"]),
                sum(_elements_here(parameter) for parameter in group["params"] if parameter in own),
                {k: float(v) for k, v in group.items() if k in ("lr", "weight_decay") and isinstance(v, int | float)},
            )
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
        ]

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        end_handling()  # the steps may take minutes, and have nothing to save
        self._strategy.counts_traffic = True

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        noted, traffic = self._noted, self._strategy.traffic
        noted.num_steps += 1
        noted.sent = [(ranks, traffic.num_calls[ranks], sent) for ranks, sent in traffic.sent.most_common()]
        traffic.sent.clear()
        traffic.num_calls.clear()
        self._note_memory(trainer, module)
        if trainer.global_step == 1:
            self._strategy.counts_traffic = False
            self._note_checkpoint(trainer)
            self._strategy.counts_traffic = True
        if trainer.global_step >= _STEPS:
            trainer.should_stop = True

    def _note_parameters(self, module: nn.Module) -> None:
        noted = self._noted
        own = set(held_parameters(module.parameters()))
        for name, parameter in module.named_parameters():
            number = _elements_here(parameter) if parameter in own else 0
            noted.num_elements += parameter.numel()
            noted.num_elements_here += number
            if is_dtensor(parameter) and not number:
                noted.empty.append(name)
        if noted.empty:
            noted.warnings.append(
                f"This rank holds nothing of {len(noted.empty)} parameter(s), such as {noted.empty[0]}: the first "
                "dimension is shorter than the number of shards."
            )

    def _note_samples(self, trainer: Run) -> None:
        noted, settings, loader = self._noted, self._settings, getattr(trainer, "train_dataloader", None)
        if not isinstance(loader, DataLoader):
            noted.warnings.append(f"The samples of a {type(loader).__name__} can only be known by reading it.")
            return
        ranks = DataRanks(
            noted.data_rank, noted.data_size, is_dealing=bool(settings.get("use_distributed_sampler", True))
        )
        cut = Cut(int(settings.get("accumulate_grad_batches", 1)), settings.get("global_batch_size"), ranks)
        noted.shares = shares = shares_of_epoch(loader, cut, self._seed)
        if shares is None:
            noted.warnings.append("Each rank reads its own data, or data of unknown length.")
            return
        noted.first_samples = shares.first
        if not shares.is_complete:
            noted.problems.append(
                f"The shares of {noted.data_size} ranks hold {sum(shares.by_rank):,} of {shares.num_entries:,} samples."
            )
        if not shares.least and self._strategy.forward_is_collective:
            noted.problems.append(
                f"{noted.data_size} ranks share a global batch of {min(shares.global_batch_size, shares.num_entries)} "
                "samples, and some have none in the first step, where every rank needs one; use larger batches, or "
                "fewer data ranks."
            )

    def _note_memory(self, trainer: Run, module: nn.Module) -> None:
        memory = self._strategy.memory
        assert memory is not None
        own = [*held_parameters(module.parameters()), *module.buffers()]
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        states = [values for optimizer in trainer.optimizers for values in optimizer.state.values()]
        self._noted.memory = {
            "parameters": storages_bytes(held_parameters(module.parameters())),
            "gradients": storages_bytes(gradients),
            "optimizer": storages_bytes(iterate_tensors(states)),
            "peak": storages_bytes(own) + memory.most,
        }

    def _note_checkpoint(self, trainer: Run) -> None:
        began = time.perf_counter()
        self._strategy.doing = "save_checkpoint"
        with TemporaryDirectory(prefix="echelon-rehearsal-") as folder:
            path = Path(folder, "checkpoint")
            trainer.save_checkpoint(path)
            self._noted.files = {name: file.size for name, file in read_manifest(path).files.items()}
        self._noted.seconds["save_checkpoint"] = time.perf_counter() - began


def held_parameters(parameters: Any) -> Iterator[Tensor]:
    """Yield the parameters that this rank really holds: if any are sharded, those and plain numbers."""
    own = list(parameters)
    is_sharded = any(is_dtensor(parameter) for parameter in own)
    yield from (parameter for parameter in own if is_dtensor(parameter) or not (is_sharded and parameter.dim()))


def _elements_here(parameter: Tensor) -> int:
    return local_shard(parameter).numel()


def axes_of(strategy: Strategy) -> Iterator[Axis]:
    """Yield the axes of the mesh, the outermost first; neighbouring ranks lie along the last one."""
    degrees = dict(strategy.mesh_axes)
    if prod(degrees.values()) != strategy.world_size:
        return
    width = strategy.world_size
    for name, degree in degrees.items():
        width //= degree
        place = strategy.rank // width % degree
        first = strategy.rank - place * width
        yield Axis(name, degree, place, range(first, first + degree * width, width))


def far_axes(axes: Sequence[Axis], local_world_size: int) -> list[str]:
    """Return a warning for each axis that spans nodes but should not."""
    return [
        f"{axis.name}={axis.degree} spans several nodes of {local_world_size} ranks: it exchanges activations in every "
        "layer over the network between nodes."
        for axis in axes
        if axis.name in _NODE_AXES and axis.ranks[0] // local_world_size != axis.ranks[-1] // local_world_size
    ]
