"""Who may run, without a process."""

from powertrain.builder.memory_scheduler import CompileJob, decide

GIB = 2**30


def acts(*units: CompileJob, available: float, memory: float = 10, jobs: int = 8) -> list[tuple[str, str]]:
    return [(act, unit.name) for act, unit in decide(units, int(available * GIB), int(memory * GIB), jobs)]


def unit(name: str, state: str = "waiting", since: float = 0, memory: float = 0, expected: float = 2) -> CompileJob:
    return CompileJob(name, int(expected * GIB), state=state, since=since, memory=int(memory * GIB))  # type: ignore[arg-type]


def test_as_many_start_as_fit() -> None:
    assert acts(unit("a"), unit("b"), unit("c"), available=5) == [("go", "a"), ("go", "b")]


def test_what_runs_may_still_grow() -> None:
    assert acts(unit("a", "running", memory=0.5), unit("b"), available=3.5) == []
    assert acts(unit("a", "running", memory=2), unit("b"), available=3.5) == [("go", "b")]


def test_one_runs_whatever_its_size() -> None:
    assert acts(unit("a", expected=99), unit("b"), available=5) == [("go", "a")]


def test_no_more_than_the_jobs_asked_for() -> None:
    assert acts(unit("a"), unit("b"), unit("c"), available=9, jobs=2) == [("go", "a"), ("go", "b")]


def test_the_youngest_is_paused_first() -> None:
    old, young = unit("old", "running", 1, 4), unit("young", "running", 2, 4)
    assert acts(old, young, available=0.2) == [("pause", "young")]


def test_the_youngest_paused_one_is_killed_when_one_runs_alone() -> None:
    units = unit("a", "running", 1, 4), unit("b", "paused", 2, 2), unit("c", "paused", 3, 2)
    assert acts(*units, available=0.2) == [("kill", "c")]


def test_a_compiler_that_we_cannot_run_again_is_not_killed() -> None:
    foreign = unit("b", "paused", 2, 2)
    foreign.launched = False
    assert acts(unit("a", "running", 1, 4), foreign, available=0.2) == [("alone", "a")]


def test_one_that_does_not_fit_is_said_once() -> None:
    only = unit("a", "running", 1, 9)
    assert acts(only, available=0.1) == [("alone", "a")]
    only.reported_alone = True
    assert acts(only, available=0.1) == []


def test_the_paused_come_before_the_waiting() -> None:
    units = unit("new"), unit("paused", "paused", 2, memory=1)
    assert acts(*units, available=2) == [("resume", "paused")]
    assert acts(unit("a", "paused", 1, 9, expected=2), available=-1) == [("resume", "a")]  # nothing else would run


def test_gcc_does_with_less_where_it_may_not_fit_alone() -> None:
    large, fits = unit("large", expected=9), unit("fits")
    large.has_low_memory_mode = fits.has_low_memory_mode = fits.seen = True
    assert acts(large, fits, available=5) == [("go", "large")]  # others like it were large; this one may not be
    large.seen = True
    assert acts(large, fits, available=5) == [("go low_memory", "large")]
    assert acts(fits, available=5) == [("go", "fits")]


def test_one_that_outgrows_all_memory_runs_again_in_less() -> None:
    only = unit("a", "running", 1, 9)
    only.has_low_memory_mode = True
    assert acts(only, available=0.1) == [("kill", "a")]
    only.low_memory = True
    assert acts(only, available=0.1) == [("alone", "a")]


def test_nothing_more_is_ended_while_one_is_ending() -> None:
    ending, running = unit("b", "killed", 2, 4), unit("a", "running", 1, 4)
    running.has_low_memory_mode = True
    assert acts(running, ending, available=0.1) == []
