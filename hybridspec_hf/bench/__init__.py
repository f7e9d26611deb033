"""Benchmarks: what they measure, on what, and against which floors. The scripts only parse, call and print."""
