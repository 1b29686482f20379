"""ParameterWrites: what a step has written into gathered parameters is kept, and equal on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from ...common.errors import ModuleError
from ..distributed.collectives import Collectives
from ..state.digest import digest_tensor, mix_numbers
from ..torch_internals.sharded_parameters import ShardedParameter
from .gathered_units import watch_units

_COMPARED: Final = ("training_step", "run_synchronized", "validation_step", "test_step", "predict_step")
"""The steps that all ranks run equally often."""

_REMEDY: Final = (
    "Reduce what is written over the ranks (self.trainer.strategy.all_reduce), so that all write the same; or keep it "
    "in a buffer (self.register_buffer) that is reduced over the ranks; or write it in a hook after the step, such as "
    "on_train_batch_end."
)


class _Key(NamedTuple):
    """What was written, and where."""

    step: str
    parameter: str


class _Written(NamedTuple):
    """What a rank has written: the part of the parameter that it has, and the digest of all values in turn."""

    part: tuple[int, ...]
    digest: Any


class ParameterWrites:
    """Copies what a step writes into gathered parameters to their shards, before ``fully_shard`` frees them.

    Each rank keeps its shard of what it has written itself, so all ranks have to write the same. They compare digests
    after the runs 1, 2, 4, 8 and so on of a step, whenever replicas are synchronized, and after runs in which a rank
    has no samples; in between nothing is sent, and nothing waits for a device.

    Args:
        roots: ``fully_shard`` roots.
        name_of: returns the name of a shard.
        collectives: over all ranks that share the parameters.
        evaluates_alone: whether each rank may run evaluation steps when it likes.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        name_of: Callable[[nn.Parameter], str],
        collectives: Collectives,
        *,
        evaluates_alone: bool,
    ) -> None:
        self.keeps_whole = False
        """Whether another rank has no samples in this run, and will need what this one writes."""
        self._name_of, self._collectives = name_of, collectives
        self._units = watch_units(roots, self._note)
        self._compared = _COMPARED[:1] if evaluates_alone else _COMPARED
        self._step = ""
        self.is_ignoring = False
        """Whether what is written now is dropped, as the run is only compared with another."""
        self._runs: Counter[str] = Counter()
        self._past: dict[_Key, _Written] = {}
        self._run: dict[_Key, _Written] = {}
        self._whole: dict[_Key, tuple[ShardedParameter, Tensor]] = {}

    # --- on this rank ------------------------------------------------------------------------------------------------

    def begin(self, step: str) -> None:
        """Name the step that runs next."""
        self._step = step

    def keep_whole(self, step: str) -> None:
        """Keep what a run of a step writes for ranks without samples, if ranks compare it when the run ends."""
        self.keeps_whole = step in self._compared

    def _note(self, parameter: ShardedParameter) -> None:
        """Keep what was written into a parameter that is still gathered."""
        if self.is_ignoring or self._collectives.is_fake:
            return
        key, whole = _Key(self._step, self._name_of(parameter.shard)), parameter.whole
        if not parameter.is_exact:
            raise ModuleError(
                f"{key.step} changed the parameter {key.parameter}, which it sees as a copy in {whole.dtype} of the "
                f"{parameter.shard.dtype} values, and the change would be lost. Keep such a tensor in a buffer "
                "(self.register_buffer), reduced over the ranks; or write it in a hook after the step, such as "
                "on_train_batch_end."
            )
        parameter.keep(whole)
        _append_writes(self._run, {key: _Written(parameter.part, digest_tensor(whole))})
        if self.keeps_whole:
            self._whole[key] = parameter, whole.clone()
            # the rank without samples has an old shard until the run has ended
            parameter.gather_as(self._whole[key][1])

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Drop what is written inside the block, for steps that run only to be compared."""
        self._look()
        self.is_ignoring = True
        try:
            yield
            self._look()
        finally:
            self.is_ignoring = False

    def _look(self) -> None:
        for unit in self._units:
            unit.look()

    # --- with the other ranks ----------------------------------------------------------------------------------------

    def end(self, step: str, *, is_absent: bool = False) -> None:
        """End a run of a step, its backward included. Collective after some runs: every rank calls it after each.

        Args:
            step: the name of the step.
            is_absent: whether this rank had no samples and did not run the step. The others have set `keeps_whole`
                before the run, and this one gets what they have written.

        Raises:
            ModuleError: on all ranks, if those with samples have not written the same.
        """
        if self.is_ignoring or step not in self._compared:
            return
        self._runs[step] += 1
        number = self._runs[step]
        if is_absent or self.keeps_whole or number & (number - 1) == 0:
            self._look()
            self.agree(is_absent=is_absent)
        elif self._run:
            _append_writes(self._past, self._run)
            self._run = {}

    def agree(self, *, is_absent: bool = False) -> None:
        """Compare what the ranks have written since the last time. Collective: every rank calls it.

        Raises:
            ModuleError: on all ranks, if they have not written the same.
        """
        collectives = self._collectives
        has_written = float(bool(self._past or self._run))
        is_alone = collectives.world_size == 1 or collectives.is_fake
        if not is_alone and collectives.all_reduce(has_written, "max"):
            rows = collectives.all_gather_object(
                (is_absent, _digests_as_numbers(self._past), _digests_as_numbers(self._run))
            )
            present = [rank for rank, row in enumerate(rows) if not row[0]]
            self._check({rank: row[1] for rank, row in enumerate(rows)})
            self._check({rank: rows[rank][2] for rank in present})
            if len(present) < len(rows):
                self._hand_over({rank: rows[rank][2] for rank in present}, is_absent=is_absent)
        for parameter, _ in self._whole.values():
            parameter.gather_as(None)
        self._past, self._run, self._whole, self.keeps_whole = {}, {}, {}, False

    def _check(self, rows: Mapping[int, Mapping[_Key, _Written]]) -> None:
        found = first_difference(rows, self._collectives.ranks)
        if found is not None:
            key, difference = found
            raise ModuleError(
                f"{key.step} changed the parameter {key.parameter} {difference}, and all ranks share its values. "
                f"{_REMEDY}"
            )

    def _hand_over(self, rows: Mapping[int, Mapping[_Key, _Written]], *, is_absent: bool) -> None:
        """Give what was written to ranks that had no samples. Collective."""
        named = {self._name_of(parameter.shard): parameter for unit in self._units for parameter in unit.parameters}
        sources = {
            (key, written.part): rank for rank in sorted(rows, reverse=True) for key, written in rows[rank].items()
        }
        for (key, part), source in sorted(sources.items()):
            own = self._whole[key][1] if source == self._collectives.rank else None
            whole = self._collectives.broadcast(own, src=source)
            parameter = named[key.parameter]
            if is_absent and parameter.part == part:
                parameter.keep(whole)


def first_difference(rows: Mapping[int, Mapping[_Key, _Written]], ranks: Sequence[int]) -> tuple[_Key, str] | None:
    """Return what was not written alike by all, and how, naming the ranks.

    Args:
        rows: what each one has written, with digests as numbers.
        ranks: the global rank of each one.
    """
    for key in sorted({key for row in rows.values() for key in row}):
        writers = [rank for rank, row in rows.items() if key in row]
        others = [ranks[rank] for rank in rows if rank not in writers]
        if others:
            return key, f"on {_name_ranks([ranks[rank] for rank in writers])}, but not on {_name_ranks(others)}"
        first: dict[tuple[int, ...], int] = {}
        for rank in writers:
            one = first.setdefault(rows[rank][key].part, rank)
            if rows[one][key] != rows[rank][key]:
                return key, f"to other values on rank {ranks[one]} than on rank {ranks[rank]}"
    return None


def _name_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{', ...' if len(ranks) > 8 else ''}"


def _append_writes(past: dict[_Key, _Written], new: Mapping[_Key, _Written]) -> None:
    for key, written in new.items():
        total = mix_numbers(past[key].digest) + written.digest if key in past else written.digest
        past[key] = _Written(written.part, total)


def _digests_as_numbers(written: Mapping[_Key, _Written]) -> dict[_Key, _Written]:
    return {key: _Written(part, int(value)) for key, (part, value) in written.items()}
