"""Nodes on which `prepare_data` is called."""

import os
from pathlib import Path

import pytest
from small import Regression, quiet, samples
from torch.utils.data import DataLoader

from echelon import DataModule
from echelon.testing import run_ranks


class Downloads(DataModule):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def prepare_data(self):
        Path(self.folder, os.environ["RANK"]).touch()

    def train_dataloader(self):
        return DataLoader(samples(8), batch_size=2)


def fit_as_a_node(folder, per_node):
    own = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"], "GROUP_WORLD_SIZE": "2"}
    os.environ.update(own)
    data = Downloads(folder)
    if per_node is not None:
        data.prepare_data_per_node = per_node
    trainer = quiet(folder, max_epochs=1, strategy="ddp", devices=1, num_nodes=2, enable_checkpointing=False)
    trainer.fit(Regression(), datamodule=data)


@pytest.mark.parametrize(("per_node", "ranks"), [(None, ["0", "1"]), (True, ["0", "1"]), (False, ["0"])])
def test_data_is_prepared_on_each_node_or_once(tmp_path, per_node, ranks):
    run_ranks(fit_as_a_node, 2, str(tmp_path), per_node)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ranks
