"""Benchmarks, each run with ``python -m experiments.benchmarks.NAME``; goals are printed, never enforced."""
