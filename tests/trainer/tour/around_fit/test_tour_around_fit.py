"""A tour around fit: what programs do beside it, in it and to it; all works, and leaves the caller unchanged.

`make tour` takes every scenario with every strategy; here each is taken with "single", and dealt to one that has ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from scenario import LAUNCHED, STRATEGIES, Fit
from scenarios import SCENARIOS
from surroundings import unchanged

from echelon.strategies.placement import BY_NAME
from echelon.testing import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

WITH_ALL = "an_error_in_training_step"
CHEAP = ("ddp", "elastic", "zero", "local_sgd")
"""What scenarios are dealt to: how ranks are launched depends on "elastic" alone, what a launch costs on all."""
OF_STRATEGIES = (
    *(("elastic", "sigint"), ("ps", "sigint"), ("pp", "sigint"), ("fsdp", "sigint")),
    ("ps", "a_program_that_was_started_without_streams"),  # its transport changes standard error
)
REST = [name for name in SCENARIOS if name not in (WITH_ALL, OF_STRATEGIES[-1][1])]
DEALT = [(CHEAP[number % len(CHEAP)], name) for number, name in enumerate(REST)]
WITH_RANKS = list(dict.fromkeys([*((strategy, WITH_ALL) for strategy in LAUNCHED), *DEALT, *OF_STRATEGIES]))
SHOWN_BY_OTHERS = (
    *(
        "should_stop",
        "an_error_in_setup",
        "an_error_in_configure_optimizers",
        "a_pool_in_a_hook",
        "a_program_in_a_hook",
    ),
    *("a_process_that_a_hook_terminates", "a_fork_that_leaves_at_once", "workers_of_a_loader", "sigusr1"),
    *("a_timer_that_ticks", "an_error_in_a_fit_in_a_thread", "a_pickle_in_a_hook", "data_that_cannot_be_pickled"),
    *("the_end_of_the_data", "no_data", "an_error_in_teardown", "a_fit_inside_an_event_loop", "threads_in_a_hook"),
    *("an_error_here_while_a_loader_has_workers", "a_handler_that_a_hook_sets", "a_fit_in_a_thread"),
    *("streams_without_a_descriptor", "a_second_fit_of_a_trainer", "a_fit_in_a_process_of_multiprocessing"),
)
"""Scenarios beside which there is one for ranks that does the same in a harder way."""


IN_NEW_PROGRAMS = (OF_STRATEGIES[-1], ("elastic", "a_fit_in_a_fork"))
"""Scenarios with ranks for which torch is imported several times."""


def cases(pairs: list[tuple[str, str]]) -> list[Any]:
    """Return strategies and scenarios; what others show is left to a sweep."""
    left = {
        *IN_NEW_PROGRAMS,
        ("single", OF_STRATEGIES[-1][1]),
        *((name, other) for name in CHEAP for other in SHOWN_BY_OTHERS),
    }
    return [pytest.param(*pair, marks=[pytest.mark.only_in_sweep] * (pair in left)) for pair in pairs]


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> None:
    """Start what forks processes, whose pipes would be a change that the first scenario with ranks leaves behind."""
    run_ranks(int, 1)


def test_the_tour_has_every_strategy_and_sixty_scenarios() -> None:
    assert set(BY_NAME) <= set(STRATEGIES)
    assert len(SCENARIOS) >= 60


@pytest.mark.parametrize(("strategy", "name"), cases([("single", name) for name in SCENARIOS]))
def test_one_process(strategy: str, name: str, tmp_path: Path) -> None:
    with unchanged():
        SCENARIOS[name](Fit(strategy, tmp_path))


@pytest.mark.parametrize(("strategy", "name"), cases(WITH_RANKS))
def test_ranks(strategy: str, name: str, tmp_path: Path) -> None:
    with unchanged():
        SCENARIOS[name](Fit(strategy, tmp_path))
