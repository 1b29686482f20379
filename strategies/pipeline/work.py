"""WindowWork: what the loop does for the micro-batches of a step in stages, and what surrounds them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from ...common.errors import NotSetUpError
from ..distributed.collectives import Collectives
from ..state.dtensor import whole_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from .timeline import WindowRecorder


class WindowWork(Protocol):
    """What the loop does for the micro-batches of one step, by their indices."""

    @property
    def signatures(self) -> Sequence[Hashable]:
        """One for each micro-batch: batches of the same shapes have the same."""

    @property
    def num_of_all(self) -> int:
        """Micro-batches on the data rank with the most."""

    @property
    def stand_in(self) -> Hashable:
        """The signature of the batch that stands in for those which only other data ranks have."""

    @property
    def position(self) -> int:
        """A number that tells the windows of a run apart, and that a resumed run has again."""

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of inputs can be computed apart from those of weights."""

    @property
    def micro_batches_a_step(self) -> int:
        """Of a whole step; the rest of an epoch may have others."""

    def arguments_at(self, index: int) -> Sequence[object]:
        """Return what the module's step gets, the batch first; behind the last index, that which stands in."""

    def unseen(self) -> AbstractContextManager[object]:
        """Return the context of the forward of a batch that stands in: it leaves no trace in the module."""

    def forward_at(self, index: int) -> object:
        """Call the module's step, as far as a stage goes."""

    def loss_at(self, index: int, output: object) -> Tensor:
        """Return the loss to differentiate of what the step returned; on the last stage. One that stands in is 0."""

    def backward_of(self, index: int, loss: Tensor) -> None:
        """Add the gradients of a loss."""

    def scaled(self, index: int, loss: Tensor) -> Tensor:
        """Return the loss as its gradients are computed in two halves."""

    def after_backward(self, index: int) -> None:
        """Take note that a micro-batch has gone backward through all stages of this rank."""


@runtime_checkable
class StagedSteps(Protocol):
    """A placed module that is divided into stages, through which the micro-batches of a step pass."""

    def run_window(self, work: WindowWork) -> None:
        """Compute and add up the gradients of a step's micro-batches. Collective: every rank calls it."""

    def record_window(self) -> WindowRecorder:
        """Record the next `run_window`, on every rank."""


def find_staged(placed: object) -> StagedSteps:
    """Return a placed module as one whose steps pass through stages.

    Raises:
        NotSetUpError: for one that is not divided into stages.
    """
    if not isinstance(placed, StagedSteps):
        raise NotSetUpError(f"The steps of {type(placed).__name__} do not pass through stages; use strategy='pp'.")
    return placed


class StepContext(NamedTuple):
    """What surrounds the steps of a pipeline whose ranks compute them together with others of the same stage."""

    recomputing: Callable[[int], AbstractContextManager[object]] = nullcontext
    """In which a stage's backward of a micro-batch runs, which may compute parts of its forward again."""
    is_true_on_any: Callable[[bool], bool] = bool
    """Tells whether one of these ranks, which all call it, has passed True."""
    has_cut_layers: bool = False
    """Whether layers are cut, so that a part rounds and draws random numbers in another way than it does as a whole."""
    comparing: Callable[[], AbstractContextManager[object]] = nullcontext
    """In which a step runs only to be compared."""
    evaluates_alone: bool = True
    """Whether these ranks alone can run a step once more without gradients, and others need not take part in it."""
    together: Collectives | None = None
    """Over the ranks of all pipelines that compute a step together; None if it is one pipeline."""
    sends: bool = False
    """Whether a stage sends activations to those of other data ranks: all then run as many micro-batches, and in the
    same order."""
    lent: Callable[[DTensor], Tensor] = whole_tensor
    """Returns a DTensor as another rank of the pipeline can compute with it. Collective: the ranks that share it."""


def signatures_of(work: WindowWork, around: StepContext) -> Sequence[Hashable]:
    """Return the signatures of the micro-batches that a rank runs, with those that stand in at the end."""
    missing = max(0, work.num_of_all - len(work.signatures)) if around.sends else 0
    return [*work.signatures, *[work.stand_in] * missing]
