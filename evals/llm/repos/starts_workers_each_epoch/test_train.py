import train


def test_it_can_be_imported():
    assert callable(train.main)
