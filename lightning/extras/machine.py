"""Functions of Lightning's ``utilities`` that ask the machine: devices, memory, seeds, files, and lengths of data."""

from __future__ import annotations

import gc
import random
import socket
import warnings
from enum import StrEnum
from functools import wraps
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ...common.errors import ConfigError
from ...common.storage import is_url
from ...strategies.cluster.environment import ENVIRON, num_cores, set_all
from ...strategies.devices import kinds
from ...strategies.devices.cuda import CUDA
from ...strategies.devices.memory import empty_caches
from ...strategies.devices.queries import check_usable
from ...strategies.distributed.rank_zero import current_rank
from ...strategies.module.out_of_memory import is_out_of_memory
from ...strategies.torch_internals.operators import tree_map
from ...trainer.data.seed import derive_seed
from ...trainer.data.seed import seed_everything as seed_generators
from ...trainer.module.batch_size import size_of

__all__ = [
    "WriteInterval",
    "convert_tensors_to_scalars",
    "disable_possible_user_warnings",
    "extract_batch_size",
    "find_free_network_port",
    "find_usable_cuda_devices",
    "garbage_collection_cuda",
    "has_iterable_dataset",
    "has_len",
    "has_len_all_ranks",
    "is_cuda_available",
    "is_cuda_out_of_memory",
    "is_cudnn_snafu",
    "is_oom_error",
    "is_out_of_cpu_memory",
    "is_shared_filesystem",
    "pl_worker_init_function",
    "reset_seed",
    "seed_everything",
    "sized_len",
    "suggested_max_num_workers",
]

_SEED: Final = "PL_GLOBAL_SEED"


# --- devices and memory ---


def is_cuda_available() -> bool:
    """Return whether there is a CUDA device."""
    return kinds.is_available(CUDA)


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Return the indices of CUDA devices on which a tensor can be created, at most so many; -1 for all.

    Raises:
        ValueError: if there are not so many devices.
        RuntimeError: if others use them.
    """
    if num_devices == 0:
        return []
    number = kinds.num_devices(CUDA)
    if not number or num_devices > number:
        found = f"only has {number} GPUs" if number else "has no visible CUDA devices"
        raise ValueError(f"You requested to find {num_devices} devices but this machine {found}; ask for fewer.")
    usable: list[int] = []
    for index in range(number):
        if len(usable) != num_devices and _is_usable(index):
            usable.append(index)
    if len(usable) < num_devices:
        raise RuntimeError(
            f"You requested to find {num_devices} devices but only {usable} are free; end the programs that use the "
            "others."
        )
    return usable


def _is_usable(index: int) -> bool:
    try:
        check_usable(torch.device(CUDA, index))
    except ConfigError:
        return False
    return True


def garbage_collection_cuda() -> None:
    """Free memory of objects that nothing refers to, and give back what torch keeps of devices for later."""
    gc.collect()
    empty_caches()


def is_oom_error(exception: BaseException) -> bool:
    """Return whether an error is from running out of memory."""
    return is_out_of_memory(exception) or is_cudnn_snafu(exception)


def is_cuda_out_of_memory(exception: BaseException) -> bool:
    """Return whether an error is from running out of the memory of a CUDA device."""
    return is_out_of_memory(exception) and "CUDA" in str(exception)


def is_cudnn_snafu(exception: BaseException) -> bool:
    """Return whether an error is the one by which cuDNN says that it has no memory."""
    return isinstance(exception, RuntimeError) and "CUDNN_STATUS_NOT_SUPPORTED" in str(exception)


def is_out_of_cpu_memory(exception: BaseException) -> bool:
    """Return whether an error is from running out of the CPU's memory."""
    return is_out_of_memory(exception) and "DefaultCPUAllocator" in str(exception)


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return how many workers each loader may have, with so many processes on this machine: a core each, less one.

    Raises:
        ValueError: for less than one process.
    """
    if local_world_size < 1:
        raise ValueError(f"`local_world_size` should be >= 1, got {local_world_size}; give the number of processes.")
    return max(1, num_cores() // local_world_size - 1)


def find_free_network_port() -> int:
    """Return a port of this machine that nothing listens on at the moment."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        port: int = listening.getsockname()[1]
    return port


def is_shared_filesystem(strategy: Any, path: str | Path | None = None, timeout: int = 3) -> bool:
    """Return whether the folder at a path is the same on all ranks. Collective: every rank calls it.

    Args:
        strategy: that of the trainer or of Fabric.
        path: the path, by default the current folder.
        timeout: the seconds after which a file that rank 0 has written should be seen.
    """
    if (path is not None and is_url(path)) or strategy.world_size == 1:
        return True
    folder = Path.cwd() if path is None else Path(path).resolve()
    mark = (folder.parent if folder.is_file() else folder) / f".shared-{strategy.broadcast(random.getrandbits(60))}"
    if strategy.is_global_zero:
        mark.touch()
    strategy.barrier()
    is_seen = _appears_within(mark, timeout)
    is_shared: bool = strategy.reduce_boolean_decision(is_seen, all=True)
    if strategy.is_global_zero:
        mark.unlink(missing_ok=True)
    return is_shared


def _appears_within(path: Path, seconds: float) -> bool:
    end = monotonic() + seconds
    while not path.exists():
        if monotonic() > end:
            return False
        sleep(0.01)
    return True


# --- seeds ---


@wraps(seed_generators)
def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python's, NumPy's and torch's generators, and note the seed in ``PL_GLOBAL_SEED``; return it.

    None stands for that variable's, or 0.
    """
    if seed is None:
        noted = ENVIRON.get(_SEED, "0")
        if not noted.isdecimal():
            raise ConfigError(f"{_SEED}={noted!r} must be an integer of at least 0; set it to one, or give seed.")
        seed = int(noted)
    chosen = seed_generators(seed, workers, verbose)
    set_all({_SEED: str(chosen), "PL_SEED_WORKERS": str(int(workers))})
    return chosen


def reset_seed() -> None:
    """Seed the generators again as `seed_everything` did; do nothing if it was not called."""
    if _SEED in ENVIRON:
        seed_generators(int(ENVIRON[_SEED]), verbose=False)


def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """Seed a worker of a loader by its number and rank; the workers of a trainer's loaders are seeded anyway."""
    seed = derive_seed(torch.initial_seed() - worker_id, worker_id, current_rank() if rank is None else rank)
    seed_generators(seed % 2**32, verbose=False)


# --- data ---


class WriteInterval(StrEnum):
    """When a `BasePredictionWriter` writes."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """Whether it writes each batch."""
        return self is not WriteInterval.EPOCH

    @property
    def on_epoch(self) -> bool:
        """Whether it writes at the end of the epoch."""
        return self is not WriteInterval.BATCH


def sized_len(dataloader: object) -> int | None:
    """Return the length of a loader, or None if it has none."""
    try:
        return len(dataloader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def has_iterable_dataset(dataloader: object) -> bool:
    """Return whether a loader reads a stream."""
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def has_len(dataloader: object) -> bool:
    """Return whether a loader has a length; warn if it is 0."""
    length = sized_len(dataloader)
    if length == 0:
        warnings.warn(
            f"`{type(dataloader).__name__}` returned 0 length; check that it is meant to have no batches.",
            stacklevel=2,
        )
    return length is not None


def has_len_all_ranks(
    dataloader: object, strategy: Any, allow_zero_length_dataloader_with_multiple_devices: bool = False
) -> bool:
    """Return whether the loaders of all ranks have lengths. Collective: every rank calls it.

    Raises:
        RuntimeError: if this rank's has no batches while others have, unless that is allowed.
    """
    length = sized_len(dataloader)
    if length is None:
        return False
    total = int(strategy.reduce(torch.tensor(length, device=strategy.root_device), reduce_op="sum"))
    if total and not length and not allow_zero_length_dataloader_with_multiple_devices:
        raise RuntimeError(
            f"`{type(dataloader).__name__}` within local rank has zero length, while all have {total} batches; give "
            "each rank at least one."
        )
    return True


def extract_batch_size(batch: Any) -> int:
    """Return the number of samples in a batch, as `self.log` weighs it: the length of its first tensor."""
    return size_of(batch)


def convert_tensors_to_scalars(data: Any) -> Any:
    """Return data with numbers in place of its tensors.

    Raises:
        ValueError: for a tensor with more than one element.
    """

    def number(value: Any) -> Any:
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"The metric `{value}` does not contain a single element, thus it cannot be converted to a scalar; "
                "reduce it first."
            )
        return value.item() if isinstance(value, Tensor) else value

    return tree_map(number, data)


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignore the warnings of Echelon's modules, or of those whose names match."""
    warnings.filterwarnings("ignore", category=UserWarning, module=module or r"echelon\b")
