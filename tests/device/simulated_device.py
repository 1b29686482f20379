"""Registration of the simulated accelerator with torch, which calls `register` by the entry point group torch.backends.

ECHELON_SIMULATED is what it is called, and where its library is: ``sim=/path/to/library.so``. With a third part,
``toy=/path/to/library.so=plain``, it has neither streams nor generators for programs, as simple devices have none.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

VARIABLE = "ECHELON_SIMULATED"
BACKEND = "simccl"
_NAME = "simulated_device_library"
_FOR_PROGRAMS = ("Stream", "Event", "stream", "current_stream", "default_generators", "get_rng_state", "set_rng_state")


def register() -> None:
    """Make the device known to torch under its name; without the variable, do nothing."""
    given = os.environ.get(VARIABLE)
    if not given:
        return
    name, path, *options = given.split("=")
    torch.utils.rename_privateuse1_backend(name)
    library = _load(path)
    module = _module(name, library)
    if options:
        for each in _FOR_PROGRAMS:
            delattr(module, each)
    torch._register_device_module(name, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    _register_collectives(name, library)


def library() -> Any:
    """Return the library, for what tests ask of the device."""
    return sys.modules[_NAME]


def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = sys.modules[_NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def _register_collectives(name: str, library: Any) -> None:
    import torch.distributed as dist

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        from torch._C._distributed_c10d import ProcessGroupGloo

        return library.backend_over(ProcessGroupGloo(store, rank, size, timeout=timeout), BACKEND)

    dist.Backend.register_backend(BACKEND, make, devices=[name])


def _module(name: str, library: Any) -> types.ModuleType:
    """Return what becomes ``torch.<name>``."""
    module: Any = types.ModuleType(f"torch.{name}")
    accelerator = torch.accelerator

    def index_of(device: Any = None) -> int:
        if device is None:
            return int(library.current_device())
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return int(library.current_device()) if index is None else index

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Any:
            if "stream_id" in given:
                return super().__new__(cls, priority=priority, device=device, **given)
            return super().__new__(cls, torch.device(name, index_of(device)), priority=priority)

    # torch.Event.elapsed_time takes no event of a subclass
    def new_event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return torch.Event(name, enable_timing=enable_timing, blocking=blocking)

    @contextlib.contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        if chosen is None:
            yield
            return
        device, before = index_of(), accelerator.current_stream(chosen.device)
        accelerator.set_stream(chosen)
        try:
            yield
        finally:
            accelerator.set_stream(before)
            library.set_device(device)

    class Device:
        def __init__(self, device: Any) -> None:
            self._index = index_of(device)

        def __enter__(self) -> None:
            self._before = index_of()
            library.set_device(self._index)

        def __exit__(self, *error: object) -> None:
            library.set_device(self._before)

    process = os.getpid()
    forked = {"late": False}

    def after_fork() -> None:
        forked["late"] = bool(library.is_initialized()) and os.getpid() != process

    os.register_at_fork(after_in_child=after_fork)

    def manual_seed(seed: int) -> None:
        library.default_generator(index_of()).manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for index in range(library.device_count()):
            library.default_generator(index).manual_seed(seed)

    def get_rng_state(device: Any = None) -> Any:
        return library.default_generator(index_of(device)).get_state()

    def set_rng_state(state: Any, device: Any = None) -> None:
        library.default_generator(index_of(device)).set_state(state)

    vars(module).update(
        is_available=lambda: True,
        device_count=library.device_count,
        current_device=library.current_device,
        set_device=lambda device: library.set_device(index_of(device)),
        get_device_name=lambda device=None: "Simulated accelerator",
        device=Device,
        Stream=Stream,
        Event=new_event,
        stream=stream,
        current_stream=lambda device=None: accelerator.current_stream(index_of(device)),
        default_stream=lambda device=None: torch.Stream(device=torch.device(name, index_of(device)), stream_id=0),
        set_stream=accelerator.set_stream,
        synchronize=lambda device=None: accelerator.synchronize(index_of(device)),
        default_generators=tuple(library.default_generator(index) for index in range(library.device_count())),
        manual_seed=manual_seed,
        manual_seed_all=manual_seed_all,
        get_rng_state=get_rng_state,
        set_rng_state=set_rng_state,
        init=lambda: None,
        _lazy_init=lambda: None,
        is_initialized=library.is_initialized,
        _is_in_bad_fork=lambda: forked["late"],
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_bf16_supported=lambda including_emulation=True: True,
        memory_stats=lambda device=None: accelerator.memory_stats(index_of(device)),
        memory_allocated=lambda device=None: accelerator.memory_allocated(index_of(device)),
        max_memory_allocated=lambda device=None: accelerator.max_memory_allocated(index_of(device)),
        memory_reserved=lambda device=None: accelerator.memory_reserved(index_of(device)),
        reset_peak_memory_stats=lambda device=None: accelerator.reset_peak_memory_stats(index_of(device)),
        mem_get_info=lambda device=None: accelerator.get_memory_info(index_of(device)),
        empty_cache=accelerator.empty_cache,
    )
    return module
