"""Advice: notes on torch errors whose text names neither the mistake nor the remedy, and on unused GPU speed."""

from __future__ import annotations

import functools
import logging
import re
from typing import Final

import torch

from ..strategies import Precision
from ..strategies.devices.cuda import could_use_tf32
from ..strategies.devices.queries import name_of
from ..strategies.distributed.debug import shapes_of

_log = logging.getLogger(__name__)

_ADVICE: Final = {
    "expected target dtype to be Long|expected scalar type Long": (
        "Class targets must be integer indices: convert them with target.long()."
    ),
    r"Target \d+ is out of bounds": (
        "Class indices go from 0 to the number of outputs - 1: give the last layer one output per class, or number "
        "the classes from 0."
    ),
    r"Expected input batch_size \(\d+\) to match target": (
        "A cross entropy needs one target for each row of its input: give labels the shape of the tokens, and where "
        "tokens predict the next one, cut logits[:, :-1] and labels[:, 1:] alike."
    ),
    "index out of range in self": (
        "An embedding has fewer rows than this index needs: use the tokenizer that belongs to the model, give the "
        "model rows for added tokens by resize_token_embeddings(len(tokenizer)), and cut sequences to its positions."
    ),
    "shapes cannot be multiplied": (
        "The last dimension of a layer's input must equal its in_features: check the batch's shapes, call flatten(1) "
        "on inputs with more dimensions, or change the layer."
    ),
    "'NoneType' object has no attribute '(experiment|log_|add_)": (
        "There is no logger: pass one, as with Trainer(logger=CSVLogger('logs')), or check `if self.logger` first."
    ),
    "no NVIDIA driver|not compiled with CUDA": (
        "The trainer moves the module and batches itself: remove .cuda(), and create tensors with device=self.device."
    ),
    'missing the required "forward" function': (
        "Call the layer that the module holds, such as self.net(x), or define forward(self, x)."
    ),
    r"Tried to step \d+ times": (
        "The schedule is shorter than training: give it total_steps=int(self.trainer.estimated_stepping_batches), and "
        "'interval': 'step' only if it counts steps. A run that resumes to train for longer uses the saved length, "
        "unless fit gets optimizer_settings='configured'."
    ),
    r"object of type '\w+' has no len\(\)": (
        "A data set that is read by index needs __len__: define it, or derive it from IterableDataset."
    ),
    "does not require grad and does not have a grad_fn": (
        "backward needs a result computed from parameters with gradients enabled: not detached, not under "
        "torch.no_grad(), and not in an evaluation, except under torch.enable_grad() with "
        "Trainer(inference_mode=False)."
    ),
    "backward through the graph a second time": (
        "The trainer calls backward on what training_step returns: return the loss without loss.backward(), and "
        "detach() what is kept from one step to the next."
    ),
    "optimizer got an empty parameter list": (
        "The module has no parameters when configure_optimizers runs, or a filter left none: keep layers in "
        "nn.ModuleList or nn.ModuleDict, as a plain list or dict hides them, and build them in __init__ or "
        "configure_model."
    ),
    "same device|same GPU|found at least two devices": (
        "Make tensors in a step with device=self.device, and keep constants with self.register_buffer."
    ),
    "(must|to) have the same dtype|expected scalar type|should be the same": (
        "Convert the data to the dtype of the module, as with batch.float(), or choose the module's with "
        "Trainer(precision=...); parts of it that were converted apart, as a body in bfloat16 below a head in float32, "
        "need one dtype, or precision='bf16-mixed'."
    ),
    "stack expects each tensor to be equal size|batch must contain|should be of equal size": (
        "The samples of a batch must be of one type and shape: pad or filter them in the data set, or give the "
        "DataLoader a collate_fn."
    ),
    "[Ii]nference tensor": (
        "Evaluation runs under torch.inference_mode: clone() what training uses again, or set "
        "Trainer(inference_mode=False)."
    ),
    "invalid python storage|data pointer (on|of)|Cannot access data pointer": (
        "This rank has only shards of the weights: call state = trainer.strategy.full_model_state() on all ranks, and "
        "save it on rank 0, as model.save_pretrained(folder, state_dict=state) does."
    ),
    "^StopIteration$": (
        "An iterator that a step or hook reads with next() has ended, which does not end the epoch: give next() a "
        "default, or make the iterator again with iter()."
    ),
    "Default process group has not been initialized": (
        "One process has no process group: ask self.global_rank and self.trainer.world_size, and use self.all_gather, "
        "self.trainer.strategy.all_reduce or barrier(), which work with any number of processes."
    ),
    r"Sampler' object has no attribute 'set_epoch'": (
        "The trainer shuffles anew in each epoch, and divides samples among processes: leave set_epoch out."
    ),
    "^'loss'$": (
        "The model returned no loss: models of Hugging Face compute one if the batch has labels, and others leave it "
        "to the step, as in cross_entropy(outputs.logits, labels)."
    ),
    r"toggle_optimizer\(\) (missing|takes)": (
        "Pass one optimizer of self.optimizers(), and nothing else: self.toggle_optimizer(optimizer), and after its "
        "step self.untoggle_optimizer(optimizer)."
    ),
    "'DataLoader' object is not subscriptable": (
        "The trainer's loaders are what was passed: a list for a list, and one DataLoader for one; leave the index out."
    ),
    "'SummaryWriter' object has no attribute 'log_": (
        "logger.experiment is torch's SummaryWriter, whose methods begin with add_; log_metrics, log_hyperparams and "
        "log_graph are methods of the logger: call self.logger.log_graph(self)."
    ),
    "can't be cast to the desired output type Long": (
        "Targets of this loss are numbers with a fraction, not class indices: convert them with target.float()."
    ),
    "must be Tensor, not (list|tuple|dict|BatchEncoding)$": (
        "A layer got several tensors at once: take the one it needs from the batch first, as in x, y = batch. With "
        "several training loaders the batch holds one of each: (x, y), (x2, y2) = batch."
    ),
    "can't start new thread": (
        "The limit on processes and threads is reached: raise it (ulimit -u, or pids of the container), or use fewer "
        "processes, workers of loaders and threads (OMP_NUM_THREADS)."
    ),
    r"must be Tensor, not \w*(ReLU|ELU|LU|Sigmoid|Tanh|Softmax|Dropout|Flatten|Identity|Norm|Swish|Mish)\d?d?$": (
        "The class of a layer was called with a tensor, which makes a layer: make it once, as nn.ReLU(), and call that."
    ),
    "FSDP does not support deepcopy": (
        "Sharded layers cannot be copied: make the copy, or the AveragedModel, in __init__ or configure_model, "
        "or let the callback EMAWeightAveraging keep the average."
    ),
    "mark a variable ready only once": (
        "DDP met the gradient of a parameter twice: give torch.utils.checkpoint use_reentrant=False, or set "
        "DDPStrategy(static_graph=True) if every step uses the same parameters."
    ),
    "SyncBatchNorm (layers only work with|expected input tensor to be on) GPU": (
        "On CPUs use GroupNorm, or plain BatchNorm layers, which Trainer(sync_batchnorm=True) converts on GPUs."
    ),
    "modified by an inplace operation": (
        "A tensor was modified before backward could use it: clone() it, or find the operation with "
        "Trainer(detect_anomaly=True)."
    ),
}
"""Patterns of error texts, and what to do about them; the first match is used."""


_ABOUT_DATA: Final = (RuntimeError, TypeError, KeyError, IndexError)
"""Errors that a step raises for an unexpected batch; exactly these classes, not subclasses."""


def show_batch(error: BaseException, batch: object, where: str) -> None:
    """Add the shapes of the batch to an error that a step raised."""
    if batch is None and type(error) in (*_ABOUT_DATA, AttributeError):
        error.add_note(f"The batch of {where} is None, as the loader gave it: does its collate_fn return the batch?")
    elif type(error) in _ABOUT_DATA:
        error.add_note(f"The batch of {where} is {shapes_of(batch)}.")


def advise_precision(device: torch.device, precision: Precision) -> None:
    """Log once per process that float32 matrix products run at a fraction of the GPU's TF32 speed."""
    if precision.is_plain and could_use_tf32(device):
        _say_once(
            f"{name_of(device)} multiplies float32 matrices several times faster in TF32, which keeps 10 bits of their "
            "fractions: torch.set_float32_matmul_precision('high'), or Trainer(precision='bf16-mixed')."
        )


@functools.cache
def _say_once(text: str) -> None:
    _log.info(text)


def add_advice(error: BaseException) -> None:
    """Add a note to an error from torch that says what to do about it."""
    text = str(error)
    if isinstance(error, StopIteration):
        text = "StopIteration"
    advice = next((advice for pattern, advice in _ADVICE.items() if re.search(pattern, text)), None)
    if advice is not None and advice not in getattr(error, "__notes__", ()):
        error.add_note(advice)
