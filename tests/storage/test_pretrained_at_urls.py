"""Folders of Hugging Face in a store: written complete or absent, and read by one process of each node."""

import sys
import threading
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from proxy import Fault

import echelon
from echelon.common.errors import CheckpointError
from echelon.common.storage import as_path, node_copy

sys.path.append(str(Path(__file__).parents[1] / "strategies" / "pretrained"))

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


class Finetuning(echelon.TrainModule):
    def __init__(self, folder):
        super().__init__()
        from tiny_models import build

        self.lm = echelon.load_pretrained(build("llama"), folder).train()

    def training_step(self, batch, batch_idx):
        return self.lm(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_a_folder_is_written_to_a_bucket_and_loaded_from_there(bucket, proxy, tmp_path):
    from small import quiet
    from tiny_models import build, saved

    source = saved("llama", tmp_path / "source")
    tokens = torch.utils.data.DataLoader(torch.randint(24, (4, 8)), 2)
    writer = echelon.HuggingFaceCheckpoint(f"{bucket}/models", max_shard_size="20KB", every_n_train_steps=1)
    quiet(max_steps=2, callbacks=writer).fit(module := Finetuning(source), tokens)
    assert writer.last_path == f"{bucket}/models/step=2"
    names = [path.name for path in as_path(writer.last_path).iterdir()]
    assert "config.json" in names and sum(name.endswith(".safetensors") for name in names) > 1
    puts = [unquote(request.target) for request in proxy.reset_counts() if request.method == "PUT"]
    puts = [target for target in puts if "step=2" in target]
    assert puts[-1].split("?")[0].endswith("config.json")  # what makes it a model's folder comes last
    loaded = echelon.load_pretrained(build("llama"), writer.last_path)
    for name, value in module.lm.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    proxy.reset_counts()
    echelon.load_pretrained(build("llama"), writer.last_path)
    assert not [one for one in proxy.reset_counts() if one.method == "GET" and one.received > 10_000]  # it is here
    with pytest.raises(CheckpointError, match="holds nothing"):
        echelon.load_pretrained(build("llama"), f"{bucket}/models/none")
    denied = {"matches": lambda request: request.method == "PUT" and ".safetensors" in request.target}
    proxy.fail(Fault("status", 403), times=float("inf"), **denied)
    with pytest.raises(CheckpointError, match="could not be written"):
        quiet(max_steps=3, callbacks=writer).fit(Finetuning(source), tokens)
    proxy.heal()
    assert echelon.load_pretrained(build("llama"), f"{bucket}/models/step=2") is not None


def test_a_node_brings_a_folder_once_and_again_when_it_has_changed(bucket, proxy):
    folder = as_path(bucket) / "model"
    for name in ("a", "b"):
        (folder / name).write_bytes(name.encode() * 10)
    found, threads = [], [threading.Thread(target=lambda: found.append(node_copy(folder))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4 and len(set(found)) == 1 and (found[0] / "a").read_bytes() == b"a" * 10
    targets = [one.target.split("?")[0] for one in proxy.reset_counts() if one.method == "GET"]
    assert sum(target.endswith(("/a", "/b")) for target in targets) == 2
    (folder / "a").write_bytes(b"A" * 10)
    newer = node_copy(folder)
    assert (newer / "a").read_bytes() == b"A" * 10 and newer != found[0] and not found[0].exists()
