"""Real training programs, armed from outside: their iterations are counted right, whatever they train with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eroica import ring as flight
from eroica.commands import Unit
from eroica.marks import Watch
from eroica.ring import Tail
from eroica.steps import Pause

ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / "tests" / "frameworks"
ARM = "import eroica, runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
Loops = dict[str, tuple[Watch, dict[str, int]]]
LAUNCHER = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")


def run(folder: Path, program: str, *arguments: str) -> list[dict[str, int]]:
    """Trains as the one rank of a job; what the program says of itself."""
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER and name[:6] != "EROICA"}
    environ = {
        **clean,
        **{"PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"},
        "EROICA_RING_DIR": str(folder / "rings"),
    }
    command = [sys.executable, "-c", ARM, str(PROGRAMS / program), *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=folder, timeout=900)
    assert "ModuleNotFoundError" not in done.stderr, f"pip install '.[frameworks]', then again: {done.stderr[-300:]}"
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def read(path: Path) -> Watch:
    """What the ring tells, after the end."""
    tail = Tail(path)
    news = tail.poll()
    tail.close()
    watch = Watch(0)
    watch.feed(news.begun, news.ended, news.words, max(record.begin_ns for record in news.begun))
    watch.finish()
    assert news.words[flight.STATE] == flight.ENDED and news.num_lost == watch.num_losses == 0
    return watch


def trained(folder: Path, program: str, *arguments: str) -> tuple[Watch, dict[str, int]]:
    """What the ring tells of a program, and what it says itself."""
    (said,) = run(folder, program, *arguments)
    (path,) = (folder / "rings").iterdir()  # no ring of a worker
    return read(path), said


LIGHT = (
    *("plain", "accumulation", "closures", "one_to_one", "five_to_one", "two_data_sets"),
    *("scaler", "in_backward", "duck", "step_raises"),
)
"""Loops that neither compile nor shard."""


def trained_loops(folder: Path, *names: str) -> Loops:
    """The same of loops that need torch alone."""
    said = run(folder, "loops.py", *names)
    assert len(list((folder / "rings").iterdir())) == len(said) == len(names)
    return {str(each["loop"]): (read(folder / "rings" / f"rank0-{each['pid']}.ring"), each) for each in said}


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Loops:
    """Those that take little time, trained by one process each."""
    return trained_loops(tmp_path_factory.mktemp("loops"), *LIGHT)


def sizes(watch: Watch) -> list[int]:
    return [i.num_batches for i in watch.iterations]


def evaluated(watch: Watch) -> list[int]:
    """Numbers of the iterations around an evaluation."""
    return [i.number for i in watch.iterations if i.pause is Pause.EVALUATION]


def is_right(watch: Watch, said: dict[str, int], unit: Unit = Unit.STEPS) -> bool:
    """As many iterations as updates, and all batches that were trained on, but none of an evaluation."""
    return (watch.num_iterations, sum(sizes(watch)), watch.unit) == (said["updates"], said["batches"], unit)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["closures", "in_backward", "one_to_one"])
def test_one_batch_for_one_update_is_one_iteration(loops: Loops, loop: str) -> None:
    watch, said = loops[loop]
    assert is_right(watch, said) and set(sizes(watch)) == {1}
    assert watch.steps_per_iteration == {"in_backward": 4, "one_to_one": 2}.get(loop, 1)
    assert watch.iterations[-1].step == watch.counts.steps == said["updates"] * watch.steps_per_iteration


@pytest.mark.slow
def test_evaluations_are_not_counted_and_the_iterations_around_them_are_known(loops: Loops) -> None:
    watch, said = loops["plain"]
    assert is_right(watch, said) and set(sizes(watch)) == {1}
    assert evaluated(watch) == [12, 24]


@pytest.mark.full
@pytest.mark.parametrize(("loop", "around"), [("compiled", []), ("fsdp2", [8, 16])])
def test_what_compiles_or_shards_is_counted_right_as_well(tmp_path: Path, loop: str, around: list[int]) -> None:
    watch, said = trained_loops(tmp_path, loop)[loop]
    assert is_right(watch, said) and set(sizes(watch)) == {1} and watch.steps_per_iteration == 1
    assert watch.iterations[-1].step == watch.counts.steps == said["updates"]
    assert evaluated(watch) == around


@pytest.mark.slow
def test_an_evaluation_on_the_data_of_training_is_told_by_the_missing_steps(loops: Loops) -> None:
    watch, said = loops["accumulation"]
    assert watch.num_iterations == said["updates"]
    assert evaluated(watch) == [3, 6, 9]
    assert {i.num_batches for i in watch.iterations if i.pause is None} == {4}


@pytest.mark.slow
def test_five_critic_steps_and_one_of_the_generator_are_one_iteration_from_the_third_on(loops: Loops) -> None:
    watch, said = loops["five_to_one"]
    learnt = [i for i in watch.iterations if i.unit == watch.iterations[-1].unit]
    assert [(i.num_batches, i.num_steps, i.step) for i in learnt] == [
        (5, 6, 6 * number) for number in range(3, said["updates"] + 1)
    ]
    assert watch.steps_per_iteration == 6 and watch.boundary(145) == 150


@pytest.mark.slow
def test_two_data_sets_for_one_update_are_training_both_from_the_fourth_update_on(loops: Loops) -> None:
    watch, said = loops["two_data_sets"]
    assert watch.num_iterations == said["updates"]
    assert sizes(watch)[3:] == [2] * (said["updates"] - 3) and evaluated(watch) == [0, 1, 2]


@pytest.mark.slow
def test_steps_that_a_scaler_left_out_are_iterations(loops: Loops) -> None:
    watch, said = loops["scaler"]
    assert is_right(watch, said) and set(sizes(watch)) == {1}
    assert [i.number for i in watch.iterations if i.skipped][-1] == 20


@pytest.mark.slow
def test_an_optimizer_that_is_none_of_torch_leaves_the_batches_to_count(loops: Loops) -> None:
    watch, said = loops["duck"]
    assert is_right(watch, said, Unit.NEXTS) and set(sizes(watch)) == {1}


@pytest.mark.slow
def test_steps_that_raised_are_none(loops: Loops) -> None:
    watch, said = loops["step_raises"]
    assert is_right(watch, said)


@pytest.mark.full
def test_accelerate_with_accumulation_and_evaluations_on_the_way_is_counted_right(tmp_path: Path) -> None:
    watch, said = trained(tmp_path, "accelerated.py")
    assert is_right(watch, said)
    # Its loader fetches one batch ahead: one more in the first update of an epoch, one less in the last.
    assert sizes(watch) == [3, 2, 2, 2, 2, 2, 2, 1] * 4
    assert evaluated(watch) == [7, 8, 15, 16, 23, 24, 31]


@pytest.mark.full
def test_the_trainer_of_transformers_is_counted_right(tmp_path: Path) -> None:
    watch, said = trained(tmp_path, "transformer_trainer.py")
    assert is_right(watch, said)
    assert sizes(watch) == [3, 2, 2, 2, 2, 2, 2, 1] * 3
    assert evaluated(watch) == [5, 10, 15, 20]


@pytest.mark.full
def test_lightning_is_counted_right(tmp_path: Path) -> None:
    watch, said = trained(tmp_path, "lightning_fit.py")
    assert is_right(watch, said) and set(sizes(watch)) == {2}
    assert evaluated(watch) == [0]  # after its sanity check
    # After each validation it saves, which the probe tells, and what is told goes before what is gathered.
    assert [i.number for i in watch.iterations if i.pause is Pause.CHECKPOINT] == [5, 10, 15, 20, 25]


@pytest.mark.full
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_stateful_loader_of_torchdata_is_counted_right_also_when_it_resumes(
    tmp_path: Path, num_workers: int
) -> None:
    watch, said = trained(tmp_path, "stateful_loader.py", str(num_workers))
    assert is_right(watch, said) and set(sizes(watch)) == {1} and evaluated(watch) == []
