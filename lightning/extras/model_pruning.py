"""ModelPruning: set the least important weights to zero at the end of each epoch, with torch.nn.utils.prune."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from ...callbacks.callback import Callback
from ...callbacks.run import Run
from ...common.errors import ConfigError, did_you_mean
from ...strategies import Strategy
from ...trainer.module.train_module import TrainModule

Pairs = Sequence[tuple[nn.Module, str]]
"""Modules, and the name of a parameter of each."""

_METHODS: Final[Mapping[str, type[prune.BasePruningMethod]]] = {
    "ln_structured": prune.LnStructured,
    "l1_unstructured": prune.L1Unstructured,
    "random_structured": prune.RandomStructured,
    "random_unstructured": prune.RandomUnstructured,
}
_CONTAINERS: Final = (TrainModule, nn.Sequential, nn.ModuleList, nn.ModuleDict)

_log = logging.getLogger(__name__)


class ModelPruning(Callback):
    """Prune weights of a module when an epoch ends; pruned weights are 0 from then on, and the others are trained.

    torch keeps the weights as ``weight_orig`` and a mask as ``weight_mask``. Checkpoints have the plain names and the
    pruned weights (`make_pruning_permanent`), and at the end of training so does the module. A run that is resumed with
    this callback keeps the masks. Every rank prunes the same weights: rank 0's masks are used. It needs whole weights
    on each rank.

    Args:
        pruning_fn: ``l1_unstructured``, ``random_unstructured``, ``ln_structured``, ``random_structured``, or a
            subclass of ``torch.nn.utils.prune.BasePruningMethod``.
        parameters_to_prune: modules with the name of a parameter; by default all `parameter_names`.
        parameter_names: ``weight``, ``bias`` or both, the default.
        use_global_unstructured: compare the weights of all parameters, instead of those of each.
        amount: the fraction (float) or number (int) of weights, or a function of the epoch that returns it.
        apply_pruning: whether to prune, or a function of the epoch.
        make_pruning_permanent: save the pruned weights under the plain names.
        use_lottery_ticket_hypothesis: set the other weights back to their first values (Frankle and Carbin 2019), or a
            function of the epoch that tells whether to.
        resample_parameters: set them to new random values instead.
        pruning_dim: the dimension of structured methods.
        pruning_norm: the norm of ``ln_structured``.
        verbose: 1 logs how much is pruned, 2 also of which parameter.
        prune_on_train_epoch_end: False prunes at the end of a validation instead.

    Raises:
        ConfigError: for invalid arguments.
    """

    PARAMETER_NAMES: ClassVar[tuple[str, ...]] = ("weight", "bias")

    def __init__(
        self,
        pruning_fn: str | type[prune.BasePruningMethod],
        parameters_to_prune: Pairs = (),
        parameter_names: Sequence[str] | None = None,
        use_global_unstructured: bool = True,
        amount: float | Callable[[int], float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        *,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        self._parameter_names = tuple(parameter_names or self.PARAMETER_NAMES)
        unknown = [name for name in self._parameter_names if name not in self.PARAMETER_NAMES]
        if unknown:
            raise ConfigError(
                f"parameter_names: {unknown[0]} isn't in {self.PARAMETER_NAMES}, got {parameter_names}; give one or "
                "both."
            )
        method, options = _method_of(pruning_fn, pruning_dim, pruning_norm)
        if use_global_unstructured and getattr(method, "PRUNING_TYPE", "") != "unstructured":
            raise ConfigError(
                "Only an unstructured method is supported with `use_global_unstructured=True`, got "
                f"{pruning_fn!r}; set it to False."
            )
        if not use_global_unstructured and not isinstance(pruning_fn, str):
            raise ConfigError(
                f"A pruning method of your own ({method.__name__}) is currently only supported with "
                "use_global_unstructured=True, got False; set it, and list one parameter in parameters_to_prune to "
                "prune that alone."
            )
        if not isinstance(amount, int | float) and not callable(amount):
            raise ConfigError(f"amount must be a number or a function of the epoch, got {amount!r}; give 0.5, say.")
        if verbose not in (0, 1, 2):
            raise ConfigError(f"verbose must be any of (0, 1, 2), got {verbose!r}; give one of them.")
        self.pruning_fn, self.amount = method, amount
        self._options, self._is_global, self._verbose = options, use_global_unstructured, verbose
        self._given, self._apply_pruning, self._is_permanent = (
            parameters_to_prune,
            apply_pruning,
            make_pruning_permanent,
        )
        self._uses_lottery, self._resample_parameters = use_lottery_ticket_hypothesis, resample_parameters
        self._at_train_epoch_end = prune_on_train_epoch_end
        self._is_fit = False
        self._parameters_to_prune: Pairs = ()
        self._places: list[str] = []
        """The name of the module of each."""
        self._original_layers: dict[int, dict[str, Any]] = {}
        """Copies of the modules before training, and the positions and names of their parameters, by ``id``."""

    # --- what may be overridden --------------------------------------------------------------------------------------

    def filter_parameters_to_prune(self, parameters_to_prune: Pairs = ()) -> Pairs:
        """Return those of the parameters that are to be pruned; by default all."""
        return parameters_to_prune

    def apply_pruning(self, amount: float) -> None:
        """Prune now."""
        pairs = self._parameters_to_prune
        before = [_count_pruned(module, name) for module, name in pairs] if self._verbose else []
        if self._is_global:
            known = set(inspect.signature(self.pruning_fn).parameters)
            options = {name: value for name, value in {**self._options, "amount": amount}.items() if name in known}
            prune.global_unstructured(pairs, pruning_method=self.pruning_fn, **options)
        else:
            for module, name in pairs:
                self.pruning_fn.apply(module, name, amount=amount, **self._options)
        if self._verbose:
            self._tell(before, [_count_pruned(module, name) for module, name in pairs], amount)

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Set the parameters to their values before training, or to new random ones."""
        for layer in self._original_layers.values():
            source = layer["data"]
            if self._resample_parameters and callable(getattr(source, "reset_parameters", None)):
                source = deepcopy(source)
                source.reset_parameters()
            for position, name in layer["names"]:
                module, _ = self._parameters_to_prune[position]
                target = getattr(module, f"{name}_orig", None)
                with torch.no_grad():
                    (getattr(module, name) if target is None else target).copy_(getattr(source, name))

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Give the module its plain parameters, with the pruned weights."""
        for part in module.modules():
            for name in _pruned_names(part):
                prune.remove(part, name)

    # --- hooks -------------------------------------------------------------------------------------------------------

    def check_strategy(self, strategy: Strategy, world_size: int, num_devices: int) -> None:
        """Refuse strategies that cut or keep parameters elsewhere."""
        if strategy.forward_is_collective or not strategy.can_try_steps:
            raise ConfigError(
                f"ModelPruning needs whole parameters in each process, got strategy={strategy.name!r}; use 'ddp', or "
                "prune before training and train with the masks."
            )

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Find the parameters, and keep their first values."""
        found = self.sanitize_parameters_to_prune(module, self._given, self._parameter_names)
        self._parameters_to_prune = self.filter_parameters_to_prune(found)
        names = {id(part): name for name, part in module.named_modules()}
        self._places = [names[id(part)] for part, _ in self._parameters_to_prune]
        self._is_fit, self._original_layers = stage == "fit", {}
        if self._uses_lottery:
            _detach_pruned(module)  # torch copies no tensors that are computed from others
            for position, (part, name) in enumerate(self._parameters_to_prune):
                layer = self._original_layers.setdefault(id(part), {"data": deepcopy(part), "names": []})
                layer["names"].append((position, name))

    @property
    def state_key(self) -> str:
        """The class with the method, which distinguishes several in one run."""
        return f"{type(self).__qualname__}(pruning_fn={self.pruning_fn.__name__!r})"

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, by the name of the parameter."""
        masks = {
            f"{place}.{name}": getattr(module, f"{name}_mask")
            for (module, name), place in zip(self._parameters_to_prune, self._places, strict=True)
            if hasattr(module, f"{name}_mask")
        }
        return {"masks": masks} if masks else {}

    def on_load_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Prune the module of a run that is resumed as that of the saved run was."""
        saved = checkpoint.get("callbacks", {}).get(self.state_key, {}).get("masks", {})
        if not self._is_fit or not saved:
            return
        weights = dict(checkpoint["state_dict"])
        renamed = {}
        for place, mask in saved.items():
            owner, _, name = place.rpartition(".")
            part = module.get_submodule(owner)
            if name in dict(part.named_parameters(recurse=False)):
                prune.custom_from_mask(part, name, mask)
            if place in weights:  # made permanent in the checkpoint
                weights[f"{place}_orig"], weights[f"{place}_mask"] = weights.pop(place), mask
                renamed[place] = f"{place}_orig"
        checkpoint["state_dict"] = weights
        states = checkpoint.get("optimizer_states", [])
        states[:] = [_rename_parameters(state, renamed) for state in states]

    def on_train_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Prune, unless it is done after a validation."""
        if self._at_train_epoch_end:
            self._prune(trainer)

    def on_validation_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Prune, if it is done here."""
        if not trainer.sanity_checking and not self._at_train_epoch_end:
            self._prune(trainer)

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Make the pruning permanent."""
        if self._is_permanent:
            self.make_pruning_permanent(module)
        else:
            _detach_pruned(module)

    def on_save_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Make the pruning permanent in the checkpoint."""
        if not self._is_permanent:
            return
        weights = dict(checkpoint["state_dict"])
        pruned = [name.removesuffix("_mask") for name in weights if name.endswith("_mask")]
        pruned = [name for name in pruned if f"{name}_orig" in weights]
        for name in pruned:
            original, mask = weights.pop(f"{name}_orig"), weights.pop(f"{name}_mask")
            weights[name] = original * mask.to(original.dtype)
        checkpoint["state_dict"] = weights
        plain = {f"{name}_orig": name for name in pruned}
        checkpoint["optimizer_states"] = [
            _rename_parameters(state, plain) for state in checkpoint.get("optimizer_states", ())
        ]
        if not checkpoint["optimizer_states"]:
            del checkpoint["optimizer_states"]

    # --- pruning -----------------------------------------------------------------------------------------------------

    def _prune(self, trainer: Run) -> None:
        epoch = trainer.current_epoch
        amount = self.amount(epoch) if callable(self.amount) else self.amount
        if not amount or not _value_at_epoch(self._apply_pruning, epoch):
            return
        with torch.inference_mode(False):  # in a validation, masks would be tensors that training cannot use
            self.apply_pruning(amount)
        if trainer.strategy.world_size > 1:
            for module, name in self._parameters_to_prune:
                mask = getattr(module, f"{name}_mask")
                mask.copy_(trainer.strategy.ranks.all.broadcast(mask))
        if _value_at_epoch(self._uses_lottery, epoch):
            self.apply_lottery_ticket_hypothesis()

    def _tell(self, before: list[tuple[int, int]], after: list[tuple[int, int]], amount: float) -> None:
        method, total = self.pruning_fn.__name__, sum(size for _, size in after)
        old, new = (sum(zeros for zeros, _ in counts) for counts in (before, after))
        share = partial("{}/{} ({:.2%})".format)
        _log.info(
            "Applied `%s`. Pruned: %s -> %s", method, share(old, total, old / total), share(new, total, new / total)
        )
        if self._verbose < 2:
            return
        for (module, name), (old, _), (new, size) in zip(self._parameters_to_prune, before, after, strict=True):
            _log.info(
                "Applied `%s` to `%r.%s` with amount=%s. Pruned: %d (%.2f%%) -> %d (%.2f%%)",
                *(method, module, name, amount, old, 100 * old / size, new, 100 * new / size),
            )

    @staticmethod
    def _is_pruning_method(method: object) -> bool:  # that of Lightning, which subclasses call
        return inspect.isclass(method) and issubclass(method, prune.BasePruningMethod)

    @staticmethod
    def sanitize_parameters_to_prune(
        pl_module: nn.Module, parameters_to_prune: Pairs = (), parameter_names: Sequence[str] = ()
    ) -> Pairs:
        """Return the given parameters, by default all with these names, after a check.

        Raises:
            ConfigError: for other objects, and parameters that the module does not have.
        """
        names = parameter_names or ModelPruning.PARAMETER_NAMES
        parts = [part for part in pl_module.modules() if not isinstance(part, _CONTAINERS)]
        if not parameters_to_prune:
            return [(part, name) for name in names for part in parts if _find_parameter(part, name) is not None]
        is_list = isinstance(parameters_to_prune, list | tuple)
        if not is_list or not all(map(_is_pair, parameters_to_prune)):
            raise ConfigError(
                "parameters_to_prune must be a list of (module, name of a parameter), got "
                f"{parameters_to_prune!r:.80}; give such a list, or leave it out."
            )
        known = set(parts)
        missing = [(repr(part)[:40], name) for part, name in parameters_to_prune if part not in known]
        missing += [
            (repr(part)[:40], name)
            for part, name in parameters_to_prune
            if part in known and _find_parameter(part, name) is None
        ]
        if missing:
            raise ConfigError(
                f"parameters_to_prune must be parameters of {type(pl_module).__name__}, got {missing[:3]}, which it "
                "lacks; take them from the module that is trained."
            )
        return parameters_to_prune


def _method_of(
    pruning_fn: object, dim: int | None, norm: int | None
) -> tuple[type[prune.BasePruningMethod], dict[str, object]]:
    """Return the pruning method, and its options other than the amount."""
    if inspect.isclass(pruning_fn) and issubclass(pruning_fn, prune.BasePruningMethod):
        return pruning_fn, {}
    name = pruning_fn.lower() if isinstance(pruning_fn, str) else pruning_fn
    if not isinstance(name, str) or name not in _METHODS:
        raise ConfigError(
            f"pruning_fn is expected to be a str in {list(_METHODS)} or a subclass of BasePruningMethod (the class), "
            f"got {pruning_fn!r}.{did_you_mean(name, _METHODS) if isinstance(name, str) else ''}"
        )
    options: dict[str, object] = {}
    if name == "ln_structured":
        options["n"] = norm
    if name.endswith("_structured") or name == "ln_structured":
        options["dim"] = dim
    for argument, value in (("pruning_dim", options.get("dim", 0)), ("pruning_norm", options.get("n", 0))):
        if value is None:
            raise ConfigError(
                f"When requesting `{name}` pruning, the `{argument}` should be provided, got None; give an int."
            )
    return _METHODS[name], options


def _value_at_epoch(setting: bool | Callable[[int], bool], epoch: int) -> bool:
    return setting(epoch) if callable(setting) else setting


def _is_pair(value: Any) -> bool:
    is_two = isinstance(value, list | tuple) and len(value) == 2
    return is_two and isinstance(value[0], nn.Module) and isinstance(value[1], str)


def _find_parameter(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter of a module, pruned or not; None if it has none of this name."""
    own = dict(module.named_parameters(recurse=False))
    return own.get(name, own.get(f"{name}_orig"))


def _count_pruned(module: nn.Module, name: str) -> tuple[int, int]:
    """Return how many weights of a parameter are pruned, and how many there are."""
    mask = getattr(module, f"{name}_mask", None)
    parameter = _find_parameter(module, name)
    assert parameter is not None
    return (0 if mask is None else int((mask == 0).sum())), parameter.numel()


def _pruned_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters of a module that are pruned."""
    originals = [name for name, _ in module.named_parameters(recurse=False) if name.endswith("_orig")]
    return [name.removesuffix("_orig") for name in originals if hasattr(module, f"{name.removesuffix('_orig')}_mask")]


def _detach_pruned(module: nn.Module) -> None:
    """Detach the pruned weights of a module, so that it can be copied and pickled."""
    for part in module.modules():
        for name in _pruned_names(part):
            setattr(part, name, getattr(part, name).detach())


def _rename_parameters(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, object]:
    """Return the state of an optimizer with other names for some parameters."""
    result = dict(state)
    for part in ("state", "dtypes"):
        if part in state:
            result[part] = {names.get(name, name): value for name, value in state[part].items()}
    result["param_groups"] = [
        {**group, "params": [names.get(name, name) for name in group["params"]]} for group in state["param_groups"]
    ]
    return result
