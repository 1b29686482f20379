"""Module for the fork server of tests: it imports once what ranks of their tests would each import.

transformers with the first of its models takes three seconds, torchmetrics as many. What is not installed is left out.
torchao asks for devices when it is imported; asked without NVML, CUDA could not be used, nor seeded, in any rank.
"""

import contextlib
import gc
import importlib
import logging
import warnings
from unittest import mock

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
with warnings.catch_warnings(action="ignore"), mock.patch("torch.cuda.device_count", return_value=0):
    for name in NAMES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
logging.disable(logging.NOTSET)
gc.freeze()  # as the module of Echelon does, before this one
