"""HolisticTraceAnalysis reading one trace into its data frame: python bench/peer_hta.py BACKEND PATH, in its own
environment.

`default` is what `TraceAnalysis` uses when nothing is said (json and pandas); `ijson` is its fastest parser
(IJSON_BATCH_AND_COMPRESS), which leaves Python frames out. Only the parse is timed: its analyses add 0.05-0.35 s.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings

from bench.process import pin, tell, timed


def main(backend: str, path: str) -> None:
    """Time one parse."""
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    # By name, so that type checks need no HolisticTraceAnalysis.
    trace = importlib.import_module("hta.common.trace")
    parser = importlib.import_module("hta.common.trace_parser")
    config = importlib.import_module("hta.configs.parser_config")
    settings = config.ParserConfig.get_default_cfg()
    if backend == "ijson":
        fastest = config.ParserBackend.IJSON_BATCH_AND_COMPRESS
        settings.set_parser_backend(fastest)
        parser.set_default_trace_parsing_backend(fastest)
    with timed() as clock:
        _, frame, _ = trace.parse_trace_file(path, settings)
    tell(**clock.told(), events=len(frame))


if __name__ == "__main__":
    pin()
    main(*sys.argv[1:])
