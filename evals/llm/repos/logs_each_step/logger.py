import json
import os
import time


class MetricsLogger:
    """One JSON line per call, safe on disk when the call returns."""

    def __init__(self, path):
        self.file = open(path, "a", encoding="utf-8")

    def log(self, step, **metrics):
        record = {"time": time.time(), "step": step, **metrics}
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self):
        self.file.close()
