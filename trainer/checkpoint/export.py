"""Export of a checkpoint's weights as one safetensors file, which other libraries load."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from ...strategies.errors import CheckpointError
from .atomic_folder import sync
from .encoding import encode
from .files import explain
from .load_weights import read_weights
from .safetensors_file import write_tensors

_NAME: Final = "model.safetensors"
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")


def export(path: str | Path, destination: str | Path) -> Path:
    """Write the weights of a checkpoint as one ``model.safetensors``, for ``from_pretrained`` and its like.

    Args:
        path: What `load_weights` reads.
        destination: A folder, or a file name ending in ``.safetensors``; what is there is replaced, atomically.

    Returns:
        The file written.

    Raises:
        CheckpointError: if the checkpoint cannot be read, or the file cannot be written; for a file of ``torch.save``,
            with the call that writes it.
    """
    destination = Path(destination)
    if destination.suffix in _TORCH_SUFFIXES:
        raise CheckpointError(
            f"destination={str(destination)!r} names a file of torch.save, which is pickled; give a folder or a "
            f"'.safetensors' file, or call torch.save(echelon.load_weights({str(path)!r}), {str(destination)!r})."
        )
    file = destination if destination.suffix == ".safetensors" else destination / _NAME
    weights = read_weights(Path(path), lazily=True)  # one tensor at a time is in memory
    encoded, blocks = encode(weights, "weights", "")
    # as safetensors.torch.save_model does: a tied name is noted with the one that holds its tensor
    tied = {name: value["$tensor"] for name, value in encoded.items() if value["$tensor"] != name}
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(temporary, blocks, tied)
        temporary.replace(file)
        sync(file.parent)
    except OSError as error:
        raise CheckpointError(f"{file} could not be written: {explain(error)}.") from error
    finally:
        temporary.unlink(missing_ok=True)
    return file
