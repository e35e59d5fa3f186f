"""The times of sums over ranks, as `engine doctor` has them: measured by processes, on the CPU."""

from quengine.parallel.sum_times import SIZES, measure


def test_sums_are_timed_by_processes_of_their_own() -> None:
    found = measure("cpu", 2)
    assert (found.problem, found.note) == ("", "sums over gloo")
    assert [(each.rows, each.width) for each in found.times] == list(SIZES)
    assert all(0 < each.seconds < 10 for each in found.times)


def test_devices_that_cannot_meet_are_a_problem_and_no_error() -> None:
    assert "have not met within" in measure("cpu", 2, seconds=0.01).problem
    assert measure("nothing", 2).problem
