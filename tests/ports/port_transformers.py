"""A BERT, fine-tuned as in transformers' run_glue_no_trainer: dict batches, decay by name, a linear schedule."""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from echelon import Trainer, TrainModule, seed_everything

EPOCHS, BATCH, LR, WARMUP = 2, 4, 1e-3, 2


def sentences():
    generator = torch.Generator().manual_seed(8)
    rows = []
    for index in range(16):
        ids = torch.randint(5, 64, (6 + index % 4,), generator=generator)
        rows.append({"input_ids": ids, "labels": int(ids[0] > 34)})
    return rows


def collate(rows):
    """Pad to the longest, as DataCollatorWithPadding does."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([r["labels"] for r in rows])}


def build(dropout):
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config)


def parameter_groups(model):
    no_decay = ["bias", "LayerNorm.weight"]
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]


def original(dropout):
    torch.manual_seed(42)
    model = build(dropout)
    # without a generator of its own, each epoch's iterator draws a seed from the one that dropout draws from
    loader = DataLoader(sentences(), BATCH, collate_fn=collate, generator=torch.Generator())
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=LR)
    scheduler = get_linear_schedule_with_warmup(optimizer, WARMUP, EPOCHS * len(loader))
    losses = []
    for _epoch in range(EPOCHS):
        model.train()
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model


class FineTuned(TrainModule):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def configure_model(self):
        if not hasattr(self, "model"):
            self.model = build(self.dropout)

    def training_step(self, batch, batch_idx):
        outputs = self.model(**batch)
        self.log("loss", outputs.loss)
        return outputs.loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(parameter_groups(self), lr=LR)
        schedule = get_linear_schedule_with_warmup(optimizer, WARMUP, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def ported(dropout, **settings):
    seed_everything(42)
    module = FineTuned(dropout)
    loader = DataLoader(sentences(), BATCH, collate_fn=collate)
    Trainer(max_epochs=EPOCHS, gradient_clip_val=1.0, global_batch_size=BATCH, **settings).fit(module, loader)
    return module.model
