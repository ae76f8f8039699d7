"""Distances to expectation and to peers (design section 4, "Roles and peers", "Localization")."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica.communication import CollectiveKind
from eroica.critical_path import Activity
from eroica.job import ProcessGroup
from eroica.localization import (
    BETA_FLOOR,
    EFFECT_FLOOR,
    Localization,
    Roles,
    family_quantile,
    localize,
    localize_stacked,
    roles_of,
)
from eroica.pattern import Function, stack
from tests import handmade as h

Floats = npt.NDArray[np.float32]


def same_role(count: int) -> Roles:
    return Roles(np.zeros(count, np.int32), ("all",), "functions")


def noise(seed: int, ranks: int = 16, functions: int = 5, spread: float = 0.002) -> Floats:
    rng = np.random.default_rng(seed)
    usual = np.linspace(0.3, 0.02, functions)
    return (usual + rng.normal(0, spread, (ranks, functions))).astype(np.float32)


def located(beta: Floats, mu: Floats | None = None, roles: Roles | None = None) -> Localization:
    nothing = np.full(beta.shape, np.nan, np.float32)
    activities = [Activity.COMPUTE] * beta.shape[1]
    return localize(beta, nothing if mu is None else mu, nothing, activities, roles or same_role(len(beta)))


def test_the_one_rank_that_differs_is_unusual_and_its_peers_are_not() -> None:
    beta = noise(1)
    beta[5, 2] += 0.1
    assert np.argwhere(located(beta).unusual).tolist() == [[5, 2]]


@given(st.integers(0, 10**6), st.permutations(range(12)))
def test_renaming_ranks_renames_findings(seed: int, order: list[int]) -> None:
    beta = noise(seed, ranks=12)
    beta[seed % 12, 1] += 0.05
    ours, theirs = located(beta), located(beta[order])
    np.testing.assert_allclose(theirs.delta, ours.delta[order], rtol=1e-4)
    np.testing.assert_array_equal(theirs.unusual, ours.unusual[order])


@given(st.integers(0, 10**6), st.permutations(range(5)))
def test_the_order_of_functions_does_not_matter(seed: int, order: list[int]) -> None:
    beta = noise(seed)
    beta[3, seed % 5] += 0.05
    np.testing.assert_array_equal(located(beta[:, order]).unusual, located(beta).unusual[:, order])


def test_less_time_than_the_peers_is_never_unusual() -> None:
    beta = noise(1)
    beta[5, 0] -= 0.2
    assert not located(beta).unusual.any()


def test_less_than_a_hundredth_of_the_iteration_is_not_worth_a_word() -> None:
    beta = np.full((16, 3), 0.2, np.float32)
    beta[4, 1] += EFFECT_FLOOR * 0.9
    assert not located(beta).unusual.any()


@pytest.mark.parametrize("ranks", [8, 32, 256])
def test_healthy_noise_is_called_unusual_in_about_one_job_of_a_hundred(ranks: int) -> None:
    # Normal noise of several floors, so that neither the floors nor the effect decide.
    beta = [np.float32(1) + noise(seed, ranks, 8, 5 * BETA_FLOOR) for seed in range(200)]
    assert sum(bool(located(some).unusual.any()) for some in beta) <= 200 * (0.05 if ranks == 8 else 0.03)


@given(st.integers(1, 10**7))
def test_the_limit_grows_with_the_number_of_cells(cells: int) -> None:
    assert family_quantile(cells) <= family_quantile(cells + 1) < 7
    assert family_quantile(1) == pytest.approx(2.326, abs=1e-3)


def test_components_that_are_not_measured_are_left_out() -> None:
    beta, mu = noise(1), np.full((16, 5), np.nan, np.float32)
    with_hole = located(beta, mu)
    np.testing.assert_array_equal(with_hole.delta, located(beta).delta)
    assert np.isnan(with_hole.peer_mu).all()
    mu[:8] = 0.5
    assert np.isfinite(located(beta, mu).delta).all() and (located(beta, mu).peer_mu == 0.5).all()


def test_roles_of_fewer_than_three_have_no_direction() -> None:
    beta = np.array([[0.2], [0.6]], np.float32)
    found = located(beta)
    assert not found.unusual.any() and (found.delta > 0).all()


def test_each_role_is_compared_with_itself_alone() -> None:
    beta = np.concatenate([np.full((4, 2), 0.1), np.full((4, 2), 0.6)]).astype(np.float32)
    roles = Roles(np.repeat([0, 1], 4).astype(np.int32), ("a", "b"), "groups")
    assert not located(beta, roles=roles).unusual.any()
    beta[6, 1] += 0.1
    assert np.argwhere(located(beta, roles=roles).unusual).tolist() == [[6, 1]]


def test_two_populations_of_equal_size_blame_neither() -> None:
    beta = np.concatenate([np.full((8, 1), 0.2), np.full((8, 1), 0.4)]).astype(np.float32)
    assert not located(beta).unusual.any()


def test_distance_is_to_the_box_of_the_kind_or_to_the_jobs_own_past() -> None:
    beta = np.array([[0.30, 0.05]], np.float32)
    nothing = np.full(beta.shape, np.nan, np.float32)
    kinds = [Activity.COMPUTE, Activity.PYTHON]
    boxed = localize(beta, nothing, nothing, kinds, same_role(1))
    assert boxed.distance.tolist() == [[0.0, pytest.approx(4.0)]]
    past = localize(beta, nothing, nothing, kinds, same_role(1), np.array([0.2, 0.05], np.float32))
    assert past.distance.tolist() == [[pytest.approx(10.0), pytest.approx(0.0)]]


def test_a_function_that_the_past_does_not_know_is_expected_to_take_nothing() -> None:
    new = Function(Activity.PYTHON, "probe", None, None)
    now = stack(h.job([h.Rank(functions={h.GEMM: 0.5, new: 0.1})] * 4))
    before = stack(h.job([h.Rank(functions={h.GEMM: 0.5})] * 4))
    found = localize_stacked(now, same_role(4), before)
    assert found.distance[:, now.functions.index(new)] == pytest.approx(10.0)
    assert found.distance[:, now.functions.index(h.GEMM)] == pytest.approx(0.0)


# --- roles ---------------------------------------------------------------------------------------------------------

KERNELS = [Function(Activity.COMPUTE, f"kernel {k}", None, None) for k in range(4)]


def by_role(roles: Roles) -> list[list[int]]:
    return sorted(roles.members(k).tolist() for k in range(len(roles.names)))


def test_pipeline_stages_are_roles() -> None:
    def groups(rank: int) -> tuple[ProcessGroup, ...]:
        line = (0, 2, 4) if rank % 2 == 0 else (1, 3, 5)
        return (ProcessGroup("1", "mesh_pp", line, 3),)

    roles = roles_of(stack(h.job([h.Rank(groups=groups(k)) for k in range(6)])))
    assert by_role(roles) == [[0, 1], [2, 3], [4, 5]] and roles.by == "groups"


def test_replicas_of_a_staged_job_are_roles() -> None:
    def rank(k: int) -> h.Rank:
        shared = (0, 1) if k < 2 else (2, 3)
        send = h.Sample(0.1, kind=CollectiveKind.SEND)
        return h.Rank(samples=[send], groups=(ProcessGroup("1", "mesh_dp", shared, 2),))

    assert by_role(roles_of(stack(h.job([rank(k) for k in range(4)])))) == [[0, 1], [2, 3]]


def test_without_groups_ranks_with_the_same_kernels_hold_the_same_role() -> None:
    light = h.Rank(functions={KERNELS[0]: 0.4, KERNELS[1]: 0.4})
    heavy = h.Rank(functions={KERNELS[2]: 0.4, KERNELS[3]: 0.4})
    roles = roles_of(stack(h.job([light] * 4 + [heavy] * 4)))
    assert by_role(roles) == [[0, 1, 2, 3], [4, 5, 6, 7]] and roles.by == "functions"


def test_host_functions_and_copies_make_no_role() -> None:
    plain = h.Rank(functions={KERNELS[0]: 0.4})
    faulty = h.Rank(
        functions={
            KERNELS[0]: 0.4,
            Function(Activity.PYTHON, "slow", "a.py:3", "a.py:3"): 0.3,
            Function(Activity.MEMORY, "Memcpy", None, None): 0.2,
            Function(Activity.ALLOCATOR, "cudaMalloc", None, None): 0.2,
        }
    )
    assert by_role(roles_of(stack(h.job([plain] * 6 + [faulty] * 2)))) == [list(range(8))]


def test_a_role_of_one_rank_found_by_functions_joins_the_nearest() -> None:
    usual = h.Rank(functions={KERNELS[0]: 0.4, KERNELS[1]: 0.4})
    odd = h.Rank(functions={KERNELS[0]: 0.2, KERNELS[3]: 0.6})
    assert by_role(roles_of(stack(h.job([usual] * 7 + [odd])))) == [list(range(8))]


def test_device_models_are_not_compared_with_each_other() -> None:
    new, old = h.Rank(device_model="H100"), h.Rank(device_model="A100")
    assert by_role(roles_of(stack(h.job([new, new, old, old])))) == [[0, 1], [2, 3]]


@given(st.permutations(range(8)))
def test_roles_follow_their_ranks_when_these_are_renumbered(order: list[int]) -> None:
    kinds = [h.Rank(functions={KERNELS[0]: 0.4, KERNELS[1]: 0.4})] * 4
    kinds += [h.Rank(functions={KERNELS[2]: 0.4, KERNELS[3]: 0.4})] * 4
    some = h.job(kinds)
    renumbered = stack([replace(some[k], rank=place) for place, k in enumerate(order)])
    assert by_role(roles_of(renumbered)) == sorted(
        sorted(place for place, k in enumerate(order) if k // 4 == half) for half in range(2)
    )
