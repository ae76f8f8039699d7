"""Plain training programs, run as processes by `test_frameworks.py` and `test_frameworks_run.py`; nothing of eroica."""
