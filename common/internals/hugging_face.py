"""Private names of Hugging Face's models and data sets, and of timm; None, or nothing, of objects that lack them.

Seen in transformers 5.23.0, diffusers 0.42.1, datasets 5.2.0 and timm 1.0.31.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def plan_dtypes(model: object, dtype: T) -> Mapping[str, T]:
    """Return the parts of a model of transformers that keep another dtype, as patterns of names (`_get_dtype_plan`)."""
    plan = getattr(model, "_get_dtype_plan", None)
    return plan(dtype) if plan is not None else {}


def list_kept_in_float32(model: object) -> Iterable[str]:
    """Return the parts of a model of diffusers that stay in float32 (`_keep_in_fp32_modules`)."""
    return getattr(model, "_keep_in_fp32_modules", None) or ()


def list_missing_patterns(model: object) -> list[str]:
    """Return patterns of the names that a folder of a model may lack (`_keys_to_ignore_on_load_missing`)."""
    return list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())


def list_unexpected_patterns(model: object) -> list[str]:
    """Return patterns of the names that may be left in a folder (`_keys_to_ignore_on_load_unexpected`)."""
    return list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def list_unsaved(model: object) -> set[str]:
    """Return the names that a model leaves out of its folder (`_keys_to_ignore_on_save`)."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def find_conversions(model: object) -> Sequence[Any] | None:
    """Return how names of files became a model's when it was loaded (`_weight_conversions`); None if it was not."""
    used: Sequence[object] | None = getattr(model, "_weight_conversions", None)
    return used


def save_timm_config(model: object, file: Path) -> None:
    """Write the config of a model of timm (`timm.models._hub`)."""
    from timm.models._hub import save_config_for_hf

    save_config_for_hf(model, str(file))


def is_split_by_node(dataset: object) -> bool:
    """Return whether ``split_dataset_by_node`` of datasets has made a stream (`_distributed`)."""
    return getattr(dataset, "_distributed", None) is not None


def is_shuffled(dataset: object) -> bool:
    """Return whether ``shuffle`` of datasets has made a stream, or one that it was made from.

    It notes that in `_shuffling`; datasets 5.2.0 instead in what it reads from (`_ex_iterable`, by its class).
    """
    source = getattr(dataset, "_ex_iterable", None)
    while source is not None and "Shuffled" not in type(source).__name__:
        source = getattr(source, "ex_iterable", None)
    return source is not None or getattr(dataset, "_shuffling", None) is not None
