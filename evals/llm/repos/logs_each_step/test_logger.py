import json

from logger import MetricsLogger


def test_a_line_per_call(tmp_path):
    logger = MetricsLogger(tmp_path / "m.jsonl")
    logger.log(1, loss=2.0)
    logger.log(2, loss=1.0)
    logger.close()
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
