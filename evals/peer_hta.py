"""HolisticTraceAnalysis on a folder of traces, in its own environment: peer_hta.py FOLDER WORLD_SIZE prints the ranks
that it calls potential stragglers, as JSON.

It always names as many as it is asked for; one is asked for.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import warnings


def main(folder: str, world_size: str) -> None:
    """Name one rank."""
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    analysis = importlib.import_module("hta.trace_analysis")  # by name: type checks need no HolisticTraceAnalysis
    files = {rank: f"{folder}/rank{rank}.json.gz" for rank in range(int(world_size))}
    named = analysis.TraceAnalysis(trace_files=files).get_potential_stragglers(num_candidates=1)
    print(json.dumps([int(rank) for rank in named]))


if __name__ == "__main__":
    main(*sys.argv[1:])
