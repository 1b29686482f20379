"""Programs drawn at random end in each layout as in one process, resumed from a checkpoint as well."""

import pytest
from random_programs import LAYOUTS
from random_runs import compare
from sweep import IS_SWEEP

SEEDS = range(1000, 1080) if IS_SWEEP else range(1000, 1008)
MANY = [layout for layout in LAYOUTS if layout != "single"]


@pytest.mark.sweep
@pytest.mark.timeout(3600 if IS_SWEEP else 600)
@pytest.mark.filterwarnings("ignore")  # what programs are warned of is not the question here
def test_random_programs_end_in_each_layout_as_in_one_process(memory_path):
    layouts = {layout: SEEDS if IS_SWEEP else SEEDS[number % 8 :: 8] for number, layout in enumerate(MANY)}
    assert list(compare(SEEDS, layouts, memory_path)) == []
