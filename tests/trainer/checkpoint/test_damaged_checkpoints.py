"""Damage is found and named, and a malicious checkpoint executes nothing."""

from __future__ import annotations

import ast
import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon
from echelon.common.errors import CheckpointError
from echelon.trainer.checkpoint import load, load_weights, newest_valid, save, verify
from echelon.trainer.checkpoint.files import FileRecord
from echelon.trainer.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from echelon.trainer.checkpoint.saving import STATE
from echelon.trainer.cli import checkpoint_contents as commands
from echelon.trainer.cli.ckpt import list_folder

FILES = ["model.safetensors", "optimizers.safetensors", STATE, MANIFEST]


def make(path: Path, step: int = 0) -> Path:
    torch.manual_seed(step)
    save(
        path,
        {
            "model": {"w": torch.randn(4, 3), "b": torch.randn(3)},
            "optimizers": [{"state": {"w": {"exp_avg": torch.randn(4, 3)}}, "lr": 0.1}],
            "trainer": {"global_step": step},
        },
    )
    return path


@pytest.fixture
def older(tmp_path: Path) -> Path:
    return make(tmp_path / "old.ckpt")


@pytest.fixture
def newer(tmp_path: Path, older: Path) -> Path:
    return make(tmp_path / "new.ckpt", 1)


def assert_detected(damaged: Path, named: str, fallback: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CheckpointError, match=named):
        verify(damaged)
    with pytest.raises(CheckpointError, match=named):
        load(damaged)
    caplog.clear()
    assert newest_valid(damaged.parent) == fallback
    (record,) = (record for record in caplog.records if record.name == "echelon")
    assert record.levelno == logging.WARNING
    assert str(damaged) in record.getMessage()
    assert named in record.getMessage()


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(name: str, newer: Path) -> None:
    original = (newer / name).read_bytes()
    for position in range(len(original)):
        damaged = bytearray(original)
        damaged[position] ^= 1 << position % 8
        (newer / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=name):
            verify(newer)
    (newer / name).write_bytes(original)
    verify(newer)


@pytest.mark.parametrize("name", FILES)
def test_last_falls_back_from_a_flipped_bit(
    name: str, older: Path, newer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = bytearray((newer / name).read_bytes())
    content[len(content) // 2] ^= 4
    (newer / name).write_bytes(content)
    assert_detected(newer, name, older, caplog)


@pytest.mark.parametrize("keep", [0.0, 0.5, -1])
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_found(
    name: str, keep: float, older: Path, newer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = (newer / name).stat().st_size
    os.truncate(newer / name, size - 1 if keep < 0 else int(size * keep))
    assert_detected(newer, name, older, caplog)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_grew_is_found(name: str, older: Path, newer: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (newer / name).open("ab") as file:
        file.write(b"\0")
    assert_detected(newer, name, older, caplog)


@pytest.mark.parametrize("name", FILES)
def test_a_deleted_file_is_found(name: str, older: Path, newer: Path, caplog: pytest.LogCaptureFixture) -> None:
    (newer / name).unlink()
    assert_detected(newer, name, older, caplog)


@pytest.mark.parametrize(("first", "second"), [(a, b) for i, a in enumerate(FILES) for b in FILES[:i]])
def test_swapped_files_are_found(
    first: str, second: str, older: Path, newer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (newer / first).rename(newer / "x")
    (newer / second).rename(newer / first)
    (newer / "x").rename(newer / second)
    assert_detected(newer, MANIFEST if MANIFEST in (first, second) else first, older, caplog)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_checkpoint_is_found(
    name: str, older: Path, newer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(older / name, newer / name)
    with pytest.raises(CheckpointError, match="damaged"):
        verify(newer)
    assert newest_valid(newer.parent) == older


@pytest.mark.parametrize("name", FILES)
def test_a_named_pipe_or_folder_in_place_of_a_file_is_found(name: str, newer: Path) -> None:
    (newer / name).unlink()
    os.mkfifo(newer / name)
    with pytest.raises(CheckpointError, match=name):
        load(newer)
    (newer / name).unlink()
    (newer / name).mkdir()
    with pytest.raises(CheckpointError, match=name):
        load(newer)


def test_all_damaged_is_an_error_that_names_each(older: Path, newer: Path) -> None:
    (older / STATE).unlink()
    (newer / MANIFEST).unlink()
    with pytest.raises(
        CheckpointError, match=r"(?s)No checkpoint in .* can be used.*manifest.json.*state.json is missing"
    ):
        newest_valid(older.parent)


# --- hostile authors: hashes are right, contents are not ---


def rewrite(folder: Path, files: dict[str, bytes], change: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Replace files of a checkpoint and make its manifest agree."""
    old = read_manifest(folder)
    records = dict(old.files)
    for name, content in files.items():
        (folder / name).write_bytes(content)
        records[name] = FileRecord(len(content), sha256(content).hexdigest())
    fields = {**vars(old), "files": records}
    if change is not None:
        change(fields)
    (folder / MANIFEST).write_bytes(Manifest(**fields).to_bytes())


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.proof,))


def payloads(proof: Path) -> Iterator[bytes]:
    yield pickle.dumps(Payload(proof))
    yield pickle.dumps({"state_dict": {"w": Payload(proof)}})
    path = proof.with_suffix(".pt")
    for zipped in (True, False):
        torch.save({"state_dict": Payload(proof)}, path, _use_new_zipfile_serialization=zipped)
        yield path.read_bytes()
    path.unlink()


def use_everything(path: Path) -> list[str]:
    """Call everything that reads a checkpoint, and return the messages."""
    said = []
    for read in (
        load,
        verify,
        load_weights,
        commands.show_checkpoint,
        lambda p: commands.compare_checkpoints(p, p),
        lambda p: load(p, verify=False),
    ):
        try:
            read(path)
        except CheckpointError as error:
            said.append(str(error))
    list_folder(path.parent)
    newest_valid(path.parent)
    return said


def test_the_payload_works_where_it_is_unpickled(tmp_path: Path) -> None:
    for payload in list(payloads(tmp_path / "proof"))[:2]:
        pickle.loads(payload)
        assert (tmp_path / "proof").exists()
        (tmp_path / "proof").unlink()


@pytest.mark.parametrize("agreeing", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_a_payload_in_any_file_executes_nothing(
    name: str, agreeing: bool, older: Path, newer: Path, tmp_path: Path
) -> None:
    proof = tmp_path / "proof"
    for payload in payloads(proof):
        make(newer, 1)
        if agreeing and name != MANIFEST:
            rewrite(newer, {name: payload})
            assert any("not" in said for said in use_everything(newer))
        else:
            (newer / name).write_bytes(payload)
            assert len(use_everything(newer)) >= 5 or name == "optimizers.safetensors"
        assert not proof.exists()


@pytest.mark.parametrize("name", ["w.pt", "w.ckpt", "w.safetensors", "w.bin"])
def test_a_payload_among_weights_executes_nothing(name: str, tmp_path: Path) -> None:
    for payload in payloads(tmp_path / "proof"):
        (tmp_path / name).write_bytes(payload)
        with pytest.raises(CheckpointError):
            load_weights(tmp_path / name)
        assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"model":' * 100_000,
        b"[]",
        b"null",
        b'{"model": {"w": {"$tensor": "nowhere"}}}',
        b'{"model": {"$os.system": "touch x"}}',
        b'{"model": {"$dtype": "load"}}',
        b'{"model": {"$bytes": "?"}}',
        b'{"model": {"$dict": [[[], 1]]}}',
        b'{"model": {"$tuple": 3}}',
        b'{"model": {"$timedelta": [1e400]}}',
        b'{"model": {"$tensor": ["w"]}}',
        b'{"model": {"$deque": [1]}}',
        b"\xff\xfe",
        b"1" * 5000,
    ],
)
def test_hostile_json_is_refused(text: bytes, newer: Path) -> None:
    rewrite(newer, {STATE: text})
    with pytest.raises(CheckpointError):
        load(newer)


def header(content: object, payload: bytes = b"\0" * 16) -> bytes:
    text = json.dumps(content).encode() if not isinstance(content, bytes) else content
    return len(text).to_bytes(8, "little") + text + payload


def entry(**changes: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 7 + b"\x7f" + b"{}",
        header(b"[" * 100_000),
        header([]),
        header(entry(shape=[5])),
        header(entry(shape=[-4])),
        header(entry(shape=[2**40, 2**40])),
        header(entry(shape=[True, 4])),
        header(entry(shape="4")),
        header(entry(dtype="F33")),
        header(entry(data_offsets=[0, 10**9])),
        header(entry(data_offsets=[-16, 0])),
        header(entry(data_offsets=[8, 24])),
        header({**entry(), "v": entry()["w"]}),
        header({"__metadata__": {"DCP_SHARDING_INFO": "[" * 100_000}, **entry()}),
        header({"__metadata__": {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [1, 2]}}'}, **entry()}),
        header({"__metadata__": {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [4611686018427387900]}}'}, **entry()}),
        header({"__metadata__": 3, **entry()}),
    ],
)
def test_hostile_tensor_files_are_refused(content: bytes, newer: Path) -> None:
    rewrite(newer, {"model.safetensors": content})
    with pytest.raises(CheckpointError, match="model.safetensors|shards of 'w'"):
        load(newer)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a\0b", ".hidden", "a\nb"])
def test_a_manifest_that_names_files_elsewhere_is_refused(name: str, newer: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"{}")

    def point_outside(fields: dict[str, Any]) -> None:
        fields["files"][name] = FileRecord(2, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a")
        fields["parts"] = {**fields["parts"], "model": [name]}

    rewrite(newer, {}, point_outside)
    with pytest.raises(CheckpointError, match="the name of a file inside the checkpoint"):
        load(newer)


def test_a_format_of_the_future_is_refused_with_its_writer(newer: Path) -> None:
    raw = (newer / MANIFEST).read_bytes()
    head = raw[: raw.rindex(b',\n "sha256"')].replace(b'"format_version": 1', b'"format_version": 2')
    (newer / MANIFEST).write_bytes(head + b',\n "sha256": "' + sha256(head).hexdigest().encode() + b'"\n}\n')
    with pytest.raises(
        CheckpointError, match="format version 2, but this version of Echelon reads 1; read it with Echelon"
    ):
        load(newer)


def test_the_package_neither_pickles_nor_loads_what_may_be_pickled() -> None:
    root = Path(echelon.__file__).parent
    outside = {"tests", "examples", "benchmarks", "docs", "build"}
    faults = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if parts[0] in outside or any(part.startswith(".") for part in parts) or parts in BETWEEN_OWN_PROCESSES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            faults += [f"{path}: import {name}" for name in names if name.split(".")[0] in UNSAFE]
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                faults += [f"{path}:{node.lineno}: torch.load"] if keywords.get("weights_only") != "True" else []
    assert faults == []


# what a caller sends to workers that it starts itself, and what looks at torch's rendezvous before torch unpickles it;
# no checkpoint comes near them; and the writer of the member that torch.load reads, which unpickles nothing
BETWEEN_OWN_PROCESSES = {
    ("trainer", "checkpoint", "single_file.py"),
    ("strategies", "distributed", "pickling.py"),
    ("strategies", "torch_internals", "rendezvous.py"),
}
UNSAFE = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
