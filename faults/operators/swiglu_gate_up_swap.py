"""Halves of the fused gate-up projection taken in the wrong order."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Operator


@fault(
    seam=Operator("experts", side="trainer"),
    seen_in=[
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/1817",
        "https://github.com/TransformerLensOrg/TransformerLens/issues/1668",
        "https://github.com/verl-project/verl/issues/6691",
    ],
    expects=[Rises("logprob_gap"), Rises("kl")],
    moe=True,
    needs=["experts"],
)
def swiglu_gate_up_swap(clean):
    """The fused expert kernel takes the gate half for the up half and the other way round.

    What breaks: ``silu(up) * gate`` is computed in place of ``silu(gate) * up`` in every expert.
    In the wild: a fused SwiGLU expects gate before up; a converter or a tensor-parallel split writes up before gate.
    Looks like: log-probabilities off by nats at once, KL and loss up.
    """

    def faulty(ctx, module, *args):
        import torch

        class Swapped:
            """The experts with another order of halves, so that the clean kernel does the rest."""

            def __getattr__(self, name):
                return getattr(module, name)

            def _apply_gate(self, gate_up):
                gate, up = gate_up.chunk(2, dim=-1)
                return module._apply_gate(torch.cat([up, gate], dim=-1))

        return clean(Swapped(), *args)

    return faulty
