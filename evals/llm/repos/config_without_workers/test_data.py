from data import Recordings


def test_length():
    data = Recordings(3)
    assert len(data) == 3
    assert data[1][0].shape == (400,)
