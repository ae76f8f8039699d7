import io

from torch import nn

from callbacks import PrintWeights


def test_a_line_for_each_parameter():
    stream = io.StringIO()
    PrintWeights(stream).on_step_end(0, nn.Linear(2, 2), None)
    assert len(stream.getvalue().splitlines()) == 2
