"""Router logits stored in bf16."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Module


@fault(
    seam=Module("router", side="trainer"),
    seen_in=[
        "https://github.com/sgl-project/sglang/issues/34861",
        "https://github.com/vllm-project/vllm-ascend/issues/9617",
        "https://github.com/vllm-project/vllm/issues/14027",
        "https://github.com/pytorch/torchtitan/issues/2389",
    ],
    expects=[Rises("logprob_gap")],
    moe=True,
    needs=["router"],
    look_alikes=["rmsnorm_no_fp32_upcast"],
)
def router_logits_bf16(clean):
    """The router's matrix product is computed and stored in bf16.

    What breaks: scores of neighbouring experts fall within one rounding step, so other experts are chosen; an upcast
        after the store does not bring the lost bits back.
    In the wild: expert sets that differ between engines on accelerators whose gate kernel writes bf16.
    Looks like: the log-probability gap between rollout and trainer gets a heavy tail; the loss hardly moves.
    """

    def faulty(ctx, module, hidden):
        class Rounded:
            """The router with its weight rounded, so that its own forward does the rest."""

            weight = module.weight.bfloat16()

            def __getattr__(self, name):
                return getattr(module, name)

        logits, weights, chosen = clean(Rounded(), hidden.bfloat16())
        return logits.to(hidden.dtype), weights.to(hidden.dtype), chosen

    return faulty
