"""Sigmoid of the rollout's SwiGLU evaluated in bf16."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Operator


@fault(
    seam=Operator("experts", side="rollout"),
    seen_in=["https://github.com/sgl-project/sglang/issues/14197"],
    expects=[Rises("logprob_gap")],
    moe=True,
    needs=["experts"],
    look_alikes=["expert_sums_reduced_in_bf16", "rollout_weights_in_bf16"],
)
def swiglu_sigmoid_bf16(clean):
    """The fused activation takes the gate's sigmoid in bf16.

    What breaks: the sigmoid has 8 bits, so each activation is off by up to 0.2 percent and large gates saturate early.
    In the wild: an accelerator's fused SwiGLU was taken out of an engine because it cost precision; by how much, and in
        which part, was not said.
    Looks like: a small constant log-probability gap on the rollout's side.
    """

    def faulty(ctx, module, *args):
        class Rounded:
            """The experts with another activation, so that the clean kernel does the rest."""

            def __getattr__(self, name):
                return getattr(module, name)

            def _apply_gate(self, gate_up):
                gate, up = gate_up.chunk(2, dim=-1)
                return gate * gate.bfloat16().sigmoid().to(gate.dtype) * up

        return clean(Rounded(), *args)

    return faulty
