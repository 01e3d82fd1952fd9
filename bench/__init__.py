"""Benchmarks: ratios against peers within one run, never timed tests."""
