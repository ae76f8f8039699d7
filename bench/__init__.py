"""Speed and memory, with the peers measured beside eroica in the same run. `make bench`; results in RESULTS.md."""
