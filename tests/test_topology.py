"""What a finding's ranks have in common in the network: said where it is all but certain, and nowhere else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica.diagnosis import diagnose
from eroica.errors import UserError
from eroica.findings import Diagnosis, Role
from eroica.job import format_ranks, told_ranks
from eroica.pattern import stack
from eroica.topology import Topology, read_topology, with_roll_ups
from tests.handmade import GEMM, Rank, Sample, everyone, job

PER_HOST = 4


def slow(ranks: set[int], num_hosts: int = 8) -> Diagnosis:
    """Of a job whose ranks on hosts a, b, ... have these slow ones among them."""
    size = num_hosts * PER_HOST
    made = [
        Rank(
            own=0.9 + 0.2 * (rank in ranks),
            length=1.3,
            samples=[Sample(0.1 + 0.2 * (rank not in ranks), channel=everyone(size))],
            functions={GEMM: 0.9 + 0.2 * (rank in ranks)},
            host="abcdefghijklmnop"[rank // PER_HOST],
        )
        for rank in range(size)
    ]
    diagnosis = diagnose(stack(job(made)))
    assert diagnosis.verdict.ranks == format_ranks(ranks), diagnosis.verdict
    return diagnosis


def leaves(num_hosts: int = 8, per_leaf: int = 2) -> Topology:
    return Topology(
        {"abcdefghijklmnop"[k]: {"leaf": (f"leaf{k // per_leaf}",), "spine": ("s",)} for k in range(num_hosts)}
    )


def said(diagnosis: Diagnosis, topology: Topology | None) -> str:
    made = with_roll_ups(diagnosis, topology)
    return next((e.text for e in made.evidence.values() if e.source == "topology"), "")


def test_all_ranks_behind_a_leaf_are_told_as_that_leaf() -> None:
    made = with_roll_ups(slow(set(range(8, 16))), leaves())
    (text,) = [e.text for e in made.evidence.values() if e.source == "topology"]
    assert text == "all 8 ranks behind leaf leaf1 are in it, and no other rank is"
    assert made.verdict.summary.startswith("ranks 8-15 (all 8 ranks behind leaf leaf1): ")
    assert made.findings[0].evidence[-1] in made.evidence
    assert (made.verdict.ranks, made.verdict.cause) == ("8-15", slow(set(range(8, 16))).verdict.cause)


def test_all_ranks_of_a_host_are_told_as_the_host_even_where_its_leaf_has_no_other() -> None:
    assert said(slow(set(range(8, 12))), leaves(per_leaf=1)).startswith("all 4 ranks of host c are in it")


def test_several_leaves_are_told_together() -> None:
    ranks = set(range(8, 16)) | set(range(0, 8))
    text = said(slow(ranks - set(range(0, 4)) - set(range(12, 16)), 16), leaves(16, 1))
    assert text.startswith("all 8 ranks of hosts b, c are in it")


@pytest.mark.parametrize(
    "ranks",
    [
        {9},  # one rank is no place
        {8, 9, 10, 11, 12},  # half of the leaf
        {0, 8, 16, 24},  # spread
        {8, 9, 10, 11, 12, 13, 14, 15, 20, 21},  # others as well
    ],
)
def test_nothing_is_said_of_ranks_that_are_only_a_part_of_a_unit_or_lie_elsewhere_too(ranks: set[int]) -> None:
    diagnosis = slow(ranks)
    text = said(diagnosis, leaves())
    assert "leaf" not in text and "spine" not in text, text


def test_a_leaf_and_a_rail_with_the_same_ranks_are_both_named_and_so_is_a_role() -> None:
    both = Topology({host: {"leaf": own["leaf"], "rail": own["leaf"]} for host, own in leaves().hosts.items()})
    diagnosis = slow(set(range(8, 16)))
    text = said(diagnosis, both)
    assert "behind leaf leaf1" in text and "on rail leaf1" in text and "cannot be told apart" in text
    roles = (Role("stage 1", "8-15", "groups"), Role("others", "0-7,16-31", "groups"))
    text = said(replace(diagnosis, roles=roles), leaves())
    assert "behind leaf leaf1" in text and "of role stage 1" in text


def test_a_rail_may_be_told_for_each_rank_of_a_host() -> None:
    rails = Topology({host: {"rail": ("r0", "r1", "r2", "r3")} for host in "abcdefgh"})
    text = said(slow({2, 6, 10, 14, 18, 22, 26, 30}), rails)
    assert text.startswith("all 8 ranks on rail r2 are in it")


def test_hosts_that_the_file_does_not_name_are_elsewhere_and_noted() -> None:
    known = Topology({host: own for host, own in leaves().hosts.items() if host != "d"})
    made = with_roll_ups(slow(set(range(8, 16))), known)
    assert "leaf" not in said(slow(set(range(8, 16))), known)
    assert any("does not name 1 of 8 hosts: d" in note for note in made.coverage.notes)


def test_without_a_file_nothing_changes() -> None:
    diagnosis = slow(set(range(8, 16)))
    assert with_roll_ups(diagnosis, None) is diagnosis


SLOW = slow(set(range(8, 16)))


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(["x", "y", "z"]), max_size=8))
def test_a_leaf_is_only_named_when_its_ranks_are_those_of_the_finding(leaf_of: dict[str, str]) -> None:
    text = said(SLOW, Topology({host: {"leaf": (leaf,)} for host, leaf in leaf_of.items()}))
    named = next((leaf for leaf in "xyz" if f"leaf {leaf} " in text), None)
    if named is not None:
        assert {host for host, leaf in leaf_of.items() if leaf == named} == {"c", "d"}


def test_a_file_is_read_from_toml_and_json_alike(tmp_path: Path) -> None:
    toml, as_json = tmp_path / "t.toml", tmp_path / "t.json"
    toml.write_text('[hosts.a]\nleaf = "l0"\nrail = ["r0", "r1"]\n')
    as_json.write_text(json.dumps({"hosts": {"a": {"leaf": "l0", "rail": ["r0", "r1"]}}}))
    assert read_topology(toml) == read_topology(as_json) == Topology({"a": {"leaf": ("l0",), "rail": ("r0", "r1")}})


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("hosts = 3", "names no host"),
        ("[", "neither TOML nor JSON"),
        ('[hosts.a]\ntorus = "t"', "leaf, rail, spine and nothing else"),
        ("[hosts.a]\nleaf = 3", "a list of names"),
        ('[hosts.a]\nleaf = ""', "a list of names"),
    ],
)
def test_a_file_that_is_no_topology_is_one_sentence(text: str, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=hint) as caught:
        read_topology(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_topology(tmp_path / "none.toml")


def test_ranks_that_a_ring_claims_are_read_within_reason() -> None:
    assert told_ranks("0-3,8") == (0, 1, 2, 3, 8)
    for senseless in ("", "0-4000000000", "0,1-99999999", "a-b", "9" * 5000):
        assert told_ranks(senseless) == ()
