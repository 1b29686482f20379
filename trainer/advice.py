"""Advice on errors of torch whose text names neither the mistake nor its remedy, added to them as a note."""

from __future__ import annotations

import re
from typing import Final

_ADVICE: Final = {
    "backward through the graph a second time": (
        "The trainer calls backward on what training_step returns: return the loss without loss.backward(), and "
        "detach() what is kept from one step to the next."
    ),
    "optimizer got an empty parameter list": (
        "The module has no parameters when configure_optimizers runs: keep layers in nn.ModuleList or nn.ModuleDict, "
        "as a plain list or dict hides them, and build them in __init__ or configure_model."
    ),
    "same device|same GPU|found at least two devices": (
        "Make tensors in a step with device=self.device, and keep constants with self.register_buffer."
    ),
    "must have the same dtype|expected scalar type|should be the same": (
        "Convert the data to the dtype of the module, as with batch.float(), or choose the module's with "
        "Trainer(precision=...)."
    ),
    "stack expects each tensor to be equal size|batch must contain|should be of equal size": (
        "The samples of a batch must be of one type and shape: pad or filter them in the data set, or give the "
        "DataLoader a collate_fn."
    ),
    "[Ii]nference tensor": (
        "Evaluation runs under torch.inference_mode: clone() what training uses again, or set "
        "Trainer(inference_mode=False)."
    ),
    "modified by an inplace operation": (
        "A tensor that backward needs was changed before it: clone() it, or find the operation with "
        "Trainer(detect_anomaly=True)."
    ),
}
"""Patterns of texts, and what to do about them; the first that fits counts."""


def advise(error: BaseException) -> None:
    """Add to an error that is torch's what to do about it."""
    text = str(error)
    advice = next((advice for pattern, advice in _ADVICE.items() if re.search(pattern, text)), None)
    if advice is not None and advice not in getattr(error, "__notes__", ()):
        error.add_note(advice)
