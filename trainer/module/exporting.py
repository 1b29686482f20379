"""Exporting: a module's forward as a program that runs without its class, in ONNX, torch.export or TorchScript."""

from __future__ import annotations

import logging
import re
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from io import BytesIO, StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from ...common.errors import MissingDependencyError, ModuleError, RunError
from ...common.flush import flush_to_disk
from ...common.storage import StorePath, any_path, send_folder
from ...strategies.distributed.nested import to_device
from ...strategies.module.untouched import Untouched
from ...strategies.state.dtensor import is_dtensor
from ...strategies.torch_internals.modules import drop_compiled_call

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.onnx import ONNXProgram

_LARGEST_FILE: Final = 1 << 30
"""Bytes of weights above which an ONNX model stores them in a second file: a protobuf message is limited to 2 GiB."""

_TORCH: Final = Path(torch.__file__).parent
_DEPENDS_ON_DATA: Final = re.compile("data-dependent|Dynamic control flow|bool\\(\\) on|guard on", re.IGNORECASE)
"""What torch says of a branch on the values of tensors."""

Sample = object
"""A tensor, a tuple of arguments, or a dict of keyword arguments of ``forward``."""


class Exporting:
    """Methods that export ``forward`` in eval mode; the module and its modes are left unchanged.

    Files are written atomically. With a strategy that shards parameters, export after `fit` has returned, or load the
    checkpoint.
    """

    example_input_array: Any

    def to_onnx(
        self, file_path: str | Path | BytesIO | None = None, input_sample: Sample = None, **kwargs: Any
    ) -> ONNXProgram | None:
        """Return ``forward`` as an ONNX program, and write it.

        Args:
            file_path: the file; None to write none. Weights of more than 1 GiB go to ``<file_path>.data`` beside it.
            input_sample: a tensor, a tuple of arguments, or a dict of keyword arguments; by default
                `example_input_array`. Its sizes are fixed, except those in ``dynamic_shapes``.
            kwargs: arguments of ``torch.onnx.export``, such as ``dynamic_shapes`` and ``input_names``.

        Returns:
            The program; None with ``dynamo=False``, torch's old exporter.

        Raises:
            MissingDependencyError: if onnx or onnxscript is not installed.
            ModuleError: without an input.
            RunError: if this rank holds only parts of the parameters.
        """
        missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
        if missing:
            raise MissingDependencyError(
                f"to_onnx needs {' and '.join(missing)}, which is not installed; run: pip install onnx onnxscript."
            )
        module = self._exported()
        args, named = _example_arguments(module, "to_onnx", "input_sample", input_sample)
        options = {"verbose": False, **kwargs, "kwargs": {**named, **(kwargs.get("kwargs") or {})} or None}
        with _in_eval_mode(module):
            if not options.get("dynamo", True):
                _write_target(file_path, lambda file: torch.onnx.export(module, args, file, **options))
                return None
            num_bytes = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
            has_data_file = bool(options.pop("external_data", num_bytes > _LARGEST_FILE))
            with _in_short(module):
                program = torch.onnx.export(module, args, **options)
        assert program is not None
        _write_target(file_path, lambda file: program.save(file, external_data=has_data_file))
        return program

    def to_exported_program(
        self, file_path: str | Path | BytesIO | None = None, input_sample: Sample = None, **kwargs: Any
    ) -> ExportedProgram:
        """Return ``forward`` as a program of ``torch.export``, and write it for ``torch.export.load``.

        Args:
            file_path: the file, ``.pt2`` by convention; None to write none.
            input_sample: as in `to_onnx`.
            kwargs: arguments of ``torch.export.export``, such as ``dynamic_shapes``.

        Raises:
            ModuleError: without an input.
            RunError: if this rank holds only parts of the parameters.
        """
        module = self._exported()
        args, named = _example_arguments(module, "to_exported_program", "input_sample", input_sample)
        with _in_eval_mode(module), _in_short(module):
            program = torch.export.export(module, args, named, **kwargs)
        _write_target(file_path, lambda file: torch.export.save(program, file))
        return program

    def to_torchscript(
        self,
        file_path: str | Path | None = None,
        method: str = "script",
        example_inputs: Sample = None,
        **kwargs: Any,
    ) -> torch.jit.ScriptModule:
        """Return ``forward`` as TorchScript, which torch has deprecated: prefer `to_exported_program`.

        Args:
            file_path: the file for ``torch.jit.load``; None to write none.
            method: ``"script"`` compiles the code of ``forward``; ``"trace"`` records what it does with an input.
            example_inputs: for ``"trace"``, in the forms that `to_onnx` accepts.
            kwargs: arguments of ``torch.jit.script`` or ``torch.jit.trace``.

        Raises:
            ModuleError: for another method, or without an input to trace.
            RunError: if this rank holds only parts of the parameters.
        """
        if method not in ("script", "trace"):
            raise ModuleError(
                "to_torchscript: the `method` parameter only supports 'script' or 'trace', but value given was: "
                f"{method}; give one of them."
            )
        warnings.warn(
            "TorchScript is deprecated in torch; call to_exported_program() for torch.export, or to_onnx().",
            DeprecationWarning,
            stacklevel=2,
        )
        module = self._exported()
        with _in_eval_mode(module), _with_trainer(module, object()), torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit")  # each of its functions is deprecated
            if method == "script":
                scripted: Any = torch.jit.script(module, **kwargs)
            else:
                args, named = _example_arguments(module, "to_torchscript", "example_inputs", example_inputs)
                scripted = torch.jit.trace(module, args or None, example_kwarg_inputs=named or None, **kwargs)
            _write_target(file_path, lambda file: torch.jit.save(scripted, str(file)))
        return scripted  # type: ignore[no-any-return]

    def _exported(self) -> nn.Module:
        """Return this module if it can be exported here."""
        assert isinstance(self, nn.Module)
        sharded = [name for name, parameter in self.named_parameters() if is_dtensor(parameter) or parameter.is_meta]
        if sharded:
            raise RunError(
                f"{type(self).__name__} cannot be exported here, got {len(sharded)} parameters of which this rank "
                f"holds only a part ({sharded[0]}, ...); call this after fit, or load the checkpoint with "
                "load_from_checkpoint."
            )
        return self


def _example_arguments(
    module: nn.Module, method: str, name: str, sample: Sample
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments of ``forward``, by position and by name, on the module's device."""
    if sample is None:
        sample = module.example_input_array
    if sample is None:
        raise ModuleError(
            f"{method} of {type(module).__name__} requires either `{name}` or `model.example_input_array` to be "
            f"defined, got None for both; pass {name}=..., or set self.example_input_array in __init__."
        )
    parameter = next(module.parameters(), None)
    sample = to_device(sample, torch.device("cpu") if parameter is None else parameter.device)
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (tuple(sample) if isinstance(sample, tuple | list) else (sample,)), {}


@contextmanager
def _in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Put all submodules in eval mode, uncompiled, and leave no trace of their calls."""
    with Untouched(module):
        for part in module.modules():
            drop_compiled_call(part)
        yield


@contextmanager
def _in_short(module: nn.Module) -> Iterator[None]:
    """Say in a few lines what torch reports of code that it cannot export; its report stays as ``__context__``."""
    tracer = logging.getLogger("torch.fx.experimental.symbolic_shapes")  # it logs the program so far
    before = tracer.level
    tracer.setLevel(logging.CRITICAL)
    printed = StringIO()
    try:
        with redirect_stderr(printed):
            yield
        sys.stderr.write(printed.getvalue())
    except Exception as error:
        if isinstance(error, TypeError | ValueError):  # of the arguments
            raise
        reason = _first_of(error)
        own = [frame for frame in extract_tb(reason.__traceback__) if _TORCH not in Path(frame.filename).parents]
        where = f" at {own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else ""
        line = next((line for line in str(reason).splitlines() if line.strip()), type(reason).__name__)
        branches = _DEPENDS_ON_DATA.search(str(reason)) is not None
        remedy = (
            "A program has no branches on the values of tensors: write torch.where(condition, a, b) or torch.cond"
            if branches
            else "Rewrite what it cannot follow, or export the part of the module that it can"
        )
        raise ModuleError(
            f"{type(module).__name__}.forward cannot be exported: {type(reason).__name__}: {line[:200]}{where}. "
            f"{remedy}; see https://docs.pytorch.org/docs/stable/export.html."
        ) from None
    finally:
        tracer.setLevel(before)


def _first_of(error: BaseException) -> BaseException:
    """Return the error that others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _write_target(target: str | Path | BytesIO | None, write: Callable[[Any], object]) -> None:
    """Write a file, and any others beside it, atomically; or write to a buffer."""
    if target is None or isinstance(target, BytesIO):
        if target is not None:
            write(target)
        return
    path = any_path("file_path", target)
    if isinstance(path, StorePath):
        with TemporaryDirectory(prefix="echelon-export-") as folder:
            write(Path(folder, path.name))
            send_folder(Path(folder), path.parent, last=[path.name], is_all=False)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.{secrets.token_hex(4)}") as folder:
        write(Path(folder, path.name))
        written = sorted(Path(folder).iterdir(), key=lambda file: file.name == path.name)  # the target last
        for file in written:
            file.replace(path.parent / file.name)
    flush_to_disk(path.parent)


@contextmanager
def _with_trainer(module: nn.Module, trainer: object) -> Iterator[None]:
    """Give a module and its submodules an empty trainer: TorchScript reads every attribute."""
    parts = [vars(part) for part in module.modules() if isinstance(part, Exporting)]
    before = [part.get("_trainer") for part in parts]
    for part in parts:
        part["_trainer"] = trainer
    try:
        yield
    finally:
        for part, own in zip(parts, before, strict=True):
            part["_trainer"] = own
