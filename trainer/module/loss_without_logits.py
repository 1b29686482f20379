"""Losses without logits: those of hidden states and a head, and those that language models compute themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...common.errors import ModuleError
from ...strategies.logits.chunked_loss import Change, CrossEntropy, total_loss
from ...strategies.logits.head_call import check_head, check_weight, loss_of_head
from ...strategies.logits.model_call import total_of_model
from ...strategies.targets.cross_entropy_call import weights_of_targets
from .loss import Loss


def linear_cross_entropy(
    hidden: Tensor,
    head: nn.Linear | Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    shift: bool = False,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
) -> Loss:
    """Return the sum of ``F.cross_entropy(head(hidden), labels)`` over tokens, computed without all logits at once.

    Logits of 4 x 4,096 tokens and 151,936 classes take 10 GB in float32, and their gradient as much. Here they are
    computed for some tokens at a time, with their gradients, so that only the gradients of `hidden` and of the head
    are kept. The values are those of the whole logits, to rounding; logits in bfloat16 or float16 enter the loss in
    float32. Under ``fsdp`` the head's weight is gathered once for the call, and under ``tp`` each rank computes the
    logits of its part of the vocabulary.

    Args:
        hidden: what the head gets, of shape (..., features).
        head: the layer that computes the logits, which belongs to the module that is trained; or a weight of shape
            (classes, features) that no strategy shards.
        labels: the classes, of shape (...,).
        bias: that of a head that is a tensor, of shape (classes,).
        shift: whether each token is to predict the next one: the label of ``hidden[..., t, :]`` is then
            ``labels[..., t + 1]``, and the last one has none.
        ignore_index: the label of tokens that do not count.
        scale: multiplies the logits.
        softcap: bounds the scaled logits by ``softcap * tanh(logits / softcap)``.
        label_smoothing: as in ``F.cross_entropy``.

    Returns:
        The total, and the number of labels that count.

    Raises:
        ModuleError: for shapes that do not fit, a head that is no plain linear layer, and a second derivative.
        DataError: for labels outside of the vocabulary; on a GPU, where reading them would wait, torch asserts it.

    Example::

        class Words(Net):
            def __init__(self):
                super().__init__()
                self.table, self.words = nn.Embedding(1000, 4), nn.Linear(8, 1000)

            def training_step(self, batch):
                hidden = self.backbone(self.table(batch))
                return linear_cross_entropy(hidden, self.words, batch, shift=True)

        trainer.fit(Words(), DataLoader(torch.randint(1000, (16, 12)), batch_size=4))
    """
    if labels.is_floating_point() or labels.shape != hidden.shape[:-1]:
        raise ModuleError(
            f"labels must be classes in the shape of the tokens, {tuple(hidden.shape[:-1])}, got {labels.dtype} of "
            f"shape {tuple(labels.shape)}; give each token one label."
        )
    target = labels.long()
    if shift:
        target = nn.functional.pad(target, (0, 1), value=ignore_index)[..., 1:]
    target = target.to(hidden.device).reshape(-1)
    loss = CrossEntropy(ignore_index, label_smoothing, None, _logit_changes(scale, softcap))
    if isinstance(head, Tensor):
        check_weight(head)
        _check_features(hidden, head.shape[-1])
        total = total_loss(hidden.reshape(-1, hidden.shape[-1]), head, bias, target, loss, None)
    else:
        if bias is not None:
            raise ModuleError(f"bias is for a head that is a tensor, got one beside a {type(head).__name__}; omit it.")
        check_head(head, "linear_cross_entropy")
        _check_features(hidden, head.in_features)
        total = loss_of_head(head, hidden, loss, target)
    return Loss(total, weights_of_targets(target, ignore_index, None).sum())


def language_model_loss(model: nn.Module, **batch: object) -> Loss:
    """Return the loss of an unmodified language model of transformers, computed without its logits.

    The model runs as in ``model(**batch).loss``, with all that it does after its head: it shifts labels, scales or caps
    logits, and adds the losses of its routers. Only the head is called when the loss is, for some tokens at a time; see
    `linear_cross_entropy`. What it may do with logits that are not there is refused by name.

    Args:
        model: a language model with ``get_output_embeddings()``, causal, masked or of an encoder and a decoder; or a
            module around one, such as a model with adapters.
        batch: its inputs, with ``labels``.

    Returns:
        The total, and the number of target tokens, so that micro-batches and ranks with few of them weigh little.

    Raises:
        ModuleError: for a model without a head, and for one that does with its logits what is not known.
        DataError: for labels outside of the vocabulary.

    Example::

        class Finetuning(TrainModule):
            def training_step(self, batch, batch_idx):
                return language_model_loss(self.lm, **batch)
    """
    return Loss(*total_of_model(model, batch))


def _logit_changes(scale: float, softcap: float | None) -> tuple[Change, ...]:
    changes: list[Callable[[Tensor, slice], Tensor]] = []
    if scale != 1.0:
        changes.append(lambda logits, columns: logits * scale)
    if softcap is not None:
        if not softcap > 0:
            raise ModuleError(f"softcap must be above 0, got {softcap}; leave it out for logits without a bound.")
        changes.append(lambda logits, columns: torch.tanh(logits / softcap) * softcap)
    return tuple(changes)


def _check_features(hidden: Tensor, number: int) -> None:
    if hidden.shape[-1] != number:
        raise ModuleError(
            f"hidden must have the {number} features that the head takes, got shape {tuple(hidden.shape)}; give what "
            "the head is called with, not logits."
        )
