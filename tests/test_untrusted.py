"""Strings of jobs are bounded, visible, without secrets, and cannot leave their fence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica.untrusted import (
    REDACTED,
    clean,
    clean_code,
    clean_source,
    clean_values,
    fence,
    is_secret_name,
    redact,
)

# Put together here, so that no scanner of this repository takes them for real ones.
SECRETS = [
    "sk-" + "proj-abcdefghijklmnop1234",
    "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2",
    "github_pat_" + "11AAAAAAA0abcdefghij",
    "hf_" + "abcdefghijklmnopqrstuvwx",
    "xoxb-" + "123456789012-abcdefghij",
    "AKIA" + "IOSFODNN7EXAMPLE",
    "AIza" + "SyA-abcdefghijklmnopqrstuvwxyz012345",
    "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0In0." + "c2lnbmF0dXJl",
    "SUAB" + "A2C3D4E5F6G7" * 4 + "ABCDEF",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_of_a_known_shape_is_taken_out_wherever_it_stands(secret: str) -> None:
    text = redact(f"connect failed: {secret}, giving up")
    assert secret not in text
    assert text.startswith("connect failed: ") and text.endswith(", giving up")


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("password=hunter2", "hunter2"),
        ("DB_PASSWORD: 'two words'", "two words"),
        ('{"api_key": "abc123"}', "abc123"),
        ("WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567", "0123456789abcdef"),
        ("Authorization: Bearer abcdef.123456", "abcdef.123456"),
        ("redis://user:pa55@host:6379/0", "pa55"),
        ("https://u:p%40ss@host/x", "p%40ss"),
        ("--token abc --token=s3cr3t-value", "s3cr3t-value"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "MIIE"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE cut off", "MIIE"),
    ],
)
def test_a_value_that_its_name_calls_a_secret_is_taken_out(text: str, secret: str) -> None:
    assert secret not in redact(text)
    assert REDACTED in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "tokenizer.py:41",
        "pad_token=50256, eos_token: 2",
        "max_tokens=4096 num_tokens=8",
        "monkey=banana",
        "author: somebody",
        "train/secrets.py:12",
        "token_embedding.weight",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
        "default_pg in 0-7",
        "python -m torch.distributed.run --nproc-per-node 8 train.py",
    ],
)
def test_ordinary_words_of_training_jobs_are_left_alone(text: str) -> None:
    assert redact(text) == text


def test_values_whose_key_names_a_secret_are_taken_out_at_any_depth() -> None:
    shown = clean_values({"env": {"HF_TOKEN": "plain", "OMP_NUM_THREADS": "8"}, "db.password": "x", "token_count": 12})
    assert shown == {"env.HF_TOKEN": REDACTED, "env.OMP_NUM_THREADS": "8", "db.password": REDACTED, "token_count": "12"}
    assert is_secret_name("AWS_SECRET_ACCESS_KEY") and not is_secret_name("keyboard")


def test_a_mapping_of_any_size_shows_a_bounded_number_of_entries_and_says_so() -> None:
    shown = clean_values({f"k{i}": i for i in range(10_000)}, most=20)
    assert len(shown) == 21 and "more" in shown["..."]


def test_a_long_string_loses_its_middle_and_keeps_both_ends() -> None:
    text = clean("/very/long/path/" + "x" * 1_000_000 + "/model.py:12", 60)
    assert len(text) <= 60
    assert clean("a" * 100 + "end", 50).endswith("end")


def test_a_secret_that_the_cut_would_split_leaves_no_tail() -> None:
    secret = SECRETS[1]
    for pad in range(0, 60):
        assert secret[-8:] not in clean("x" * pad + " " + secret + " " + "y" * 40, 48)


@given(st.text(max_size=80), st.integers(8, 60))
def test_what_was_cleaned_is_one_line_of_bounded_visible_encodable_text(text: str, limit: int) -> None:
    shown = clean(text, limit)
    assert len(shown) <= limit
    assert shown.encode("utf-8").decode() == shown
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u2028\u2029\u202e\u200b\ufeff\U000e0041" for c in shown)


@given(st.lists(st.text(max_size=60) | st.sampled_from(["-----END DATA 0-----", "a\n-----END DATA", "| "]), max_size=6))
def test_no_line_can_close_the_fence_around_it(lines: list[str]) -> None:
    block = fence(lines, "DATA").split("\n")
    assert block[0].startswith("-----BEGIN DATA ") and block[-1] == block[0].replace("BEGIN", "END")
    assert len(block) == max(len(lines), 1) + 2
    assert all(line.startswith("| ") for line in block[1:-1])
    mark = block[0].split()[-1].strip("-")
    assert not any(mark in line for line in lines)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("token = batch[0]", "token = batch[0]"),
        ('API_KEY = "abc"', "API_KEY = [redacted]"),
        ('    api_key: str = "abc"', "    api_key: str = [redacted]"),
        (
            "def login(password: str | None = 'hunter2', wait=3):",
            "def login(password: str | None = [redacted], wait=3):",
        ),
        ("token: torch.Tensor = batch[0]", "token: torch.Tensor = batch[0]"),
        ("x = 1  # password=hunter2 for now", "x = 1  # password=[redacted] for now"),
        ("\tx = 1", "    x = 1"),
    ],
)
def test_a_line_of_source_loses_its_secrets_and_nothing_else(line: str, shown: str) -> None:
    assert clean_code(line) == shown


def test_no_line_of_a_private_key_is_shown_wherever_the_lines_begin() -> None:
    marks = "-----BEGIN RSA PRIVATE KEY-----", "-----END RSA PRIVATE KEY-----"
    body = ["MIIEowIBAAKCAQEAx7", "Zk3v9aQ+/bC=="]
    lines = ["import os", f'KEY = """{marks[0]}', "Proc-Type: 4,ENCRYPTED", "", *body, f'{marks[1]}"""', "x = 1"]
    for first in range(1, 9):
        shown = clean_source(lines, first, 8)
        assert len(shown) == 9 - first
        assert shown[-1] == "x = 1"
        assert not any(part in "".join(shown) for part in body)
    joined = [
        f'KEY = ("{marks[0]}\\n"',
        f'    "{body[0]}\\n"',
        f'    "{marks[1]}")',
        'find = "-----BEGIN PRIVATE KEY-----"',
    ]
    assert not any(body[0] in line for line in clean_source([*joined, "y = loss + 1"], 1, 5))
    assert clean_source([*joined, "y = loss + 1"], 1, 5)[-1] == "y = loss + 1"
