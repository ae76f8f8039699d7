"""A running coordinator as a source, and the windows that may be asked of it.

What it has told is fetched over its HTTP API (`eroica.client`): the newest incidents in one request, each diagnosis
once, since it never changes. A list is good for a second, so that many calls at once are one request: a coordinator
lets a token ask some twenty times a second. Whether a problem was seen before goes by its fingerprint, as the
coordinator tells problems apart, and what people confirmed stands beside it.

`Windows` remembers what was asked for which job, so that a client that asks again, because its call had timed out, gets
the window that is under way and not a second one.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from eroica.answers import Incident, Job, Window
from eroica.client import Client
from eroica.errors import DataError, EroicaError, UserError
from eroica.findings import Detail, Diagnosis, FunctionName, from_json
from eroica.wording import seconds
from mcp_server.sources import Seen

MOST_DIAGNOSES = 40
"""Newest diagnoses that are fetched for lists; an older one is fetched when its id is named."""
MOST_HISTORY = 400
PAGE = 50
FRESH_S = 1.0
MOST_KEPT = 200
MOST_DETAILS = 4
"""The numbers of a large job take megabytes."""


class CoordinatorSource:
    """See the module, and `Source`."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self.what = f"the coordinator at {client.url}"
        self.windows = Windows(client)
        self.client = self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._listed: tuple[float, list[Incident] | EroicaError] | None = None
        self._diagnoses: OrderedDict[str, Diagnosis] = OrderedDict()
        self._details: OrderedDict[str, Detail | None] = OrderedDict()

    def diagnoses(self) -> list[Diagnosis]:
        """See `Source`: the newest ones."""
        return [self._fetched(one.id) for one in self._newest()[:MOST_DIAGNOSES]]

    def one(self, id: str) -> Diagnosis | None:
        """See `Source`."""
        if any(one.id == id for one in self._newest()):
            return self._fetched(id)
        try:
            return self._fetched(id)
        except UserError:  # there is none, or this is no id
            return None

    def detail(self, id: str) -> Detail | None:
        """See `Source`."""
        with self._lock:
            if id in self._details:
                self._details.move_to_end(id)
                return self._details[id]
        try:
            found = detail_from(self._client.detail(id))
        except UserError:  # a hang has none, and they may be too many to be kept
            found = None
        with self._lock:
            self._details[id] = found
            while len(self._details) > MOST_DETAILS:
                self._details.popitem(last=False)
        return found

    def incidents(self) -> list[Seen]:
        """See `Source`."""
        listed = self._newest()
        while listed and len(listed) % PAGE == 0 and len(listed) < MOST_HISTORY:
            page = self._client.incidents(cursor=listed[-1].number, limit=PAGE)
            listed = [*listed, *page.incidents]
            if page.next is None:
                break
        return [_seen(one) for one in listed]

    def jobs(self) -> Mapping[str, Sequence[str]]:
        """See `Source`: where they stand now."""
        return {job.name: _standing(job) for job in self._client.jobs()}

    def version(self) -> str:
        """See `Source`."""
        return ",".join(f"{one.number}:{one.confirmed}" for one in self._newest()[:PAGE])

    def _newest(self) -> list[Incident]:
        with self._asking:  # one asks, the others take its answer, also if there is none
            if self._listed is None or self._clock() - self._listed[0] > FRESH_S:
                answer: list[Incident] | EroicaError
                try:
                    answer = self._client.incidents(limit=PAGE).incidents
                except EroicaError as error:
                    answer = error
                self._listed = self._clock(), answer
            answer = self._listed[1]
        if isinstance(answer, EroicaError):
            raise type(answer)(str(answer))
        return answer

    def _fetched(self, id: str) -> Diagnosis:
        with self._lock:
            known = self._diagnoses.get(id)
        if known is None:
            known = replace(from_json(self._client.incident(id)), id=id)
            with self._lock:
                self._diagnoses[id] = known
                while len(self._diagnoses) > MOST_KEPT:
                    self._diagnoses.popitem(last=False)
        return known


class Windows:
    """What was asked for of which job."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._keys: dict[str, str] = {}
        """By job: of the request that is under way, also if its answer was lost."""
        self._ids: dict[str, str] = {}

    def is_under_way(self, job: str) -> bool:
        """A window was asked for and is not over, which is looked up: nobody may have asked how it ended. Raises
        EroicaError."""
        with self._lock:
            if job not in self._keys:
                return False
            if job not in self._ids:
                return True  # its answer was lost
        try:
            window = self.look(job)
        except UserError:  # nobody knows of it any more
            with self._lock:
                self._keys.pop(job, None)
            return False
        return window is not None and not window.is_over

    def start(self, job: str) -> Window:
        """Have all ranks captured now: the window that is under way, or a new one. Raises EroicaError."""
        with self._lock:
            key = self._keys.get(job)
            if key is None:
                key = self._keys[job] = secrets.token_hex(8)
                self._ids.pop(job, None)
        try:
            window = self._client.start_window(job, key)
            if window.is_over:  # of the request before; this one is another
                with self._lock:
                    key = self._keys[job] = secrets.token_hex(8)
                    self._ids.pop(job, None)
                window = self._client.start_window(job, key)
        except UserError:  # it was refused, and nothing is under way
            with self._lock:
                self._keys.pop(job, None)
            raise
        self._keep(job, window)
        return window

    def look(self, job: str) -> Window | None:
        """What has become of the window that was asked for last; None if none was. Raises EroicaError."""
        id = self._ids.get(job)
        if id is None:
            return None
        window = self._client.window(job, id)
        self._keep(job, window)
        return window

    def cancel(self, job: str) -> Window | None:
        """Leave it. Raises EroicaError."""
        id = self._ids.get(job)
        if id is None:
            return None
        window = self._client.cancel_window(job, id)
        self._keep(job, window)
        return window

    def _keep(self, job: str, window: Window) -> None:
        with self._lock:
            self._ids[job] = window.id
            if window.is_over:
                self._keys.pop(job, None)


def _seen(one: Incident) -> Seen:
    confirmed = f"{one.confirmed.cause}: {one.confirmed.note}" if one.confirmed is not None else ""
    return Seen(
        id=one.id,
        created=one.created,
        job=one.job,
        kind=one.kind,
        cause=one.cause,
        ranks=one.ranks,
        summary=one.summary,
        place=one.fingerprint,
        is_kept=True,
        confirmed=confirmed.removesuffix(": "),
    )


def _standing(job: Job) -> list[str]:
    if not job.is_live:
        return [f"over; last heard of {job.last_seen or 'at an unknown time'}"]
    if job.has_ended:
        return ["ended on all of its hosts"]
    away = [host for host, is_heard in job.hosts.items() if not is_heard]
    lines = [
        f"{job.window or 'running'}: {job.num_alive} of {job.world_size or 'an unknown number of'} ranks on "
        f"{len(job.hosts)} host{'s' if len(job.hosts) != 1 else ''}, {job.num_iterations} iterations"
    ]
    if job.iteration_s is not None:
        slowest = f", the slowest rank {seconds(job.slowest_s)}" if job.slowest_s is not None else ""
        lines.append(f"{seconds(job.iteration_s)} per iteration now{slowest}")
    if away:
        lines.append(f"not heard: {', '.join(away[:8])}" + (f" and {len(away) - 8} more" if len(away) > 8 else ""))
    if not job.has_baseline:
        lines.append("no healthy window to compare with yet")
    return lines


def detail_from(plain: Mapping[str, Any]) -> Detail:
    """The numbers of a page from their JSON, where null is what was not measured. Raises DataError."""

    def numbers(name: str, kind: type[np.generic]) -> Any:
        return np.array(plain[name], dtype=np.float64).astype(kind)  # None becomes NaN

    try:
        num_ranks, num_functions = len(plain["ranks"]), len(plain["functions"])
        texts = {
            name: msgspec.convert(plain[name], tuple[str, ...]) for name in ("hosts", "roles", "groups", "group_ranks")
        }
        detail = Detail(
            ranks=numbers("ranks", np.int32),
            functions=msgspec.convert(plain["functions"], tuple[FunctionName, ...]),
            beta=numbers("beta", np.float32).reshape(num_ranks, num_functions),
            mu=numbers("mu", np.float32).reshape(num_ranks, num_functions),
            own_s=numbers("own_s", np.float64),
            wait_s=numbers("wait_s", np.float64),
            transfer_s=numbers("transfer_s", np.float64),
            idle_s=numbers("idle_s", np.float64),
            own_by_step_s=numbers("own_by_step_s", np.float32).reshape(num_ranks, -1),
            first_step=msgspec.convert(plain.get("first_step"), int | None),
            group_transfer_s=numbers("group_transfer_s", np.float64),
            group_wait_s=numbers("group_wait_s", np.float64),
            **texts,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the numbers of this diagnosis make no sense ({error}); is the coordinator newer?") from None
    lengths = {
        *(len(values) for values in (detail.own_s, detail.wait_s, detail.transfer_s, detail.idle_s)),
        *(len(values) for values in (detail.hosts, detail.roles, detail.own_by_step_s)),
    }
    groups = {len(detail.groups), len(detail.group_ranks), len(detail.group_transfer_s), len(detail.group_wait_s)}
    if lengths != {num_ranks} or len(groups) != 1:
        raise DataError("the numbers of this diagnosis make no sense (lists differ in length)")
    return detail
