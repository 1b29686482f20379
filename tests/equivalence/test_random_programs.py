"""Programs and loops drawn at random end in each layout as in one process, resumed or stopped anywhere as well."""

import pytest
from random_loops import ENGINES, compare_loops
from random_programs import LAYOUTS
from random_runs import compare
from random_stops import STARTS, drawn_layouts, program_of
from random_stops import compare as compare_stopped
from sweep import IS_SWEEP

MANY = [layout for layout in LAYOUTS if layout != "single"]
SEEDS = range(1000, 1060) if IS_SWEEP else range(1000, 1008)
TOGETHER = {title: [title] for title in MANY} if IS_SWEEP else {"all": MANY}
"""The layouts of a test: in a sweep, each one trains all programs."""
STOPPED = ["single", "ddp x 2", "fsdp x 2", "pp x 2", "hsdp 2 x 2", "ddp x 2, started", "elastic x 2", "in turn"]
"""Where programs are stopped."""


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # what programs are warned of is not the question here
@pytest.mark.parametrize("titles", TOGETHER.values(), ids=TOGETHER)
def test_random_programs_end_in_each_layout_as_in_one_process(memory_path, titles):
    layouts = {title: SEEDS if IS_SWEEP else SEEDS[number % 8 :: 8] for number, title in enumerate(titles)}
    assert list(compare(SEEDS, layouts, memory_path)) == []


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", ENGINES if IS_SWEEP else ["ddp x 2", "fsdp x 3"])
def test_random_loops_end_under_an_engine_as_in_one_process(memory_path, title):
    seeds = range(1000, 1060) if IS_SWEEP else range(1000, 1008)
    assert list(compare_loops(seeds, {title: seeds}, memory_path)) == []


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", STOPPED if IS_SWEEP else ["single", "ddp x 2", "in turn"])
def test_random_programs_that_are_stopped_anywhere_end_as_undisturbed_ones(memory_path, title):
    seeds = range(1000, 1040) if IS_SWEEP else range(1000, 1004) if title == "single" else [1004]
    for seed in seeds:
        layouts = drawn_layouts(seed) if title == "in turn" else (title,) * STARTS
        if any(map(program_of(seed).is_left_out, layouts)):
            continue
        (folder := memory_path / str(seed)).mkdir()
        stops, said = compare_stopped(seed, layouts, folder)
        assert not said, (seed, layouts, stops, said)
