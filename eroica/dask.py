"""Reads traces on a Dask cluster: a `concurrent.futures` executor over a scheduler that somebody else runs.

For traces that outgrow a machine, terabytes of them, where the workers stand near the files. Nothing of the analysis is
here: `offline` gives this executor the same task as a process of its own, a path in and some kilobytes out. So the
client holds summaries alone, however large the traces are; a worker holds as many traces at a time as it has threads,
each of up to two thirds of its file.

A cluster loses workers. Dask gives what a dead worker was reading to another one, a few times; a trace that cannot be
read after that fails alone, with one sentence, and so do all that are left when nobody is there to read them. Dask
carries its tasks by pickle: whoever reaches its scheduler can run code on its workers and here, so name only a cluster
that you trust. Used by `offline`.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from eroica import __version__
from eroica.errors import UnavailableError, UserError

if TYPE_CHECKING:
    from distributed import Client

P = ParamSpec("P")
T = TypeVar("T")

CONNECT_S = 15.0
"""For the scheduler to answer, at the start and when the connection was lost."""
LOOK_S = 2.0
"""Between looks whether anybody is left to read."""
ALONE_S = 30.0
"""Without any worker for so long, nobody will come: a nanny starts a dead worker anew within seconds, and a scheduler
of jobs (Slurm, Kubernetes), which takes longer, has brought workers before we begin."""
_FOREIGN = (ImportError, AttributeError, pickle.PickleError, EOFError)
"""What a task fails with where the worker has another eroica, numpy or Python than we."""


class DaskExecutor(Executor):
    """Tasks on the workers of one cluster. Futures fail with EroicaError where the cluster is to blame."""

    def __init__(self, client: Client, url: str) -> None:
        self._url = url
        self._client = client
        self._pool = client.get_executor(pure=False)
        self._lock = threading.Lock()
        """Of `_open`."""
        self._open: set[Future[Any]] = set()
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="eroica-dask", daemon=True)
        self._watcher.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Executor.submit`; `fn` is known to the workers by its name."""
        told: Future[T] = Future()
        told.set_running_or_notify_cancel()
        with self._lock:
            self._open.add(told)
        inner: Future[T] = self._pool.submit(fn, *args, **kwargs)
        inner.add_done_callback(lambda done: self._pass_on(done, told))
        return told

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Give up what is not done, and let go of the cluster."""
        self._is_over.set()
        self._watcher.join(2 * LOOK_S)
        with contextlib.suppress(Exception):  # the cluster may be gone, and we are leaving
            self._pool.shutdown(wait=False)

    def _pass_on(self, done: Future[Any], told: Future[Any]) -> None:
        if done.cancelled():
            self._end(told, UnavailableError(f"the Dask scheduler at {self._url} was lost"))
            return
        error = done.exception()
        if error is None:
            with self._lock:
                is_open = told in self._open
                self._open.discard(told)
            if is_open:
                told.set_result(done.result())
        else:
            self._end(told, self._translated(error))

    def _translated(self, error: BaseException) -> BaseException:
        from distributed.scheduler import KilledWorker

        if isinstance(error, KilledWorker):
            return UnavailableError(
                f"{error.allowed_failures + 1} workers of the Dask cluster died while they had it, the last at "
                f"{error.last_worker.address}, as they do when memory runs out; give workers more memory, or fewer "
                "threads each"
            )
        if isinstance(error, _FOREIGN):
            return UnavailableError(
                f"a worker of the Dask cluster could not run eroica {__version__} ({type(error).__name__}: {error}); "
                "install the same version of it and of numpy on all workers"
            )
        return error

    def _end(self, told: Future[Any], error: BaseException) -> None:
        with self._lock:
            is_open = told in self._open
            self._open.discard(told)
        if is_open:
            told.set_exception(error)

    def _watch(self) -> None:
        """Fail what is open when the scheduler is lost for good, or has had no worker for long."""
        alone_s = 0.0
        while not self._is_over.wait(LOOK_S):
            if self._client.status in ("closed", "closing"):
                self._fail_all(f"the Dask scheduler at {self._url} was lost")
                return
            try:
                num_workers = len(self._client.ncores())
            except Exception:  # whatever a lost connection makes of it; `status` tells more in the next round
                num_workers = 0
            alone_s = 0.0 if num_workers else alone_s + LOOK_S
            if alone_s >= ALONE_S:
                self._fail_all(f"the Dask cluster at {self._url} has had no worker for {ALONE_S:.0f} s")
                alone_s = 0.0

    def _fail_all(self, why: str) -> None:
        with self._lock:
            open_now = list(self._open)
        for told in open_now:
            self._end(told, UnavailableError(why))


@contextmanager
def dask_executor(url: str) -> Iterator[DaskExecutor]:
    """Connect for the block. Raises UserError without Dask here or with another eroica on the workers, UnavailableError
    if no scheduler answers or it has no worker."""
    try:
        from distributed import Client
    except ImportError:
        raise UserError("reading on a Dask cluster needs Dask here, too; pip install 'eroica[dask]'") from None
    with _silence():
        try:
            client = Client(url, timeout=CONNECT_S, set_as_default=False)
        except ValueError as error:
            raise UserError(f"{url} is no address of a Dask scheduler ({error}); write dask:tcp://HOST:8786") from None
        except (OSError, TimeoutError):
            raise UnavailableError(
                f"no Dask scheduler answers at {url}; start one with `dask scheduler`, and workers with `dask worker`"
            ) from None
        try:
            _check(client, url)
            with DaskExecutor(client, url) as executor:
                yield executor
        finally:
            with contextlib.suppress(Exception):  # as above
                client.close(timeout=LOOK_S)


def _check(client: Client, url: str) -> None:
    """Workers are there, and have this eroica: another one would give summaries of another form."""
    told: dict[str, object] = client.run(_installed, on_error="return")
    if not told:
        raise UnavailableError(f"the Dask scheduler at {url} has no worker; start some with `dask worker {url}`")
    for address, version in sorted(told.items()):
        if version != __version__:
            has = f"has eroica {version}" if isinstance(version, str) else f"cannot import eroica ({version})"
            raise UserError(f"the Dask worker at {address} {has}; install eroica {__version__} on all workers")


def _installed() -> str:
    """On a worker."""
    return __version__


@contextmanager
def _silence() -> Iterator[None]:
    """Dask's own words about lost workers and versions go unsaid: what matters comes as an error of a task."""
    logger = logging.getLogger("distributed")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
