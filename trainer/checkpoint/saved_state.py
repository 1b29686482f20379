"""Schema of the state that a run saves, and errors of code that reads a part of it: a checkpoint may be forged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from torch import Tensor

from ...common.errors import CheckpointError, EchelonError
from ...strategies.state.omitted_weights import OMITTED, OMITTED_SCHEMA
from ...strategies.state.schema import COUNT, INTEGER, NUMBER, TEXT, check_schema, format_as_line

NAMES_FOR_HOOKS: Final = {"model": "state_dict", "optimizers": "optimizer_states"}
"""The parts that hooks see under Lightning's names."""
_REDUCTIONS: Final = ("mean", "sum", "min", "max")
_METRIC: Final = {
    "name": TEXT,
    "in_batch": bool,
    "is_double": bool,
    "options": {
        "on_step": (bool, None),
        "on_epoch": (bool, None),
        "reduce_fx": _REDUCTIONS,
        "prog_bar": bool,
        "logger": bool,
        "sync_dist": bool,
        "add_dataloader_idx": bool,
        "rank_zero_only": bool,
        "enable_graph": bool,
    },
}
_TRAINING: Final = {
    "optimizers": [dict],
    "lr_schedulers": [object],
    "precision": dict,
    "loop": dict,
    "data": [[dict]],
    "datamodule": dict,
    "metrics": {
        "epoch": {TEXT: {"total": Tensor, "weight": (NUMBER, Tensor), "metric": (_METRIC, None)}},
        "latest": {TEXT: Tensor},
        "computed_at": {TEXT: INTEGER},
        "in_bar": {TEXT: Tensor},
    },
    "callbacks": {TEXT: object},
    "rng": [dict],
}
_OPTIONAL: Final = {
    "lr_scheduler_optimizers": [(COUNT, None)],
    "hyper_parameters": {TEXT: object},
    "hyper_parameters_argument": (TEXT, None),
    "hyper_parameters_type": ("omegaconf", None),
    "hyper_parameters_containers": [TEXT],
    "omitted_hyper_parameters": ([TEXT], None),
    OMITTED: OMITTED_SCHEMA,
    "datamodule_hyper_parameters": {TEXT: object},
    "datamodule_hyper_parameters_argument": (TEXT, None),
    "datamodule_hyper_parameters_type": ("omegaconf", None),
    "datamodule_hyper_parameters_containers": [TEXT],
    "datamodule": dict,
    "loggers": [{"type": TEXT, "name": TEXT, "version": TEXT}],
}
FORGED: Final = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError),
    *(RecursionError, RuntimeError, TypeError, ValueError),
)


def check_saved(state: Mapping[str, object], place: str) -> None:
    """Check the parts that a state has; to resume training from it, it must have all parts.

    Raises:
        CheckpointError: with the value that is not as a run saves it.
    """
    check_schema(state, {"model": {TEXT: object}}, place)
    check_schema(state, {name: schema for name, schema in _OPTIONAL.items() if name in state}, place)
    if "loop" in state:
        check_schema(state, _TRAINING, place)
        if not state["data"]:
            raise CheckpointError(
                f"{place}['data'] must be a list with an item for each rank, got []; use another one."
            )


@contextmanager
def explain_bad_part(part: str) -> Iterator[None]:
    """Turn errors that a part of a checkpoint makes torch or Python raise into one that names the part.

    Raises:
        CheckpointError: for any error that is not Echelon's own.
    """
    try:
        yield
    except EchelonError:
        raise
    except FORGED as error:
        raise unfit_part_error(part, error) from error


def unfit_part_error(part: str, error: Exception) -> CheckpointError:
    """Return the error for a part that made torch or Python raise this error."""
    return CheckpointError(
        f"The part {part!r} of the checkpoint does not fit this run: {type(error).__name__}: "
        f"{format_as_line(str(error))}; use another checkpoint, or load the weights only (echelon.load_weights)."
    )
