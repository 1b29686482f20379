"""DataParallelStrategy: one process cuts every batch over several devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .cluster.hardware import Hardware
from .distributed.nested import to_device
from .errors import ConfigError, ModuleError
from .module.precision import Precision
from .parallel.batch_split import combine, split
from .strategy import Strategy


class DataParallelStrategy(Strategy):
    """Compute each step on several devices of one process, a part of the batch on each, as torch's ``DataParallel``.

    The module lives on the first device and computes the first part itself; replicas, made anew for each step, compute
    the others. What a step changes in a replica is lost, but what it logs counts. On GPUs the parts run at the same
    time; on the CPU one after another, each in a thread of its own: torch has one random generator for the CPU, and
    who draws first must not be left to chance.
    """

    name: ClassVar[str] = "dp"
    uses_many_devices: ClassVar[bool] = True

    def __init__(self) -> None:
        self._places: dict[int, torch.device] = {}
        super().__init__()

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        if hardware.num_nodes != 1:
            raise ConfigError(
                f"strategy='dp' is one process on one machine, but num_nodes={hardware.num_nodes}; set num_nodes=1, or "
                "use strategy='ddp'."
            )
        super().validate(hardware, precision)

    def connect(self, hardware: Hardware, precision: Precision) -> None:
        super().connect(hardware, precision)
        self._devices = [hardware.device(index) for index in range(len(hardware.devices))]

    @property
    def device(self) -> torch.device:
        """The device of the part that the calling thread computes; everywhere else the first one."""
        return self._places.get(threading.get_ident(), self._first_device)

    @device.setter
    def device(self, device: torch.device) -> None:
        self._first_device = device

    def setup_module(self, module: nn.Module, *, is_manual: bool = False) -> None:
        if len(self._devices) > 1:
            _check_replicable(module, len(self._devices), is_manual)
        super().setup_module(module, is_manual=is_manual)

    def run(self, step_name: str, *args: Any) -> Any:
        batches, sizes = split(args[0], len(self._devices))
        with self.forward_context:
            if len(sizes) == 1:
                return getattr(self.module, step_name)(*args)
            devices = self._devices[: len(sizes)]
            modules = _replicate(self.module, devices)
            parts = [
                _Part(module, device, f"part {index + 1} of {len(sizes)}", self.precision, self._places)
                for index, (module, device) in enumerate(zip(modules, devices, strict=True))
            ]
            inputs = [
                (step_name, to_device(batch, device), *args[1:]) for batch, device in zip(batches, devices, strict=True)
            ]
            outputs = _apply(parts, inputs, devices)
            for part, size in zip(parts, sizes, strict=True):
                part.log.replay(self.module, size)
            outputs = [to_device(output, self.device) for output in outputs]
            # grows the graph, and so goes where the parts went
            has_graph = self.device.type == "cpu" and torch.is_grad_enabled()
            return _in_a_thread(combine, outputs, sizes, step_name) if has_graph else combine(outputs, sizes, step_name)


def _check_replicable(module: nn.Module, num_devices: int, is_manual: bool) -> None:
    if is_manual:
        raise ConfigError(
            f"strategy='dp' cannot train {type(module).__name__} on devices={num_devices} with "
            "automatic_optimization=False: each part of a batch would make an update of its own; use strategy='ddp', "
            "or return the loss."
        )
    compiled = [type(part).__name__ for part in module.modules() if vars(part).get("_compiled_call_impl") is not None]
    if compiled:
        raise ConfigError(
            f"strategy='dp' with devices={num_devices} cannot replicate compiled modules, and {compiled[0]} is one; "
            "set compile=False, or use strategy='ddp'."
        )


def _replicate(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """Return the module, and a replica of it for each device but the first."""
    if devices[0].type == "cpu":
        replicas = [_replicate_on_cpu(module) for _ in devices[1:]]
    else:
        from torch.nn.parallel import replicate

        replicas = replicate(module, devices, detach=not torch.is_grad_enabled())[1:]
    for part in chain.from_iterable(replica.modules() for replica in replicas):
        own = vars(part).get("forward")
        if isinstance(own, MethodType):  # such as a checkpointed one, in place of the class's
            vars(part)["forward"] = MethodType(own.__func__, part)
    return [module, *replicas]


def _replicate_on_cpu(module: nn.Module) -> nn.Module:
    """Return a replica that shares the parameters and has buffers of its own, as `replicate` makes them for GPUs."""
    buffers = {buffer: buffer.clone() for buffer in module.buffers()}
    replicas = {part: part._replicate_for_data_parallel() for part in module.modules()}  # noqa: SLF001
    for part, replica in replicas.items():
        state = vars(part)
        vars(replica).update(
            _parameters=dict(state["_parameters"]),
            _buffers={name: buffers.get(buffer) for name, buffer in state["_buffers"].items()},
            _modules={name: replicas.get(child) for name, child in state["_modules"].items()},
        )
    replica_of_module: nn.Module = replicas[module]
    return replica_of_module


def _apply(parts: Sequence[_Part], inputs: Sequence[tuple[Any, ...]], devices: Sequence[torch.device]) -> list[Any]:
    """Call each part in a thread; on the CPU one after another."""
    if devices[0].type != "cpu":
        from torch.nn.parallel import parallel_apply

        return parallel_apply(parts, inputs, devices=devices)
    return [_in_a_thread(part, *args) for part, args in zip(parts, inputs, strict=True)]


def _in_a_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns in a new thread.

    Autograd numbers the nodes of a graph by thread and adds gradients in that order. A thread that has computed before
    would let it depend on how much: a resumed run would round otherwise.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="echelon-dp") as thread:
        return thread.submit(function, *args).result()


class _Part(nn.Module):
    """A step on one device; a module, because that is what `parallel_apply` takes."""

    def __init__(
        self, module: nn.Module, device: torch.device, where: str, precision: Precision, places: dict[int, torch.device]
    ) -> None:
        super().__init__()
        self.module = module
        self.log = _Log()
        self._device, self._where, self._precision, self._places = device, where, precision, places
        self._has_grad, self._is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def forward(self, step_name: str, *args: Any) -> Any:
        """Call the step in the modes of the thread that made this part; torch keeps them for each thread."""
        thread = threading.get_ident()
        self._places[thread] = self._device
        vars(self.module)["log"] = self.log  # hides the method, in this instance and during this step
        try:
            with torch.inference_mode(self._is_inference), torch.set_grad_enabled(self._has_grad), self._autocast():
                return getattr(self.module, step_name)(*args)
        except Exception as error:
            error.add_note(f"{step_name} failed on {self._where} of the batch, on {self._device}.")
            raise
        finally:
            del vars(self.module)["log"], self._places[thread]

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        if self._precision.autocast_dtype is None:  # a default dtype is set already, for all threads
            yield
            return
        with self._precision.forward_context(self._device):
            # One cache of cast weights serves all threads, and the first that is done empties it: whether two parts
            # share a cast, and so how their gradients are rounded, would be left to chance.
            torch.set_autocast_cache_enabled(False)
            yield


class _Log:
    """What a part logs, kept until all are done: then it is logged in the order of the parts, by their sizes."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if isinstance(value, nn.Module):
            raise ModuleError(
                f"self.log({name!r}, ...) got a {type(value).__name__} that accumulates by itself, which replicas of "
                "strategy='dp' lose; log numbers, or use strategy='ddp'."
            )
        # a copy, for what is logged may be changed in place
        kept = value.detach().clone() if isinstance(value, Tensor) else value
        self._calls.append((name, kept, args, options))

    def replay(self, module: Any, size: int) -> None:
        """Log it into the module, with the weight of a part of so many samples where the user gave none."""
        for name, value, args, options in self._calls:
            weight = options.get("batch_size")
            module.log(name, value, *args, **{**options, "batch_size": size if weight is None else weight})
