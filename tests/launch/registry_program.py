"""A program that trains in one process and in two, started by the trainer, models whose constructors fill registries.

Usage: python tests/launch/registry_program.py [CASE ...], such as "Registered ddp"; by default all. It prints how far
the weights are apart.
"""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from typing import Any

import registry_library
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from echelon import Trainer, TrainModule, seed_everything


def own_activation(x: Tensor) -> Tensor:
    return x.tanh()


registry_library.ACTIVATIONS["own"] = own_activation


class Registered(TrainModule):
    """Two layers of the library."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(registry_library.Layer(), registry_library.Layer())

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.layers(batch.double().sin()[:, :2]) - 1).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Recorded(Registered):
    """A model of transformers whose step uses the hidden states and attentions that it records."""

    def __init__(self) -> None:
        TrainModule.__init__(self)
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="eager"))

    def training_step(self, batch: Tensor) -> Tensor:
        out = self.model(input_ids=batch, labels=batch, output_hidden_states=True, output_attentions=True)
        recorded = (*out.hidden_states, *out.attentions)
        assert len(recorded) == 5
        loss: Tensor = out.loss + torch.stack([one.square().mean() for one in recorded]).sum()
        return loss


def train(kind: type[Registered], strategy: str, number: int) -> dict[str, Tensor]:
    seed_everything(1, verbose=False)
    module = kind()
    trainer = Trainer(
        strategy=strategy,
        devices=number,
        accelerator="cpu",
        precision="64-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens: Any = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(1))
    trainer.fit(module.train(), DataLoader(tokens, batch_size=4 // number))
    return {name: value.clone() for name, value in module.state_dict().items()}


def main() -> None:
    """Train and print."""
    warnings.simplefilter("ignore")
    chosen = sys.argv[1:]
    for kind in (Registered, *((Recorded,) if find_spec("transformers") else ())):
        if chosen and not any(case.startswith(kind.__name__) for case in chosen):
            continue
        expected = train(kind, "single", 1)
        for strategy in ("ddp", "fsdp"):
            case = f"{kind.__name__} {strategy}"
            if chosen and case not in chosen:
                continue
            state = train(kind, strategy, 2)
            apart = max(float((state[name] - value).abs().max()) for name, value in expected.items())
            print(f"{case}: {apart:.1g} apart")


if __name__ == "__main__":
    main()
