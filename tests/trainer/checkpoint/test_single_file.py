"""A checkpoint in one file is read by ``torch.load``, and by us as exactly and as safely as a folder."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import struct
import tempfile
import zipfile
from collections import Counter, deque
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.common.errors import CheckpointError
from echelon.trainer.checkpoint import (
    export,
    list_checkpoints,
    load,
    load_weights,
    newest_valid,
    point_link,
    remove_checkpoint,
    resolve_checkpoint,
    save,
    verify,
)
from echelon.trainer.checkpoint.files import while_it_stays
from echelon.trainer.checkpoint.manifest import make_trailer, read_manifest
from echelon.trainer.checkpoint.single_file import SingleFile
from echelon.trainer.cli.checkpoint_contents import compare_checkpoints, show_checkpoint, verify_all
from echelon.trainer.cli.ckpt import list_folder


class Mode(Enum):
    FAST = "fast"


def state(step: int = 0) -> dict[str, Any]:
    torch.manual_seed(step)
    weight = torch.randn(4, 3)
    return {
        "model": {
            "w": weight,
            "tied": weight,
            "half": torch.randn(3, dtype=torch.bfloat16),
            "float8": torch.ones(4).to(torch.float8_e4m3fn),
            "short": torch.arange(3).to(torch.uint16),
            "complex": torch.randn(3, dtype=torch.complex64),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(3),
            "slice": torch.randn(5, 5)[1:3, ::2],
        },
        "optimizers": [
            {
                "state": {"w": {"exp_avg": torch.randn(4, 3), "step": torch.tensor(2.0)}},
                "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["half", "w"]}],
                "dtypes": {"w": torch.float32},
            }
        ],
        "loop": {"epoch": 3, "global_step": step},
        "hyper_parameters": {"lr": 0.1, "path": {"$path": "data"}, "sizes": {"$tuple": [1, 2]}},
        "user": {
            "set": {1, 2},
            "frozen": frozenset({3}),
            "deque": deque([1], 3),
            "counter": Counter("aab"),
            "bytes": b"abc",
            "complex": 1 + 2j,
            "time": timedelta(days=1),
            "path": Path("a"),
            "dtype": torch.float32,
            "device": torch.device("cpu"),
            "keys": {1: 2, (1, 2): 3},
            "infinite": float("inf"),
            "size": torch.Size([1]),
            "mode": Mode.FAST,
            "large": 10**30,
        },
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save(tmp_path / "a.ckpt", state(1), single_file=SingleFile())
    return tmp_path / "a.ckpt"


def assert_same(first: Any, second: Any) -> None:
    if isinstance(first, torch.Tensor):
        assert (first.dtype, first.shape) == (second.dtype, second.shape)
        assert first.numel() == 0 or bytes_of(first) == bytes_of(second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for name in first:
            assert_same(first[name], second[name])
    elif isinstance(first, list):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_same(one, other)
    else:
        assert type(first) is type(second)
        assert first == second


def bytes_of(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_everything_comes_back_exactly(file: Path) -> None:
    loaded = load(file)
    assert_same(loaded, state(1))
    assert loaded["model"]["w"] is loaded["model"]["tied"]
    assert_same(load(file, parts=["loop"]), {"loop": {"epoch": 3, "global_step": 1}})
    loaded["model"]["w"].zero_()  # a private map
    assert_same(load(file), state(1))


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_reads_plain_values_and_tensors_under_the_names_of_lightning(mmap: bool, file: Path) -> None:
    saved, read = state(1), torch.load(file, weights_only=True, mmap=mmap)
    assert_same(read["state_dict"], saved["model"])
    assert read["hyper_parameters"] == {"lr": 0.1, "path": "data", "sizes": (1, 2)}
    assert (read["epoch"], read["global_step"]) == (3, 1)
    (optimizer,) = read["optimizer_states"]
    assert optimizer["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}]
    assert_same(optimizer["state"], {1: saved["optimizers"][0]["state"]["w"]})
    assert read["user"]["path"] == "a"
    assert read["user"]["mode"] == "fast"
    storages = {tensor.untyped_storage().data_ptr() for tensor in read["state_dict"].values() if tensor.numel()}
    assert len(storages) == len(saved["model"]) - 2  # each has its own; one is tied, one is empty
    if mmap:
        assert all(pointer % 8 == 0 for pointer in storages)


def test_it_is_a_file_to_everything_that_handles_files(file: Path, tmp_path: Path) -> None:
    assert file.is_file()
    assert zipfile.ZipFile(file).testzip() is None
    copy = Path(shutil.copy(file, tmp_path / "copy.pt"))
    with copy.open("rb") as opened:
        assert_same(torch.load(opened, weights_only=True)["state_dict"], state(1)["model"])
    assert_same(load(copy), state(1))
    torch.save(torch.load(file, weights_only=True), copy)  # what only torch has written holds weights
    assert_same(load_weights(copy), state(1)["model"])
    with pytest.raises(CheckpointError, match=r"is a file of Lightning's.*load_weights"):
        resolve_checkpoint(copy)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.ckpt"
    save(file, {"model": {"w": torch.randn(2)}}, single_file=SingleFile())
    original = file.read_bytes()
    for position in range(0, len(original), 3):
        damaged = bytearray(original)
        damaged[position] ^= 1 << position % 8
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            verify(file)
        assert [one.path for one in list_checkpoints(file.parent)] == [file]
    file.write_bytes(original)
    verify(file)


@pytest.mark.parametrize("size", [0, 10, 60, 1000, -100, -1])
def test_last_skips_a_file_that_was_cut_short(size: int, file: Path) -> None:
    save(file.with_name("b.ckpt"), state(2), single_file=SingleFile())
    whole = file.with_name("b.ckpt").read_bytes()
    file.with_name("b.ckpt").write_bytes(whole[:size])
    assert newest_valid(file.parent) == file
    with pytest.raises(CheckpointError):
        load(file.with_name("b.ckpt"))
    file.with_name("b.ckpt").write_bytes(whole + b"more")
    assert newest_valid(file.parent) == file


def test_files_and_folders_are_found_side_by_side(file: Path) -> None:
    folder = file.parent
    save(folder / "b.ckpt", state(2))
    save(folder / "c.ckpt", state(3), single_file=SingleFile())
    (folder / "notes.ckpt").write_text("no checkpoint")
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.6"}, folder / "foreign.ckpt")
    assert [one.path.name for one in list_checkpoints(folder)] == ["a.ckpt", "b.ckpt", "c.ckpt"]
    assert resolve_checkpoint("last", folder) == folder / "c.ckpt"
    point_link(folder / "last.ckpt", folder / "c.ckpt")
    assert os.readlink(folder / "last.ckpt") == "c.ckpt"
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 3
    assert load(folder / "last.ckpt")["loop"]["global_step"] == 3
    assert not remove_checkpoint(folder / "c.ckpt")  # the newest, and linked
    assert remove_checkpoint(file)
    point_link(folder / "last.ckpt", folder / "b.ckpt")
    assert load(folder / "last.ckpt")["loop"]["global_step"] == 2
    assert {path.name for path in folder.iterdir()} == {"b.ckpt", "c.ckpt", "last.ckpt", "notes.ckpt", "foreign.ckpt"}


@pytest.mark.parametrize("has_exchange", [True, False])
def test_a_file_replaces_a_folder_and_a_folder_a_file(
    has_exchange: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_exchange:
        monkeypatch.setattr("echelon.trainer.checkpoint.atomic_folder._exchange_names", lambda *_: False)
    for step, is_file in enumerate((True, False, True, True), start=2):
        save(file, state(step), single_file=SingleFile() if is_file else None)
        assert file.is_file() is is_file
        assert load(file)["loop"]["global_step"] == step
        assert [path.name for path in file.parent.iterdir()] == ["a.ckpt"]


def test_a_temporary_file_is_written_to_and_other_files_are_not(tmp_path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=tmp_path) as named:
        save(named.name, state(1), single_file=SingleFile())
        assert torch.load(named.name, weights_only=True)["global_step"] == 1
    torch.save({}, tmp_path / "model.pt")
    save(tmp_path / "model.pt", state(1), single_file=SingleFile())
    verify(tmp_path / "model.pt")
    (tmp_path / "program.py").write_text("precious")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data.csv", "precious")
    for name in ("program.py", "data.zip"):
        with pytest.raises(CheckpointError, match="is not a checkpoint, so it is not overwritten"):
            save(tmp_path / name, state(1), single_file=SingleFile())
    with pytest.raises(CheckpointError, match="is not a checkpoint, so it is not overwritten"):
        save(tmp_path / "program.py", state(1))


def test_a_reader_keeps_the_file_that_it_has_opened(file: Path) -> None:
    def read(held: int | None) -> str:
        before = read_manifest(file, held).saved_at
        save(file, state(2), single_file=SingleFile())
        file.unlink()
        assert read_manifest(file, held).saved_at == before
        return before

    assert while_it_stays(file, read)
    assert not file.exists()


def test_the_commands_take_files(file: Path, tmp_path: Path) -> None:
    save(tmp_path / "b.ckpt", state(1))
    assert [line.split()[-1] for line in list_folder(tmp_path)] == ["a.ckpt", "b.ckpt"]
    assert any(
        "model.w: float32 (4, 3)" in line.replace("  w:", "model.w:") for line in show_checkpoint(file, shows_all=True)
    )
    assert verify_all([tmp_path])[1]
    assert compare_checkpoints(file, tmp_path / "b.ckpt")[1]
    assert_same(load_weights(export(file, tmp_path / "out"))["w"], state(1)["model"]["w"])


# --- forged files: every hash fits ---


def forge(file: Path, name: str, change: Any) -> None:
    """Replace the content of a member, and sign the file anew."""
    manifest = read_manifest(file)
    raw, pieces, begin = file.read_bytes(), {}, 0
    for piece, record in manifest.files.items():
        pieces[piece] = raw[begin : begin + record.size]
        begin += record.size
    pieces[name] = change(pieces[name])
    end = sum(map(len, pieces.values()))
    records = {
        piece: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for piece, content in pieces.items()
    }
    text = json.loads(zipfile.ZipFile(file).read("echelon/manifest.json"))
    text.pop("sha256")
    head = json.dumps({**text, "files": records}, indent=1).encode().removesuffix(b"\n}")
    signed = head + b',\n "sha256": "' + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'
    rest = header(len(signed)) + signed + make_trailer(end)[:-64]
    file.write_bytes(b"".join(pieces.values()) + rest + hashlib.sha256(rest).hexdigest().encode())


def header(size: int) -> bytes:
    return struct.pack("<4s5H3L2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 0, size, size, 0, 0)


def with_json(change: Any) -> Any:
    """Return a function that changes the JSON in a member."""

    def changed(member: bytes) -> bytes:
        content = json.loads(member[member.index(b"{") :])
        change(content)
        text = json.dumps(content).encode()
        return header(len(text)) + text

    return changed


def test_a_forged_file_is_the_same_where_nothing_is_forged(file: Path) -> None:
    forge(file, "tensors.json", with_json(lambda content: None))
    assert_same(load(file), state(1))


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["PAYLOAD"],)


def test_what_is_pickled_is_never_executed(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAYLOAD", str(tmp_path / "executed"))
    forge(file, "data.pkl", lambda content: pickle.dumps(Payload()) + content)
    assert_same(load(file), state(1))
    assert load_weights(file)
    verify(file)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [0, 10**12], "shape": [25 * 10**10]},
        {"data_offsets": [-48, 0]},
        {"data_offsets": [0.5, 48.5]},
        {"data_offsets": [48, 0]},
        {"data_offsets": "all"},
        {"shape": [4, -3]},
        {"shape": [10**20, 3]},
        {"shape": "large"},
        {"dtype": "F12"},
        {"dtype": ["F32"]},
    ],
    ids=repr,
)
def test_a_forged_place_of_a_tensor_is_refused(entry: dict[str, Any], file: Path) -> None:
    forge(file, "tensors.json", with_json(lambda content: content["model.tensors"]["w"].update(entry)))
    with pytest.raises(CheckpointError, match="does not describe its tensors|No weight"):
        load(file)


@pytest.mark.parametrize("index", [{}, {"model.tensors": 5}, {"model.tensors": {"w": 5}}, {"model.tensors": []}])
def test_a_forged_index_is_refused(index: dict[str, Any], file: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content.clear()
        content.update(index)

    forge(file, "tensors.json", with_json(change))
    with pytest.raises(CheckpointError):
        load(file)


@pytest.mark.parametrize("content", [b"", b"PK", header(10**9), header(4) + b"[1,2", header(4) + b"[12]"])
@pytest.mark.parametrize("name", ["tensors.json", "state.json"])
def test_a_forged_member_is_refused(name: str, content: bytes, file: Path) -> None:
    forge(file, name, lambda _: content)
    with pytest.raises(CheckpointError):
        load(file)
