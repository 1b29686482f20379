"""Layers and losses of torch, each in a module that every layout trains: what is compared with one process."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from unusual_modules import Plain


class Layered(Plain):
    """Has a layer of torch after its blocks."""

    def __init__(self, make: Callable[[], nn.Module], use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.use = make(), use

    def hidden(self, x: Tensor, task: int) -> Tensor:
        return self.use(self.layer, super().hidden(x, task))


class Measured(Plain):
    """Returns a loss of torch."""

    def __init__(self, measure: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.measure = measure

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        return self.measure(self.head(self.hidden(x, task)), y, x)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def tokens(x: Tensor) -> Tensor:
    """Return a token of 12 for each place."""
    return (x.detach().sum(-1) * 100).long() % 12


def logits(scores: Tensor) -> Tensor:
    """Return three logits for each place, in a row."""
    return torch.cat([scores, -scores, 0.5 * scores], -1).flatten(0, 1)


def classes(y: Tensor) -> Tensor:
    return ((y + 1) * 1.4999).long().clamp(0, 2).flatten()


def some(y: Tensor, x: Tensor) -> Tensor:
    """Return classes, of which a number that differs from batch to batch are ignored."""
    return classes(y).masked_fill(x[..., 0].flatten() > 0.3, -100)


def weights() -> Tensor:
    return torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


def called(layer: Any, x: Tensor) -> Tensor:
    return layer(x)


def first(layer: Any, x: Tensor) -> Tensor:
    return layer(x)[0]


def on_channels(layer: Any, x: Tensor) -> Tensor:
    return layer(x.transpose(1, 2)).transpose(1, 2)


def on_tokens(layer: Any, x: Tensor) -> Tensor:
    return x + layer(tokens(x)).view(len(x), -1, 4)


def twice(layer: Any, x: Tensor) -> Tensor:
    return layer(x, x)


def attention(layer: Any, x: Tensor, **settings: Any) -> Tensor:
    return layer(x, x, x, **settings)[0]


def causal(layer: Any, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=x.dtype)
    return attention(layer, x, attn_mask=mask, is_causal=True, need_weights=False)


def seq_first(layer: Any, x: Tensor) -> Tensor:
    return attention(layer, x.transpose(0, 1)).transpose(0, 1)


def padded(layer: Any, x: Tensor) -> Tensor:
    return layer(x, src_key_padding_mask=(torch.arange(4) == 3).expand(len(x), 4))


def cells(layer: Any, x: Tensor) -> Tensor:
    return torch.stack([layer(x[:, place])[0] for place in range(4)], 1)


def weighted_bags(layer: Any, x: Tensor) -> Tensor:
    bags = torch.arange(0, 4 * len(x) + 1, 4)
    return x + layer(tokens(x).flatten(), bags, per_sample_weights=x.mean(-1).flatten())[:, None]


def scaled(layer: Any, x: Tensor) -> Tensor:
    return x * layer["scale"] + layer["shift"]


def folded(layer: Any, x: Tensor) -> Tensor:
    return F.fold(F.unfold(layer(x)[:, None], 2), 4, 2)[:, 0]


def encoder_layer(**settings: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, **settings)


def decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


def doubled() -> nn.Module:
    return parametrize.register_parametrization(nn.Linear(4, 4), "weight", Doubled())


def scale_and_shift() -> nn.Module:
    return nn.ParameterDict({"scale": nn.Parameter(torch.full((4,), 0.5)), "shift": nn.Parameter(torch.zeros(4))})


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "RNN": (lambda: nn.RNN(4, 4, batch_first=True), first),
    "LSTM, projected, both ways": (
        lambda: nn.LSTM(4, 5, num_layers=2, proj_size=2, bidirectional=True, batch_first=True),
        first,
    ),
    "GRU": (lambda: nn.GRU(4, 4), lambda layer, x: first(layer, x.transpose(0, 1)).transpose(0, 1)),
    "LSTMCell": (lambda: nn.LSTMCell(4, 4), cells),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), attention),
    "MultiheadAttention, causal": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), causal),
    "MultiheadAttention, with keys": (lambda: nn.MultiheadAttention(4, 2, kdim=4, add_bias_kv=True), seq_first),
    "TransformerEncoderLayer": (lambda: encoder_layer(norm_first=True), called),
    "TransformerEncoder, padded": (lambda: nn.TransformerEncoder(encoder_layer(), 2), padded),
    "TransformerDecoder": (lambda: nn.TransformerDecoder(decoder_layer(), 2), twice),
    "Transformer": (lambda: nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True), twice),
    "Embedding": (lambda: nn.Embedding(12, 4, padding_idx=0), on_tokens),
    "Embedding, by frequency": (lambda: nn.Embedding(12, 4, scale_grad_by_freq=True), on_tokens),
    "Embedding, sparse": (lambda: nn.Embedding(12, 4, sparse=True), on_tokens),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(12, 4, mode="max"), on_tokens),
    "EmbeddingBag, weighted": (lambda: nn.EmbeddingBag(12, 4, mode="sum", include_last_offset=True), weighted_bags),
    "Bilinear": (lambda: nn.Bilinear(4, 4, 4), twice),
    "Conv1d": (lambda: nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"), on_channels),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 4, 3, padding=1, groups=2), on_channels),
    "PReLU": (lambda: nn.PReLU(4), on_channels),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), on_channels),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), on_channels),
    "RMSNorm": (lambda: nn.RMSNorm(4), called),
    "LayerNorm": (lambda: nn.LayerNorm(4, bias=False), called),
    "Unflatten": (lambda: nn.Sequential(nn.Flatten(1), nn.Linear(16, 16), nn.Unflatten(1, (4, 4))), called),
    "Fold": (lambda: nn.Linear(4, 4), folded),
    "ParameterDict": (scale_and_shift, scaled),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), called),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), called),
    "orthogonal, householder": (
        lambda: parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="householder"),
        called,
    ),
    "parametrize": (doubled, called),
    "prune": (lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5), called),
    "prune, structured": (lambda: prune.ln_structured(nn.Linear(4, 4), "weight", 0.25, 2, 0), called),
}
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda s, y, x: F.cross_entropy(logits(s), classes(y)),
    "cross_entropy, ignored": lambda s, y, x: F.cross_entropy(logits(s), some(y, x)),
    "cross_entropy, weighted": lambda s, y, x: F.cross_entropy(
        logits(s), some(y, x), weight=weights(), label_smoothing=0.1
    ),
    "cross_entropy, sequences": lambda s, y, x: F.cross_entropy(
        logits(s).view(len(s), 4, 3).transpose(1, 2), some(y, x).view(len(s), 4)
    ),
    "cross_entropy, probabilities": lambda s, y, x: F.cross_entropy(logits(s), logits(y).softmax(-1)),
    "nll_loss": lambda s, y, x: F.nll_loss(logits(s).log_softmax(-1), some(y, x), weight=weights()),
    "linear_cross_entropy": lambda s, y, x: F.linear_cross_entropy(logits(s), 2 * torch.eye(3).double(), some(y, x)),
    "binary_cross_entropy_with_logits": lambda s, y, x: F.binary_cross_entropy_with_logits(
        s, (y > 0).to(s.dtype), pos_weight=weights()[-1:]
    ),
    "l1_loss": lambda s, y, x: F.l1_loss(s, y),
    "huber_loss": lambda s, y, x: F.huber_loss(s, y),
    "kl_div": lambda s, y, x: F.kl_div(logits(s).log_softmax(-1), logits(y).softmax(-1), reduction="batchmean"),
    "gaussian_nll_loss": lambda s, y, x: F.gaussian_nll_loss(s, y, s.square() + 0.1),
    "poisson_nll_loss": lambda s, y, x: F.poisson_nll_loss(s, y.abs()),
    "triplet_margin_loss": lambda s, y, x: F.triplet_margin_loss(s[..., 0], y[..., 0], -y[..., 0]),
    "multi_margin_loss": lambda s, y, x: F.multi_margin_loss(logits(s), classes(y), weight=weights()),
    "multilabel_soft_margin_loss": lambda s, y, x: F.multilabel_soft_margin_loss(logits(s), (logits(y) > 0).double()),
}
ROWS: dict[str, Callable[[], Plain]] = {
    **{name: functools.partial(Layered, *parts) for name, parts in LAYERS.items()},
    **{
        name: functools.partial(Measured, measure)
        for name, measure in LOSSES.items()
        if hasattr(F, name.partition(",")[0])  # linear_cross_entropy is new in torch 2.14
    },
}
