"""Optimizers of torch and of libraries, in a module that is trained on every layout."""

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "equivalence"))
sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from unusual_modules import Plain

Make = Callable[[list[torch.nn.Parameter]], Any]
"""Returns what `configure_optimizers` returns for these parameters."""
NOT_HERE = ("fused", "bnb", "adahessian")
"""What optimizers of timm are named that need CUDA, or a second derivative."""
BY_KIND = ("adago", "adamuon", "muon", "muonclip", "normuon")
"""The optimizers of pytorch_optimizer whose groups say whether Muon updates them."""
ALSO_NOT_HERE = (
    *("adahessian", "sophiah", "alig", "bsam"),  # a second derivative, or a closure
    *("adalomo", "adammini", "lomo"),  # a model instead of parameters
    *("demo", "fadam", "spectralsphere", "distributedmuon"),  # einops, float32, matrices only, a process group
)
"""Those that need something else than parameters and their gradients."""


class Optimized(Plain):
    """The plain module of the equivalence tests with an optimizer of the catalogue."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make([parameter for parameter in self.parameters() if parameter.requires_grad])


def muon_and_sgd(parameters: list[torch.nn.Parameter]) -> Any:
    """Return torch's Muon for the matrices, and SGD for the rest."""
    matrices = [parameter for parameter in parameters if parameter.dim() == 2]
    rest = [parameter for parameter in parameters if parameter.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.SGD(rest, lr=0.01)]


def of_torch() -> dict[str, Make]:
    """Return the optimizers of torch, but those for sparse gradients."""
    kinds = {name: kind for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    plain = {
        name: kind
        for name, kind in kinds.items()
        if issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam", "Muon")
    }
    return {
        **{f"torch {name}": lambda parameters, kind=kind: kind(parameters, lr=0.01) for name, kind in plain.items()},
        "torch Muon and SGD": muon_and_sgd,
    }


def of_timm() -> dict[str, Make]:
    """Return the optimizers of timm by its names for them."""
    from timm.optim import create_optimizer_v2, list_optimizers

    names = [name for name in list_optimizers() if not name.startswith(NOT_HERE)]
    return {
        f"timm {name}": lambda parameters, name=name: create_optimizer_v2(parameters, opt=name, lr=0.01)
        for name in names
    }


def of_pytorch_optimizer() -> dict[str, Make]:
    """Return the optimizers of pytorch_optimizer by its names for them."""
    from pytorch_optimizer import get_supported_optimizers, load_optimizer

    def make(parameters: list[torch.nn.Parameter], kind: Any, *, by_kind: bool) -> Any:
        matrices = [parameter for parameter in parameters if parameter.dim() == 2]
        rest = [parameter for parameter in parameters if parameter.dim() != 2]
        groups = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
        arguments = inspect.signature(kind).parameters
        settings = {name: value for name, value in (("lr", 0.01), ("num_iterations", 8)) if name in arguments}
        return kind(groups if by_kind else parameters, **settings)

    names = [name for name in sorted(get_supported_optimizers()) if not name.startswith(("bnb", "torchao"))]
    return {
        name: functools.partial(make, kind=load_optimizer(name), by_kind=name in BY_KIND)
        for name in names
        if name not in ALSO_NOT_HERE
    }


def of_others() -> dict[str, Make]:
    """Return single optimizers of other libraries."""
    import torchao.optim
    from lion_pytorch import Lion
    from transformers.optimization import Adafactor

    def adafactor(parameters: list[torch.nn.Parameter]) -> Any:
        return Adafactor(parameters, lr=0.01, relative_step=False, scale_parameter=False)

    kinds = [getattr(torchao.optim, name) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")]
    return {
        "transformers Adafactor": adafactor,
        "lion-pytorch Lion": lambda parameters: Lion(parameters, lr=0.01),
        **{f"torchao {kind.__name__}": lambda parameters, kind=kind: kind(parameters, lr=0.01) for kind in kinds},
    }


def optimizers() -> dict[str, Callable[[], Optimized]]:
    """Return all rows of the catalogue: each makes a module."""
    return _rows({**of_torch(), **of_timm(), **of_others()})


def pytorch_optimizers() -> dict[str, Callable[[], Optimized]]:
    """Return all rows of the catalogue of pytorch_optimizer."""
    return _rows(of_pytorch_optimizer())


def _rows(kinds: dict[str, Make]) -> dict[str, Callable[[], Optimized]]:
    return {name: functools.partial(Optimized, make) for name, make in kinds.items()}
