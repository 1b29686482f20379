"""LightningCLI: run a module with a trainer, both configured by arguments and config files."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from ...callbacks.dispatch import overrides_method
from ...common.errors import RunError
from ...trainer.module.train_module import TrainModule
from ...trainer.trainer import Trainer
from ..checkpoint_files import load_checkpoint
from ..extras.machine import seed_everything
from ..module import LightningDataModule, LightningModule
from ..names import VERSION
from ..stand_in import stand_in
from ..trainer import LightningTrainer
from .configured import ConfiguredOptimizers, describe_object, describe_optimizers, instantiate_class, optimizers_for
from .parser import AUTOMATIC, LightningArgumentParser, need_jsonargparse
from .save_config import SaveConfigCallback
from .types import ArgsType, LRSchedulerTypeTuple


class LightningCLI:
    """A command line for a module and a trainer: ``fit``, ``validate``, ``test`` and ``predict``.

    Paths of Lightning's classes in a config name Echelon's (`stand_in`).

    Args:
        model_class: the module's class, or a function that returns a module; None lets the config choose one.
        datamodule_class: the same for a data module.
        save_config_callback: the callback that saves the config; None saves none.
        save_config_kwargs: its arguments.
        trainer_class: the trainer's class, or a function that returns a trainer.
        trainer_defaults: other defaults for the trainer, and callbacks that are always there.
        seed_everything_default: the seed; True chooses that of an earlier `seed_everything`, or 0; False sets none.
        parser_kwargs: the parser's arguments; under the name of a subcommand, those of its parser.
        parser_class: the class of the parsers.
        subclass_mode_model: let the config choose a subclass of `model_class`.
        subclass_mode_data: let it choose one of `datamodule_class`.
        args: what is read instead of ``sys.argv``: a list of arguments, or a dict.
        run: run the subcommand; otherwise there are none, and trainer and module are only made.
        auto_configure_optimizers: add arguments for an optimizer and a scheduler that the module gets.
        load_from_checkpoint_support: accepted; checkpoints hold the arguments that ``save_hyperparameters`` keeps.

    Raises:
        MissingDependencyError: without jsonargparse.
        SystemExit: for arguments that cannot be read.
    """

    def __init__(
        self,
        model_class: type[Any] | Callable[..., Any] | None = None,
        datamodule_class: type[Any] | Callable[..., Any] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = LightningTrainer,
        trainer_defaults: dict[str, Any] | None = None,
        *,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[LightningArgumentParser] = LightningArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        need_jsonargparse()
        with suppress(RunError):  # Lightning itself is imported: its paths are its own
            stand_in()
        self.save_config_callback, self.save_config_kwargs = save_config_callback, save_config_kwargs or {}
        self.trainer_class, self.trainer_defaults = trainer_class, trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_kwargs, self.parser_class = parser_kwargs or {}, parser_class
        self.auto_configure_optimizers = auto_configure_optimizers
        self.model_class, self.datamodule_class = model_class, datamodule_class
        self.subclass_mode_model = model_class is None or subclass_mode_model
        self.subclass_mode_data = datamodule_class is None or subclass_mode_data
        self._subparsers: dict[str, LightningArgumentParser] = {}
        self._arguments_of: dict[str, list[str]] = {}

        own = {name: value for name, value in self.parser_kwargs.items() if name not in self.subcommands()}
        of_subcommands = {name: value for name, value in self.parser_kwargs.items() if name in self.subcommands()}
        self.setup_parser(run, own, of_subcommands)
        self.parse_arguments(self.parser, args)
        self.subcommand = self.config["subcommand"] if run else None
        self._read_checkpoint()
        self._seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run(self.subcommand)

    # --- the parser --------------------------------------------------------------------------------------------------

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands, each a method of the trainer, and those of its arguments that no config has."""
        evaluation = {"model", "dataloaders", "datamodule"}
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            **{name: set(evaluation) for name in ("validate", "test", "predict")},
        }

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return a parser that reads config files."""
        from jsonargparse import ActionConfigFile

        kwargs.setdefault("dump_header", [f"lightning.pytorch=={VERSION}"])
        parser = self.parser_class(**kwargs)
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="Path of a config file in YAML or JSON.")
        return parser

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Make the parser, with its arguments or its subcommands."""
        self.parser = self.init_parser(**main_kwargs)
        if add_subcommands:
            self._add_subcommands(subparser_kwargs)
        else:
            self._add_arguments(self.parser)

    def _add_subcommands(self, options: Mapping[str, dict[str, object]]) -> None:
        from jsonargparse import class_from_function

        given = self.trainer_class
        kind: Any = given if isinstance(given, type) else class_from_function(given)
        group = self.parser.add_subcommands()
        for name, skipped in self.subcommands().items():
            summary = (getattr(kind, name).__doc__ or "").strip().partition("\n")[0]
            parser = self.init_parser(**{"description": summary, **options.get(name, {})})
            self._add_arguments(parser)
            self._arguments_of[name] = parser.add_method_arguments(kind, name, skip=set(skipped))
            self._subparsers[name] = parser
            group.add_subcommand(name, parser, help=summary)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the seed."""
        parser.add_argument(
            "--seed_everything",
            type=bool | int,
            default=self.seed_everything_default,
            help="The seed of all generators; true chooses 0, false sets none.",
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the arguments of trainer, module and data module."""
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        defaults = {f"trainer.{name}": value for name, value in self.trainer_defaults.items() if name != "callbacks"}
        parser.set_defaults(defaults)
        model = self.model_class or LightningModule
        parser.add_lightning_class_args(model, "model", subclass_mode=self.subclass_mode_model)
        data, is_given = self.datamodule_class or LightningDataModule, self.datamodule_class is not None
        parser.add_lightning_class_args(data, "data", subclass_mode=self.subclass_mode_data, required=is_given)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add or link arguments of your own; override it."""

    def _add_arguments(self, parser: LightningArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser.optimizers:
                parser.add_optimizer_args((Optimizer,))
            if not parser.lr_schedulers:
                parser.add_lr_scheduler_args(LRSchedulerTypeTuple)
        self.link_optimizers_and_lr_schedulers(parser)

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: LightningArgumentParser) -> None:
        """Link groups of optimizers and schedulers to the arguments that they name."""
        for key, (kinds, link_to) in {**parser.optimizers, **parser.lr_schedulers}.items():
            if link_to == AUTOMATIC:
                continue
            if isinstance(kinds, tuple):
                parser.link_arguments(key, link_to)
            else:
                parser.link_arguments(key, link_to, compute_fn=_make_describer(kinds))

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Read the arguments into ``self.config``."""
        if args is not None and len(sys.argv) > 1:
            warnings.warn(
                f"LightningCLI's args parameter is set, so it reads args={args!r:.80}, and not the command line "
                f"{sys.argv[1:]}; leave one of them out.",
                stacklevel=3,
            )
        is_object = args is not None and not isinstance(args, list)
        self.config: Any = parser.parse_object(args) if is_object else parser.parse_args(args)

    def _read_checkpoint(self) -> None:
        """Build the module with the hyper-parameters of the checkpoint that is given by its path."""
        path = self._get(self.config, "ckpt_path") if self.subcommand is not None else None
        if path is None or self.subclass_mode_model or not Path(path).exists():
            return
        taken = self._get(self.config, "model") or {}
        saved = load_checkpoint(path).get("hyper_parameters") or {}
        model = {name: value for name, value in saved.items() if name in taken}
        if model:
            self.config = self.parser.parse_object({self.subcommand: {"model": model}}, self.config)

    # --- the objects -------------------------------------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        """Run before the objects are made; override it."""

    def instantiate_classes(self) -> None:
        """Make the module, the data module and the trainer."""
        make = getattr(self.parser, "instantiate", None) or self.parser.instantiate_classes
        self.config_init: Any = make(self.config)
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")
        self._give_optimizers()
        self.trainer = self.instantiate_trainer()

    def after_instantiate_classes(self) -> None:
        """Run when the objects are made; override it."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the trainer, with further arguments."""
        settings = {**dict(self._get(self.config_init, "trainer", {})), **kwargs}
        if "callbacks" not in settings:
            warnings.warn(
                f"The `{getattr(self.trainer_class, '__qualname__', self.trainer_class)}` class does not expose the "
                "`callbacks` argument, so the callbacks of the config are left out; add it.",
                stacklevel=2,
            )
            return self.trainer_class(**settings)
        parser = self._parser(self.subcommand)
        callbacks = _as_list(settings["callbacks"])
        callbacks += [self._get(self.config_init, key) for key in parser.callback_keys]
        for one in _as_list(self.trainer_defaults.get("callbacks")):
            callbacks.append(instantiate_class((), one) if isinstance(one, Mapping) else one)
        if self.save_config_callback is not None and not settings.get("fast_dev_run", False):
            config = self.config.get(str(self.subcommand), self.config)
            callbacks.append(self.save_config_callback(parser, config, **self.save_config_kwargs))
        return self.trainer_class(**{**settings, "callbacks": callbacks})

    @staticmethod
    def configure_optimizers(lightning_module: Any, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """Return what the module's ``configure_optimizers`` returns; override it."""
        return optimizers_for(optimizer, lr_scheduler)

    def _give_optimizers(self) -> None:
        """Give the module the optimizer and the scheduler of the config, if it has any."""
        if not self.auto_configure_optimizers:
            return
        found = describe_optimizers(self._parser(self.subcommand), lambda key: self._get(self.config_init, key))
        if found is None or found[0] is None:
            return
        if overrides_method(self.model, "configure_optimizers", TrainModule):
            name = type(self.model).__name__
            warnings.warn(
                f"`{name}.configure_optimizers` will be overridden by `{type(self).__name__}.configure_optimizers`, as "
                "the config has an optimizer.",
                stacklevel=2,
            )
        made = ConfiguredOptimizers(self.configure_optimizers, found[0], found[1])
        self.model.configure_optimizers = MethodType(made, self.model)

    def _get(self, config: Any, key: str, default: object = None) -> Any:
        return config.get(str(self.subcommand), config).get(key, default)

    def _parser(self, subcommand: str | None) -> LightningArgumentParser:
        return self.parser if subcommand is None else self._subparsers[subcommand]

    # --- the run -----------------------------------------------------------------------------------------------------

    def _seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is False or seed is None:
            return
        chosen = seed_everything(None if seed is True else seed, workers=True)
        (self.config if self.subcommand is None else self.config[self.subcommand])["seed_everything"] = chosen

    def _run(self, subcommand: str) -> None:
        """Run a subcommand: the method of this name, by default the trainer's, between ``before_`` and ``after_``."""
        arguments = {
            name: value
            for name, value in self.config_init[subcommand].items()
            if name in self._arguments_of[subcommand]
        }
        arguments["model"] = self.model
        if self.datamodule is not None:
            arguments["datamodule"] = self.datamodule
        getattr(self, f"before_{subcommand}", _do_nothing)()
        getattr(self, subcommand, getattr(self.trainer, subcommand))(**arguments)
        getattr(self, f"after_{subcommand}", _do_nothing)()


def _make_describer(kind: type) -> Callable[[object], dict[str, object]]:
    def description(init_args: object) -> dict[str, Any]:
        return describe_object(kind, init_args)

    return description


def _do_nothing() -> None:
    pass


def _as_list(value: object) -> list[object]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
