"""What one rank is doing at the moment it is looked at, in a word: by its stack where there is one, else its ring.

Pure. A rank either waits for somebody (a call of a group, a message, its loader, a lock, a queue), stands in a phase
that takes its time, leaves, is gone, or does its own work. The innermost frames decide: a user's line on top is own
work, whatever collective may still be in flight behind it. Used by `hang`; who is waited for is `waiting`'s question.

Wrong where a C extension waits under a line that does not say so (".wait(", ".item(", ...): that reads as own work.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from eroica.locking import holder
from eroica.standing import Call, Frame, RankView, Thread, last_calls, user_frame

WAITING = ("call", "message", "rendezvous")
"""Doings that other ranks can end."""
PHASES = ("save", "load", "evaluation", "compile")

_COLLECTIVES = re.compile(
    r"(all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|barrier|gather|scatter|reduce|send|recv|isend|irecv|"
    r"monitored_barrier|wait|synchronize|batch_isend_irecv|_object|_verify_param|_sync_(module|params|buffers))"
)
_DISTRIBUTED = re.compile(r"/torch/distributed/(?!elastic|checkpoint|run|launch)")
_WAITING_LINE = re.compile(
    r"\.(wait|wait_stream|result|value|item|cpu|tolist|numpy|synchronize|wait_tensor)\(|\bwait\("
)
_DEVICE_WAIT = re.compile(r"/torch/(cuda|xpu|npu|hpu|mps|accelerator)/|/torch_\w+/")
_DEVICE_WAITS = ("synchronize", "wait_stream", "wait_event", "wait")
"""What waits for a device, and so for the calls that are under way on it."""
_MESSAGE_LINE = re.compile(r"\b(i?send|i?recv)\b")
_LOADER = re.compile(r"/torch/utils/data/|/torchdata/")
_LOADER_WAIT = ("_try_get_data", "_get_data", "_next_data")
_QUEUE = re.compile(
    r"/(queue|threading|selectors|multiprocessing/(queues|connection|popen_fork|process)|subprocess)\.py$"
)
_LEAVING = ("destroy_process_group", "_exit_function", "_shutdown", "_run_exitfuncs", "_shutdown_workers")
_RENDEZVOUS_FUNCTIONS = (
    "rendezvous",
    "_store_based_barrier",
    "init_process_group",
    "_new_process_group_helper",
    "split_group",
)
_SAVING = re.compile(r"/torch/(serialization|distributed/checkpoint/.*)\.py$|/safetensors/")
_SAVING_FUNCTIONS = re.compile(r"^(async_)?save($|_)|^_?(legacy_)?save$|write_data|save_checkpoint")
_USERS_SAVING = re.compile(
    r"^_*(async_)?sav(e|ing)($|_)|(^|_)(write|dump|store|persist|export)s?_\w*(checkpoint|ckpt|snapshot|weights|state)"
    r"|(^|_)(checkpoint|ckpt)$"
)
"""Names that people give to what saves by other means than torch's own: plain files, numpy, an object store."""
_LOADING_FUNCTIONS = re.compile(r"^_?load($|_)|read_data")
_EVALUATION = re.compile(
    r"^_?(evaluate|evaluation|validate|validation|eval|valid|run_eval\w*|eval_\w+|evaluation_loop)$"
)
"""Names by which people call it; whoever calls it otherwise has the probe's record of the phase, or neither."""
_COMPILER = re.compile(
    r"/torch/(_dynamo/(convert_frame|symbolic_convert|output_graph)|_inductor/.*|_functorch/aot.*)\.py$|/triton/compiler/"
)


_SOCKET = re.compile(
    r"/(socket|ssl|smtplib|ftplib|imaplib)\.py$|/(http|urllib|xmlrpc)/|"
    r"/site-packages/(urllib3|requests|httpx|httpcore|aiohttp|grpc|websockets?|botocore)/"
)
_SOCKET_LINE = re.compile(r"\.(recv|recv_into|recvfrom|recvmsg|connect|accept)\(|\b(create_connection|getaddrinfo)\(")


@dataclass(frozen=True, slots=True)
class Doing:
    """What a rank does."""

    what: str
    """died, exception, stopped, traced, ended, leaving, save, load, evaluation, compile, rendezvous, call, message,
    loader, lock, queue, own, unknown."""
    call: Call | None = None
    """The call that it waits in, for `call` and `message`."""
    frame: Frame | None = None
    """The user's line that it stands in."""
    by: str = "ring"
    """stack, ring, phase, process or note: what tells so."""


def doing(view: RankView) -> Doing:
    """See the module."""
    main = view.main
    frame = user_frame(main)
    if view.state in ("stopped", "traced", "died", "ended"):
        call = failed_call(view) if view.exception else waiting_call(view)
        return Doing("exception" if view.exception else view.state, call, frame, "process")
    if view.exception:
        return Doing("exception", failed_call(view), frame, "note")
    if view.phase in PHASES and not _waits_in_call(view, main):
        return Doing(view.phase, None, frame, "phase")
    if main is not None and main.frames:
        return _by_stack(view, main, frame)
    if view.is_leaving or view.phase == "teardown":
        return Doing("leaving", None, None, "note")
    if view.phase == "rendezvous":
        return Doing("rendezvous", None, None, "phase")
    return _by_ring(view)


def asks_outside(main: Thread | None) -> bool:
    """The driving thread stands in a connection to something that is no rank: in a library that speaks to servers, or
    in a line of the user's that does."""
    for frame in main.frames if main is not None else ():
        if frame.is_users:
            return bool(_SOCKET_LINE.search(frame.source))
        if _DISTRIBUTED.search(frame.file):
            return False
        if _SOCKET.search(frame.file):
            return True
    return False


def waiting_call(view: RankView) -> Call | None:
    """The call that it is in by its ring: the earliest that is not over, else the latest whose end cannot be seen.

    On a device many calls are in flight, and which of them is stuck the ring does not tell: the latest is as far as the
    rank has come.
    """
    if not view.is_recording:
        return None
    inside = [call for call in view.calls if call.status == "in"]
    if inside:
        return max(inside, key=lambda call: call.for_s)
    latest = min(view.calls, key=lambda call: call.for_s, default=None)
    return latest if latest is not None and latest.status == "unseen" else None


def failed_call(view: RankView) -> Call | None:
    """The call whose failure was the last thing that it did on any group: what an error of communication came from."""
    latest = min(view.calls, key=lambda call: call.for_s, default=None) if view.is_recording else None
    return latest if latest is not None and latest.status in ("failed", "in") else None


def _waits_in_call(view: RankView, main: Thread | None) -> bool:
    """A phase such as an evaluation may hold collectives of its own; in one of them it is a rank that waits."""
    if main is None or not main.frames:
        return any(call.status == "in" for call in view.calls)
    return _by_stack(view, main, None).what in ("call", "message")


def _by_stack(view: RankView, main: Thread, frame: Frame | None) -> Doing:
    if main.waits_for:
        owner = holder(view, main.waits_for, main)
        if owner is not None and not owner.waits_for and _communicates(owner):
            # Another thread holds the lock while it waits for other ranks: so does this one, then.
            return _in_call(view, user_frame(owner), owner.frames[0].function) or Doing("lock", None, frame, "stack")
        return Doing("lock", None, frame, "stack")
    top = main.frames[0]
    if top.is_users:
        if _WAITING_LINE.search(top.source):
            return _in_call(view, frame, top.source) or Doing("own", None, frame, "stack")
        return _around(view, main) or Doing("own", None, frame, "stack")
    for inner in main.frames:
        if inner.is_users:
            break
        if inner.function.rpartition(".")[2] in _LEAVING or inner.file.endswith("/eroica/probe/recorder.py"):
            return Doing("leaving", None, frame, "stack")
        if inner.function.rpartition(".")[2] in _RENDEZVOUS_FUNCTIONS:
            return Doing("rendezvous", None, frame, "stack")
        if _LOADER.search(inner.file) and inner.function.rpartition(".")[2] in _LOADER_WAIT and _is_queue(main.frames):
            return Doing("loader", None, frame, "stack")
        if _SAVING.search(inner.file):
            name = inner.function.rpartition(".")[2]
            if _SAVING_FUNCTIONS.search(name):
                return Doing("save", None, frame, "stack")
            if _LOADING_FUNCTIONS.search(name):
                return Doing("load", None, frame, "stack")
        if _COMPILER.search(inner.file):
            return Doing("compile", None, frame, "stack")
        if _DEVICE_WAIT.search(inner.file) and inner.function.rpartition(".")[2] in _DEVICE_WAITS:
            found = _in_call(view, frame, inner.function)
            if found is not None:
                return found
        if inner.function.endswith("_engine_run_backward") or (
            _DISTRIBUTED.search(inner.file) and _COLLECTIVES.search(inner.function)
        ):
            found = _in_call(view, frame, inner.function)
            if found is not None:
                return found
    if _is_queue(main.frames):
        return _around(view, main) or Doing("queue", None, frame, "stack")
    return _around(view, main) or Doing("own", None, frame, "stack")


def _communicates(thread: Thread) -> bool:
    top = thread.frames[0] if thread.frames else None
    return top is not None and bool(_DISTRIBUTED.search(top.file) and _COLLECTIVES.search(top.function))


def _around(view: RankView, main: Thread) -> Doing | None:
    """A phase further out: saving goes through the user's own code, too, and so does leaving."""
    for outer in main.frames:
        name = outer.function.rpartition(".")[2]
        if _EVALUATION.search(name):
            return Doing("evaluation", None, user_frame(main), "stack")
        if outer.is_users:
            if _USERS_SAVING.search(name):
                return Doing("save", None, user_frame(main), "stack")
            continue
        if name in _LEAVING:
            return Doing("leaving", None, user_frame(main), "stack")
        if _SAVING.search(outer.file) and _SAVING_FUNCTIONS.search(name):
            return Doing("save", None, user_frame(main), "stack")
        if _COMPILER.search(outer.file):
            return Doing("compile", None, user_frame(main), "stack")
    return None


def _in_call(view: RankView, frame: Frame | None, line: str) -> Doing | None:
    call = waiting_call(view)
    message = _last_message(view)
    if message is not None and _MESSAGE_LINE.search(f"{line} {frame.source if frame is not None else ''}"):
        return Doing("message", message, frame, "stack")
    if call is not None and call.is_message:
        return Doing("message", call, frame, "stack")
    if call is not None:
        return Doing("call", call, frame, "stack")
    return None


def _last_message(view: RankView) -> Call | None:
    messages = [call for call in last_calls(view).values() if call.is_message] if view.is_recording else []
    return min(messages, key=lambda call: call.for_s, default=None)


def _is_queue(frames: tuple[Frame, ...]) -> bool:
    return bool(_QUEUE.search(frames[0].file))


def _by_ring(view: RankView) -> Doing:
    if not view.is_recording:
        return Doing("unknown")
    call = waiting_call(view)
    if call is not None:
        return Doing("message" if call.is_message else "call", call, None, "ring")
    if any(span.kind == "next" for span in view.open):
        return Doing("loader", None, None, "ring")
    return Doing("own", None, None, "ring")
