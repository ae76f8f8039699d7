"""What the environment of ranks says."""

from __future__ import annotations

from eroica.changes import changes, holders, of_versions, sentence

ODD = {"name": "env.X", "usual": "null", "odd": [{"value": '"1"', "ranks": "2-3"}]}


def test_a_setting_is_found_on_all_ranks_or_on_those_that_have_it() -> None:
    environment = {"common": {"torch.cudnn.benchmark": True}, "differences": [ODD]}
    assert list(holders(environment, "torch.cudnn.benchmark")) == [("true", None)]
    assert list(holders(environment, "env.X")) == [("", None), ("1", frozenset({2, 3}))]
    assert list(holders(environment, "env.Y")) == []


def test_an_environment_of_another_form_tells_nothing() -> None:
    broken = {"name": "env.X", "usual": "{", "odd": [{"ranks": "2-x"}, 7]}
    for environment in ({}, {"common": 3, "differences": "env.X"}, {"differences": [3, {"name": "env.X", "odd": 1}]}):
        assert list(holders(environment, "env.X")) == []
    assert list(holders({"differences": [broken]}, "env.X")) == [("{", None)]
    assert changes({}, {"common": {"torch": "2.7"}}) == ()


def test_versions_are_told_apart_from_other_settings_that_changed() -> None:
    before = {"common": {"torch": "2.6.0", "nccl": "2.21", "env.NCCL_ALGO": "Ring", "device": "A"}}
    after = {"common": {"torch": "2.7.1", "nccl": "2.21", "torch.threads": 8}}
    found = changes(before, after)
    assert [change.name for change in found] == ["env.NCCL_ALGO", "torch"], "what one side lacks may be unread"
    assert sentence(of_versions(found)) == "torch 2.6.0 -> 2.7.1"
    assert str(found[0]) == "env.NCCL_ALGO Ring -> not set"
