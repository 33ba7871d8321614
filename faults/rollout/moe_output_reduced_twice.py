"""Expert output summed over ranks twice."""

from harness.catalogue import fault
from harness.claims import Falls, Rises
from harness.seams import Operator


@fault(
    seam=Operator("experts", side="rollout"),
    mode="free",
    seen_in=[
        "https://github.com/vllm-project/vllm-ascend/issues/6710",
        "https://github.com/vllm-project/vllm-ascend/issues/10443",
        "https://github.com/vllm-project/vllm/issues/28277",
    ],
    expects=[Rises("logprob_gap"), Falls("reward")],
    moe=True,
    needs=["experts"],
    look_alikes=["norm_topk_prob_ignored", "dispatch_drops_remote_experts"],
    expected_verdict="INCONCLUSIVE",
    reason="at three seeds the fidelity is 0.74 [0.46, 0.88]: the interval straddles the bar",
)
def moe_output_reduced_twice(clean, *, ranks=4):
    """The rollout sums the experts' output over ranks again, after the kernel has done so.

    What breaks: every rank already holds the full sum, so a second all-reduce multiplies it by the number of ranks.
    In the wild: expert parallelism on one accelerator family, whose fused kernel returned an aggregated result.
    Looks like: the sampler is off at once: the gap is large and constant, the reward drops, the trainer looks healthy.
    """

    def faulty(ctx, module, *args):
        return clean(module, *args) * ranks

    return faulty
