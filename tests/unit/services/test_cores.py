import os

import pytest

from services.cores import cpu_quota, default_threads


@pytest.mark.parametrize(
    ("text", "threads"),
    [("max 100000", 4), ("200000 100000", 2), ("250000 100000", 3), ("20000 100000", 1), ("900000 100000", 4)],
)
def test_threads_are_those_of_the_cores_and_of_the_quota(tmp_path, text, threads):
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert default_threads([4, 5, 6, 7], tmp_path) == threads


def test_the_older_layout_of_cgroups_is_read_too(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path) == 1.5


def test_without_a_limit_every_core_that_the_process_was_given_counts(tmp_path):
    assert default_threads([], tmp_path) == len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text("nonsense")
    assert default_threads([], tmp_path) == len(os.sched_getaffinity(0))
