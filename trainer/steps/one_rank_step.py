"""OneRankStep: an optimizer step that a single rank makes by itself."""

from __future__ import annotations

from functools import partial

from ..data.micro_batch import Window
from ..loop.step import Step


class OneRankStep(Step):
    """The step of a single rank, shared with no other."""

    __slots__ = ()

    def forward_backward(self, window: Window) -> bool:
        last = len(window) - 1
        self.weights = self.make_weights(window) if last or self.passes_closure else None
        self.has_gradients, self.left, self.first_batch_idx = False, None, self.state.batches_in_epoch
        self.metrics.position = self.state.global_step + 1
        for index, micro_batch in enumerate(window):
            if index:
                self.end(window[index - 1])
            if not self.begin(micro_batch):
                return False
            if last:
                self.set_grad_sync(index == last)
            if index == last and self.passes_closure:
                self.left = partial(self.run_micro_batch, micro_batch, is_first=index == 0)
            else:
                self.run_micro_batch(micro_batch, is_first=index == 0)
        return True
