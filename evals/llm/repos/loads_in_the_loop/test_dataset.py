from dataset import Scans


def test_a_sample_is_the_same_each_time():
    scans = Scans(4, latency=0)
    assert len(scans) == 4
    assert (scans[2][0] == scans[2][0]).all()
