"""Checks of a pipeline in the user's process, before any other process starts, and the table of its stages."""

from __future__ import annotations

from torch import nn

from ...common.errors import ConfigError
from .partition import Partition, check_is_cut, make_partition
from .schedule import Schedule


def check_pipeline(pp: int, **options: bool) -> None:
    """Check that a strategy with `pp` ranks per pipeline is asked for none of `options`, which a pipeline cannot have.

    Raises:
        ConfigError: for an option that is asked for.
    """
    for name, is_asked in options.items():
        if is_asked:
            raise ConfigError(f"pp={pp} cannot be combined with {name}; leave {name} out, or use dp_shard for pp.")


def check_module(module: nn.Module, schedule: Schedule, *, is_built: bool) -> None:
    """Check that a module, as far as it is built, can be cut into stages.

    Raises:
        ConfigError: if it cannot.
        ModuleError: if stages of several ranks share a module.
    """
    name = type(module).__name__
    if not getattr(module, "automatic_optimization", True):
        raise ConfigError(
            f"pp={schedule.num_ranks} needs a module with automatic_optimization=True, got {name} with False; return "
            "the loss, or use dp_shard instead of pp."
        )
    if sum("configure_sharding" in vars(kind) for kind in type(module).__mro__) > 1:
        raise ConfigError(
            f"pp={schedule.num_ranks} cuts {name} into stages itself, but {name} overrides configure_sharding; remove "
            "one of them."
        )
    if is_built:
        check_is_cut(module, make_partition(module, schedule.num_stages))


def check_number(schedule: Schedule, num_micro_batches: int | None) -> None:
    """Check the number of micro-batches of a whole step; the last step of an epoch may have any number.

    Raises:
        ConfigError: for fewer than the schedule needs, and for None: steps that differ in their number.
    """
    if num_micro_batches is None:
        raise ConfigError(
            "A pipeline has the same number of micro-batches in each step, got accumulate_tokens with "
            f"pp={schedule.num_ranks}; use accumulate_grad_batches, or a strategy without stages."
        )
    needed = schedule.reason_against(num_micro_batches)
    if needed:
        raise ConfigError(
            f"accumulate_grad_batches must be {needed}, with schedule={schedule.name!r} and pp={schedule.num_ranks}, "
            f"got {num_micro_batches} micro-batches per step; set it (or global_batch_size), or use schedule='gpipe'."
        )


def stage_table(module: nn.Module, schedule: Schedule) -> str:
    """Return a table of the stages of a module, and the share of idle time to expect."""
    partition = make_partition(module, schedule.num_stages)
    all_bytes = sum(part.num_bytes for part in partition.parts.values()) or 1
    rows = [("stage", "rank", "parts", "bytes", "of all")]
    for stage in range(schedule.num_stages):
        size = partition.bytes_of(stage)
        row = (
            str(stage),
            str(schedule.rank_of(stage)),
            _format_stage(partition, stage),
            f"{size:,}",
            f"{size / all_bytes:.0%}",
        )
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    idle = ", ".join(f"{schedule.idle_share(number):.0%} with {number}" for number in (4, 8, 16, 32))
    shared = f"On every stage: {', '.join(partition.everywhere)}." if partition.everywhere else ""
    title = f"Stages of {type(module).__name__} ({schedule.name}, pp={schedule.num_ranks}):"
    return "\n".join(filter(None, [title, *lines, shared, f"Idle share by micro-batches: {idle}."]))


def _format_stage(partition: Partition, stage: int) -> str:
    names = partition.stages[stage]
    return ", ".join(names) if len(names) < 5 else f"{names[0]} ... {names[-1]} ({len(names)} parts)"
