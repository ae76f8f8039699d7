from replay import Replay


def test_old_records_go():
    replay = Replay(5, seed=0)
    replay.add_episode(9)
    assert [one["t"] for one in replay.records] == [4, 5, 6, 7, 8]
