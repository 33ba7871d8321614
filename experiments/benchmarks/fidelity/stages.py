"""Which arms the study wants, stage by stage, the most telling first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.benchmarks.fidelity.bank import Bank, Subject, default_proxy, studied
from harness.catalogue import FaultSpec, find
from harness.plan import Arm

TUNING = (0, 1, 2)
HELD_OUT = (3, 4, 5)
MANY = tuple(range(16))
NULL_SEEDS = tuple(range(60))
NULL_DRAWS = (0, 1)

SAMPLE = (
    "attention_scale_left_at_one",
    "clip_norm_misses_experts",
    "entropy_counts_padding",
    "expert_gradients_scaled",
    "expert_weights_not_synced",
    "gating_weights_detached",
    "grad_overflow",
    "gradients_not_zeroed",
    "group_counts_taken_for_cumsum",
    "kl_sign_flipped",
    "last_micro_batch_dropped",
    "logprobs_shifted_by_one",
    "loss_mean_over_microbatches",
    "master_weights_in_bf16",
    "norm_topk_prob_ignored",
    "rmsnorm_no_fp32_upcast",
    "router_logits_bf16",
    "rollout_weights_in_bf16",
    "routing_not_replayed",
    "swiglu_gate_up_swap",
)
"""Twenty faults over all families, for what costs too much over the whole catalogue."""

COVERAGE = (
    "grad_overflow",
    "last_micro_batch_dropped",
    "loss_mean_over_microbatches",
    "rmsnorm_no_fp32_upcast",
    "router_logits_bf16",
    "rollout_weights_in_bf16",
    "temperature_missing_in_logprob",
    "kl_sign_flipped",
)
SEVERITIES = {
    "expert_gradients_scaled": (2.0, 4.0, 8.0, 16.0),
    "recompute_reroutes_tokens": (0.05, 0.1, 0.2, 0.4),
    "retokenised_logprobs_misaligned": (0.05, 0.1, 0.2, 0.4),
    "rollout_weights_averaged": (0.5, 0.75, 0.9, 0.97),
    "router_input_glitches": (0.125, 0.25, 0.5, 1.0),
    "router_splitk_noise": (2.0**-11, 2.0**-9, 2.0**-7, 2.0**-5),
    "routing_not_replayed": (0.025, 0.05, 0.1, 0.2),
    "stale_gradient_bucket": (0.1, 0.2, 0.4, 0.8),
}
"""Faults that are tried at several severities, mildest first."""


def replayed() -> list[FaultSpec]:
    """The faults that are studied on tapes."""
    return [f for f in studied() if f.mode == "replay"]


def catalogue_arms(bank: Bank, pair: str, seeds: Sequence[int], free: bool = False) -> Iterator[Arm]:
    """Every fault on the original and its proxy, seed by seed."""
    faults = [f for f in studied() if f.mode == "free"] if free else replayed()
    subjects = (default_proxy(pair), Subject(pair))
    for seed in seeds:
        for fault in faults:
            for subject in subjects:
                yield from bank.arms(subject, fault, (seed,))


def variants(bank: Bank, pair: str) -> list[Subject]:
    """The proxies by strategy and size, and the stand-ins that people use today."""
    from experiments.benchmarks.fidelity.standins import random_weights, truncated

    kept = default_proxy(pair).experts
    total = bank.experts(pair)
    made = [Subject(pair, kept, s) for s in ("frequency", "random", "first")]
    made += [Subject(pair, total // part, "facility") for part in (2, 8, 16) if total // part != kept]
    return [*made, truncated(bank, pair), random_weights(bank, pair)]


def variant_arms(bank: Bank, pair: str, seeds: Sequence[int]) -> Iterator[Arm]:
    """Twenty faults on every variant of the proxy."""
    for subject in variants(bank, pair):
        for fault in map(find, SAMPLE):
            yield from bank.arms(subject, fault, seeds)


def coverage_arms(bank: Bank, pair: str) -> Iterator[Arm]:
    """A few faults at many seeds."""
    for seed in MANY:
        for fault in map(find, COVERAGE):
            for subject in (default_proxy(pair), Subject(pair)):
                yield from bank.arms(subject, fault, (seed,))


def severity_arms(bank: Bank, pair: str, seeds: Sequence[int]) -> Iterator[Arm]:
    """Faults at several severities on the original and its proxy."""
    for name, values in SEVERITIES.items():
        for value in values:
            for subject in (default_proxy(pair), Subject(pair)):
                yield from bank.arms(subject, find(name), seeds, severity=value)


def null_arms(bank: Bank, pair: str) -> Iterator[Arm]:
    """Two null draws of healthy runs at many seeds."""
    for seed in NULL_SEEDS:
        for subject in (default_proxy(pair), Subject(pair)):
            yield from bank.arms(subject, find("noop"), (seed,), draws=NULL_DRAWS)
