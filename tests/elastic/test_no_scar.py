"""Kills, and nodes that join, leave and are lost: the run takes the same steps as an undisturbed one."""

import pytest
from no_scar import suffer
from sweep import IS_SWEEP


@pytest.mark.sweep
@pytest.mark.timeout(1200)  # of a busy machine
@pytest.mark.parametrize("inner", ["fsdp", *["ddp"] * IS_SWEEP])
def test_a_run_with_faults_and_resizes_ends_as_if_nothing_had_been(memory_path, inner):
    suffer(memory_path, inner=inner, kills=3 if IS_SWEEP else 1, joins=1, leaves=1)
