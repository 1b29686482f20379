"""Switches for randomness: dropout, augmentation and, on request, batch statistics, in the same way on every layout."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from ...callbacks.dispatch import overrides_method
from ...common.internals.stack_frames import find_frame
from ...strategies.torch_internals.modules import BatchNorm, Dropout
from ..data.generators import Generators
from ..data.loader_kinds import is_indexed
from ..data.seed import derive_seed
from ..module.data_module import DataHooks, DataModule

_DROPOUTS: Final = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu),
    *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
)
_SIGNATURES: Final = {F.scaled_dot_product_attention: 4}
"""The position of ``dropout_p`` in functions written in C."""
_OF_ATTENTION: Final = inspect.signature(F.multi_head_attention_forward)
_IN_C: Final = frozenset(_DROPOUTS[-4:])


class NoDropout(TorchFunctionMode):
    """Runs torch's dropout functions, and attention, as in evaluation, even if a module calls them directly."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        if func in _DROPOUTS:
            name, place = ("train", 2) if func in _IN_C else ("training", 4 if func is F.rrelu else 2)
            args, given = _replace_argument(args, given, name, place, value=False)
        elif func is F.scaled_dot_product_attention:
            args, given = _replace_argument(args, given, "dropout_p", _SIGNATURES[func], value=0.0)
        elif func is F.multi_head_attention_forward:
            call = _OF_ATTENTION.bind(*args, **given)
            call.arguments["dropout_p"] = 0.0
            args, given = call.args, call.kwargs
        return func(*args, **given)


class NotesRounding(NoDropout):
    """Does so, and notes the first line from which a gradient goes through float32."""

    def __init__(self) -> None:
        super().__init__()
        self.line = ""
        """The file, the number and the text of the line; "" if there is none."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        output = super().__torch_function__(func, types, args, kwargs)
        if not self.line and type(output) is Tensor and output.dtype is torch.float32 and output.requires_grad:
            frames = traceback.extract_stack(find_frame(1))  # the caller's
            own = [frame for frame in frames if Path(torch.__file__).parent not in Path(frame.filename).parents]
            self.line = f"{own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else "torch"
        return output


def _replace_argument(
    args: tuple[object, ...], kwargs: dict[str, object], name: str, place: int, *, value: object
) -> tuple[tuple[object, ...], dict[str, object]]:
    if len(args) > place:
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


def switch_off(module: nn.Module, *, freezes_batchnorm: bool) -> None:
    """Switch off the dropout of layers in place, and with `freezes_batchnorm` the statistics of batches."""
    for layer in module.modules():
        if isinstance(layer, Dropout):
            layer.p = 0.0
        elif isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
            layer.dropout = 0.0
        elif isinstance(layer, BatchNorm) and freezes_batchnorm:
            layer.train = lambda mode=True, layer=layer: layer  # type: ignore[method-assign, misc]
            layer.training = False


def describe_switched_off(module: nn.Module, *, freezes_batchnorm: bool) -> list[str]:
    """Return a line for each kind of randomness that is switched off in a module."""
    kinds: dict[str, list[str]] = {"dropout": [], "batch statistics": []}
    for name, layer in module.named_modules():
        drops = getattr(layer, "p" if isinstance(layer, Dropout) else "dropout", 0.0)
        if type(drops) is float and drops > 0:
            kinds["dropout"].append(name)
        if freezes_batchnorm and isinstance(layer, BatchNorm):
            kinds["batch statistics"].append(name)
    return [
        f"{kind} switched off in {', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''}"
        for kind, names in kinds.items()
        if names
    ]


class Seeded:
    """A data set whose random augmentation depends only on the sample's index, whichever rank reads it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._generators = Generators()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, index: Any) -> object:
        with self._streams_of(index):
            return self._dataset[index]

    def __getitems__(self, indices: Sequence[object]) -> list[object]:
        whole = getattr(self._dataset, "__getitems__", None)
        if whole is None:
            return [self[index] for index in indices]
        samples = []
        for index in indices:
            with self._streams_of(index):
                samples += whole([index])
        return samples

    @contextmanager
    def _streams_of(self, index: object) -> Iterator[None]:
        generators = self._generators
        before = generators.new_state()
        generators.seed(derive_seed(7, index if isinstance(index, int) else hash(repr(index))))
        try:
            yield
        finally:
            generators.put(before)


class SeededData(DataModule):
    """The loaders of another data module, or given ones, over `Seeded` data sets.

    Args:
        data: a data module, a training loader, or a pair of one for training and one for validation; None if the
            module brings its own.
        module: the user's.
        global_batch_size: the samples of a step; it changes the batch size of the training loader, in manual
            optimization, where the trainer cannot cut batches, and for stages.
        num_pieces: how many micro-batches a rank's samples are cut into.
    """

    def __init__(self, data: object, module: Any, global_batch_size: int | None = None, num_pieces: int = 1) -> None:
        super().__init__()
        self._global_batch_size, self._num_pieces = global_batch_size, num_pieces
        self._owner = data if isinstance(data, DataModule) else module
        pair = data if isinstance(data, tuple) else (data, None)
        self._given = (None, None) if data is None or isinstance(data, DataModule) else pair
        is_given = self._given[0] is not None
        owns = overrides_method(self._owner, "val_dataloader", DataHooks)
        self.has_validation_data = self._given[1] is not None if is_given else owns
        """Whether there is validation data."""
        if not self.has_validation_data:
            self.val_dataloader = None  # type: ignore[method-assign, assignment]
        if self._owner is not module:
            for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
                if getattr(type(self._owner), name) is not getattr(DataModule, name):
                    setattr(self, name, getattr(self._owner, name))

    def prepare_data(self) -> None:
        if isinstance(self._owner, DataModule):
            self._owner.prepare_data()

    def setup(self, stage: str) -> None:
        if isinstance(self._owner, DataModule):
            self._owner.trainer = self.trainer
            self._owner.setup(stage)

    def teardown(self, stage: str) -> None:
        if isinstance(self._owner, DataModule):
            self._owner.teardown(stage)

    def train_dataloader(self) -> Any:
        loader = _with_seeded_dataset(self._given[0] if self._given[0] is not None else self._owner.train_dataloader())
        if self._global_batch_size is None or self.trainer is None:
            return loader
        session = self.trainer.session  # type: ignore[attr-defined]  # the trainer has more than `Run`
        ranks = session.strategy.data_size
        if self._num_pieces == 1 and session.state.data_size:
            # in manual optimization a resumed run keeps its samples per step: the loader's times the ranks at its start
            ranks = session.state.data_size
        return _with_batches_of(loader, math.ceil(self._global_batch_size / (ranks * self._num_pieces)))

    def val_dataloader(self) -> object:
        return _with_seeded_dataset(self._given[1] if self._given[0] is not None else self._owner.val_dataloader())


def _with_batches_of(loader: DataLoader[object], size: int) -> DataLoader[object]:
    return DataLoader(
        loader.dataset,
        size,
        sampler=loader.sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


def _with_seeded_dataset(loader: Any) -> Any:
    if is_indexed(loader) and not isinstance(loader.dataset, Seeded):
        vars(loader)["dataset"] = Seeded(loader.dataset)  # the loader forbids plain assignment once it is created
    return loader
