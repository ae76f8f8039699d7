"""Planted repositories and near misses: what codemods make of them, given a finding that names the place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eroica.assist import codemods
from eroica.assist.change import Lead, Place
from eroica.assist.fixing import Plan, fix
from eroica.assist.leads import lead_of
from eroica.assist.reading import Sources
from eroica.assist.repository import Repository
from evals.fixes import board, by_hand, diagnoses_in
from evals.llm.planted import Planted, planted

UNSOLVED = {
    "config_without_workers": "no DataLoader whose arguments are seen",  # a configuration sets the number
}


def test_there_are_twelve_repositories_and_six_near_misses() -> None:
    assert (len(planted()), len(planted("near_misses"))) == (12, 6)


@pytest.mark.parametrize("one", planted(), ids=lambda one: one.name)
def test_a_planted_fault_gets_a_patch_or_a_reason(one: Planted) -> None:
    row = by_hand(one)
    assert row["solved"] != (one.name in UNSOLVED), row["said"]
    assert UNSOLVED.get(one.name, "") in row["said"]


@pytest.mark.parametrize("one", planted("near_misses"), ids=lambda one: one.name)
def test_a_near_miss_is_left_alone(one: Planted) -> None:
    row = by_hand(one)
    assert not row["solved"], row["diff"]
    assert "no codemod fits" in row["said"]


_OF_THE_HOST = ("unknown", "host_python", "cpu_contention", "device_sync", "checkpoint_io", "gil_contention")


def _named(one: Planted, cause: str, path: str, function: str) -> list[codemods.Codemod]:
    """Codemods that fit where a finding names no more than a function."""
    sources = Sources({file.name: file.read_text() for file in one.folder.glob("*.py")})
    lines = sources.text(path).splitlines()
    line = next(number for number, text in enumerate(lines, 1) if f"def {function}(" in text)
    seen = codemods.propose(sources, Lead(cause, "all", "aten::sqrt", (Place(path, line, function),)))
    return [seen[0]] if isinstance(seen, tuple) else []


@pytest.mark.parametrize(
    ("name", "word"),
    [("starts_workers_each_epoch", "mean"), ("collects_a_big_heap", "mean"), ("logs_each_step", "median")],
)
def test_what_costs_now_and_then_is_measured_by_the_mean_whatever_the_finding_says(
    name: str, word: str, tmp_path: Path
) -> None:
    one = next(one for one in planted() if one.name == name)
    diagnosis = one.diagnosis()
    diagnosis = replace(diagnosis, findings=(replace(diagnosis.findings[0], steps="stable"),))
    fixed = fix(Plan(diagnosis=diagnosis, repository=Repository(one.checkout(tmp_path))), lambda text: None)
    assert ("median" if fixed.is_stable else "mean") == word


def test_a_save_that_the_ranks_have_noted_is_found_without_a_line_and_no_other_cause_leads_to_it() -> None:
    one = next(one for one in planted() if one.name == "saves_in_the_loop")
    sources = Sources({file.name: file.read_text() for file in one.folder.glob("*.py")})
    seen = codemods.propose(sources, Lead("checkpoint_io", "rank", ""))
    assert isinstance(seen, tuple)
    assert (seen[0].name, seen[1].path) == ("saves behind training", "pretrain.py")
    direct = sources.text("pretrain.py").replace(
        "save_checkpoint(folder, step,", "torch.save(model.state_dict(), folder) #"
    )
    for cause in ("unknown", "host_python", "cpu_contention"):
        assert isinstance(codemods.propose(sources, Lead(cause, "all", "")), list)
        assert isinstance(codemods.propose(Sources({"pretrain.py": direct}), Lead(cause, "all", "")), list)


@pytest.mark.parametrize("cause", _OF_THE_HOST)
def test_where_a_finding_names_the_function_of_the_loop_alone_the_fault_is_found_and_a_near_miss_left(
    cause: str,
) -> None:
    one = next(one for one in planted() if one.name == "statistics_each_step")
    assert [codemod.name for codemod in _named(one, cause, "fit.py", "fit")] == ["seldom reports"]
    for near in planted("near_misses"):
        assert not _named(near, cause, "train.py", "main"), near.name


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "reason"),
    [
        ("syncs_micro_steps", "trainer.py", "        return loss.detach()",
         "        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)\n        return loss.detach()",
         "looks at gradients"),
        ("syncs_micro_steps", "trainer.py", "        loss.backward()",
         "        if loss < 9:\n            loss.backward()", "under a condition"),
        ("syncs_micro_steps", "trainer.py", "        self.model.train()", "        self.training_step(warm_up)",
         "in no `for` loop"),
        ("syncs_micro_steps", "trainer.py", "self.model = DistributedDataParallel(model)", "self.model = model",
         "no model of DistributedDataParallel"),
        ("syncs_micro_steps", "trainer.py",
         "        return torch.nn.functional.cross_entropy(self.model(inputs), labels)",
         "        self.optimizer.zero_grad()\n        return self.model(inputs).sum()", "looks at gradients"),
        ("searches_for_unused", "train.py", "    model = distributed.wrap(Network())",
         "    model = distributed.wrap(Network())\n    other = distributed.wrap(make())", "cannot be told"),
        ("searches_for_unused", "train.py", "    model = distributed.wrap(Network())",
         "    net = Network()\n    net.embed.requires_grad_(False)\n    model = distributed.wrap(net)", "freezes"),
        ("searches_for_unused", "train.py", "distributed.wrap(Network())", "distributed.wrap(*parts)",
         "cannot be told"),
        ("searches_for_unused", "network.py", "        return self.head(x)", "        return x.sum()",
         "does not use head"),
        ("statistics_each_step", "callbacks.py", "        for name, parameter",
         "        self.last = step\n        for name, parameter", "does more than report"),
        ("statistics_each_step", "callbacks.py", "(self, step, model, loss):\n        for",
         "(self, count, model, loss):\n        for", "does more than report"),
        ("statistics_each_step", "callbacks.py", "        for name, parameter",
         "        model.eval()\n        for name, parameter", "does more than report"),
    ],
)  # fmt: skip
def test_what_a_function_or_method_hides_is_looked_at_before_a_patch(
    name: str, file: str, old: str, new: str, reason: str
) -> None:
    one = next(one for one in planted() if one.name == name)
    texts = {path.name: path.read_text() for path in one.folder.glob("*.py")}
    assert old in texts[file]
    diagnosis = one.diagnosis()
    named = diagnosis.findings[0]
    assert isinstance(codemods.propose(Sources(texts), lead_of(named, diagnosis, Sources(texts), "/nowhere")), tuple)
    sources = Sources(texts | {file: texts[file].replace(old, new)})
    found = lead_of(named, diagnosis, sources, "/nowhere")
    found = replace(found, places=found.places or lead_of(named, diagnosis, Sources(texts), "/nowhere").places)
    seen = codemods.propose(sources, found)
    assert isinstance(seen, list), seen
    assert any(reason in refusal.reason for _, refusal in seen), seen


def test_a_file_that_is_no_diagnosis_ends_no_campaign(tmp_path: Path) -> None:
    for number, text in enumerate(("{", "[]", '{"schema": "eroica.diagnosis/9"}', '{"schema": "eroica.diagnosis/1"}')):
        (tmp_path / f"diagnosis-{number}.json").write_text(text)
    assert diagnoses_in(tmp_path) == []


def test_the_board_counts_the_newest_result_of_each_repository(tmp_path: Path) -> None:
    row = '{"name": "a", "about": "x | y", "diagnosed": [], "said": "no", "solved": %s}\n'
    (tmp_path / "r.jsonl").write_text(row % "false" + row % "true")
    told = board(tmp_path / "r.jsonl")
    assert "| a | x / y | nothing | none | no |  | 0 | yes |" in told
    assert "Solved: 1 of 12; run: 1." in told
