"""A Trainer with layers cut by a plan that it finds, or that the model has, takes the steps of one process."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.common.errors import ModuleError


class Words(echelon.TrainModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch):
        (tokens,) = batch
        logits = self.model(tokens)
        logits = logits if torch.is_tensor(logits) else logits.logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Unchecked(Words):
    def __init__(self):
        super().__init__(nn.Embedding(12, 16))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 12)

    def training_step(self, batch):
        return self.down(self.up(self.model(batch[0])).tanh()).square().mean()


def llama():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    return Words(transformers.LlamaForCausalLM(config))


def encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return Words(nn.Sequential(nn.Embedding(12, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 12)))


def trained(make, **settings):
    echelon.seed_everything(1)
    module = make()
    trainer = echelon.Trainer(
        accelerator="cpu", precision="64-true", max_epochs=2, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, **settings,
    )  # fmt: skip
    torch.manual_seed(3)
    trainer.fit(module, DataLoader(TensorDataset(torch.randint(0, 12, (8, 6))), 4))
    return module.state_dict()


@pytest.mark.parametrize("make", [llama, encoder], ids=lambda make: make.__name__)
def test_steps_with_cut_layers_sequences_and_logits_are_those_of_one_process(make):
    strategy = echelon.ParallelStrategy(tp=2, sequence_parallel=True, loss_parallel=True)
    cut = trained(make, strategy=strategy, devices=2)
    torch.testing.assert_close(cut, trained(make), rtol=0, atol=1e-12)


class Anomalous(Words):
    def training_step(self, batch):
        return (super().training_step(batch) * 0).sqrt()


def test_anomalies_are_looked_for_in_cut_layers():
    strategy = echelon.ParallelStrategy(tp=2)
    cut = trained(encoder, strategy=strategy, devices=2, detect_anomaly=True)
    torch.testing.assert_close(cut, trained(encoder), rtol=0, atol=1e-12)
    with pytest.raises(RuntimeError, match="Function 'MulBackward0' returned nan values"):
        trained(lambda: Anomalous(encoder().model), strategy=strategy, devices=2, detect_anomaly=True)


def test_a_plan_that_no_forward_can_check_is_refused_before_the_first_update():
    strategy = echelon.ParallelStrategy(tp=2, tp_plan={"up": "colwise", "down": "rowwise"})
    with pytest.raises(ModuleError, match="cuts up, down, which belong to Unchecked itself, but its step does not"):
        trained(Unchecked, strategy=strategy, devices=2)
