"""What changed between two diagnoses: what came, went and moved, in the order of what it costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eroica import cli
from eroica.compare import Comparison, Side, compare, render_json, render_markdown, render_text
from eroica.findings import Detail, Diagnosis, FunctionName, Iteration
from eroica.report import render_json as diagnosis_json
from tests import samples


def _compare(a: samples.Sample, b: samples.Sample) -> Comparison:
    return compare(Side("a", *a), Side("b", *b))


def _texts(comparison: Comparison, what: str) -> list[str]:
    return [one.text for one in comparison.differences if one.what == what]


def _timed(sample: samples.Sample, observed_s: float) -> samples.Sample:
    diagnosis, detail = sample
    return replace(diagnosis, iteration=Iteration(observed_s, None, None)), detail


def test_a_fault_that_came_goes_when_the_sides_change_places() -> None:
    healthy, slow = samples.healthy(), samples.slow_input()
    there, back = _compare(healthy, slow), _compare(slow, healthy)
    assert "slower" in there.summary and "faster" in back.summary and "healthy before, slow now" in there.summary
    came = [one for one in there.differences if one.what == "finding"]
    went = [one for one in back.differences if one.what == "finding"]
    assert [one.change for one in came] == ["came"] * len(slow[0].findings)
    assert [one.change for one in went] == ["went"] * len(slow[0].findings)
    assert {one.effect_s for one in came} == {-(one.effect_s or 0) for one in went}
    assert any("input pipeline" in one.text and "rank 3" in one.text for one in came)


def test_the_same_twice_differs_in_nothing() -> None:
    for sample in (samples.healthy(), samples.slow_input(), samples.rotating_gc(), samples.throttled_gpu()):
        comparison = _compare(sample, sample)
        assert comparison.differences == () and comparison.summary.startswith("as fast as before")
        assert "nothing else differs" in render_text(comparison)


def test_differences_stand_in_the_order_of_their_effect_and_those_without_last() -> None:
    slow = samples.slow_input()
    a = replace(samples.healthy()[0], environment={"torch": "2.12"}), samples.healthy()[1]
    b = replace(slow[0], environment={"torch": "2.13", "env": {"OMP_NUM_THREADS": "1"}}), slow[1]
    effects = [one.effect_s for one in _compare(a, b).differences]
    sizes = [abs(effect) for effect in effects if effect is not None]
    assert sizes == sorted(sizes, reverse=True) and None in effects
    assert None not in effects[: len(sizes)]
    assert _texts(_compare(a, b), "environment") == ["env.OMP_NUM_THREADS: not set -> 1", "torch: 2.12 -> 2.13"]


def test_a_finding_whose_cost_changes_is_the_same_finding_with_more_or_less() -> None:
    diagnosis, detail = samples.slow_input()
    (first, *others) = diagnosis.findings
    cost = first.impact.seconds_per_iteration
    assert cost is not None
    cheaper = replace(first, impact=replace(first.impact, seconds_per_iteration=cost / 2))
    halved = replace(diagnosis, findings=(cheaper, *others)), detail
    (less,) = [one for one in _compare((diagnosis, detail), halved).differences if one.what == "finding"]
    assert less.change == "less" and less.effect_s == pytest.approx(-cost / 2)
    # The same fault on another rank, a line further down: moved, neither gone nor new.
    assert first.function is not None
    there = replace(first, ranks="5", function=replace(first.function, location="train/data.py:99"))
    moved = replace(diagnosis, findings=(there, *others)), detail
    (other,) = [one for one in _compare((diagnosis, detail), moved).differences if one.what == "finding"]
    assert other.change == "other" and "rank 3 before" in other.text and other.effect_s is None


def test_functions_that_moved_are_named_with_the_rank_that_alone_did() -> None:
    a = _timed(samples.healthy(), 0.1)
    diagnosis, detail = a
    name = FunctionName("host", "fresh", "new.py:1")
    everywhere = np.full((len(detail.ranks), 1), 0.2, np.float32)
    alone = np.full((len(detail.ranks), 1), 0.0, np.float32)
    alone[2] = 0.05
    for column, said, effect in ((everywhere, "mean over ranks: 0 us -> 20 ms", 0.02), (alone, "on rank 2", 0.005)):
        more = replace(
            detail,
            functions=(*detail.functions, name),
            beta=np.hstack([detail.beta, column]),
            mu=np.hstack([detail.mu, column]),
        )
        (found,) = [one for one in _compare(a, (diagnosis, more)).differences if one.what == "function"]
        assert said in found.text and found.change == "came" and found.effect_s == pytest.approx(effect)


def test_a_function_that_an_edit_moved_down_is_the_same_and_a_longer_iteration_is_told() -> None:
    diagnosis, detail = _timed(samples.healthy(), 0.1)
    shifted = tuple(
        replace(name, location=f"{name.location.partition(':')[0]}:999") if name.location else name
        for name in detail.functions
    )
    assert _compare((diagnosis, detail), (diagnosis, replace(detail, functions=shifted))).differences == ()
    longer = replace(detail, own_s=detail.own_s + 0.05)
    (own,) = [one for one in _compare((diagnosis, detail), (diagnosis, longer)).differences if one.what == "time"]
    assert own.text.startswith("own time") and own.effect_s == pytest.approx(0.05)


def test_what_was_seen_is_compared_and_what_could_not_be_is_said() -> None:
    comparison = compare(Side("a", samples.healthy()[0], None), Side("b", samples.no_data(), None))
    assert "functions and times of ranks were not compared: a and b" in comparison.notes[0]
    assert "the length of an iteration is not known on both sides" in comparison.notes
    assert "ranks seen: 8 -> 0" in _texts(comparison, "coverage")
    assert compare(Side("a", *samples.partial()), Side("b", *samples.healthy())).differences


def test_strings_of_jobs_form_no_escape_sequences_and_no_markup() -> None:
    hostile = samples.hostile("\x1b[31m<script>`|@all\n# x")
    comparison = _compare(samples.healthy(), hostile)
    text, markdown = render_text(comparison), render_markdown(comparison)
    assert "\x1b" not in text + markdown and "<script>" not in markdown and "@all" not in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert all(line.count("|") == 4 for line in rows)
    assert json.loads(render_json(comparison))["schema"] == "eroica.comparison/1"


def _empty_detail(detail: Detail) -> Detail:
    none = np.empty(0)
    return replace(
        detail, ranks=detail.ranks[:0], own_s=none, wait_s=none, transfer_s=none, idle_s=none, beta=detail.beta[:0]
    )


def test_a_side_without_a_rank_is_compared_as_far_as_it_goes() -> None:
    diagnosis, detail = samples.healthy()
    nothing: tuple[Diagnosis, Detail] = (samples.no_data(), _empty_detail(detail))
    for pair in (((diagnosis, detail), nothing), (nothing, (diagnosis, detail)), (nothing, nothing)):
        assert render_text(_compare(*pair))


def test_an_iteration_of_no_length_is_not_known() -> None:
    sides = [Side("a", _timed(samples.healthy(), 0.0)[0], None), Side("b", samples.slow_input()[0], None)]
    for a, b in (sides, sides[::-1]):
        assert "the length of an iteration is not known on both sides" in compare(a, b).notes


def test_the_command_takes_files_and_folders_and_names_what_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, sample in (("a", samples.healthy()), ("b", samples.slow_input())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "diagnosis.json").write_text(diagnosis_json(sample[0]))
    a, b = str(tmp_path / "a"), str(tmp_path / "b" / "diagnosis.json")
    assert cli.main(["compare", a, b]) == 0
    assert "slower" in capsys.readouterr().out.splitlines()[0]
    other = tmp_path / "kept.json"
    other.write_text(json.dumps(json.loads((tmp_path / "b" / "diagnosis.json").read_text()), separators=(",", ":")))
    assert cli.main(["compare", a, str(other)]) == 0
    assert f"{a} and {other} hold diagnoses alone" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["compare", a, b, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"]
    assert cli.main(["compare", a, b, "--format", "md"]) == 0
    assert capsys.readouterr().out.startswith("**")
    incidents = tmp_path / "incidents"
    incidents.mkdir()
    (incidents / "diagnosis-1.json").write_text(diagnosis_json(samples.healthy()[0]))
    assert cli.main(["compare", a, str(incidents)]) == 0
    (incidents / "diagnosis-2.json").write_text(diagnosis_json(samples.healthy()[0]))
    capsys.readouterr()
    assert cli.main(["compare", a, str(incidents)]) == 1
    assert "holds 2 diagnoses" in capsys.readouterr().err
    assert cli.main(["compare", a, str(tmp_path / "absent")]) == 1
    assert "absent" in capsys.readouterr().err
