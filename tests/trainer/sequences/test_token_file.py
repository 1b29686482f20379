"""Files of tokens are read where they are asked for, at any size, and damaged ones are named."""

import os
import pickle
import struct
import time

import numpy as np
import pytest
import torch
from small import raises
from torch.utils.data import DataLoader

from echelon import ConfigError, DataError, KeyedSampler, Mixture, PackedDataset, TokenFile

TOKENS = np.arange(1000, dtype=np.int64) % 251


def megatron(folder, documents, dtype="<u2", code=8, name="data"):
    """Write documents, which are lists of sequences, as Megatron does; return the path of the tokens."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    starts = np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize
    bounds = np.cumsum([0, *map(len, documents)])
    path = folder / f"{name}.bin"
    path.write_bytes(np.concatenate(sequences).astype(dtype).tobytes())
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(bounds))
    columns = np.array(lengths, "<i4").tobytes() + starts.astype("<i8").tobytes() + bounds.astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(head + columns)
    return path


@pytest.fixture(params=["uint16.bin", "int32.bin", "npy", "megatron"])
def path_and_dtype(request, tmp_path):
    if request.param == "npy":
        np.save(tmp_path / "tokens.npy", TOKENS.astype(np.uint16))
        return tmp_path / "tokens.npy", None
    if request.param == "megatron":
        return megatron(tmp_path, [[TOKENS[:400]], [TOKENS[400:]]]), None
    dtype = request.param.removesuffix(".bin")
    TOKENS.astype(dtype).tofile(tmp_path / "tokens.bin")
    return tmp_path / "tokens.bin", dtype


def test_a_file_is_cut_into_sequences(path_and_dtype):
    path, dtype = path_and_dtype
    data = TokenFile(path, 64, dtype=dtype, vocab_size=251)
    assert (len(data), data.num_tokens) == (15, 1000)
    for number, sample in enumerate(data[index] for index in range(len(data))):
        start = 64 * number
        assert sample["input_ids"].tolist() == sample["labels"].tolist() == TOKENS[start : start + 64].tolist()
        assert sample["shift_labels"].tolist() == TOKENS[start + 1 : start + 65].tolist()
        assert sample["input_ids"].dtype == torch.int64
    assert data[-1]["input_ids"].tolist() == data[14]["input_ids"].tolist()
    assert TokenFile(path, 100, dtype=dtype)[9]["shift_labels"].tolist() == [*TOKENS[901:].tolist(), -100]
    with pytest.raises(IndexError, match="below 15, got 15"):
        data[15]


def test_documents_of_an_index_are_packed(tmp_path):
    documents = [[TOKENS[:5]], [TOKENS[5:9], TOKENS[9:20]], [TOKENS[20:21]], [TOKENS[21:90]]]
    data = TokenFile(megatron(tmp_path, documents))
    assert data.lengths.tolist() == [5, 15, 1, 69]
    assert [data[index].tolist() for index in range(4)] == [np.concatenate(each).tolist() for each in documents]
    packs = PackedDataset(data, 32)
    found = sorted(
        token
        for pack in packs
        for token, number in zip(pack["input_ids"], pack["document_ids"], strict=True)
        if number >= 0
    )
    assert found == sorted(TOKENS[:90].tolist())
    assert TokenFile(tmp_path / "data.idx").lengths.tolist() == [5, 15, 1, 69]


def test_workers_open_the_file_by_themselves(path_and_dtype):
    path, dtype = path_and_dtype
    data = TokenFile(path, 64, dtype=dtype)
    assert len(pickle.dumps(data)) < 1000
    again = pickle.loads(pickle.dumps(data))
    assert again[3]["input_ids"].tolist() == data[3]["input_ids"].tolist()
    context = "forkserver"  # which gets the data set as "spawn" does, but imports nothing anew
    loader = DataLoader(data, 4, num_workers=1, sampler=KeyedSampler(data, seed=1), multiprocessing_context=context)
    read = torch.cat([batch["input_ids"][:, 0] for batch in loader]).tolist()
    assert sorted(read) == sorted(TOKENS[:960:64].tolist())


def test_a_file_of_a_trillion_tokens_opens_at_once(tmp_path):
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        try:
            os.truncate(file.fileno(), 2 * 10**12)
        except OSError:
            pytest.skip("the file system has no sparse files of this size")
        file.seek(2 * (10**12 - 2048))
        file.write(TOKENS.astype(np.uint16).tobytes())
    began = time.process_time()
    data = TokenFile(path, 2048, dtype="uint16")
    loader = DataLoader(data, 8, sampler=KeyedSampler(data))
    assert next(iter(loader))["input_ids"].shape == (8, 2048)
    assert time.process_time() - began < 5
    assert len(data) == 10**12 // 2048
    assert data[-1]["input_ids"][:1000].tolist() == TOKENS.tolist()  # 2048 is a divisor of 10 ** 12


def test_files_are_mixed_by_tokens(tmp_path):
    for name, value in (("a", 1), ("b", 2)):
        np.full(4000, value, np.uint16).tofile(tmp_path / f"{name}.bin")
    files = {name: TokenFile(tmp_path / f"{name}.bin", size, dtype="uint16") for name, size in (("a", 10), ("b", 40))}
    mixture = Mixture({"a": (files["a"], 0.5), "b": (files["b"], 0.5)}, by="tokens", stop=100)
    assert abs(mixture.progress(100)["mixture/a/samples"] - 80) <= 1


def test_mistakes_and_damage_are_named(tmp_path):
    plain = tmp_path / "plain.bin"
    TOKENS.astype(np.uint16).tofile(plain)
    good = megatron(tmp_path, [[TOKENS[:50]], [TOKENS[50:]]])

    def changed(name, change):
        """Copy the pair of files, with the bytes of the index or of the tokens changed."""
        for suffix in (".bin", ".idx"):
            (tmp_path / f"{name}{suffix}").write_bytes(change(suffix, good.with_suffix(suffix).read_bytes()))
        return tmp_path / f"{name}.bin"

    with raises(ConfigError, "dtype must be given for plain.bin"):
        TokenFile(plain, 8)
    with raises(ConfigError, "dtype must be one of uint8", "got 'float32'"):
        TokenFile(plain, 8, dtype="float32")
    with raises(ConfigError, "seq_len must be given for plain.bin"):
        TokenFile(plain, dtype="uint16")
    with raises(ConfigError, "seq_len must be at least 1, got seq_len=0"):
        TokenFile(plain, 0, dtype="uint16")
    with raises(ConfigError, "dtype must be that of the index data.idx, uint16, got 'int32'"):
        TokenFile(good, 8, dtype="int32")
    with raises(DataError, "must be a file of tokens, got none there"):
        TokenFile(tmp_path / "nowhere.bin", 8, dtype="uint16")
    with raises(DataError, "at least one sequence of seq_len=2000 tokens, got 1000"):
        TokenFile(plain, 2000, dtype="uint16")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with raises(DataError, "a multiple of 2 bytes", "got 3: it is empty, cut short"):
        TokenFile(tmp_path / "odd.bin", 1, dtype="uint16")
    with raises(DataError, "Tokens of", "must be below vocab_size=100, got 100 at place 100, read as uint16"):
        list(TokenFile(plain, 50, dtype="uint16", vocab_size=100))
    with raises(DataError, "must begin with Megatron's mark"):
        TokenFile(changed("mark", lambda suffix, old: b"x" + old[1:] if suffix == ".idx" else old))
    with raises(DataError, "it is cut short; copy or write it again"):
        TokenFile(changed("short", lambda suffix, old: old[:-4] if suffix == ".idx" else old))
    with raises(DataError, "must have 1000 tokens, as cut.idx says, got 900: it is cut"):
        TokenFile(changed("cut", lambda suffix, old: old[:1800] if suffix == ".bin" else old))
    with raises(DataError, "must be of version 1"):
        TokenFile(changed("version", lambda suffix, old: old[:9] + b"\x02" + old[10:] if suffix == ".idx" else old))
    np.save(tmp_path / "floats.npy", np.ones(10))
    with raises(DataError, "must be one row of integers, got float64 of shape [10]"):
        TokenFile(tmp_path / "floats.npy", 2)
    (tmp_path / "broken.npy").write_bytes(b"no array")
    with raises(DataError, "must be an array that NumPy reads"):
        TokenFile(tmp_path / "broken.npy", 2)
