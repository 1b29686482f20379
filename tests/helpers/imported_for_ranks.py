"""Module for the fork server of tests: it imports once what ranks of their tests would each import.

transformers with the first of its models takes three seconds, torchmetrics as many. What is not installed is left out.
torchao asks for devices when it is imported; asked without NVML, CUDA could not be used, nor seeded, in any rank.
"""

import contextlib
import gc
import importlib
import logging
import warnings

import torch

NAMES = (
    "echelon.testing",
    "pytest",
    "tensorboard.backend.event_processing.event_accumulator",
    "torchmetrics",
    "transformers.models.llama.modeling_llama",
    "peft",
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed.pipelining",
    "torch.nn.attention.flex_attention",
    "torch.utils.tensorboard",
)

logging.disable(logging.WARNING)  # torchao's to torch
device_count, torch.cuda.device_count = torch.cuda.device_count, lambda: 0
with warnings.catch_warnings(action="ignore"):
    for name in NAMES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
torch.cuda.device_count = device_count
logging.disable(logging.NOTSET)
gc.freeze()  # as the module of Echelon does, before this one
