from trainer import TrainingArguments


def test_defaults():
    args = TrainingArguments()
    assert args.gradient_accumulation_steps > 1
