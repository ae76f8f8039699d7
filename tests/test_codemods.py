"""Codemods: what each repairs, and the near misses that it must not touch.

`changed` gives the lines that a patch takes away and adds, and checks on the way what holds for all of them: the
outcome compiles, every other line is as it was, and the same codemod refuses to do it again.
"""

from __future__ import annotations

import ast
import difflib
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eroica.assist import codemods
from eroica.assist.change import Change, Lead, Place
from eroica.assist.reading import Code, Sources
from eroica.assist.rewriting import Rewrite

HEAD = """\
import gc
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Clips(Dataset):
    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file:
            return decode(file.read())


def main(paths):
    rank = dist.get_rank()
    data = Clips(paths)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = DDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """\
    for epoch in range(3):
        for step, (inputs, labels) in enumerate(loader):
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""
NOTHING: Mapping[str, object] = MappingProxyType({})


def program(inside: str = "", before: str = "", after: str = "", loop: str = LOOP, head: str = HEAD) -> str:
    """A training program with lines at the end of its loop, before and after it."""

    def indented(lines: str, depth: int) -> str:
        return "".join(" " * 4 * depth + line + "\n" if line else "\n" for line in lines.splitlines())

    return head + indented(before, 1) + loop + indented(inside, 3) + indented(after, 1)


def lead(source: str, cause: str, at: str, name: str = "", values: Mapping[str, object] = NOTHING) -> Lead:
    """A finding at the first line that holds `at`; "" = at none."""
    line = next((n for n, text in enumerate(source.splitlines(), 1) if at and at in text), None)
    assert line is not None or not at
    return Lead(cause, "all", name, (Place("train.py", line, ""),) if line else (), values)


def outcome(codemod: str, source: str, found: Lead) -> Change | str:
    """What one codemod makes of it: the change, or the reason against it."""
    chosen = next(one for one in codemods.fitting(found) if one.name == codemod)
    seen = chosen.propose(Sources({"train.py": source}), found)
    return seen if isinstance(seen, Change) else seen.reason


def changed(codemod: str, source: str, found: Lead) -> tuple[list[str], list[str]]:
    """Lines taken away and added, stripped."""
    seen = outcome(codemod, source, found)
    assert isinstance(seen, Change), seen
    ast.parse(seen.after)
    lines = [line for line in difflib.ndiff(source.splitlines(), seen.after.splitlines()) if line[0] in "+-"]
    gone = [line[2:].strip() for line in lines if line[0] == "-"]
    came = [line[2:].strip() for line in lines if line[0] == "+"]
    again = outcome(codemod, seen.after, found)
    assert isinstance(again, str), "applied twice is not once"
    return gone, came


def refused(codemod: str, source: str, found: Lead) -> str:
    seen = outcome(codemod, source, found)
    assert isinstance(seen, str), f"{codemod} touched a near miss"
    return seen


# ---- anomaly mode

ANOMALY = "torch.autograd.set_detect_anomaly(True)"


def test_anomaly_mode_is_taken_out_as_a_call_and_as_a_context() -> None:
    source = program(before="torch.autograd.set_detect_anomaly(True)")
    assert changed("anomaly mode", source, lead(source, "configuration", "anomaly", ANOMALY)) == ([ANOMALY], [])
    loop = LOOP.replace(
        "            loss.backward()\n",
        "            with torch.autograd.detect_anomaly(check_nan=True):\n                # the usual\n"
        "                loss.backward()\n",
    )
    source = program(loop=loop)
    gone, came = changed("anomaly mode", source, lead(source, "configuration", "detect_anomaly", ANOMALY))
    assert (gone[0], came) == (
        "with torch.autograd.detect_anomaly(check_nan=True):",
        ["# the usual", "loss.backward()"],
    )


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("torch.autograd.set_detect_anomaly(os.environ.get('DEBUG') == '1')", "switched by"),
        ("torch.autograd.set_detect_anomaly(False)", "no line"),
        ("if debug:\n    torch.autograd.set_detect_anomaly(True)", "under the condition `debug`"),
        ("torch.autograd.set_detect_anomaly(True)\nassert torch.is_anomaly_enabled()", "asks whether"),
        ("if not debug:\n    return\ntorch.autograd.set_detect_anomaly(True)", "under the condition `not debug`"),
        (
            "def look():\n    torch.autograd.set_detect_anomaly(True)\nif debug:\n    look()",
            "under the condition `debug`",
        ),
        ("guard = torch.autograd.set_detect_anomaly(True)", "uses the result"),
        (
            "torch.autograd.set_detect_anomaly(True)\ntry:\n    loss.backward()\nexcept RuntimeError:\n    skip()",
            "catches errors",
        ),
    ],
)
def test_anomaly_mode_that_somebody_asked_for_stays(before: str, reason: str) -> None:
    source = program(before=before)
    found = lead(source, "configuration", "" if "False" in before else "set_detect_anomaly", ANOMALY)
    assert re.search(reason, refused("anomaly mode", source, found))


# ---- no_sync

ROUNDS = "gradient reduction on each of 4 micro-steps, without no_sync()"
ACCUMULATING = """\
    for step, (inputs, labels) in enumerate(loader):
        loss = criterion(model(inputs), labels) / 4
        loss.backward()
        if (step + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
NESTED = """\
    for batch in loader:
        optimizer.zero_grad()
        for micro in range(4):
            loss = criterion(model(batch[micro]), 0)
            loss.backward()
        optimizer.step()
"""


def test_micro_steps_reduce_gradients_in_the_last_one_only() -> None:
    source = program(loop=ACCUMULATING)
    gone, came = changed("no_sync", source, lead(source, "configuration", "", ROUNDS))
    assert came == [
        "import contextlib",
        "with contextlib.nullcontext() if (step + 1) % 4 == 0 else model.no_sync():",
        "loss = criterion(model(inputs), labels) / 4",
        "loss.backward()",
    ]
    assert gone == came[2:]
    source = program(loop=NESTED)
    _, came = changed("no_sync", source, lead(source, "configuration", "", ROUNDS))
    assert came[1] == "with contextlib.nullcontext() if micro == 4 - 1 else model.no_sync():"


def test_micro_steps_of_a_sharded_model_are_told_by_its_own_switch() -> None:
    head = HEAD.replace("    model = DDP(nn.Linear(4, 4))\n", "    model = nn.Linear(4, 4)\n    fully_shard(model)\n")
    head = head.replace("import gc\n", "import gc\nfrom torch.distributed.fsdp import fully_shard\n")
    source = program(loop=ACCUMULATING, head=head)
    assert changed("no_sync", source, lead(source, "configuration", "", ROUNDS)) == (
        [],
        ["model.set_requires_gradient_sync((step + 1) % 4 == 0)"],
    )


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("        if (step", "        nn.utils.clip_grad_norm_(weights, 1)\n        if (step", "looks at gradients"),
        ("        if (step", "        log(model.module.weight.grad)\n        if (step", "looks at gradients"),
        ("        loss = ", "        optimizer.zero_grad()\n        loss = ", "nothing is accumulated"),
        ("if (step + 1) % 4 == 0", "if loss.item() < 1.0 and step % 4", "no condition on the number"),
        ("if (step + 1) % 4 == 0", "if (step + rank) % 4 == 0", "differs from rank to rank"),
        ("        loss.backward()\n", "        loss.backward()\n        step = step + 1\n", "changes after"),
        ("        if (step", "        optimizer.step()\n        if (step", "steps after each backward"),
        ("        loss.backward()\n", "        loss.backward()\n        (loss * 2).backward()\n", "several backward"),
        ("        loss.backward()\n", "        with model.no_sync():\n            loss.backward()\n", "already"),
        ("model(inputs)", "other(inputs)", "no model of"),
    ],
)  # fmt: skip
def test_accumulation_that_needs_each_reduction_stays(old: str, new: str, reason: str) -> None:
    assert old in ACCUMULATING
    source = program(loop=ACCUMULATING.replace(old, new, 1))
    assert re.search(reason, refused("no_sync", source, lead(source, "configuration", "", ROUNDS)))


# ---- loaders


def test_a_loader_gets_workers_that_live_on_over_epochs() -> None:
    source = program()
    gone, came = changed("worker processes", source, lead(source, "input_pipeline", "return decode"))
    assert gone == ["loader = DataLoader(data, batch_size=8, shuffle=True)"]
    assert came == ["loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True)"]
    source = source.replace("batch_size=8", "batch_size=8, num_workers=0")
    found = replace(lead(source, "input_pipeline", "return decode"), share=0.7, cores_per_rank=8.0)
    assert "num_workers=4" in changed("worker processes", source, found)[1][0]


def test_a_number_of_workers_that_others_use_too_is_changed_for_the_loader_alone() -> None:
    source = program(before="NUM = 0", after="test(NUM)").replace("batch_size=8", "batch_size=8, num_workers=NUM")
    source = source.replace("    NUM = 0\n", "").replace("import gc\n", "import gc\nNUM = 0\n")
    gone, came = changed("worker processes", source, lead(source, "input_pipeline", "return decode"))
    assert "num_workers=NUM" in gone[0]
    assert "num_workers=2" in came[0]
    source = source.replace("test(NUM)", "")
    assert changed("worker processes", source, lead(source, "input_pipeline", "return decode"))[1][0] == "NUM = 2"


def test_crowded_cores_give_a_loader_workers_only_where_its_data_set_is_named() -> None:
    source = program()
    assert changed("worker processes", source, lead(source, "cpu_contention", "def __getitem__"))[1]
    assert "not about the data set" in refused("worker processes", source, lead(source, "cpu_contention", "def main"))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("Clips(Dataset)", "Clips(IterableDataset)", "iterable"),
        ("batch_size=8", "batch_size=8, num_workers=6", "has 6 workers already"),
        ("batch_size=8", "batch_size=8, num_workers=options.workers", "options.workers"),
        ("batch_size=8", "batch_size=8, **options", "no DataLoader whose arguments are seen"),
        ("return decode(file.read())", "self.cache[index] = file.read()\n            return 1", "own state"),
        ("return decode(file.read())", "self.seen.append(index)\n            return 1", "own state"),
        ("            return decode(file.read())", "            return decode(file.read()).to('cuda')", "device"),
        ("            return decode(file.read())", "            return decode(file.read()).cuda()", "device"),
        ("self.paths = paths", "self.paths = open(paths)", "must not share"),
        ("self.paths = paths", "self.paths = paths\n        self.draw = random.Random(0)", "must not share"),
        ("            return decode(file.read())", "            return next(self.stream)", "own state"),
        ("self.paths = paths", "self.paths = sqlite3.connect(paths)", "must not share"),
        ("batch_size=8", "batch_size=8, collate_fn=lambda batch: batch", "lambda"),
        ("data = Clips(paths)", "data = load_dataset(paths)", "not in the repository"),
        ("class Clips(Dataset)", "main_loop()\n\n\nclass Clips(Dataset)", "when it is imported"),
    ],
)  # fmt: skip
def test_a_data_set_that_processes_cannot_share_gets_no_workers(old: str, new: str, reason: str) -> None:
    source = program().replace(old, new, 1)
    assert source != program()
    at = "class Clips" if "return decode" not in source else "return decode"
    assert re.search(reason, refused("worker processes", source, lead(source, "input_pipeline", at)))


def test_workers_are_kept_over_epochs_unless_the_data_set_changes_between_them() -> None:
    source = program().replace("batch_size=8", "batch_size=8, num_workers=4")
    found = lead(source, "input_pipeline", "return decode")
    assert changed("persistent workers", source, found)[1][0].endswith(
        "num_workers=4, shuffle=True, persistent_workers=True)"
    )
    for old, new, reason in [
        ("        for step,", "        data.set_epoch(epoch)\n        for step,", "changes the data set"),
        ("        for step,", "        data.scale = epoch\n        for step,", "changes the data set"),
        ("        for step,", "        loader.dataset.shuffle(epoch)\n        for step,", "changes the data set"),
        ("num_workers=4", "num_workers=4, persistent_workers=True", "keeps its workers already"),
        ("    for epoch in range(3):\n        for", "    if True:\n        for", "not run again"),
        ("num_workers=4", "num_workers=count", "not seen"),
    ]:
        near = source.replace(old, new, 1)
        assert near != source
        assert re.search(reason, refused("persistent workers", near, found)), new


def test_batches_are_pinned_where_they_are_copied_to_a_device() -> None:
    source = program().replace("            loss = ", '            inputs = inputs.to("cuda")\n            loss = ')
    found = lead(source, "host_device_copy", "inputs.to")
    gone, came = changed("pinned memory", source, found)
    assert came == [
        "loader = DataLoader(data, batch_size=8, shuffle=True, pin_memory=True)",
        'inputs = inputs.to("cuda", non_blocking=True)',
    ]
    assert len(gone) == 2
    for old, new, reason in [
        ('"cuda"', '"cpu"', "no copy"),
        ("batch_size=8", "batch_size=8, pin_memory=True", "already"),
        ("inputs.to(", "weights.to(", "no copy"),
    ]:
        assert re.search(reason, refused("pinned memory", source.replace(old, new), found))


# ---- reports


def test_what_only_reports_is_done_every_some_steps() -> None:
    source = program("print(step, loss.item())")
    assert changed("seldom reports", source, lead(source, "host_python", "print(")) == (
        ["print(step, loss.item())"],
        ["if step % 50 == 0:", "print(step, loss.item())"],
    )
    source = program(
        'if rank == 0:\n    value = loss.item()\n    log.write(f"{value}\\n")\n    log.flush()\n'
        "    os.fsync(log.fileno())"
    )
    assert changed("seldom reports", source, lead(source, "host_python", "os.fsync")) == (
        ["if rank == 0:"],
        ["if rank == 0 and step % 50 == 0:"],
    )
    head = HEAD.replace(
        "def main",
        "def tell(step, loss):\n    with open('log', 'a') as file:\n        file.write(f'{step} {loss}')\n"
        "        file.flush()\n\n\ndef main",
    )
    source = program("tell(step, loss.item())", head=head)
    assert changed("seldom reports", source, lead(source, "host_python", "file.flush"))[1][0] == "if step % 50 == 0:"


def test_a_function_that_a_profile_names_stands_for_the_statements_of_its_loop() -> None:
    source = program(
        "if rank == 0:\n    print(loss.item(), flush=True)\n    time.sleep(0.01)\nif step % 100 == 0:\n    print(step)"
    )
    found = lead(source, "host_python", "def main")
    assert changed("seldom reports", source, found) == (["if rank == 0:"], ["if rank == 0 and step % 50 == 0:"])
    source = program("print(loss.item())\nlabels = labels + 1\nprint(labels.sum())")
    found = lead(source, "host_python", "def main")
    assert "2 statements would fit" in refused("seldom reports", source, found)


def test_values_that_are_made_for_a_report_alone_go_with_it() -> None:
    source = program(
        "norm = 0.0\nfor weight in model.parameters():\n    norm += weight.grad.norm().item() ** 2\n"
        "print(step, norm ** 0.5)"
    )
    gone, came = changed("seldom reports", source, lead(source, "host_python", "norm +="))
    assert came == ["if step % 50 == 0:", *gone]
    assert len(gone) == 4
    source = source.replace("print(step, norm", "stop = norm > 9\n            print(step, norm") + "    return stop\n"
    assert "not only reported" in refused("seldom reports", source, lead(source, "host_python", "norm +="))


def test_what_goes_on_from_step_to_step_is_worked_out_in_each_and_shown_every_some_steps() -> None:
    source = program("seen += len(inputs)\nprint(step, seen)", before="seen = 0")
    assert changed("seldom reports", source, lead(source, "host_python", "print(step, seen")) == (
        ["print(step, seen)"],
        ["if step % 50 == 0:", "print(step, seen)"],
    )


CALLBACKS = """\
class Callback:
    def on_step_end(self, step, model):
        pass


class Tell(Callback):
    def on_step_end(self, step, model):
        print(step, sorted(model.weight.flatten().tolist()), file=self.stream)


def main"""


def test_a_callback_that_only_tells_returns_in_most_steps_where_the_loop_that_calls_it_is_named() -> None:
    inside = "for callback in callbacks:\n    callback.on_step_end(step, model)"
    source = program(inside, head=HEAD.replace("def main", CALLBACKS))
    for at in ("def main", "callback.on_step_end", "print(step, sorted"):
        gone, came = changed("seldom reports", source, lead(source, "unknown", at))
        assert (gone, came) == ([], ["if step % 50:", "return"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("print(step, sorted", "self.seen.append(sorted"),
        ("on_step_end(self, step, model)", "on_step_end(self, step=None, model=None)"),
        ("        pass", "        self.steps += 1"),
        ("callback.on_step_end(step, model)", "callback.on_step_end(model=model)"),
        ("            loss.backward()", "            loss.backward()\n            final.on_step_end(step, model)"),
        ("    callback.on_step_end", "    if step % 100 == 0: callback.on_step_end"),
        (
            "    def on_step_end(self, step, model):\n        print",
            "    def on_step_end(self, at, model):\n        print",
        ),
    ],
)
def test_a_callback_that_does_more_or_is_called_otherwise_too_is_called_as_before(old: str, new: str) -> None:
    inside = "for callback in callbacks:\n    callback.on_step_end(step, model)"
    source = program(inside, head=HEAD.replace("def main", CALLBACKS))
    assert old in source
    source = source.replace(old, new)
    if "step=None" in new:
        source = source.replace("callback.on_step_end(step, model)", "callback.on_step_end()")
    refused("seldom reports", source, lead(source, "unknown", "def main"))


def test_a_counter_with_a_stride_counts_no_steps() -> None:
    loop = LOOP.replace("step, (inputs, labels) in enumerate(loader)", "at in range(1, 999, 2)")
    source = program("print(loss.item())", loop=loop)
    came = changed("seldom reports", source, lead(source, "device_sync", "print("))[1]
    assert came[0] == "for step, at in enumerate(range(1, 999, 2)):"


def test_a_loop_without_a_counter_gets_one() -> None:
    source = program(
        "print(loss.item())",
        loop=LOOP.replace("step, (inputs, labels) in enumerate(loader)", "inputs, labels in loader"),
    )
    assert changed("seldom reports", source, lead(source, "device_sync", "print("))[1][0] == (
        "for step, (inputs, labels) in enumerate(loader):"
    )


@pytest.mark.parametrize(
    ("inside", "at", "reason"),
    [
        ("if step % 100 == 0:\n    print(loss.item())", "print(", "already"),
        ("if loss.item() > 10:\n    print('diverged')", "print(", "seldom already"),
        ("is_time = step % 100 == 0\nif is_time:\n    print(loss.item())", "print(", "already"),
        ("history.append(loss.item())", "append", "more than report"),
        ("value = loss.item()\nif value > 10:\n    break", "loss.item()", "not only reported"),
        ("logger.warning('%s', loss.item())", "warning", "more than report"),
        ("print(next(stream))", "print(", "more than report"),
        ("if rank == 0:\n    value = loss.item()\nstop(value)", "value =", "not only reported"),
        ("if rank == 0:\n    value = loss.item()\n    print(value)\nstop(value)", "if rank == 0", "used elsewhere"),
        ("total += loss.item()\nprint(total)", "total +=", "in the next step"),
        ("if rank == 0:\n    best = min(best, loss.item())\n    print(best)", "if rank == 0", "in the next step"),
        ("save(step, loss.item())", "save(", "more than report"),
    ],
)
def test_what_decides_or_is_seldom_already_is_reported_as_before(inside: str, at: str, reason: str) -> None:
    source = program(inside)
    assert re.search(reason, refused("seldom reports", source, lead(source, "host_python", at)))


def test_sums_and_lists_stay_on_the_device_until_they_are_read() -> None:
    source = program(
        "total += loss.item() * 8\nif step % 100 == 0:\n    print(f'{total:.3f}')\n    total = 0.0",
        before="total = 0.0",
        after="return total",
    )
    assert changed("read back later", source, lead(source, "device_sync", "total +=")) == (
        ["total += loss.item() * 8"],
        ["total += loss.detach().double() * 8", "total = float(total)", "total = float(total)"],
    )
    source = program("history.append(float(loss))", before="history = []", after="return history")
    assert changed("read back later", source, lead(source, "device_sync", "history.append")) == (
        ["history.append(float(loss))"],
        ["history.append(loss.detach().clone())", "history[:] = [float(value) for value in history]"],
    )
    source = program("value = loss.item()\nif step % 10 == 0:\n    print(value)")
    assert changed("read back later", source, lead(source, "device_sync", "value =")) == (
        ["value = loss.item()"],
        ["value = loss.detach().clone()", "value = float(value)"],
    )


def test_what_a_loss_is_divided_by_is_no_tensor() -> None:
    source = program(
        "total += float(rounds) * loss.item()",
        before="rounds = options.rounds\ntotal = 0.0",
        after="return total",
        loop=LOOP.replace("loss.backward()", "(loss / rounds).backward()"),
    )
    came = changed("read back later", source, lead(source, "device_sync", "total +="))[1]
    assert came[0] == "total += float(rounds) * loss.detach().double()"


@pytest.mark.parametrize(
    ("begins", "counted", "kept", "settled"),
    [
        ("0", "(guess == labels).sum()", ".detach().long()", "total = int(total)"),
        ("0", "guess.eq(labels).sum()", ".detach().long()", "total = int(total)"),
        ("0.0", "(guess == labels).sum()", ".detach().double()", "total = float(total)"),
        ("0", "(guess == labels).float().mean()", ".detach().double()", "total = float(total)"),
        ("0", "loss", ".detach().double()", "total = float(total)"),
    ],
)
def test_a_sum_of_whole_numbers_stays_a_whole_number(begins: str, counted: str, kept: str, settled: str) -> None:
    source = program(
        f"guess = model(inputs).argmax(dim=1)\ntotal += {counted}.item()",
        before=f"total = {begins}",
        after='print(f"{total:d}")',
    )
    assert changed("read back later", source, lead(source, "device_sync", "total +=")) == (
        [f"total += {counted}.item()"],
        [f"total += {counted}{kept}", settled],
    )


@pytest.mark.parametrize(
    ("inside", "before", "reason"),
    [
        ("value = (inputs.argmax() == 1).sum().item()\nif step % 9 == 0:\n    print(value)", "pass", "whole number"),
        ("total += (inputs.argmax() == 1).sum().item() * 8", "total = 0", "whole number"),
        ("history.append(inputs.argmax().item())", "history = []", "whole number"),
        ("value = loss.item()\nif value > 3:\n    break", "pass", "read in each step"),
        ("value = loss.item()\nscheduler.step(value)", "pass", "read in each step"),
        ("self.value = loss.item()", "pass", "others may read"),
        ("totals['loss'] += loss.item()", "totals = {}", "others may read"),
        ("history.append(loss.item())", "history = given", "made empty"),
        ("total += labels.item()", "total = 0", "no tensor"),
        ("if loss.item() > 3:\n    break", "pass", "no tensor is read back into"),
        ("total += loss.item()\nbar.set_postfix(total=total)", "total = 0", "read in each step"),
        ("total += loss.item()", "total = 0\ndef tell():\n    print(total)", "a function inside"),
        ("total += loss.item()", "total = torch.zeros(1)", "not known for a number"),
        ("value = loss.item()", "value = None", "not known for a number"),
        ("total += meter.update(loss.item())", "total = 0.0", "passed on"),
    ],
)
def test_a_value_that_the_step_needs_is_read_back_in_it(inside: str, before: str, reason: str) -> None:
    source = program(inside, before=before, after="print(total, history, value)")
    assert re.search(reason, refused("read back later", source, lead(source, "device_sync", ".item()")))


def test_a_bare_wait_for_the_device_goes() -> None:
    source = program("torch.cuda.synchronize()")
    found = lead(source, "device_sync", "synchronize")
    assert changed("no wait for the device", source, found) == (["torch.cuda.synchronize()"], [])
    source = program("if torch.cuda.is_available():\n    torch.cuda.synchronize()")
    found = lead(source, "device_sync", "synchronize")
    assert changed("no wait for the device", source, found)[1] == []


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        ("torch.cuda.synchronize()\ntook = time.perf_counter() - began", "takes the time"),
        ("host = loss.to('cpu', non_blocking=True)\ntorch.cuda.synchronize()", "without waiting"),
        ("with torch.cuda.stream(side):\n    pass\ntorch.cuda.synchronize()\ntorch.cuda.Stream()", "streams"),
        ("if step % 100 == 0:\n    torch.cuda.synchronize()", "not in each step"),
        ("dist.barrier()", "no bare wait"),
    ],
)
def test_a_wait_that_orders_something_stays(inside: str, reason: str) -> None:
    source = program(inside)
    at = "barrier" if "barrier" in inside else "cuda.synchronize"
    assert re.search(reason, refused("no wait for the device", source, lead(source, "device_sync", at)))


# ---- garbage collection


def test_collections_come_at_the_same_steps_on_all_ranks() -> None:
    source = program("if step % 8 == rank:\n    gc.collect()")
    assert changed("aligned collection", source, lead(source, "host_gc", "gc.collect")) == (
        ["if step % 8 == rank:"],
        ["if step % 8 == 0:"],
    )
    head = HEAD.replace(
        "def main", "def tidy(step, rank):\n    if step % 8 == rank:\n        gc.collect()\n\n\ndef main"
    )
    source = program("tidy(step, rank)", head=head)
    assert changed("aligned collection", source, lead(source, "host_gc", "gc.collect")) == (
        ["if step % 8 == rank:"],
        ["if step % 8 == 0:"],
    )
    source = program("gc.collect()")
    assert changed("aligned collection", source, lead(source, "host_gc", ""))[1] == [
        "if step % 50 == 0:",
        "gc.collect()",
    ]
    source = program()
    assert changed("aligned collection", source, lead(source, "host_gc", "")) == (
        [],
        ["gc.collect()", "gc.freeze()", "gc.disable()", "if step % 50 == 0:", "gc.collect()"],
    )


@pytest.mark.parametrize(
    ("inside", "before", "reason"),
    [
        ("if step % 100 == 0:\n    gc.collect()", "", "same steps on all ranks already"),
        ("if step % 8 == rank:\n    gc.collect()\n    evaluate()", "", "decides more"),
        ("if draw.random() < 0.1:\n    gc.collect()", "", "does something itself"),
        ("", "gc.disable()", "steers the collector already"),
        ("freed = gc.collect()", "", "uses what"),
        ("gc.collect(0)", "", "young generation"),
    ],
)
def test_a_collector_that_is_steered_is_left_alone(inside: str, before: str, reason: str) -> None:
    source = program(inside, before=before)
    assert re.search(reason, refused("aligned collection", source, lead(source, "host_gc", "")))


# ---- threads, unused parameters

CROWDED = {"threads": 24, "ranks": 4, "cores": 8.0}


def test_threads_are_shared_out_where_the_repository_sets_them() -> None:
    for before, name, expected in [
        ("torch.set_num_threads(24)", "torch.set_num_threads(24)", "torch.set_num_threads(2)"),
        ('os.environ["OMP_NUM_THREADS"] = "24"', "OMP_NUM_THREADS=24", 'os.environ["OMP_NUM_THREADS"] = "2"'),
        ('start(env={"OMP_NUM_THREADS": "24"})', "OMP_NUM_THREADS=24", 'start(env={"OMP_NUM_THREADS": "2"})'),
    ]:
        source = program(before=before)
        found = lead(source, "configuration", "", name, CROWDED)
        assert changed("threads", source, found) == ([before], [expected])
    source = program(before="NUM = 24\ntorch.set_num_threads(NUM)\nread(NUM)")
    found = lead(source, "configuration", "", "torch.set_num_threads(24)", CROWDED)
    assert changed("threads", source, found) == (["torch.set_num_threads(NUM)"], ["torch.set_num_threads(2)"])
    script = "#!/bin/sh\n# OMP_NUM_THREADS=24 was fast\nexport OMP_NUM_THREADS=24\ntorchrun train.py\n"
    found = lead("x", "configuration", "", "OMP_NUM_THREADS=24", CROWDED)
    seen = codemods.propose(Sources({"run.sh": script, "train.py": program()}), found)
    assert isinstance(seen, tuple)
    assert seen[1].after == script.replace("export OMP_NUM_THREADS=24", "export OMP_NUM_THREADS=2")


def test_threads_that_somebody_else_sets_are_left_alone() -> None:
    for before, name, values, reason in [
        ("", "OMP_NUM_THREADS=24", CROWDED, "launcher or the shell"),
        ("torch.set_num_threads(24)\ntorch.set_num_threads(24)", "torch.set_num_threads(24)", CROWDED, "2 places"),
        ("torch.set_num_threads(options.threads)", "torch.set_num_threads(24)", CROWDED, "not this one"),
        ("torch.set_num_threads(24)", "torch.set_num_threads(24)", {}, "does not tell"),
    ]:
        source = program(before=before)
        assert re.search(reason, refused("threads", source, lead(source, "configuration", "", name, values)))


UNUSED = "ddp.1.find_unused_parameters=True: the graph is walked"
NET = """\
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layer = nn.Linear(width, width)

    def forward(self, inputs):
        return inputs + self.layer(self.norm(inputs))


class Net(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(depth))
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(8, 2))

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def main():
    model = DistributedDataParallel(Net(3), find_unused_parameters=True)
    return model
"""


def test_unused_parameters_are_looked_for_no_more_where_all_are_used() -> None:
    assert changed("unused parameters", NET, lead(NET, "configuration", "", UNUSED)) == (
        ["model = DistributedDataParallel(Net(3), find_unused_parameters=True)"],
        ["model = DistributedDataParallel(Net(3))"],
    )


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("inputs = block(inputs)", "if inputs.mean() > 0:\n                inputs = block(inputs)", "decides"),
        ("        return self.head(inputs)", "        return inputs", "does not use head"),
        ("        return self.head(inputs)", "        return self.head(inputs), inputs", "several results"),
        ("return self.head(inputs)", "self.head(inputs)\n        return inputs", "does not use a result"),
        ("return self.head(inputs)", "if inputs:\n            return inputs\n        return self.head(inputs)", "ways"),
        ("for block in self.blocks:", "for block in self.blocks[:2]:", "chooses"),
        ("nn.ReLU(), nn.Linear(8, 2)", "nn.ReLU(), timm.create_model('x')", "not known to use all"),
        ("find_unused_parameters=True", "find_unused_parameters=options.unused", "options.unused"),
        ("    return model\n", "    model.module.head.requires_grad_(False)\n    return model\n", "freezes"),
        ("return self.head(inputs)", "pair = inputs, self.head(inputs)\n        return pair", "several results"),
        ("for block in self.blocks:", "for block, _ in zip(self.blocks, inputs):", "fewer modules"),
        ("Block(nn.Module)", "Block(Base)", "inherits"),
    ],
)  # fmt: skip
def test_a_model_that_may_leave_parameters_out_keeps_the_flag(old: str, new: str, reason: str) -> None:
    near = NET.replace(old, new, 1)
    assert near != NET
    assert re.search(reason, refused("unused parameters", near, lead(near, "configuration", "", UNUSED)))


# ---- saves, collectives


def test_checkpoints_are_written_behind_the_training() -> None:
    source = program("if rank == 0 and step % 20 == 0:\n    torch.save(model.state_dict(), f'{step}.pt')")
    gone, came = changed("saves behind training", source, lead(source, "checkpoint_io", "torch.save"))
    assert gone == ["torch.save(model.state_dict(), f'{step}.pt')"]
    assert "_save_behind(torch.save, model.state_dict(), f'{step}.pt')" in came
    assert came.count("_finish_saves()") == 2
    seen = outcome("saves behind training", source, lead(source, "checkpoint_io", "torch.save"))
    assert isinstance(seen, Change)
    assert seen.after.rstrip().endswith("\n    _finish_saves()")


def test_a_function_that_only_writes_is_handed_over_whole() -> None:
    head = HEAD.replace(
        "def main",
        "def write(state, path):\n    time.sleep(0.5)\n    torch.save(state, path + '.new')\n"
        "    os.replace(path + '.new', path)\n\n\ndef main",
    )
    source = program("if rank == 0:\n    write({'model': model.state_dict(), 'step': step}, f'{step}.pt')", head=head)
    gone, came = changed("saves behind training", source, lead(source, "checkpoint_io", "time.sleep"))
    assert gone == ["write({'model': model.state_dict(), 'step': step}, f'{step}.pt')"]
    assert "_save_behind(write, {'model': model.state_dict(), 'step': step}, f'{step}.pt')" in came
    asks = source.replace("torch.save(state, path + '.new')", "torch.save(state.state_dict(), path + '.new')")
    asks = asks.replace("write({'model': model.state_dict(), 'step': step}", "write(model.module")
    seen = outcome("saves behind training", asks, lead(asks, "checkpoint_io", "time.sleep"))
    assert isinstance(seen, Change)
    assert "_save_behind(write, _Taken(model.module), f'{step}.pt')" in seen.after and "class _Taken" in seen.after
    near = asks.replace("os.replace(path", "print(state)\n    os.replace(path")
    assert "copy of states" in refused("saves behind training", near, lead(near, "checkpoint_io", "time.sleep"))
    near = source.replace("write({'model': model.state_dict(), 'step': step}", "write(model")
    assert "copy of states" in refused("saves behind training", near, lead(near, "checkpoint_io", "time.sleep"))
    near = source.replace("    time.sleep(0.5)\n", "    global last\n")
    assert "cannot be told" in refused("saves behind training", near, lead(near, "checkpoint_io", "torch.save"))


@pytest.mark.parametrize(
    ("writer", "call", "reason"),
    [
        ("def write(path, /, of):\n    torch.save(of.state_dict(), path)", "write('a', model)", ""),
        ("def write(of, path):\n    torch.save(of.state_dict(prefix='net.'), path)", "write(model, 'a')", "copy of"),
        ("def write(of, path):\n    torch.save([of.state_dict(), (lambda: of)], path)", "write(model, 'a')", "copy of"),
        (
            "net = None\n\n\ndef write(state, path):\n    torch.save([state, net.state_dict()], path)",
            "write(optimizer.state_dict(), 'a')",
            "no torch.save",
        ),
    ],
)
def test_what_a_function_asks_for_is_taken_before_training_goes_on(writer: str, call: str, reason: str) -> None:
    source = program(call, head=HEAD.replace("def main", f"{writer}\n\n\ndef main"))
    found = lead(source, "checkpoint_io", call)
    if reason:
        assert re.search(reason, refused("saves behind training", source, found))
    else:
        assert "_save_behind(write, 'a', _Taken(model))" in changed("saves behind training", source, found)[1]


def test_what_cannot_be_copied_is_written_at_once() -> None:
    source = program("torch.save({'model': model.state_dict(), 'loss': loss}, step)")
    seen = outcome("saves behind training", source, lead(source, "checkpoint_io", "torch.save"))
    assert isinstance(seen, Change)
    helper = seen.after[seen.after.index("_writer =") : seen.after.index("class Clips")]
    names: dict[str, object] = {}
    exec("import copy, concurrent.futures\n" + helper, names)
    save, lock, written = names["_save_behind"], threading.Lock(), list[object]()
    assert callable(save)
    save(lambda state, path: written.append(state["loss"]), {"loss": lock}, 1)
    assert written == [lock], "as a tensor that was computed, which torch does not copy"


def test_saves_written_behind_the_training_are_copies_in_order_and_raise_their_errors() -> None:
    source = program("torch.save({'model': model.state_dict(), 'step': step}, step)")
    seen = outcome("saves behind training", source, lead(source, "checkpoint_io", "torch.save"))
    assert isinstance(seen, Change)
    tree = ast.parse(seen.after)
    tree.body = [
        one
        for one in tree.body
        if (isinstance(one, ast.Import) and one.names[0].name in ("copy", "concurrent.futures"))
        or (isinstance(one, (ast.Assign, ast.AnnAssign)) and ast.unparse(one)[0] == "_")
        or (isinstance(one, ast.FunctionDef) and one.name in ("_save_behind", "_finish_saves"))
    ]
    written: list[tuple[object, object]] = []

    class Torch:
        @staticmethod
        def save(state: object, path: object) -> None:
            if path == 2:
                raise OSError("disk full")
            written.append((state, path))

    names: dict[str, object] = {"torch": Torch}
    exec(compile(tree, "saves", "exec"), names)
    save, finish = names["_save_behind"], names["_finish_saves"]
    assert callable(save) and callable(finish)
    state = {"weight": [1]}
    save(Torch.save, state, 1)
    state["weight"][0] = 5
    save(Torch.save, state, 2)
    with pytest.raises(OSError, match="disk full"):
        finish()
    finish()
    assert written == [({"weight": [1]}, 1)]


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        ("torch.save(model.state_dict(), 'a')\nos.replace('a', 'b')", "may need the file"),
        ("torch.save(model.state_dict(), 'a')\ndist.barrier()", "may need the file"),
        ("torch.save(model, 'a')", "cannot be told"),
        ("torch.save(model.state_dict(), 'a')\ntorch.save(optimizer.state_dict(), 'b')", "2 places"),
        ("torch.save(model.state_dict(), 'a')\nif step > 9:\n    return", "may return|may need"),
        ("buffer = io.BytesIO()\ntorch.save(model.state_dict(), buffer)", "into memory"),
        ("torch.save(model.state_dict(), 'a')\nglobal _writer", "a _writer of its own"),
    ],
)
def test_a_file_that_is_needed_at_once_is_written_at_once(inside: str, reason: str) -> None:
    source = program(inside)
    source = source.replace("            global _writer\n", "\n\n_writer = open_board()\n")
    found = lead(source, "checkpoint_io", "" if "2 places" in reason else "torch.save")
    assert re.search(reason, refused("saves behind training", source, found))


def test_all_ranks_come_to_a_collective_that_one_rank_came_to() -> None:
    source = program("if rank == 0:\n    write(loss)\n    dist.barrier()")
    found = lead(source, "collective_mismatch", "optimizer.step()")
    gone, came = changed("collective of all ranks", source, found)
    assert (gone, came) == (["dist.barrier()"], ["dist.barrier()"])
    source = program("if rank == 0:\n    mean = loss.detach().clone()\n    dist.all_reduce(mean)\n    print(mean)")
    seen = outcome("collective of all ranks", source, found)
    assert isinstance(seen, Change)
    lines = [line.strip() for line in seen.after.splitlines()]
    assert lines[lines.index("dist.all_reduce(mean)") + 1 :][:2] == ["if rank == 0:", "print(mean)"]
    source = program(
        "if step % 10 == 0 and rank == 0:\n    mean = loss.detach().clone()\n    dist.all_reduce(mean)\n    print(mean)"
    )
    seen = outcome("collective of all ranks", source, found)
    assert isinstance(seen, Change)
    assert "            if step % 10 == 0:\n                mean = loss" in seen.after
    near = source.replace("step % 10 == 0", "loss < 3")
    assert "may differ between ranks" in refused("collective of all ranks", near, found)
    head = HEAD.replace(
        "def main",
        "def average(value):\n    total = value.detach().clone()\n    dist.all_reduce(total)\n    return total\n\n\n"
        "def main",
    )
    source = program("if rank == 0:\n    mean = average(loss)\n    print(mean)", head=head)
    found = lead(source, "collective_mismatch", "mean = average")
    assert changed("collective of all ranks", source, found) == (["mean = average(loss)"], ["mean = average(loss)"])


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        ("if rank == 0:\n    dist.all_reduce(loss, group=leaders)", "for a group"),
        ("if rank == 0:\n    dist.barrier(leaders)", "for a group"),
        ("if rank == 0:\n    dist.broadcast(loss, 0)\nelse:\n    dist.broadcast(other, 0)", "has an else"),
        ("if rank != 0:\n    dist.barrier()\nprepare()\nif rank == 0:\n    dist.barrier()", "counterpart"),
        ("if rank == 0:\n    dist.send(loss, 1)\nif rank == 1:\n    dist.recv(loss, 0)", "no collective of all ranks"),
        ("if dist.is_initialized():\n    dist.all_reduce(loss)", "no collective of all ranks"),
        ("if rank == 0:\n    mean = read_back()\n    dist.all_reduce(mean)", "calls read_back"),
        ("if rank == 0:\n    gathered = []\n    dist.gather(loss, gathered)", "other arguments"),
        ("if rank == 0:\n    if step > 3:\n        return\n    dist.barrier()", "may leave"),
        ("if rank == 0:\n    mean = loss\n    dist.all_reduce(mean)\nif step:\n    print(mean)", "used elsewhere"),
    ],
)
def test_a_call_that_some_ranks_alone_may_make_stays(inside: str, reason: str) -> None:
    source = program(inside)
    found = lead(source, "collective_mismatch", "optimizer.step()")
    assert re.search(reason, refused("collective of all ranks", source, found))


# ---- for all of them


def test_files_of_tests_are_never_patched_and_no_python_is_no_program() -> None:
    source = program(before="torch.autograd.set_detect_anomaly(True)")
    found = Lead("configuration", "all", ANOMALY)
    for path in ("tests/train.py", "test_train.py", "notes.txt"):
        assert isinstance(codemods.propose(Sources({path: source, "bad.py": "def ("}), found), list)


def test_line_ends_tabs_and_odd_characters_stay_as_they_are() -> None:
    source = program(before="torch.autograd.set_detect_anomaly(True)\nname = 'Zürich'  # é\tend")
    for odd in (source.replace("\n", "\r\n"), source.replace("    ", "\t")):
        seen = outcome("anomaly mode", odd, lead(odd, "configuration", "anomaly", ANOMALY))
        assert isinstance(seen, Change)
        kept = [line for line in odd.splitlines(keepends=True) if "anomaly" not in line]
        assert seen.after == "".join(kept)
    paged = program("x = 1\nif rank == 0:\n    print(loss.item())").replace("class Clips", "\f\nclass Clips")
    line = next(n for n, text in enumerate(paged.split("\n"), 1) if "print(" in text)
    found = Lead("host_python", "rank", "", (Place("train.py", line, ""),))
    seen = outcome("seldom reports", paged, found)
    assert isinstance(seen, Change)
    assert seen.after == paged.replace("if rank == 0:", "if rank == 0 and step % 50 == 0:")


_STATEMENTS = st.sampled_from(
    [
        "x = 1",
        "# a comment",
        "",
        "call(a, b)  # why",
        "text = '''two\n  lines'''",
        "y = [\n    1,\n\n    2,\n]",
        "del z",
        "pass",
    ]
)


@given(st.lists(_STATEMENTS, max_size=6), st.lists(_STATEMENTS, max_size=6))
def test_a_wrapped_statement_changes_no_other_line(above: list[str], below: list[str]) -> None:
    before, after = "\n".join([*above, ""]), "\n".join(["", *below, ""])
    source = f"{before}mark()\n{after}"
    code = Code("x.py", source)
    target = next(n for n in code.tree.body if isinstance(n, ast.Expr) and ast.unparse(n) == "mark()")
    rewrite = Rewrite(code)
    rewrite.wrap([target], "if step % 5 == 0:")
    assert rewrite.text() == f"{before}if step % 5 == 0:\n    mark()\n{after}"
    rewrite = Rewrite(code)
    rewrite.remove(target)
    assert ast.unparse(ast.parse(rewrite.text())) == ast.unparse(ast.parse(source.replace("mark()\n", "", 1)))
