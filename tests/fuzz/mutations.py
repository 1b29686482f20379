"""Mutations of files, each a function of a seed: of bytes, of JSON with matching hashes, of folders."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DEEP = "[" * 5000 + "]" * 5000

HOSTILE: list[Any] = [
    *(None, True, False, "", 0, 1, -1, -5, 0.5, 1e25, 10**25, 2**31, 2**62, 2**63, 2**64, -(2**63), 1e308, 1e-320),
    *(
        [],
        {},
        [[]],
        [{}],
        [None],
        {"": None},
        [[[[[]]]]],
        "x" * 5000,
        "9" * 5000,
        "\ud800",
        "a\x00b",
        "\x1b[31mred\x1b]0;t\x07",
    ),
    *("../../outside/precious.ckpt", "/etc/passwd", "nan", "inf", "\u202e", "${oc.env:HOME}", "%s%n", "-1", "1e400"),
    {"$deque": [], "maxlen": 10**12},
    {"$deque": [], "maxlen": -1},
    {"$size": [10**12, 10**12]},
    {"$size": ["a"]},
    {"$tuple": [1]},
    {"$tuple": None},
    {"$set": [[1]]},
    {"$dict": [[1]]},
    {"$dict": [[[1], 2]]},
    {"$counter": [["a", "b"]]},
    {"$bytes": "AAAA" * 1000},
    {"$bytes": "!"},
    {"$float": "1e999"},
    {"$float": "x"},
    {"$complex": ["1"]},
    {"$timedelta": [10**12, 0, 0]},
    {"$datetime": "not a date"},
    {"$date": "0000-00-00"},
    {"$path": "a\x00b"},
    {"$path": 5},
    {"$dtype": "__builtins__"},
    {"$dtype": "float32"},
    {"$device": "cuda:99999999999999999999"},
    {"$device": "cpu"},
    {"$enum": ["os:system", "x", 1]},
    {"$enum": ["subprocess:Popen", "x"]},
    {"$namespace": {"__class__": 1}},
    {"$namespace": []},
    {"$environment": 5},
    {"$tensor": "absent"},
    {"$tensor": None},
    {"$array": "weight"},
    {"$number": "weight"},
    {"$unknown": 1},
]


class Raw(str):
    """A text that is written into JSON as it is: what `json` would not write."""

    __slots__ = ()


RAW = [
    Raw(text) for text in ("1e400", "-1e400", "Infinity", "NaN", "9" * 5000, "0." + "1" * 5000, DEEP, '"\\ud800"', "-0")
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every value inside a value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def mutate_json(value: Any, rng: random.Random) -> Any:
    """Return a value in which some places have changed."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        known = list(places(value))
        *path, last = rng.choice(known[1:]) if len(known) > 1 else (None,)
        if last is None:
            return rng.choice(HOSTILE)
        parent = at(value, tuple(path))
        action = rng.random()
        if action < 0.12:
            del parent[last]
        elif action < 0.2 and isinstance(parent, dict):
            name = rng.choice([text for text in HOSTILE if isinstance(text, str)])
            parent[name] = parent.pop(last) if rng.random() < 0.5 else parent[last]
        elif action < 0.3:
            parent[last] = (
                json.loads(json.dumps(at(value, rng.choice(known)))) if rng.random() < 0.7 else [parent[last]] * 3
            )
        elif action < 0.42 and type(parent[last]) is int:
            parent[last] += rng.choice([-1, 1, 7, -(2**33), 2**33])
        elif action < 0.5 and isinstance(parent[last], list):
            rng.shuffle(parent[last])
        elif action < 0.6:
            parent[last] = rng.choice(RAW)
        else:
            parent[last] = rng.choice(HOSTILE)
    return value


def dump(value: Any) -> bytes:
    """Return JSON that may hold what no writer would write."""
    raws: list[str] = []

    def replaced(item: Any) -> Any:
        if isinstance(item, Raw):
            raws.append(item)
            return f"RAW{len(raws) - 1}WAR"
        if isinstance(item, dict):
            return {key: replaced(inner) for key, inner in item.items()}
        return [replaced(inner) for inner in item] if isinstance(item, list) else item

    text = json.dumps(replaced(value), indent=1)
    for number, raw in enumerate(raws):
        text = text.replace(f'"RAW{number}WAR"', raw)
    return text.encode()


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return bytes, some of them changed, cut, doubled or added."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        position = rng.randrange(len(changed) + 1)
        action = rng.randrange(5)
        if action == 0 and changed:
            changed[min(position, len(changed) - 1)] = rng.randrange(256)
        elif action == 1:
            del changed[position : position + rng.choice([1, 8, 200])]
        elif action == 2:
            changed[position:position] = changed[position : position + rng.choice([1, 8, 200])]
        elif action == 3:
            changed[position:position] = rng.choice(
                [b"\x00", b"\xff\xfe", b"\x1b[31m", b"9" * 300, b"[" * 300, b"\n", b'"']
            )
        else:
            changed = changed[:position]
    return bytes(changed)


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Return a safetensors file with another header; its length fits, or does not."""
    length = int.from_bytes(data[:8], "little")
    header = dump(mutate_json(json.loads(data[8 : 8 + length]), rng))
    said = len(header) if rng.random() < 0.8 else rng.choice([0, 1, 2**63, 2**40, length])
    return said.to_bytes(8, "little") + header + data[8 + length :]


def forge(folder: Path) -> None:
    """Make the hashes and sizes of a manifest match the files, as anyone with write access can."""
    path = folder / "manifest.json"
    if not path.is_file():
        return
    try:
        manifest = json.loads(path.read_bytes())
        del manifest["sha256"]
        for name, entry in manifest["files"].items():
            if not (folder / name).is_file():
                continue
            content = (folder / name).read_bytes()
            entry.update(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    except (ValueError, LookupError, TypeError, AttributeError, OSError):
        return
    sign(path, json.dumps(manifest, indent=1).encode())


def sign(path: Path, text: bytes) -> None:
    """Write a manifest with the hash of its content."""
    head = text.removesuffix(b"\n}")
    path.write_bytes(head + b',\n "sha256": "' + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n')


def mutate_checkpoint(folder: Path, rng: random.Random) -> None:
    """Change something in a checkpoint, mostly so that its hashes fit."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    path = rng.choice([*files, *(file for file in files if file.suffix == ".json"), folder / "state.json"])
    action = rng.random()
    if not path.is_file() or action < 0.06:
        replace_entry(path, rng)
        return
    data = path.read_bytes()
    if action < 0.25:
        path.write_bytes(mutate_bytes(data, rng))
    elif path.name == "manifest.json":
        manifest = json.loads(data)
        del manifest["sha256"]
        sign(path, dump(mutate_json(manifest, rng)))
        return
    elif path.suffix == ".json":
        path.write_bytes(dump(mutate_json(json.loads(data), rng)))
    else:
        path.write_bytes(mutate_safetensors(data, rng))
    if rng.random() < 0.9:
        forge(folder)


def replace_entry(path: Path, rng: random.Random) -> None:
    """Put something else in the place of a file or folder."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    makers: list[Callable[[], object]] = [
        lambda: None,
        path.mkdir,
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(path.name),
        lambda: path.symlink_to(path.parent / "absent"),
        lambda: path.write_bytes(b""),
        lambda: path.write_bytes(rng.randbytes(100)),
    ]
    rng.choice(makers)()


YAML = [
    *("[" * 3000, "{a: " * 3000, "- " * 3000, "&a [*a]", "&a {b: *a}", "*missing"),
    *("!!python/object/apply:os.system [id]", "!!binary x", "!!set {a}", "!!float x", "!!int x", "!!timestamp x"),
    *("!!omap [a]", "9" * 5000, "1e400", ".inf", ".nan", "0x" + "f" * 5000, "1:2:3", "2026-99-99", "2026-01-01"),
    *("'\\", '"\\ud800"', "\x00", "\x1b[31m", "[os.system]", "{_target_: [a]}", "{_target_: os.system}"),
    *("{_target_: {a: 1}}", "{_target_: 5}", "{_target_: ''}", "{_target_: torch.nn.Linear}", "${seed}", "${a"),
    *("${oc.env:ABSENT_VARIABLE}", "${oc.create:${seed}}", "${.}", "${..}", "${trainer}", "${module}", "???"),
    *("null", "-5", "0.5", "1e25", "[]", "{}", "x" * 5000, "true", "<<: *a", "? [a]\n: b", "..", "\t", "%TAG"),
    *("{1: 2}", "{null: 1}", "{true: 1}", "{[a]: 1}"),
]


def mutate_yaml(text: str, rng: random.Random) -> bytes:
    """Return a config in which some values or lines have changed."""
    if rng.random() < 0.2:
        return mutate_bytes(text.encode(), rng)
    lines = text.splitlines()
    for _ in range(rng.choice([1, 1, 2])):
        number = rng.randrange(len(lines))
        line, action = lines[number], rng.random()
        key, colon, _ = line.partition(": ")
        if action < 0.75 and colon:
            lines[number] = f"{key}: {rng.choice(YAML)}"
        elif action < 0.85:
            lines[number] = line.replace(
                key.strip(), rng.choice(["_target_", "trainer", "<<", "x" * 5000, "'\x1b[31m'", "5", ""]), 1
            )
        elif action < 0.92:
            lines.insert(number, rng.choice(lines))
        else:
            del lines[number]
            lines = lines or [""]
    return "\n".join(lines).encode("utf-8", "surrogatepass")
