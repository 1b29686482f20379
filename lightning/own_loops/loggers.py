"""Loggers with the arguments of Lightning's Fabric: `root_dir` in place of `save_dir`."""

from __future__ import annotations

from pathlib import Path

from ...trainer.loggers import CSVLogger, TensorBoardLogger


class FabricCSVLogger(CSVLogger):
    """A `CSVLogger` in a folder below `root_dir`; further arguments are those of `CSVLogger`."""

    def __init__(
        self,
        root_dir: str | Path,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(root_dir, name, version, prefix, flush_logs_every_n_steps)


class FabricTensorBoardLogger(TensorBoardLogger):
    """A `TensorBoardLogger` in a folder below `root_dir`; further arguments are those of `TensorBoardLogger`."""

    def __init__(
        self,
        root_dir: str | Path,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | Path | None = None,
    ) -> None:
        super().__init__(root_dir, name, version, False, default_hp_metric, prefix, sub_dir=sub_dir)
