"""PlacedSlices: a module on several devices of one process, each of which computes a slice of every batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...common.errors import ModuleError
from ..devices.replicas import replicate_module
from ..distributed.nested import to_device
from ..module.precision import Precision
from ..parallel.batch_split import combine_results, split_batch
from .placed import Placed, Site


class PlacedSlices(Placed):
    """A module on the first of several devices, which computes the first slice of a batch; replicas compute the others.

    Args:
        site: where it lies.
        module: the module.
        devices: those that compute.
        device_of_thread: where the device of each thread that computes a slice is noted, by its identifier.
    """

    def __init__(
        self,
        site: Site,
        module: nn.Module,
        devices: Sequence[torch.device],
        device_of_thread: MutableMapping[int, torch.device],
    ) -> None:
        super().__init__(site, module)
        self._devices, self._device_of_thread = devices, device_of_thread

    def step_fn(self, step_name: str) -> Callable[..., Any]:
        return partial(self._run, step_name)

    def _run(self, step_name: str, *args: object) -> Any:
        batches, sizes = split_batch(args[0], len(self._devices))
        with self.forward_context:
            if len(sizes) == 1:
                return getattr(self.module, step_name)(*args)
            devices = self._devices[: len(sizes)]
            modules = replicate_module(self.module, devices)
            steps = [
                _SliceStep(module, device, f"slice {index + 1} of {len(sizes)}", self.precision, self._device_of_thread)
                for index, (module, device) in enumerate(zip(modules, devices, strict=True))
            ]
            inputs = [
                (step_name, to_device(batch, device), *args[1:]) for batch, device in zip(batches, devices, strict=True)
            ]
            outputs = _apply_steps(steps, inputs, devices)
            for step, size in zip(steps, sizes, strict=True):
                step.log.replay(self.module, size)
            outputs = [to_device(output, self.device) for output in outputs]
            # combining extends the autograd graph, so it needs a new thread as the slices did
            has_graph = self.device.type == "cpu" and torch.is_grad_enabled()
            return (
                _in_a_thread(combine_results, outputs, sizes, step_name)
                if has_graph
                else combine_results(outputs, sizes, step_name)
            )


def _apply_steps(
    steps: Sequence[_SliceStep], inputs: Sequence[tuple[object, ...]], devices: Sequence[torch.device]
) -> list[object]:
    """Call each step in a thread of its own; on the CPU, one after another."""
    if devices[0].type != "cpu":
        from torch.nn.parallel import parallel_apply

        # indices: torch (2.14) takes no torch.device here that is not CUDA's
        return parallel_apply(steps, inputs, devices=[device.index for device in devices])
    return [_in_a_thread(step, *args) for step, args in zip(steps, inputs, strict=True)]


def _in_a_thread(function: Callable[..., object], *args: object) -> object:
    """Call a function in a new thread and return its result.

    Autograd numbers the nodes of a graph per thread, and adds gradients in that order. In a thread that has computed
    before, the order would depend on how much, and a resumed run would round differently.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="echelon-dp") as thread:
        return thread.submit(function, *args).result()


class _SliceStep(nn.Module):
    """A step on one slice of the batch; a module, because `parallel_apply` takes modules."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        where: str,
        precision: Precision,
        device_of_thread: MutableMapping[int, torch.device],
    ) -> None:
        super().__init__()
        self.module = module
        self.log = _Log()
        self._device, self._where, self._precision = device, where, precision
        self._device_of_thread = device_of_thread
        self._has_grad, self._is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def forward(self, step_name: str, *args: object) -> Any:
        """Call the step in the grad and inference modes of the thread that made this; both are thread-local."""
        thread = threading.get_ident()
        self._device_of_thread[thread] = self._device
        vars(self.module)["log"] = self.log  # hides the method, in this instance and during this step
        try:
            with torch.inference_mode(self._is_inference), torch.set_grad_enabled(self._has_grad), self._autocast():
                return getattr(self.module, step_name)(*args)
        except Exception as error:
            error.add_note(f"{step_name} failed on {self._where} of the batch, on {self._device}.")
            raise
        finally:
            del vars(self.module)["log"], self._device_of_thread[thread]

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        if self._precision.autocast_dtype is None:  # the default dtype is global, and set already
            yield
            return
        with self._precision.forward_context(self._device):
            # All threads share one cache of cast weights, which the first to finish clears: whether two slices share
            # a cast, and so how their gradients are rounded, would depend on timing.
            torch.set_autocast_cache_enabled(False)
            yield


class _Log:
    """Keeps what a slice logs until all slices are done, to log it in slice order, weighted by slice size."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, object, tuple[object, ...], dict[str, object]]] = []

    def __call__(self, name: str, value: object, *args: object, **options: object) -> None:
        if isinstance(value, nn.Module):
            raise ModuleError(
                f"self.log({name!r}, ...) got a {type(value).__name__} that accumulates by itself, which replicas of "
                "strategy='dp' lose; log numbers, or use strategy='ddp'."
            )
        # a copy, since the user may change it in place
        kept = value.detach().clone() if isinstance(value, Tensor) else value
        self._calls.append((name, kept, args, options))

    def replay(self, module: Any, size: int) -> None:
        """Log the kept values in the module, with `size`, the slice's number of samples, as the default weight."""
        for name, value, args, options in self._calls:
            weight = options.get("batch_size")
            module.log(name, value, *args, **{**options, "batch_size": size if weight is None else weight})
