"""Plain training programs, run as processes by `test_marks_real.py`. They take nothing from eroica."""
