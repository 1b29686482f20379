"""chemprop: a message-passing network, read back from its checkpoint and from a file of its own."""

import torch


def run(settings):
    from chemprop import data, models, nn
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning import pytorch as pl

    smiles = ["C", "CC", "CCC", "CCO", "CCN", "c1ccccc1", "CC(=O)O", "CCCC"]
    points = [data.MoleculeDatapoint.from_smi(one, [float(len(one))]) for one in smiles]
    dataset = data.MoleculeDataset(points)
    loader = data.build_dataloader(dataset, batch_size=4, shuffle=False, num_workers=0)
    model = models.MPNN(nn.BondMessagePassing(d_h=8), nn.MeanAggregation(), nn.RegressionFFN(input_dim=8, hidden_dim=8))
    saver = ModelCheckpoint("checkpoints", monitor="val_loss")
    trainer = pl.Trainer(**{**settings, "enable_checkpointing": True, "callbacks": [saver]})
    trainer.fit(model, loader, loader)
    restored = models.MPNN.load_from_checkpoint(saver.best_model_path)
    models.save_model("model.pt", model)
    from_file = models.load_model("model.pt", multicomponent=False)
    for name, value in from_file.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name])
    (again,) = trainer.validate(restored, loader, verbose=False)
    return {"loss": float(trainer.callback_metrics["val_loss"]), "restored": float(again["val_loss"])}
