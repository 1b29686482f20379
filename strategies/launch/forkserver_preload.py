"""Module for the fork server only: it imports what workers need, and unblocks their signals.

``timeout``, ``scancel`` or a terminal signal every process of a run. This would end the fork server, and the exit codes
of workers would be lost; so it is started with these signals blocked. Its children inherit that and unblock them here.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import sys

from .worker import CULPRITS, NOT_FOR_THE_FORK_SERVER, makes_devices_unusable, take_preload

_OF_RANKS = (
    *("callbacks.heartbeat", "callbacks.memory_snapshots", "strategies.placed.watched_shards"),
    *("trainer.data.evaluation_data", "trainer.data.iterable_stream"),
    *("trainer.steps.make_step", "trainer.steps.pipeline_step", "trainer.planning.machine"),
)
"""Modules that no package exports, which a run imports when it comes to use them."""

os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_THE_FORK_SERVER))


def _import_all(names: str) -> None:
    needs_devices, *modules = names.split(",")
    for name in modules:
        with contextlib.suppress(ImportError):  # the worker that needs it reports this
            importlib.import_module(name)
            if needs_devices and not CULPRITS and makes_devices_unusable():
                CULPRITS.append(name)


def _end_process(server: int) -> None:
    """End the process `server` at once: taking down what is frozen takes a second, and triton 3.9 reports leaks."""
    if os.getpid() != server:  # a child of it
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _import_package(name: str) -> None:
    """Import all that a package exports, which workers would each import when they use it."""
    package = importlib.import_module(name)
    for exported in package.__all__:
        getattr(package, exported)


_ECHELON = __package__.partition(".")[0]
for _name in ("", ".callbacks", ".strategies", ".trainer.checkpoint", ".trainer.tuning"):
    _import_package(f"{_ECHELON}{_name}")
for _name in _OF_RANKS:
    importlib.import_module(f"{_ECHELON}.{_name}")
_import_all(take_preload())
gc.freeze()  # garbage collections in workers neither search what was imported nor copy its pages
if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):  # not if something else imports this
    atexit.register(_end_process, os.getpid())
