"""Pacing asks for little, believes nobody, proves itself by trials, and is off where it does not help."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eroica.cli import main
from eroica.errors import UserError
from eroica.fabric.pacing import HARD_CAP_S, Limits, Order, Pacer, Phase, Seen, bounded, dispersion, holds, judge
from eroica.fabric.parameters import Fabric, Host, Noise, Setting, Workload
from eroica.fabric.simulator import Passage, Steering, simulate
from eroica.gains import Mean, Row, compare, mean_of, render_html, render_text
from eroica.simulation import alone, at_all_times, by_policy

SHORT = Limits(memory=4, block=4, most_blocks=12, rest=20, again=40, ttl_s=5.0)


def seen(step: int, length_s: float, wait_s: float = 0.03) -> Seen:
    waits = np.full((4, 2), wait_s)
    waits[step % 4] = 0.0
    return Seen(step, length_s, {"g": waits})


def drive(limits: Limits, gain: float, iterations: int, seed: int = 0, wait_s: float = 0.03) -> Pacer:
    """A job of which delays make the iteration shorter by `gain`."""
    rng, pacer, clock = np.random.default_rng(seed), Pacer(limits), 0.0
    for step in range(iterations):
        length = 0.2 * (1 - gain * pacer.is_paced) * math.exp(0.02 * rng.standard_normal())
        clock += length
        pacer.observe(seen(step, length, wait_s), clock)
    return pacer


def test_a_job_whose_ranks_arrive_together_is_left_alone() -> None:
    pacer = drive(SHORT, 0.0, 200, wait_s=0.001)
    assert pacer.phase is Phase.WATCHING and not pacer.changes and not pacer.verdicts


def test_pacing_stays_on_where_a_trial_shows_a_gain() -> None:
    pacer = drive(Limits(memory=4, again=10_000), 0.1, 600)
    assert pacer.phase is Phase.ON and pacer.verdicts[-1].is_better and pacer.is_paced
    assert [change.phase for change in pacer.changes] == [Phase.TRIAL, Phase.ON]


@pytest.mark.parametrize("gain", [0.0, -0.05])
def test_pacing_turns_itself_off_where_it_gains_nothing_or_costs(gain: float) -> None:
    pacer = drive(Limits(memory=4, rest=10_000), gain, 600, seed=1)
    assert pacer.phase is Phase.RESTING and not pacer.is_paced and not pacer.verdicts[-1].is_better
    assert "no gain" in pacer.changes[-1].why


def test_the_rest_after_a_vain_trial_grows_and_a_gain_that_ends_is_found_out() -> None:
    pacer = drive(SHORT, 0.0, 1500)
    begun = [change.step for change in pacer.changes if change.phase is Phase.TRIAL]
    gaps = np.diff(begun)
    assert len(gaps) > 2 and gaps[-1] > gaps[0]


def test_without_any_effect_a_trial_says_better_in_fewer_than_one_in_twenty() -> None:
    rng, better = np.random.default_rng(0), 0
    for _ in range(400):
        off: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
        on: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
        for _ in range(20):
            off.append(np.exp(0.2 * rng.standard_normal(8)))
            on.append(np.exp(0.2 * rng.standard_normal(8)))
            verdict = judge(off, on, 40)
            if verdict.decided:
                better += verdict.is_better
                break
    assert better / 400 < 0.05


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=8, max_size=8), st.floats(0, 0.2))
def test_whatever_ranks_claim_nobody_is_held_longer_than_the_cap(claims: list[float], cap_s: float) -> None:
    limits = Limits(max_delay_s=cap_s, group_caps_s={"g": 0.01})
    delays = bounded([np.array(claims).reshape(4, 2)] * 4, limits, "g", 0.2)
    order = Order(1, 0.0, 10.0, {"g": delays}, {}, 0.0)
    for member in range(-1, 6):
        held = [order.delay_of("g", member, k, age_s=0.0, cap_s=cap_s) for k in range(3)]
        assert all(0 <= h <= min(cap_s, 0.01) for h in held) and sum(held) <= 0.2 * 0.2 + 1e-9


@given(st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 1e9), st.floats(0, 100), st.integers(0, 3))
def test_an_order_is_believed_within_its_time_and_the_receivers_cap_only(
    delay: float, ttl_s: float, age_s: float, version: int
) -> None:
    order = Order(1, 0.0, ttl_s, {"g": ((delay,),)}, {}, 0.0, version=version)
    held = order.delay_of("g", 0, 0, age_s=age_s, cap_s=1e9)
    assert 0 <= held <= HARD_CAP_S
    if age_s > ttl_s or age_s > 60 or version != 1:
        assert held == 0.0


def test_a_lying_rank_moves_no_delay_of_another() -> None:
    honest = [np.array([[0.03, 0.0], [0.02, 0.0], [0.0, 0.0]])] * 4
    lies = [np.where(np.array([[False], [False], [True]]), 1e6, w) for w in honest]
    one, other = (bounded(waits, Limits(), "g", 0.2) for waits in (honest, lies))
    assert one[:2] == other[:2] and sum(other[2]) <= 0.2 * 0.2 + 1e-9


def told(step: int, late: int = 3) -> Seen:
    """Four members, of which one comes 30 ms after the others, who come at 50 ms."""
    waits = np.full((4, 1), 0.03)
    waits[late] = 0.0
    return Seen(step, 0.2, {"g": waits}, {"g": np.full((4, 1), 0.08)})


def test_early_ranks_are_held_until_the_last_one_usually_comes_and_late_ones_are_not() -> None:
    pacer = Pacer(Limits(memory=4, block=4))
    orders = [pacer.observe(told(step), step * 0.2) for step in range(20)]
    order = next(o for o in orders if o is not None and o.delay_s)
    assert order.not_before_s == {"g": (0.08,)}

    def held(since_s: float | None, member: int = 0) -> float:
        return order.delay_of("g", member, 0, age_s=0.0, cap_s=0.05, since_s=since_s)

    assert held(0.05) == pytest.approx(0.03) and held(0.07) == pytest.approx(0.01)
    assert held(0.08) == held(0.3) == 0.0  # as late as the last one, or later
    assert held(0.0) == pytest.approx(0.03)  # no longer than it usually waits, however early
    assert held(0.05, member=3) == 0.0  # it never waits, so it is never early
    assert held(None) == held(math.nan) == 0.0  # it cannot tell how late it is


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=8, max_size=8),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0, 0.2),
)
def test_whatever_moments_ranks_claim_nobody_is_held_beyond_the_cap_or_the_moment(
    claims: list[float], since_s: float, cap_s: float
) -> None:
    begun = np.array(claims).reshape(4, 2)
    recent = [Seen(step, 0.2, {"g": np.abs(begun)}, {"g": begun}) for step in range(4)]
    delays, until = holds(recent, Limits(max_delay_s=cap_s), 0.2)
    order = Order(1, 0.0, 10.0, delays, {}, 0.0, not_before_s=until)
    for member in range(4):
        held = [order.delay_of("g", member, k, age_s=0.0, cap_s=cap_s, since_s=since_s) for k in range(3)]
        assert all(0 <= h <= cap_s for h in held)
        assert all(h == 0 or since_s + h <= until["g"][k] + 1e-9 for k, h in enumerate(held))


def test_a_lying_rank_moves_no_moment() -> None:
    honest = told(0).begun_s["g"]
    for lie in (0.0, 1e6, math.nan, -1.0, math.inf):
        begun = honest.copy()
        begun[2] = lie
        recent = [Seen(step, 0.2, told(step).wait_s, {"g": begun}) for step in range(4)]
        assert holds(recent, Limits(), 0.2)[1] == {"g": (0.08,)}


def test_without_moments_of_all_groups_ranks_are_held_for_a_time() -> None:
    both = {"g": np.full((4, 1), 0.03), "h": np.full((4, 1), 0.02)}
    delays, until = holds([Seen(step, 0.2, both, {"g": both["g"]}) for step in range(4)], Limits(), 0.2)
    assert until == {} and delays["h"][0] == (0.02,)


def test_a_rehearsal_says_what_it_would_do_and_holds_nobody() -> None:
    pacer, orders = Pacer(Limits(memory=4, block=4, dry_run=True)), []
    for step in range(60):
        order = pacer.observe(seen(step, 0.2), step * 0.2)
        orders += [order] if order is not None else []
    told = [o for o in orders if o.delay_s]
    assert told and max(told[0].delay_s["g"][0]) > 0
    assert all(o.delay_of("g", 0, k, age_s=0, cap_s=1) == 0 for o in told for k in range(2))


def test_a_rehearsal_of_a_trial_shows_no_gain_whatever_chance_makes_of_it() -> None:
    for gain in (0.0, 0.1):
        pacer = drive(replace(SHORT, dry_run=True), gain, 200)
        ends = [change for change in pacer.changes if change.phase is Phase.RESTING]
        assert ends and not pacer.verdicts and all(change.phase is not Phase.ON for change in pacer.changes)
        assert all(change.why == "nobody was held in this rehearsal of a trial" for change in ends)


def test_orders_are_renewed_before_they_end_and_one_word_ends_them() -> None:
    pacer, sent = Pacer(Limits(memory=4, block=30, ttl_s=2.0)), []
    for step in range(60):
        order = pacer.observe(seen(step, 0.2), step * 0.2)
        sent += [order] if order is not None else []
    gaps = np.diff([o.issued_s for o in sent if o.delay_s])
    assert len(gaps) and gaps.max() <= 2.0
    last = pacer.off(60, "the user said so", 12.0)
    assert not last.delay_s and not pacer.is_paced and last.number > sent[-1].number


def test_what_no_job_should_be_asked_for_cannot_be_set() -> None:
    with pytest.raises(UserError, match="max_delay_s is 5"):
        Limits(max_delay_s=5.0)
    with pytest.raises(UserError, match="cap of group 'g'"):
        Limits(group_caps_s={"g": math.nan})


def test_dispersion_is_what_the_usual_member_waits() -> None:
    assert dispersion(seen(0, 0.2)) == pytest.approx(0.06 / 0.2)
    assert dispersion(Seen(0, 0.2, {"g": np.full((3, 1), np.nan)})) == 0.0


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 100))
def test_on_the_model_the_policy_costs_little_where_it_cannot_help(seed: int) -> None:
    setting = Setting(hosts=2, host=Host(gpus=4))
    pacer = Pacer(SHORT)
    free = simulate(setting, 120, seed)
    paced = simulate(setting, 120, seed, steer=by_policy(setting, pacer))
    assert paced.length_s.mean() < 1.02 * free.length_s.mean()
    assert paced.delay_s.max() <= SHORT.max_delay_s


def test_held_at_all_times_an_iteration_takes_as_long_as_before_since_no_late_rank_is_held() -> None:
    setting = Setting(hosts=4, noise=Noise(scatter=0.03, background=None))
    free = simulate(setting, 150, 0)
    held = simulate(setting, 150, 0, steer=at_all_times(setting, Limits()))
    assert held.delay_s.max() > 0.001
    assert held.length_s.mean() == pytest.approx(free.length_s.mean(), rel=0.003)
    waited = held.begin_s[:, 0, 1:] - held.enter_s[:, :, 1:].min(axis=1)
    would_have = free.begin_s[:, 0, 1:] - free.enter_s[:, :, 1:].min(axis=1)
    assert waited.mean() < 0.9 * would_have.mean()


class Lost(Pacer):
    """Of which one order arrives, and no word after it."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.sent: list[bool] = []

    def observe(self, seen: Seen, now_s: float) -> Order | None:
        order = super().observe(seen, now_s) if not any(self.sent) else None
        self.sent.append(order is not None and bool(order.delay_s))
        return order


def test_delays_vanish_within_their_time_to_live_when_no_more_word_comes() -> None:
    setting = Setting(hosts=1, host=Host(gpus=4), noise=Noise(scatter=0.1, stalls=None, background=None))
    pacer = Lost(Limits(memory=4, block=4, ttl_s=0.5, threshold=0.001))
    run = simulate(setting, 60, 0, steer=by_policy(setting, pacer), detail=60)
    first = pacer.sent.index(True) + 1
    longest = first + math.ceil(0.5 / float(run.length_s.min())) + 1
    assert longest < 40
    assert run.delay_s[first].max() > 0 and run.delay_s[longest:].max() == 0


def test_in_jitter_without_contention_the_trials_find_no_gain_and_pacing_is_off() -> None:
    setting = alone(Setting(hosts=2, host=Host(gpus=4)), "imbalance")
    pacer = Pacer(SHORT)
    simulate(setting, 240, 0, steer=by_policy(setting, pacer))
    phases = [change.phase for change in pacer.changes]
    assert pacer.verdicts and Phase.ON not in phases and Phase.RESTING in phases
    assert all("no gain" in change.why for change in pacer.changes if change.phase is Phase.RESTING)


def test_where_waiting_ranks_slow_their_host_holding_them_helps_the_late_one() -> None:
    setting = Setting(
        hosts=2,
        host=Host(gpus=4),
        workload=Workload(crowding=0.5),
        noise=Noise(scatter=0.0, stalls=None, background=None, straggler=1),
    )
    free = simulate(setting, 80, 0)
    undisturbed = replace(setting, workload=replace(setting.workload, crowding=0.0))
    held = simulate(setting, 80, 0, steer=at_all_times(setting, Limits(quantile=0.0)))
    best = simulate(undisturbed, 80, 0)
    assert free.length_s[-1] > held.length_s[-1] >= best.length_s[-1] * (1 - 1e-9)


def test_where_reductions_that_meet_lose_goodput_groups_in_turns_lose_less() -> None:
    setting = Setting(
        hosts=4,
        host=Host(gpus=2),
        fabric=Fabric(hosts_per_leaf=1, oversubscription=2.0, meeting_loss=0.8, goodput_loss=0.0, spread=True),
        workload=Workload(layout="tensor", buckets=2, compute_s=0.01),
        noise=Noise(scatter=0.0, stalls=None, background=None),
    )
    free = simulate(setting, 2, 0)

    def in_turns(passage: Passage) -> Steering:
        return Steering(np.zeros((8, 2)), np.array([-1, 0]), 1.0)

    assert simulate(setting, 2, 0, steer=in_turns).length_s[1] < 0.85 * free.length_s[1]


def test_groups_that_share_a_link_go_one_after_another_in_a_trial() -> None:
    pacer = Pacer(Limits(memory=4, block=4), sharing=[("g", "h", "i")])
    orders = [pacer.observe(seen(step, 0.2), step * 0.2) for step in range(20)]
    told = [o for o in orders if o is not None and o.after]
    assert told and told[0].after == {"h": "g", "i": "h"} and told[0].patience_s <= 0.05


def test_the_command_prints_the_models_answer_beside_the_published_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["simulate", "--hosts", "1,4", "--seeds", "2", "--iterations", "30"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "-0.6%..+0.8%" in text and "a model, no measurement" in text and "where pacing helps" in text
    assert main([*arguments, "--format", "json", "--out", str(tmp_path / "out")]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = told["rows"]
    assert [row["hosts"] for row in rows] == [1, 4] and rows[0]["seeds"] == 2
    assert json.loads((tmp_path / "out" / "simulation.json").read_text()) == told
    assert "<script" not in (tmp_path / "out" / "simulation.html").read_text()
    assert main(["simulate", "--max-delay-ms", "9999"]) == 1
    assert main([*arguments[:-1], "29"]) == 1
    assert "29 iterations are too few" in capsys.readouterr().err


def row_of(mode: str, gain: float, cv: float, trials: int = 3) -> Row:
    """64 hosts at a CV of 0.22, sure to a tenth of a percent."""
    mean, change = Mean(0.13, 0.129, 0.131), Mean(gain, gain - 0.001, gain + 0.001)
    calm = Mean(cv, cv, cv)
    usual = Mean(0.22, 0.2, 0.24)
    return Row(64, 512, mode, mean, usual, mean, calm, change, mean, usual, Mean(0, 0, 0), 0, trials, 5)


def test_each_row_says_whether_pacing_helps_and_failure_modes_alone_have_no_published_figure() -> None:
    rows = [row_of("all", 0.12, 0.08), row_of("contention", -0.05, 0.3), row_of("locality", 0.0, 0.1)]
    rows += [row_of("nothing", 0.0, 0.22, 0), row_of("imbalance", 0.0, 0.22)]
    said = ["helps", "costs, and the trials leave it off", "steadier, not faster"]
    said += ["nothing to gain; never tried, ranks come together", "nothing to gain, and the trials leave it off"]
    assert [row.verdict for row in rows] == said
    text, page = render_text(rows), render_html(rows)
    assert all(word in text and word in page for word in said)
    assert text.count("+11.0%, CV 0.22 -> 0.09") == 2  # in the headline, and in the row of the whole job


@pytest.mark.parametrize("half", [math.nan, 0.2])
def test_what_too_few_seeds_leave_open_is_not_called_nothing(half: float) -> None:
    row = replace(row_of("all", 0.0, 0.22), held_gain=Mean(0.11, 0.11 - half, 0.11 + half))
    assert row.verdict == "not sure: more seeds would tell"


@pytest.mark.parametrize(
    ("seeds", "student"), [(5, 2.776), (11, 2.228), (12, 2.201), (18, 2.110), (30, 2.045), (100, 1.984)]
)
def test_intervals_over_seeds_are_students(seeds: int, student: float) -> None:
    values = np.random.default_rng(0).normal(size=seeds).tolist()
    mean, error = mean_of(values), np.std(values, ddof=1) / math.sqrt(seeds)
    assert (mean.high - mean.low) / 2 / error == pytest.approx(student, rel=2e-3)


def test_a_picture_of_values_that_are_all_nought_is_drawn() -> None:
    row = replace(row_of("all", 0.0, 0.0), cv=Mean(0, 0, 0), policy_cv=Mean(0, 0, 0))
    assert "<svg" in render_html([replace(row, hosts=4), replace(row, hosts=8)])


def test_pictures_show_each_size_and_what_was_published() -> None:
    small = replace(row_of("all", 0.001, 0.22), hosts=4, ranks=32)
    page = render_html([small, row_of("all", 0.12, 0.08)])
    assert page.count("<circle") >= 3 * 2 * 3 - 2
    assert "published: 11" in page and "under the policy, 64 hosts: 0.22" in page
    assert "Iteration time" not in render_html([small])  # one size makes no curve


def test_a_size_is_compared_seed_by_seed_with_itself() -> None:
    row = compare(Setting(hosts=1, host=Host(gpus=2)), [0, 1], 30, SHORT)
    assert row.policy_gain.low <= row.policy_gain.value <= row.policy_gain.high and row.ranks == 2
