"""Kinds of savings: what each means, in the words of ``echelon doctor --advice``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

EXPLANATIONS: Final[Mapping[str, str]] = {
    "optimizer": (
        "The update goes through its tensors one by one, with ten operators each. fused=True updates all of them in "
        "one, foreach=True in as few calls as there are operators; both compute the same. Measured: the time of the "
        "updates, and that of each form on a sample of the tensors."
    ),
    "loader": (
        "Training waits for batches that this process, or too few workers, read between the steps. "
        "DataLoader(num_workers=n) reads beside them, in processes of their own. Measured: the wait, and how much of "
        "it is work of a processor; such work is not moved where no processor is free."
    ),
    "precision": (
        "Matrix products are in float32 on a device that multiplies bfloat16 faster. precision='bf16-mixed' keeps the "
        "weights in float32. Measured: the products of the largest layers, in both. Losses differ by rounding."
    ),
    "micro-batches": (
        "A step is made of micro-batches of so few rows that reading the weights costs more than the products. A "
        "larger batch_size with a smaller accumulate_grad_batches makes the same steps. Measured: the products of the "
        "largest layers with as many rows, and with twice as many; and the memory that is free."
    ),
    "padding": (
        "Pad tokens are computed like others. Pad each batch to its longest row only, or make batches of rows of "
        "similar length (TokenBatchSampler), or pack them (PackedDataset). Measured: the pads of the first batches "
        "with an attention_mask; the time is taken to follow the tokens, and is less for a small model."
    ),
    "recomputation": (
        "activation_checkpointing computes blocks again in backward, to keep less, where memory is free. Measured: the "
        "forward of a block, and the bytes of all its results, which are more than it keeps."
    ),
    "logs": (
        "An accelerator stands still after each logged step until the host has read the values. A larger "
        "log_every_n_steps reads them less often. Measured: the time between steps in which the device has no work."
    ),
}
