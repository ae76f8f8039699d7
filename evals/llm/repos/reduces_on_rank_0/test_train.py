import train


def test_it_can_be_imported():
    assert callable(train.log_mean_loss)
