"""Gate and up rows interleaved by the exporter."""

from harness.catalogue import fault
from harness.claims import Rises
from harness.seams import Stage


@fault(
    seam=Stage.SYNC,
    seen_in=[
        "https://github.com/vllm-project/vime/issues/274",
        "https://github.com/vllm-project/vime/issues/285",
    ],
    expects=[Rises("logprob_gap")],
    moe=True,
    needs=["experts"],
    look_alikes=["expert_reload_layout_lost", "swiglu_gate_up_swap"],
)
def gate_up_interleaved_on_export(clean):
    """Gate and up rows are exported alternately and read as two halves.

    What breaks: one side of a conversion writes gate, up, gate, up; the other takes the first half of the rows for the
        gate, so every gate is half gate and half up.
    In the wild: a raw weight conversion that made the two sides disagree on one accelerator and kept GRPO from
        learning; the default conversion was changed there. Which tensor was misread is not public.
    Looks like: a log-probability gap in nats from the first sync on.
    """

    def faulty(ctx, update):
        import torch

        clean(ctx, update)
        for _, experts in ctx.rollout.modules("experts"):
            halves = experts.gate_up_proj.chunk(2, dim=1)
            experts.gate_up_proj.copy_(torch.stack(halves, dim=2).flatten(1, 2))

    return faulty
