"""The command ``echelon doctor``: finds what would break a run on this machine, or between the nodes of a launch."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from ....common.console import say
from ....common.local_path import local_path
from ....common.table import render_boxed_table
from ....strategies.cluster.environment import DEFAULT_PORT, Environment
from ....strategies.cluster.launchers import detect_environment
from ....strategies.doctor.examine import Patient, describe_checks, examine_machine
from ....strategies.doctor.finding import Finding
from ....strategies.doctor.machine import NestedTimeouts
from ....strategies.doctor.peers import NodeReport, Way, measure_peers
from ...savings.kinds import EXPLANATIONS
from ..launch import parse_seconds
from ..output import make_printable, terminal_width

_EPILOG: Final = f"""\
on one machine:
  echelon doctor
  echelon doctor --nproc 4 --folder /shared/runs

on a node, before a launch whose nodes meet at 10.0.0.1, port {DEFAULT_PORT}:
  echelon doctor --rdzv 10.0.0.1

on every node, with a table of latency and bandwidth between them:
  echelon launch --nproc 1 --nnodes 2 --node-rank 0 --rdzv 10.0.0.1 -m echelon doctor      on the first
  echelon launch --nproc 1 --nnodes 2 --node-rank 1 --rdzv 10.0.0.1 -m echelon doctor      on the second

what the advice of a run on its time means:
  echelon doctor --advice

It contacts only this machine, the host of --rdzv, and the nodes of the launch.

exit codes:
  0 nothing would stop a run   1 a finding would stop it   2 wrong command
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description of the run."""
    parser.epilog = _EPILOG
    parser.add_argument("--rdzv", metavar="HOST[:PORT]", help="where the nodes will meet, as for echelon launch")
    parser.add_argument("--port", type=_parse_port, metavar="N", help="a port of this machine that the run will take")
    parser.add_argument("--nproc", type=_parse_count, default=1, metavar="N", help="processes on this node (1)")
    parser.add_argument("--folder", type=Path, default=Path(), metavar="DIR", help="where the run will write (.)")
    for name, default, what in (
        ("start-timeout", 300.0, "how long processes wait for each other at the start"),
        ("timeout", 1800.0, "how long a collective may take"),
        ("hang-timeout", None, "how long a step may take"),
    ):
        shown = f" ({default:g})" if default is not None else ""
        parser.add_argument(f"--{name}", type=parse_seconds, default=default, metavar="S", help=what + shown)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--advice", action="store_true", help="explain what a run may say of its time, and end")


def run(options: argparse.Namespace) -> int:
    """Print what is wrong; return 1 if anything would stop a run, else 0."""
    if options.advice:
        say(
            json.dumps(dict(EXPLANATIONS))
            if options.json
            else make_printable("\n".join(map(_format_explanation, EXPLANATIONS)))
        )
        return 0
    environment = detect_environment()
    host, port = _parse_endpoint(options)
    is_launched = environment.is_external and environment.num_nodes > 1
    if environment.is_external and environment.local_rank:
        return 0  # the first process of each node reports for it
    patient = Patient(
        local_path("--folder", options.folder).absolute(),
        environment.local_world_size if environment.is_external else options.nproc,
        environment.main_address if is_launched else host,
        None if is_launched else port,
        NestedTimeouts(options.start_timeout, options.timeout, options.hang_timeout),
    )
    found = examine_machine(patient)
    if is_launched:
        return _tell_all(environment, measure_peers(environment, found, patient.run_folder), as_json=options.json)
    if options.json:
        checked = describe_checks(patient)
        say(json.dumps({"is_sound": not found, "findings": [asdict(one) for one in found], "checked": checked}))
    else:
        say(
            make_printable(
                "\n".join([*(one.describe() for one in found), _format_examined(patient), _format_verdict(found)])
            )
        )
    return int(any(one.stops for one in found))


def _format_explanation(kind: str) -> str:
    width = terminal_width() or 120
    return textwrap.fill(f"{kind}: {EXPLANATIONS[kind]}", width, subsequent_indent="    ", break_on_hyphens=False)


def _format_examined(patient: Patient) -> str:
    text = f"Checked: {', '.join(describe_checks(patient))}."
    return textwrap.fill(text, terminal_width() or 120, break_long_words=False, break_on_hyphens=False)


def _tell_all(environment: Environment, reports: Sequence[NodeReport], *, as_json: bool) -> int:
    """Print the reports of all nodes on the first one; return the same exit code on each."""
    found = [one for report in reports for one in report.findings]
    if environment.node_rank == 0:
        say(json.dumps(_as_values(reports)) if as_json else make_printable(describe_reports(reports)))
    return int(any(one.stops for one in found))


def describe_reports(reports: Sequence[NodeReport]) -> str:
    """Return the findings of each node, and the network between them as a table."""
    lines = []
    for report in reports:
        if report.findings:
            lines.append(f"node {report.node} ({report.name}, {report.address}):")
            lines += [one.describe() for one in report.findings]
    head = ["From \\ to", *(f"node {report.node}" for report in reports)]
    rows = [
        [
            f"node {report.node} ({report.address})",
            *("-" if to == report.node else _format_way(way) for to, way in ways),
        ]
        for report in reports
        for ways in [list(enumerate(report.ways))]
    ]
    lines += ["Round trip and bandwidth:", render_boxed_table(head, rows, "<" + ">" * len(reports))]
    return "\n".join([*lines, _format_verdict([one for report in reports for one in report.findings])])


def _format_way(way: Way) -> str:
    if way.latency is None:
        return "unreachable"
    speed = "no large messages" if way.bandwidth is None else f"{way.bandwidth / 1e6:.0f} MB/s"
    return f"{way.latency * 1000:.2f} ms, {speed}"


def _as_values(reports: Sequence[NodeReport]) -> dict[str, object]:
    return {"is_sound": not any(report.findings for report in reports), "nodes": [asdict(one) for one in reports]}


def _format_verdict(found: Sequence[Finding]) -> str:
    stopping = sum(one.stops for one in found)
    if not found:
        return "No problems were found."
    return f"{stopping} error(s), which would stop a run, and {len(found) - stopping} warning(s)."


def _parse_endpoint(options: argparse.Namespace) -> tuple[str | None, int | None]:
    """Return the host and the port that the user names.

    Raises:
        ArgumentError: for what is not an endpoint.
    """
    if options.rdzv is None:
        return None, options.port
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    if not options.rdzv:
        raise argparse.ArgumentError(None, "--rdzv is empty; give HOST or HOST:PORT, or leave it out")
    if options.port is not None:
        raise argparse.ArgumentError(None, f"--port {options.port} was given with --rdzv; write --rdzv HOST:PORT")
    try:
        host, port = parse_rendezvous_endpoint(options.rdzv, DEFAULT_PORT)
    except ValueError as error:
        reason = f"--rdzv {options.rdzv} must be an address ({error}); give HOST or HOST:PORT"
        raise argparse.ArgumentError(None, reason) from None
    return host, port


def _parse_count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a number from 1, got {text!r}")
    return int(text)


def _parse_port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 65535, got {text!r}")
    return int(text)
