"""The offline job: a folder of traces in, a diagnosis out.

Finds the files, reads and summarizes each rank on its own (memory does not grow with the number of ranks), then
stacks, localizes and diagnoses the summaries. Any `concurrent.futures` executor can do the reading, since a task gets
a path and returns a few kilobytes; processes here are the default, a Dask cluster is the other (`engine`). Used by the
CLI, the demo and the MCP server. A rank whose file cannot be used is reported as missing with the reason; only when no
file can be used does the job fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread

from eroica import __version__
from eroica.context import Context
from eroica.diagnosis import diagnose_in_detail
from eroica.errors import DataError, EroicaError, UnavailableError, UserError
from eroica.findings import Detail, Diagnosis
from eroica.job import format_ranks
from eroica.pattern import Stacked, Summary, stack, summarize
from eroica.topology import Topology, with_roll_ups
from eroica.trace import TraceFile, find_traces, read_timeline, read_trace

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""
DASK = "dask:"
Progress = Callable[[int, int, str], None]
"""Called with (done, total, what was read)."""


def _quiet(done: int, total: int, what: str) -> None:
    pass


@cache
def keep_freed_memory() -> None:
    """Let glibc reuse large arrays instead of mapping each one afresh: page faults were 40 % of the time on 1 GB traces
    (bench). Another C library simply has no mallopt."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(parameter, 1 << 30)


def summarize_file(path: str, ranks: Sequence[int]) -> list[Summary] | str:
    """Summaries of a file's ranks, or why there are none; runs in a worker process."""
    try:
        if not Path(path).exists():  # it was found a moment ago, by whoever sent us here
            return f"{path}: {socket.gethostname()} does not see it; put traces where all who read them see them"
        if Path(path).suffix == ".parquet":
            wanted = set(ranks)
            return [summarize(trace) for trace in read_timeline(path) if trace.rank in wanted]
        return [summarize(read_trace(path, rank=ranks[0]))]
    except (DataError, UserError, OSError) as error:
        return str(error)
    except MemoryError:
        return f"{path}: there is not enough memory to read it"


@contextmanager
def _processes(jobs: int, tasks: int) -> Iterator[Executor | None]:
    """Worker processes, or None where starting them costs more than it gains."""
    if jobs < 2 or tasks < 2:
        yield None
        return
    others = set(active_children())
    # Spawned, not forked: the caller may hold threads (a server, a progress display).
    with ProcessPoolExecutor(min(jobs, tasks), get_context("spawn"), initializer=_prepare_worker) as executor:
        try:
            yield executor
        except BaseException:
            # Nobody will take the results; without this, Ctrl-C would wait until all files are read. The executor gives
            # up what is pending when it sees its processes end.
            for process in set(active_children()) - others:
                process.terminate()
            raise


@contextmanager
def engine(name: str) -> Iterator[Executor | None]:
    """What is to read, by the name that `--engine` has for it: None = processes here ("local"), else "dask:URL"."""
    if not name.startswith(DASK):
        yield None
        return
    from eroica.dask import dask_executor

    with dask_executor(name.removeprefix(DASK)) as executor:
        yield executor


def _prepare_worker() -> None:
    """In a process of our own; a worker of somebody else's cluster keeps its allocator as it is."""
    keep_freed_memory()
    _end_with_parent()


def _end_with_parent() -> None:
    """In a worker: leave when whoever started it is gone; a killed parent tells its workers nothing."""

    def watch() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started meanwhile never see Ctrl-C, which a terminal sends to all of them: their parent ends them, and
    prints one sentence instead of a traceback of each."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stack_paths(
    paths: Sequence[str | Path], *, jobs: int = 1, progress: Progress = _quiet, executor: Executor | None = None
) -> tuple[Stacked, tuple[str, ...]]:
    """Summaries of all ranks behind `paths`, stacked, and notes on what could not be used.

    Raises UserError if no trace is found or ranks clash, DataError if none of the files can be used.
    """
    found = find_traces(paths)
    notes = list(found.notes)
    if found.ignored:
        shown = ", ".join(f"{Path(path).name} ({why})" for path, why in found.ignored[:5])
        notes.append(
            f"{len(found.ignored)} file{'s' if len(found.ignored) > 1 else ''} left out: {shown}"
            f"{', ...' if len(found.ignored) > 5 else ''}"
        )
    by_path: dict[str, list[TraceFile]] = {}
    for file in found.files:
        by_path.setdefault(file.path, []).append(file)
    summaries: list[Summary] = []
    failures: list[str] = []

    def take(path: str, result: list[Summary] | str, done: int) -> None:
        if isinstance(result, str):
            failures.append(f"rank {format_ranks(f.rank for f in by_path[path])} could not be read: {result}")
        else:
            summaries.extend(result)
        progress(done, len(by_path), path)

    with _processes(jobs if executor is None else 1, len(by_path)) as own:
        pool = executor or own
        if pool is None:
            keep_freed_memory()
            for done, (path, files) in enumerate(by_path.items(), start=1):
                take(path, summarize_file(path, [f.rank for f in files]), done)
        else:
            with _interrupts_held():
                # Whoever reads may have another working directory.
                pending = {
                    pool.submit(summarize_file, os.path.abspath(path), [f.rank for f in files]): path
                    for path, files in by_path.items()
                }
            for done, future in enumerate(as_completed(pending), start=1):
                try:
                    result = future.result()
                except BrokenExecutor:
                    # Which file it was is not known: all that were pending fail alike.
                    raise UnavailableError(
                        "a process that reads traces was killed, as the system does when memory runs out; try again "
                        "with a smaller --jobs"
                    ) from None
                except UnavailableError as error:  # a cluster has lost this file, and may yet read the others
                    result = str(error)
                take(pending[future], result, done)
    failures.sort()
    if failures and not summaries:
        raise DataError(
            failures[0].partition(" could not be read: ")[2]
            if len(failures) == 1
            else f"none of the {len(by_path)} traces could be read; first: {failures[0]}"
        )
    return _with_world(stack(summaries), found.world_size), (*notes, *failures)


def _with_world(stacked: Stacked, world_size: int | None) -> Stacked:
    return replace(stacked, world_size=max(stacked.world_size, world_size or 0))


def diagnose_paths(
    paths: Sequence[str | Path],
    *,
    job: str = "",
    baseline_paths: Sequence[str | Path] = (),
    jobs: int = 1,
    progress: Progress = _quiet,
    executor: Executor | None = None,
    topology: Topology | None = None,
) -> tuple[Diagnosis, Detail]:
    """Read, summarize, stack, localize, diagnose: what `eroica diagnose` does.

    `baseline_paths`: traces of the same job when it was healthy. `executor` takes the place of `jobs` processes of its
    own. `topology`: where hosts stand in the network. Raises EroicaError with one sentence for people.
    """
    stacked, notes = stack_paths(paths, jobs=jobs, progress=progress, executor=executor)
    baseline = None
    if baseline_paths:
        try:
            baseline, _ = stack_paths(baseline_paths, jobs=jobs, progress=progress, executor=executor)
        except EroicaError as error:
            raise type(error)(f"baseline: {error}") from None
    created = datetime.now(UTC).isoformat(timespec="seconds")
    context = Context(job=job, created=created, version=__version__, baseline=baseline, notes=notes)
    diagnosis, detail = diagnose_in_detail(stacked, context)
    return with_roll_ups(diagnosis, topology), detail
