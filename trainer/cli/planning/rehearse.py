"""``echelon rehearse``: one rank of a run of any size, on this machine, without memory and without the other ranks."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

from ....common.console import say
from ....common.errors import ConfigError
from ....common.process_memory import peak_of_process
from ....common.table import render_fitted_table
from ....common.units import in_units
from ....strategies.launch.launcher import launch_all
from ....strategies.placement import BY_NAME, is_auto
from ....strategies.registry import find_strategy
from ...data.seed import seed_everything
from ...planning.profiling import build_without_memory, lacks_values, needs_values
from ...planning.rehearsal import RehearsedStrategy, as_rank
from ...planning.rehearsed_rank import RehearsedRank, TakeNotes
from ...trainer import Trainer
from ..config import build_module, check_config
from ..config_file import load_config
from ..instantiate import build_targets
from ..output import make_printable, terminal_width

_KEPT: Final = (
    *("precision", "gradient_clip_val", "gradient_clip_algorithm", "max_steps", "max_epochs"),
    *("accumulate_grad_batches", "global_batch_size", "use_distributed_sampler", "activation_checkpointing"),
)
"""The settings of a config's trainer that a rehearsal uses."""

_SECONDS: Final = 3600.0
"""The time limit of a rehearsal."""

_EPILOG: Final = """\
The rank sets up, runs two steps on tensors without memory, and works out its files of a checkpoint. torch's fake
process group replaces all other ranks. docs/plan.md says what this finds, and what only a real run shows.

examples:
  echelon rehearse config.yaml --nodes 128 --nproc 8
  echelon rehearse config.yaml --nodes 128 --nproc 8 --rank 0 --rank 517 --rank 1023
  echelon rehearse config.yaml --nodes 4 --nproc 8 --json trainer.strategy=hsdp

exit codes:
  0 every given rank would run   1 one would fail, or needs values   2 wrong command or config
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config with its overrides, the run, and the ranks to rehearse."""
    parser.epilog = _EPILOG
    parser.add_argument("config", metavar="CONFIG", help="a YAML file as for `echelon fit`")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="a key of the config and its new value")
    parser.add_argument("--nodes", type=int, metavar="N", help="the number of nodes (as the config says)")
    parser.add_argument("--nproc", type=int, metavar="N", help="processes per node (as the config says)")
    parser.add_argument(
        "--rank", type=int, action="append", metavar="N", help="a rank to rehearse; may be given several times (0)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.add_argument("--traceback", action="store_true", help="show where an error that Echelon reports was raised")


def run(options: argparse.Namespace) -> int:
    """Print what each rank would be and do; return 0 if all of them would run."""
    config = load_config(options.config, options.overrides)
    sys.path[:0] = [str(Path(options.config).resolve().parent), str(Path.cwd())]
    check_config(config)
    trainer = dict(config.values.get("trainer") or {})
    nodes = _check_number("--nodes", options.nodes, trainer.get("num_nodes", 1))
    nproc = _check_number("--nproc", options.nproc, trainer.get("devices"))
    ranks = options.rank or [0]
    wrong = [rank for rank in ranks if not 0 <= rank < nodes * nproc]
    if wrong:
        raise ConfigError(
            f"--rank must be from 0 to {nodes * nproc - 1}, got {wrong[0]}; give the rank of a process of the run."
        )
    # torch keeps much of a rank's mesh for the life of the process
    noted = [
        launch_all(
            partial(_rehearse_rank, config.values, trainer, rank, nodes, nproc, shows=options.traceback),
            num_processes=1,
            timeout=_SECONDS,
        )[0]
        for rank in ranks
    ]
    if options.json:
        say(json.dumps(as_json(noted)))
    else:
        say(make_printable("\n\n".join(render_findings(one, nproc, terminal_width()) for one in noted)))
    return 1 if any(one.problems for one in noted) else 0


def _check_number(argument: str, given: int | None, of_config: object) -> int:
    number = of_config if given is None else given
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"{argument} must be >= 1, got {number!r}; give the number in the run to rehearse.")
    return number


def _rehearse_rank(
    values: Mapping[str, object], trainer: Mapping[str, object], rank: int, nodes: int, nproc: int, *, shows: bool
) -> RehearsedRank:
    """Rehearse one rank; what would end its run is noted as a problem."""
    noted = RehearsedRank(rank, nodes * nproc)
    began = time.perf_counter()
    strategy: RehearsedStrategy | None = None
    doing = "build"
    try:
        # what the user's code prints is not part of the answer
        with redirect_stdout(sys.stderr), as_rank(rank, nodes * nproc, nproc) as mode:
            given = build_targets(trainer.get("strategy", "auto"), "trainer.strategy")
            inner = find_strategy("ddp" if is_auto(given) else given, BY_NAME)()
            noted.strategy = given if isinstance(given, str) else type(inner).__name__
            strategy = RehearsedStrategy(inner, mode)
            doing = ""
            _rehearse_fit(values, trainer, strategy, noted, (nodes, nproc))
    # whatever a step raises would end the run
    except Exception as error:  # noqa: BLE001
        if shows:
            traceback.print_exc()
        noted.is_known = not lacks_values(error)
        noted.problems.append(_in_words(error, doing or (strategy.doing if strategy else "build"), values))
    noted.process_bytes = peak_of_process()
    if strategy is not None:
        noted.seconds = {**strategy.seconds, **noted.seconds}
    noted.seconds["all"], noted.seconds["cpu"] = time.perf_counter() - began, time.process_time()
    return noted


def _rehearse_fit(
    values: Mapping[str, object],
    given: Mapping[str, object],
    strategy: RehearsedStrategy,
    noted: RehearsedRank,
    size: tuple[int, int],
) -> None:
    nodes, nproc = size
    began = time.perf_counter()
    kept: dict[str, Any] = build_targets({name: given[name] for name in _KEPT if name in given}, "trainer")
    notes = TakeNotes(noted, strategy, kept, _set_seed(values))
    quiet: dict[str, Any] = {"accelerator": "cpu", "devices": nproc, "num_nodes": nodes, "barebones": True}
    trainer = Trainer(**quiet, **kept, limit_val_batches=0, strategy=strategy, callbacks=[notes])
    with build_without_memory(strategy.mode):
        module = build_module(values)
    data = build_targets(values.get("data"), "data")
    noted.seconds["build"] = time.perf_counter() - began
    trainer.fit(module, datamodule=data)
    if not noted.num_steps and not noted.problems:
        noted.problems.append(
            "It takes no step: the training loader has no batch, or max_steps and max_epochs allow none."
        )


def _set_seed(values: Mapping[str, Any]) -> int:
    if values.get("seed") is not None:
        seed_everything(values["seed"], verbose=False)
    return torch.initial_seed()


def _in_words(error: Exception, doing: str, values: Mapping[str, Any]) -> str:
    """Return what an error says, with its notes, and where it came."""
    if lacks_values(error):
        error = needs_values(str(values["module"].get("_target_")), error, "leave that out for the rehearsal")
    text = str(error) or "no message"
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return "\n".join([f"In {doing}: {kind}{text}", *getattr(error, "__notes__", ())])


def as_json(noted: Sequence[RehearsedRank]) -> dict[str, object]:
    """Return the findings as JSON values; sizes are in bytes, times in seconds."""
    ranks = []
    for one in noted:
        values = asdict(one)
        values["axes"] = {
            axis.name: {"degree": axis.degree, "place": axis.place, "ranks": list(axis.ranks)} for axis in one.axes
        }
        values["sent"] = [{"ranks": list(ranks), "calls": calls, "bytes": sent} for ranks, calls, sent in one.sent]
        if one.shares is not None:
            del values["shares"]["first"]
            values["shares"]["here"] = one.shares.by_rank[one.data_rank]
        ranks.append(values)
    return {"runs": not any(one.problems for one in noted), "ranks": ranks}


def render_findings(noted: RehearsedRank, nproc: int, width: int | None = None) -> str:
    """Return the findings about a rank as text."""
    lines = [f"Rank {noted.rank} of {noted.world_size:,}, strategy {noted.strategy}"]
    lines[0] += f": {noted.rank % nproc} on node {noted.node_rank}" if noted.axes or noted.groups else ""
    rows = [*_of_layout(noted), *_of_samples(noted), *_of_module(noted), *_of_step(noted), *_of_files(noted)]
    lines += [render_fitted_table(["", ""], rows, "<<", width)] if rows else []
    lines += [f"Note: {warning}" for warning in noted.warnings]
    verdict = "It would fail." if noted.is_known else "It cannot be rehearsed."
    lines += [f"{verdict} {problem}" for problem in noted.problems]
    if not noted.problems:
        lines.append(f"It would run. Rehearsed in {noted.seconds['all']:.1f} s.")
    return "\n".join(lines)


def _of_layout(noted: RehearsedRank) -> list[list[str]]:
    return [
        [f"{axis.name} {axis.degree}", f"place {axis.place}, with ranks {ranks_in_words(axis.ranks)}"]
        for axis in noted.axes
    ]


def _of_samples(noted: RehearsedRank) -> list[list[str]]:
    shares = noted.shares
    if shares is None:
        return []
    rest = f", the last of {shares.last_batch:,}" if shares.last_batch else ""
    first = ", ".join(map(str, noted.first_samples[:4])) + (", ..." if noted.first_samples[4:] else "")
    return [
        ["samples", f"{shares.by_rank[noted.data_rank]:,} of {shares.num_entries:,} per epoch; the first are {first}"],
        ["global batches", f"of {shares.global_batch_size:,}{rest}, divided among {noted.data_size:,} ranks"],
    ]


def _of_module(noted: RehearsedRank) -> list[list[str]]:
    rows = []
    if noted.num_elements:
        rows.append(["parameters", f"{noted.num_elements_here:,} of {noted.num_elements:,} elements here"])
    for group in noted.groups:
        settings = ", ".join(f"{name}={value:g}" for name, value in group.settings.items())
        text = f"{group.num_parameters} parameters, {group.num_elements:,} elements here, {settings}"
        rows.append([group.optimizer, text])
    return rows


def _of_step(noted: RehearsedRank) -> list[list[str]]:
    rows = [
        [f"sent to {len(ranks)} ranks", f"{in_units(sent)} per step in {calls} calls, {ranks_in_words(ranks)}"]
        for ranks, calls, sent in noted.sent
        if sent
    ]
    if noted.memory:
        state = ", ".join(f"{in_units(size)} {kind}" for kind, size in noted.memory.items() if kind != "peak")
        rows.append(["held", f"{state}; at most {in_units(noted.memory['peak'])}"])
    return rows


def _of_files(noted: RehearsedRank) -> list[list[str]]:
    return [[name, in_units(size)] for name, size in noted.files.items()]


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks in human-readable form: 8 to 15, or 5, 13, ..., 1021."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(ranks) > 3 and steps == {1}:
        return f"{ranks[0]} to {ranks[-1]}"
    shown = [str(rank) for rank in ranks] if len(ranks) <= 4 else [str(ranks[0]), str(ranks[1]), "...", str(ranks[-1])]
    return ", ".join(shown)
