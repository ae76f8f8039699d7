"""A job of any size with a planted fault, as the summaries that its ranks would send: no traces, no processes.

Hosts of 8 ranks; each step has an all_reduce within the host and one over the whole job; 40 functions, 10 steps. One
rank waits for its input for a tenth of a step too long: its own time and that function rise, the other ranks of its
host wait for it in the host's collective and all others in the job's, so that the whole job is as slow. Numbers are
drawn by seed and place, so that any process can make any part of the same job. Used by `bench.scale`; what eroica makes
of such a fault in real traces is what `evals` measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from eroica.collectives import Channel, Ledger
from eroica.critical_path import NUM_ACTIVITIES, Activity
from eroica.job import ProcessGroup
from eroica.pattern import Coverage, Function, Patterns, Summary
from eroica.trace import CollectiveKind
from eroica.utilisation import MU_SOURCES

PER_HOST = 8
STEPS = 10
FIRST_STEP = 100
STEP_S = 1.0
OWN, EXPOSED = 0.80, 0.15
"""Shares of a healthy step; the rest is idle."""
DELAY = 0.10
"""Of a healthy step: what the fault adds to it."""
NOISE = 0.002
"""Of a step: by which ranks differ."""
BLOCK = 1 << 16
"""Ranks made at once."""


def _functions() -> tuple[Function, ...]:
    host = ("train.py:42", "train.py:42")
    kernels = [Function(Activity.COMPUTE, f"kernel_{k:02d}_bf16_256x128", None, None) for k in range(34)]
    return (
        *kernels,
        Function(Activity.COLLECTIVE, "all_reduce [tensor_parallel]", None, None),
        Function(Activity.COLLECTIVE, "all_reduce [default_pg]", None, None),
        Function(Activity.MEMORY, "Memcpy HtoD", None, None),
        Function(Activity.LAUNCH, "cudaLaunchKernel", *host),
        Function(Activity.PYTHON, "log_metrics", *host),
        Function(Activity.INPUT, "__next__", "torch/utils/data/dataloader.py:733", "train.py:40"),
    )


FUNCTIONS = _functions()
INPUT = len(FUNCTIONS) - 1
TENSOR, WORLD = 34, 35
MU_SOURCE = max(range(len(MU_SOURCES)), key=lambda k: "counter" in str(MU_SOURCES[k]))


@dataclass(frozen=True)
class Fleet:
    """The job."""

    num_ranks: int
    seed: int = 0

    @cached_property
    def culprit(self) -> int:
        """Whose input is slow."""
        return int(np.random.default_rng([self.seed, self.num_ranks]).integers(self.num_ranks))

    @cached_property
    def _usual(self) -> np.ndarray:
        """Shares of a slow step by function: kernels share what collectives and the rest leave."""
        random = np.random.default_rng(self.seed)
        shares = np.zeros(len(FUNCTIONS))
        shares[36:] = 0.01, 0.02, 0.004, 0.003
        shares[:34] = random.dirichlet(np.full(34, 3.0)) * (OWN - shares.sum())
        return shares * STEP_S / (STEP_S + DELAY)

    def summaries(self, first: int = 0, count: int | None = None) -> Iterator[Summary]:
        """Of so many ranks from that one on; both whole hosts."""
        last = self.num_ranks if count is None else min(first + count, self.num_ranks)
        for begin in range(first, last, BLOCK):
            yield from self._block(begin, min(BLOCK, last - begin))

    def _block(self, first: int, count: int) -> Iterator[Summary]:
        random = np.random.default_rng([self.seed, first])
        ranks = np.arange(first, first + count)
        culprit = ranks == self.culprit
        mate = (ranks // PER_HOST == self.culprit // PER_HOST) & ~culprit
        length = STEP_S + DELAY

        def noise(*shape: int) -> np.ndarray:
            return random.standard_normal((count, *shape), np.float32) * np.float32(NOISE)

        own = OWN * STEP_S + noise(STEPS) * 2 + np.where(culprit, DELAY, 0.0)[:, None]
        tensor = np.abs(noise(STEPS)) + 0.05 + np.where(mate, DELAY, 0.0)[:, None]
        world = np.abs(noise(STEPS)) + 0.10 + np.where(culprit | mate, 0.0, DELAY)[:, None]
        beta = np.maximum(self._usual + noise(len(FUNCTIONS)) * 0.5, 1e-4).astype(np.float32)
        beta[culprit, INPUT] += DELAY / length
        beta[:, TENSOR], beta[:, WORLD] = tensor.mean(1) / length, world.mean(1) / length
        mu = np.full((count, len(FUNCTIONS)), 0.7, np.float32) + noise(len(FUNCTIONS)) * 10
        sigma = np.full((count, len(FUNCTIONS)), 0.1, np.float32) + noise(len(FUNCTIONS)) * 5
        by_activity = np.zeros((count, NUM_ACTIVITIES), np.float32)
        for k, function in enumerate(FUNCTIONS):
            by_activity[:, function.activity] += beta[:, k]
        samples = np.stack([tensor, world], 2).reshape(count, -1).astype(np.float32)
        before = np.stack([own * 0.5, own * 0.5], 2).reshape(count, -1).astype(np.float32)
        exposed = (tensor + world).astype(np.float32)
        # A rank tells its functions by falling share, and so each in an order of its own.
        order = np.argsort(-beta, axis=1, kind="stable")
        beta, mu, sigma = (np.take_along_axis(column, order, axis=1) for column in (beta, mu, sigma))
        columns = (beta, mu, sigma, by_activity, own.astype(np.float32), exposed, samples, before)
        for rank, places, *row in zip(ranks.tolist(), order.tolist(), *columns, strict=True):
            yield self._summary(rank, tuple([FUNCTIONS[k] for k in places]), *row)

    @cached_property
    def _alike(self) -> dict[str, np.ndarray]:
        """Columns that are the same on all ranks."""
        steps = np.arange(FIRST_STEP, FIRST_STEP + STEPS)
        return {
            "source": np.full(len(FUNCTIONS), MU_SOURCE, np.uint8),
            "count": np.ones(len(FUNCTIONS), np.float32),
            "work": np.full(len(FUNCTIONS), np.nan),
            "steps": steps,
            "length": np.full(STEPS, STEP_S + DELAY, np.float32),
            "waiting": np.zeros(STEPS, np.float32),
            "top": np.full(STEPS, -1, np.int32),
            "excess": np.zeros(STEPS, np.float32),
            "by_work": np.full(STEPS, np.nan, np.float32),
            "per_channel": np.ones(2, np.float32),
            "bytes": np.full(2, 1e9),
            "step": np.repeat(steps, 2),
            "channel": np.tile(np.array([0, 1], np.int32), STEPS),
            "position": np.zeros(2 * STEPS, np.int32),
            "kind": np.full(2 * STEPS, CollectiveKind.ALL_REDUCE, np.uint8),
            "check": np.full(2 * STEPS, 7),
        }

    def _summary(
        self,
        rank: int,
        functions: tuple[Function, ...],
        beta: np.ndarray,
        mu: np.ndarray,
        sigma: np.ndarray,
        by_activity: np.ndarray,
        own: np.ndarray,
        exposed: np.ndarray,
        samples: np.ndarray,
        before: np.ndarray,
    ) -> Summary:
        alike, head = self._alike, rank - rank % PER_HOST
        last = min(head + PER_HOST, self.num_ranks) - 1
        mine = f"{head}-{last}"
        return Summary(
            rank=rank,
            world_size=self.num_ranks,
            host=f"node{rank // PER_HOST:06d}",
            device_model="NVIDIA H100 80GB HBM3",
            groups=(
                ProcessGroup("0", "default_pg", (), self.num_ranks),
                ProcessGroup("1", "tensor_parallel", tuple(range(head, last + 1)), last + 1 - head),
            ),
            steps_by="ProfilerStep",
            window_s=STEPS * (STEP_S + DELAY),
            started_ns=None,
            num_iterations=STEPS,
            patterns=Patterns(
                functions=functions,
                beta=beta,
                mu=mu,
                sigma=sigma,
                mu_source=alike["source"],
                count=alike["count"],
                work=alike["work"],
                cutoff=0.0,
                activity_beta=by_activity,
                threads=(),
            ),
            ledger=Ledger(
                steps=alike["steps"],
                length_s=alike["length"],
                own_s=own,
                exposed_s=exposed,
                waiting_s=alike["waiting"],
                top_function=alike["top"],
                top_excess_s=alike["excess"],
                top_by_work=alike["by_work"],
                channels=(
                    Channel(mine, "tensor_parallel", last + 1 - head),
                    Channel("default_pg", "default_pg", self.num_ranks),
                ),
                channel_count=alike["per_channel"],
                channel_exposed_s=alike["per_channel"],
                channel_bytes=alike["bytes"],
                step=alike["step"],
                channel=alike["channel"],
                position=alike["position"],
                kind=alike["kind"],
                check=alike["check"],
                work_before_s=before,
                duration_s=samples,
                sample_exposed_s=samples,
                in_flight=alike["position"],
                complete_steps=alike["steps"],
            ),
            coverage=Coverage(
                num_events=40_000,
                num_kernels=12_000,
                num_launches=12_000,
                num_collectives=2 * STEPS,
                explained=0.97,
                has_device=True,
                partial=False,
                epoch=True,
                notes=(),
            ),
        )
