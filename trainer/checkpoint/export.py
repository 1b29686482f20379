"""Export of a checkpoint's weights as one safetensors file, which other libraries can load."""

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
    """Write the weights of a checkpoint as one ``model.safetensors``, for ``from_pretrained`` and the like.

    Args:
        path: Anything that `load_weights` reads.
        destination: A folder, or a file name ending in ``.safetensors``; an existing file is replaced atomically.

    Returns:
        The written file.

    Raises:
        CheckpointError: if the checkpoint cannot be read, the file cannot be written, or `destination` has a suffix of
            ``torch.save``.
    """
    destination = Path(destination)
    if destination.suffix in _TORCH_SUFFIXES:
        raise CheckpointError(
            f"destination={str(destination)!r} names a torch.save file, which would be pickled; give a folder or a "
            f"'.safetensors' file, or call torch.save(echelon.load_weights({str(path)!r}), {str(destination)!r})."
        )
    file = destination if destination.suffix == ".safetensors" else destination / _NAME
    weights = read_weights(Path(path), lazily=True)  # only one tensor at a time is in memory
    encoded, blocks = encode(weights, "weights", "")
    # as in safetensors.torch.save_model, a tied name is noted with the name that holds its tensor
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
