"""Signs of trouble in one run by itself, and what looks like trouble and is none.

One function per sign; each yields what it sees. A sign without a healthy twin rests on the level of a metric and on
its own past, so it points somewhere; it proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.trace import Trace, to_json_value

Kind = Literal["symptom", "benign"]
Point = tuple[int, float]

GAP_NATS = 0.1
"""Mean log-probability gap of trainer and rollout, in nats, from which on they disagree (0.01 to 0.03 is usual)."""
CLIPPED = 0.9
SPIKE = 10.0
LEAST = 8


@dataclass(frozen=True)
class Sign:
    """Something seen in a run.

    Attributes:
        kind: ``symptom``, or ``benign`` for what is often taken for one.
        name: A short name.
        metric: The metric that shows it.
        step: Step at which it begins, or is first seen.
        sentence: What was seen, with its numbers.
    """

    kind: Kind
    name: str
    metric: str
    step: int
    sentence: str

    def to_json(self) -> dict[str, object]:
        """Return JSON data."""
        return dict(vars(self))


def look(trace: Trace) -> list[Sign]:
    """Return what is seen in a run, symptoms first, then by step."""
    found = [sign for see in SIGNS for sign in see(trace)]
    return sorted(found, key=lambda s: (s.kind == "benign", s.step))


def first_trouble(runs: Iterable[Trace]) -> int | None:
    """Return the median over runs of the step of the first symptom; None if a run shows none."""
    steps = sorted(min((s.step for s in look(run) if s.kind == "symptom"), default=-1) for run in runs)
    return None if not steps or steps[0] < 0 else steps[(len(steps) - 1) // 2]


def points(trace: Trace, metric: str) -> list[Point]:
    """Return the steps and values of a metric where it is there."""
    return [(s, v) for s, v in zip(trace.steps, trace.column(metric), strict=True) if v is not None]


def finite(trace: Trace, metric: str) -> list[Point]:
    """Return the steps and values of a metric where it is a finite number."""
    return [(s, v) for s, v in points(trace, metric) if math.isfinite(v)]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _lasting(values: list[Point], factor: float, floor: float) -> tuple[int, float, float] | None:
    """Find a lasting change of level by a factor, up (factor > 1) or down (factor < 1).

    Compared are the medians of the first and of the last quarter, at least three values each.

    Returns:
        The first step from which on no value lies on the old side of the geometric middle, and both levels.
    """
    if len(values) < LEAST:
        return None
    quarter = max(3, len(values) // 4)
    early, late = (_median([v for _, v in part]) for part in (values[:quarter], values[-quarter:]))
    if min(early, late) < 0 or max(early, late) < floor or early == late:
        return None
    ratio = math.inf if early == 0 else late / early
    if (factor > 1 and ratio < factor) or (factor < 1 and ratio > factor):
        return None
    middle = math.sqrt(max(early, floor * 1e-3) * max(late, floor * 1e-3))
    old = [i for i, (_, v) in enumerate(values[:-1]) if (v < middle) == (factor > 1)]
    return values[old[-1] + 1 if old else 0][0], early, late


def not_finite(trace: Trace) -> Iterator[Sign]:
    """NaN and infinities, the metric that had them first; kl that is NaN throughout is not computed at beta 0."""
    for metric in _watched(trace):
        held = points(trace, metric)
        sick = [(s, v) for s, v in held if not math.isfinite(v)]
        if not sick:
            continue
        share = (
            f"{len(sick)} of {len(held)} values are not finite, first {to_json_value(sick[0][1])} at step {sick[0][0]}"
        )
        others = [m for m in ("loss", "grad_norm", "entropy", "reward") if m != metric]
        well = [m for m in others if (p := points(trace, m)) and len(finite(trace, m)) == len(p)]
        ill = [m for m in others if m in trace.metrics and m not in well]
        if metric == "kl" and len(sick) == len(held) and well and not ill:
            yield Sign(
                "benign",
                "kl not computed",
                metric,
                sick[0][0],
                f"{share} while {', '.join(well)} are: with beta 0 trainers do not compute the KL term",
            )
        else:
            yield Sign("symptom", "not finite", metric, sick[0][0], share)


def loss_missing(trace: Trace) -> Iterator[Sign]:
    """A loss that is not printed where the gradient norm is NaN (Megatron leaves it out)."""
    norms = dict(points(trace, "grad_norm"))
    gone = [
        s
        for s, v in zip(trace.steps, trace.column("loss"), strict=True)
        if v is None and not math.isfinite(norms.get(s, 0))
    ]
    if gone:
        yield Sign(
            "symptom",
            "loss left out",
            "loss",
            gone[0],
            f"no loss in {len(gone)} records whose gradient norm is "
            "not finite: Megatron does not print a loss that is NaN",
        )


def zero_loss(trace: Trace) -> Iterator[Sign]:
    """A loss of exactly 0: benign beside a healthy gradient, a symptom beside none."""
    loss = finite(trace, "loss")
    zeros = [s for s, v in loss if v == 0]
    if len(zeros) < max(1, len(loss) / 2):
        return
    norms = [v for _, v in points(trace, "grad_norm")]
    healthy = [v for v in norms if math.isfinite(v) and v > 1e-4]
    share = f"the loss is exactly 0 in {len(zeros)} of {len(loss)} records"
    if norms and len(healthy) >= 0.8 * len(norms):
        yield Sign(
            "benign",
            "loss 0",
            "loss",
            zeros[0],
            f"{share} with a gradient norm of about {_median(healthy):.3g}: "
            "with one update per batch the ratio is 1 and centred advantages sum to 0",
        )
    elif norms and max((v for v in norms if math.isfinite(v)), default=0.0) < 1e-5:
        yield Sign("symptom", "loss 0", "loss", zeros[0], f"{share}, and so is the gradient norm: nothing is learned")


def no_reward(trace: Trace) -> Iterator[Sign]:
    """A reward that is 0 throughout."""
    held = finite(trace, "reward")
    if len(held) >= 3 and all(v == 0 for _, v in held):
        yield Sign("symptom", "no reward", "reward", held[0][0], f"the reward is 0 in all {len(held)} records")


def no_gradient(trace: Trace) -> Iterator[Sign]:
    """A gradient norm of 0, or next to it, for several records."""
    norms = finite(trace, "grad_norm")
    zeros = [s for s, v in norms if v < 1e-5]
    if not norms or len(zeros) < max(1, len(norms) / 2):
        return
    why = ""
    spread = [v for _, v in finite(trace, "reward_std") if v > 1e-3]
    clipped = [
        v
        for m in ("completions/clipped_ratio", "clipped_ratio", "response_length/clip_ratio")
        for _, v in finite(trace, m)
        if v >= CLIPPED
    ]
    if spread:
        why = (
            f"; yet rewards differ within groups (reward_std about {_median(spread):.3g}): there is something to learn"
        )
    elif clipped:
        why = f"; {_median(clipped):.0%} of the completions are cut at their greatest length, so none earns a reward"
    exact = "0" if all(v == 0 for s, v in norms if s in set(zeros)) else "below 1e-5"
    yield Sign(
        "symptom",
        "no gradient",
        "grad_norm",
        zeros[0],
        f"the gradient norm is {exact} in {len(zeros)} of {len(norms)} records{why}",
    )


def all_cut(trace: Trace) -> Iterator[Sign]:
    """Nearly all completions reach the greatest length."""
    for metric in ("completions/clipped_ratio", "clipped_ratio", "response_length/clip_ratio"):
        held = finite(trace, metric)
        cut = [s for s, v in held if v >= CLIPPED]
        if held and len(cut) >= max(1, len(held) / 2):
            yield Sign(
                "symptom",
                "completions cut",
                metric,
                cut[0],
                f"{len(cut)} of {len(held)} records have {CLIPPED:.0%} or "
                "more of their completions cut at the greatest length",
            )


def frozen(trace: Trace) -> Iterator[Sign]:
    """A metric that keeps one value, other than 0, to the last digit."""
    for metric in ("loss", "grad_norm", "entropy", "kl", "reward", "logprob_gap"):
        held = finite(trace, metric)
        end = next((i for i in range(len(held) - 1, 0, -1) if held[i - 1][1] != held[-1][1]), 0)
        if len(held) - end >= max(6, len(held) // 3) and held[-1][1] != 0:
            yield Sign(
                "symptom",
                "frozen",
                metric,
                held[end][0],
                f"{metric} is exactly {held[-1][1]:g} in its last {len(held) - end} records",
            )


def spikes(trace: Trace) -> Iterator[Sign]:
    """Single values far above their neighbourhood; in the first tenth of a run gradient norms are noisy by nature."""
    for metric in ("grad_norm", "loss", "kl", "logprob_gap"):
        held = finite(trace, metric)
        high = []
        for i, (step, value) in enumerate(held):
            near = [v for _, v in held[max(0, i - 5) : i] + held[i + 1 : i + 6]]
            if len(near) >= 4 and value > SPIKE * max(_median([abs(v) for v in near]), 1e-6) and i + 1 < len(held):
                high.append((i, step, value))
        early = [h for h in high if h[0] < max(5, len(held) // 10)]
        late = [h for h in high if h not in early]
        if late:
            _, step, value = max(late, key=lambda h: h[2])
            yield Sign(
                "symptom",
                "spikes",
                metric,
                late[0][1],
                f"{len(late)} values stand out {SPIKE:g} times above their "
                f"neighbours, the largest {value:.3g} at step {step}",
            )
        if early and metric == "grad_norm":
            yield Sign(
                "benign",
                "early noise",
                metric,
                early[0][1],
                f"{early[0][2]:.3g} at step {early[0][1]} stands out of "
                "the first records, where gradient norms are noisy before the optimiser's moments have settled",
            )
        elif early:
            yield Sign("symptom", "spikes", metric, early[0][1], f"{early[0][2]:.3g} at step {early[0][1]} stands out")


def restless_start(trace: Trace) -> Iterator[Sign]:
    """A gradient norm that varies by a factor in the first few records."""
    held = finite(trace, "grad_norm")[:6]
    values = [v for _, v in held if v > 0]
    if len(values) >= 3 and 2 < max(values) / min(values) <= 10 and trace.steps[0] <= 10:
        yield Sign(
            "benign",
            "early noise",
            "grad_norm",
            held[0][0],
            f"between {min(values):.3g} and {max(values):.3g} in the "
            "first records: gradient norms are noisy before the optimiser's moments have settled",
        )


def mismatch(trace: Trace) -> Iterator[Sign]:
    """Trainer and rollout that disagree about the probabilities of the same tokens."""
    held = finite(trace, "logprob_gap")
    high = [(s, v) for s, v in held if abs(v) > GAP_NATS]
    if high and len(high) >= len(held) / 4:
        yield Sign(
            "symptom",
            "trainer and rollout disagree",
            "logprob_gap",
            high[0][0],
            f"{len(high)} of {len(held)} values exceed {GAP_NATS} (about 0.01 to 0.03 is usual), the largest "
            f"{max(v for _, v in high):.3g}",
        )
    ratio = finite(trace, "sampling/importance_sampling_ratio/mean")
    low = [(s, v) for s, v in ratio if v < 0.1]
    if low:
        yield Sign(
            "symptom",
            "importance ratios vanish",
            "sampling/importance_sampling_ratio/mean",
            low[0][0],
            f"mean importance ratio {low[0][1]:.3g}: the rollout has other weights than the trainer",
        )


LASTING = (
    ("grad_norm", 5.0, 0.0, "gradient grows"),
    ("grad_norm", 0.1, 1e-3, "gradient fades"),
    ("entropy", 0.2, 1e-2, "entropy collapses"),
    ("entropy", 2.0, 1e-1, "entropy explodes"),
    ("kl", 10.0, 0.1, "KL grows"),
    ("reward", 0.5, 0.05, "reward falls"),
    ("response_length", 0.5, 8.0, "responses shorten"),
    ("response_length", 2.0, 8.0, "responses lengthen"),
    ("logprob_gap", 2.0, 0.02, "trainer and rollout drift apart"),
    ("clip_fraction", 3.0, 0.1, "more is clipped"),
)
"""Metric, factor from the first to the last quarter, least level that matters, name."""


def lasting(trace: Trace) -> Iterator[Sign]:
    """A metric whose level changes by a factor that healthy training seldom shows."""
    for metric, factor, floor, name in LASTING:
        found = _lasting(finite(trace, metric), factor, floor)
        if found is not None:
            step, early, late = found
            yield Sign("symptom", name, metric, step, f"{metric} goes from about {early:.3g} to about {late:.3g}")


def sentinel(trace: Trace) -> Iterator[Sign]:
    """Exactly -1 in a metric that cannot be negative."""
    for metric in ("grad_norm", "entropy", "response_length", "clip_fraction"):
        at = [s for s, v in finite(trace, metric) if v == -1.0]
        if at:
            yield Sign(
                "benign",
                "sentinel",
                metric,
                at[0],
                f"{metric} is exactly -1 in {len(at)} records: it stands for a value that was not computed",
            )


SIGNS: tuple[Callable[[Trace], Iterator[Sign]], ...] = (
    not_finite,
    loss_missing,
    zero_loss,
    no_reward,
    no_gradient,
    all_cut,
    frozen,
    spikes,
    restless_start,
    mismatch,
    lasting,
    sentinel,
)


def _watched(trace: Trace) -> list[str]:
    first = ["loss", "grad_norm", "entropy", "kl", "reward", "logprob_gap", "response_length", "clip_fraction"]
    return [m for m in first if m in trace.metrics] or list(trace.metrics)
