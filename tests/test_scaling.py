"""Lost time is laid to the mode that was planted, adds up to the iteration, and is told for several sizes together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.taxonomy import is_right, tell
from eroica.cli import main
from eroica.efficiency import render_html, render_json, render_text, study
from eroica.fabric.parameters import QUIET, Fabric, Host, Layout, Noise, Setting, Stalls, Workload
from eroica.fabric.simulator import simulate
from eroica.pattern import stack
from eroica.scaling import MODES, Account, Part, Share, account
from eroica.simulation import summaries
from evals.kineto_file import write_json
from evals.synth import cluster
from tests import handmade as h


def accounted(setting: Setting, iterations: int = 40, seed: int = 0) -> Account:
    told = account(stack(summaries(simulate(setting, iterations, seed))))
    assert told is not None
    return told


LAYOUTS: st.SearchStrategy[Layout] = st.sampled_from(["data", "tensor"])
NOISY = Noise(stalls=Stalls(rate=0.02))


@pytest.mark.parametrize(
    "modes",
    [
        (),
        *((mode,) for mode in MODES),
        pytest.param((Part.SYNCHRONISATION, Part.CONTENTION), marks=pytest.mark.full),
        pytest.param((Part.LOCALITY, Part.STRAGGLER), marks=pytest.mark.full),
        pytest.param((Part.CONTENTION, Part.LOCALITY), marks=pytest.mark.full),
    ],
    ids=lambda modes: "+".join(modes) or "nothing",
)
def test_a_planted_mode_is_named_and_no_other(modes: tuple[Part, ...]) -> None:
    told, costs = tell(frozenset(modes), seed=1)
    assert is_right(frozenset(told.modes), costs)
    assert set(told.modes) <= set(modes)


def test_the_rank_that_is_always_slow_is_told() -> None:
    noise = replace(QUIET, scatter=0.005, straggler=11, straggler_slowdown=0.3)
    told = accounted(Setting(hosts=4, noise=noise))
    assert told.modes == (Part.STRAGGLER,) and told.stragglers == (11,)


@settings(max_examples=6, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    LAYOUTS,
    st.sampled_from([3, 40]),
    st.integers(0, 100),
)
def test_ideal_and_parts_add_up_to_the_iteration(
    hosts: int, gpus: int, layout: Layout, buckets: int, seed: int
) -> None:
    setting = Setting(hosts=hosts, host=Host(gpus=gpus), noise=NOISY, workload=Workload(layout=layout, buckets=buckets))
    told = account(stack(summaries(simulate(setting, 12, seed))))
    if hosts * gpus == 1:
        assert told is None
        return
    assert told is not None
    whole = told.ideal_s + sum(share.seconds for share in told.parts.values())
    assert whole == pytest.approx(told.iteration_s.seconds, rel=1e-6)
    assert all(share.low <= share.seconds + 1e-9 <= share.high + 2e-9 for share in told.parts.values())
    assert set(told.parts) == set(Part) and 0 < told.efficiency <= 1.001


def test_a_sample_of_many_communications_still_tells_whose_the_time_is() -> None:
    noise = replace(QUIET, scatter=0.005, straggler=3, straggler_slowdown=0.3)
    told = accounted(Setting(hosts=4, noise=noise, workload=Workload(buckets=40)), 20)
    assert told.modes == (Part.STRAGGLER,) and any("only a sample" in note for note in told.notes)


def test_renaming_ranks_changes_no_part() -> None:
    given = summaries(simulate(Setting(hosts=3, host=Host(gpus=4), noise=NOISY), 20, 5))
    order = np.random.default_rng(0).permutation(len(given))
    one, other = (
        account(stack(given)),
        account(stack([replace(s, rank=int(r)) for s, r in zip(given, order, strict=True)])),
    )
    assert one is not None and other is not None
    assert [p.seconds for p in one.parts.values()] == pytest.approx([p.seconds for p in other.parts.values()])


def test_ranks_that_are_given_no_work_at_all_are_accounted_for() -> None:
    ranks = []
    for k in range(4):
        own = 0.5 if k == 0 else 0.9
        spent = {h.GEMM: own}
        ranks.append(h.Rank(own, samples=[h.Sample(1 - own, channel=h.everyone(4))], functions=spent, work=spent))
    given = h.job(ranks, 12)
    idle = replace(given[0], patterns=replace(given[0].patterns, work=np.zeros(1)))
    told = account(stack([idle, *given[1:]]))
    assert told is not None and all(np.isfinite(part.seconds) for part in told.parts.values())


def test_a_rank_of_which_few_iterations_are_known_is_left_out_and_said() -> None:
    ranks = [h.Rank(own, samples=[h.Sample(1 - own, channel=h.everyone(4))]) for own in (0.5, 0.5, 0.9, 0.5)]
    short = h.summary(3, ranks[3], world_size=4, num_steps=4)
    told = account(stack([*h.job(ranks, 12)[:3], short]))
    assert told is not None and (told.num_ranks, told.num_steps) == (3, 12)
    assert told.modes == (Part.STRAGGLER,) and told.stragglers == (2,)
    assert any(note.startswith("rank 3 has fewer than 8 of the iterations") for note in told.notes)
    assert account(stack([short, *[h.summary(k, ranks[k], world_size=4, num_steps=4) for k in range(3)]])) is None


@pytest.mark.parametrize(("own", "num_bytes"), [(0.0, 1e6), (0.5, 0.0)])
def test_runs_without_own_work_or_bytes_are_told_together(own: float, num_bytes: float) -> None:
    def run(size: int) -> Account:
        ranks = [h.Rank(own, samples=[h.Sample(0.5, channel=h.everyone(size))], host=f"h{k}") for k in range(size)]
        told = [h.less(s, channel_bytes=np.full(1, num_bytes)) for s in h.job(ranks, 12)]
        accounted = account(stack(told))
        assert accounted is not None
        return accounted

    told = study([("two", run(2)), ("four", run(4))])
    assert (told.sizes[1].relative is None) == (own == 0)
    assert json.loads(render_json(told))["runs"][1]["ranks"] == 4 and "four" in render_text(told)


def test_of_too_few_steps_or_ranks_nothing_is_said() -> None:
    given = summaries(simulate(Setting(hosts=2, host=Host(gpus=2)), 12, 0))
    assert account(stack(given[:1])) is None and account(stack([])) is None
    assert account(stack(summaries(simulate(Setting(hosts=2, host=Host(gpus=2)), 5, 0)))) is None


def test_what_is_longer_at_all_times_than_at_the_smallest_size_is_contention() -> None:
    quiet = Noise(scatter=0.002, stalls=None, background=None)
    fabric = Fabric(oversubscription=8.0)
    runs = [(f"{hosts} hosts", accounted(Setting(hosts=hosts, noise=quiet, fabric=fabric))) for hosts in (16, 2, 4)]
    found = study(runs)
    assert [size.account.num_hosts for size in found.sizes] == [2, 4, 16]
    alone = next(told for name, told in runs if name == "16 hosts")
    assert alone.modes == () and found.sizes[-1].account.modes == (Part.CONTENTION,)
    relative = found.sizes[-1].relative
    assert relative is not None and relative.low <= relative.seconds <= relative.high < 0.9
    assert "what grows with size: contention" in render_text(found)
    told = json.loads(render_json(found))
    assert told["schema"] == "eroica.scaling/1" and told["runs"][0]["relative_efficiency"] is None
    for run in told["runs"]:
        parts = sum(part["seconds"] for part in run["parts"].values())
        assert run["ideal_s"] + parts == pytest.approx(run["iteration"]["seconds"], rel=1e-4)


def test_efficiency_beside_the_smallest_run_is_as_unsure_as_both_are_together() -> None:
    told = accounted(Setting(hosts=2, host=Host(gpus=2)), 12)

    def run(ranks: int, low: float, high: float) -> tuple[str, Account]:
        return f"{ranks}", replace(told, num_ranks=ranks, ideal_s=0.5, iteration_s=Share(1.0, low, high))

    def interval(first: tuple[str, Account], second: tuple[str, Account]) -> tuple[float, float]:
        relative = study([first, second]).sizes[1].relative
        assert relative is not None and relative.seconds == pytest.approx(1.0)
        return relative.low, relative.high

    sure, unsure = (1.0, 1.0), (0.8, 1.25)
    assert interval(run(4, *sure), run(8, *unsure)) == pytest.approx((0.8, 1.25))
    assert interval(run(4, *unsure), run(8, *sure)) == pytest.approx((0.8, 1.25))
    low, high = interval(run(4, *unsure), run(8, *unsure))
    assert low == pytest.approx(0.8**2**0.5) and high == pytest.approx(1.25**2**0.5)


def test_names_of_runs_cannot_break_the_page_and_it_needs_no_script() -> None:
    told = accounted(Setting(hosts=2, host=Host(gpus=2)), 12)
    page = render_html(study([("<script>alert(1)</script>\x1b[2J", told), ("b", replace(told, num_ranks=8))]))
    assert "<script" not in page and "\x1b" not in page and "&lt;script&gt;" in page and "<svg" in page


def test_of_runs_whose_traces_name_no_host_nothing_is_said_of_their_hosts() -> None:
    given = summaries(simulate(Setting(hosts=2, host=Host(gpus=2)), 12, 0))
    told = account(stack([replace(summary, host="") for summary in given]))
    assert told is not None
    notes = study([("a", told), ("b", replace(told, num_ranks=8))]).notes
    assert any("name no second host" in note for note in notes) and not any("within a host" in note for note in notes)


def test_runs_of_one_size_are_no_scaling() -> None:
    told = accounted(Setting(hosts=2, host=Host(gpus=2)), 12)
    assert any("show scatter, not scaling" in note for note in study([("a", told), ("b", told)]).notes)


def test_folders_of_traces_are_told_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for ranks in (2, 4):
        made = cluster("slow_input", world_size=ranks, effect=0.2, seed=1, num_iterations=10, max_events=300)
        folder = tmp_path / f"run{ranks}"
        folder.mkdir()
        for rank in range(ranks):
            write_json(made.written(rank), folder / f"rank{rank}.json.gz")
    folders = [str(tmp_path / "run4"), str(tmp_path / "run2")]
    assert main(["scaling", *folders, "--jobs", "1", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "straggler (rank" in text and "4 ranks lose" in text
    assert json.loads((tmp_path / "out" / "scaling.json").read_text())["runs"][1]["ranks"] == 4
    assert "<svg" in (tmp_path / "out" / "scaling.html").read_text()
    assert main(["scaling", str(tmp_path / "nothing")]) == 1
