"""Runs that save to S3 on loopback and are killed at random moments; `make soak` kills a hundred."""

import pytest
from kills import kill_until_through


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_loses_nothing(bucket, s3_server, tmp_path):
    assert kill_until_through(f"{bucket}/runs", s3_server, tmp_path, kills=1) >= 1
