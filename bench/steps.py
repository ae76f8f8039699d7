"""How soon a slowdown is noticed, how often a healthy job is suspected, and what one mark costs.

    python -m bench.steps            about a minute
    python -m bench.steps --quick    a quarter of the series

Series are made, not recorded: 100 ms iterations times a lognormal or heavy-tailed noise, with hiccups of 2 to 10 times
in up to 1 % of the iterations. Healthy ones show what false alarms cost; in the others something changes at iteration
500. Delays are iterations from the change to the first trigger.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from math import exp, pi, sin
from statistics import median

from eroica.degradation import Change, Degradation, Trigger
from eroica.steps import Iteration, Iterations, Mark

ONSET = 500
USUAL_NS = 100_000_000
Effect = Callable[[int], float]
"""Iterations since the change -> factor on the duration."""


def iterations(factors: Iterator[float], usual_ns: int = USUAL_NS) -> Iterator[Iteration]:
    """Plain iterations of these durations."""
    now = 0
    for number, factor in enumerate(factors):
        start, now = now, now + max(int(usual_ns * factor), 1)
        yield Iteration(number, 0, start, now, 0, number + 1, 1, 1, 5, 0, False, None)


def noise(rng: random.Random, sigma: float, heavy: bool, hiccups: float) -> float:
    """Factor on one healthy iteration."""
    factor = exp(rng.gauss(0.0, sigma))
    if heavy:  # Student's t with 3 degrees of freedom, upwards only.
        chi = sum(rng.gauss(0.0, 1.0) ** 2 for _ in range(3)) / 3
        factor *= 1 + sigma * abs(rng.gauss(0.0, 1.0)) / chi**0.5
    if rng.random() < hiccups:
        factor *= rng.uniform(2.0, 10.0)
    return factor


def healthy(seed: int, num: int = 3000) -> tuple[float, bool, float, Iterator[float]]:
    """A random healthy series: spread, heavy tails or not, rate of hiccups, factors."""
    rng = random.Random(seed)
    sigma, heavy, hiccups = rng.uniform(0.002, 0.15), rng.random() < 0.5, rng.uniform(0.0, 0.01)
    return sigma, heavy, hiccups, (noise(rng, sigma, heavy, hiccups) for _ in range(num))


def first_trigger(factors: Iterator[float]) -> Trigger | None:
    """The first change for the worse."""
    judge = Degradation()
    for iteration in iterations(factors):
        for trigger in judge.add(iteration):
            if trigger.change is not Change.RECOVERED:
                return trigger
    return None


def with_effect(seed: int, sigma: float, effect: Effect, num: int) -> Iterator[float]:
    """Lognormal noise, hiccups in 0.3 %, and the effect from ONSET on."""
    rng = random.Random(seed)
    for i in range(ONSET + num):
        yield noise(rng, sigma, False, 0.003) * (effect(i - ONSET) if i >= ONSET else 1.0)


EFFECTS: dict[str, Effect] = {
    "+7 %": lambda i: 1.07,
    "+10 %": lambda i: 1.10,
    "+15 %": lambda i: 1.15,
    "+50 %": lambda i: 1.5,
    "x10 every 8": lambda i: 10.0 if i % 8 == 0 else 1.0,
    "x4 every 50": lambda i: 4.0 if i % 50 == 0 else 1.0,
    "drift 0.5 %/iteration": lambda i: 1 + 0.005 * i,
    "drift 0.05 %/iteration": lambda i: 1 + 0.0005 * i,
}


def mark_cost_ns(num: int = 60_000) -> tuple[float, float]:
    """Nanoseconds per mark in `Iterations.feed`, and per iteration in `Degradation.add`, of processor time."""
    rng = random.Random(0)
    marks = [Mark.NEXT, *[Mark.COLLECTIVE] * 10, Mark.BEGIN, Mark.END]
    learnt, now = Iterations(), 0
    started = time.process_time_ns()
    for i in range(num):
        now += 7_000_000
        learnt.feed(marks[i % len(marks)], now, 1)
    per_mark = (time.process_time_ns() - started) / num
    series = list(iterations(noise(rng, 0.02, True, 0.01) for _ in range(num // 6)))
    judge = Degradation()
    started = time.process_time_ns()
    for iteration in series:
        judge.add(iteration)
    return per_mark, (time.process_time_ns() - started) / len(series)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the series")
    parts = 4 if parser.parse_args().quick else 1

    num = 200 // parts
    found = [(seed, first_trigger(healthy(seed)[3])) for seed in range(num)]
    kinds = Counter(t.change.value for _, t in found if t)
    print(f"false triggers: {sum(kinds.values())} of {num} healthy series of 3,000 iterations {dict(kinds)}")
    for seed, trigger in found:
        if trigger:
            sigma, heavy, hiccups, _ = healthy(seed)
            print(f"  seed {seed}: sigma {sigma:.3f} heavy {heavy} hiccups {hiccups:.4f}: {trigger.change.value}"
                  f" at {trigger.number}, cost {trigger.cost:.1%}")  # fmt: skip
    days = 8 // parts
    silent = sum(
        first_trigger((1 + 0.015 * sin(2 * pi * i / 8640)) * noise(rng, 0.01, False, 0.0) for i in range(25_920))
        is None
        for rng in map(random.Random, range(days))
    )
    print(f"1.5 % daily sine with 1 % noise over three days of 10 s iterations: silent in {silent} of {days}")

    print("\niterations from the change to the trigger (median, worst; found before 2,000), by noise")
    runs = 20 // parts
    for name, effect in EFFECTS.items():
        line = f"{name:>24}"
        for sigma in (0.01, 0.03, 0.10):
            delays, early = [], 0
            for seed in range(runs):
                trigger = first_trigger(with_effect(seed, sigma, effect, 2000))
                if trigger and trigger.number < ONSET:
                    early += 1
                elif trigger:
                    delays.append(trigger.number - ONSET + 1)
            text = f"{median(delays):.0f}, {max(delays)}" if delays else "-"
            line += f"   {sigma:.0%}: {text} ({len(delays)}/{runs}{f', {early} early' if early else ''})"
        print(line)
    per_mark, per_iteration = mark_cost_ns()
    print(f"\n{per_mark:.0f} ns per mark learnt, {per_iteration:.0f} ns per iteration judged")


if __name__ == "__main__":
    main()
