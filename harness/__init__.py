"""Reproduce RL post-training failures of mixture-of-experts models on expert-pruned proxies."""

__version__ = "0.1.0"
