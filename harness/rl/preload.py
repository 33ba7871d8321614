"""Imported once by the process that workers are forked from, so that an arm does not pay for imports."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.models.qwen3_moe import modeling_qwen3_moe

from harness.rl import run

__all__ = ["AutoModelForCausalLM", "AutoTokenizer", "DynamicCache", "modeling_qwen3_moe", "run", "torch"]
