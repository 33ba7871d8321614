"""The fused Ascend operators: references against closed forms and other libraries, whole models against eager."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from harness.errors import MachineError, UsageError
from harness.rl import npu_ops
from harness.rl.npu_ops import reference as ref
from harness.seams import FUSED
from tests.conftest import SMALL, Bench
from tests.fakes import torch_npu as fake

D = torch.float64
COMMON: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


def rand(*shape: int, seed: int = 0, grad: bool = False) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)
    return x.requires_grad_(grad)


@pytest.fixture
def ops() -> npu_ops.Table:
    return npu_ops.table("reference")


def test_registry_holds_every_operator_under_its_name_in_torch_npu(ops: npu_ops.Table) -> None:
    assert tuple(ops) == FUSED
    assert set(fake.CHECKS) == set(FUSED)


def test_rms_norm_agrees_with_torch_and_adds_the_residual() -> None:
    x, other, gamma = rand(3, 8), rand(3, 8, seed=1), rand(8, seed=2)
    y, rstd = ref.npu_rms_norm(x, gamma, 1e-5)
    torch.testing.assert_close(y, F.rms_norm(x, (8,), gamma, 1e-5))
    torch.testing.assert_close(rstd[:, 0], (x.square().mean(1) + 1e-5) ** -0.5)
    y2, _, total = ref.npu_add_rms_norm(x, other, gamma, 1e-5)
    torch.testing.assert_close(total, x + other)
    torch.testing.assert_close(y2, F.rms_norm(x + other, (8,), gamma, 1e-5))


def test_rms_norm_works_in_fp32_inside_and_keeps_the_type() -> None:
    x = torch.full((1, 4), 300.0, dtype=torch.float16)  # 300^2 is beyond fp16
    y, rstd = ref.npu_rms_norm(x, torch.ones(4, dtype=torch.float16))
    assert y.dtype == torch.float16
    assert rstd.dtype == torch.float32
    assert y.tolist() == [[1.0] * 4]


def test_swiglu_takes_gate_first() -> None:
    gate, up = rand(3, 4), rand(3, 4, seed=1)
    torch.testing.assert_close(ref.npu_swiglu(torch.cat([gate, up], -1)), gate / (1 + (-gate).exp()) * up)
    with pytest.raises(ValueError, match="must be even, got 5"):
        ref.npu_swiglu(rand(3, 5))


@pytest.mark.parametrize(("mode", "pair"), [("half", (0, 2)), ("interleave", (0, 1))])
def test_rotary_rotates_the_pairs_of_its_mode(mode: str, pair: tuple[int, int]) -> None:
    x = torch.zeros(1, 1, 1, 4, dtype=D)
    x[..., pair[0]] = 1.0  # the first of the pair turns into (cos, sin)
    angle = torch.full((1, 1, 1, 4), 0.3, dtype=D)
    out = ref.npu_rotary_mul(x, angle.cos(), angle.sin(), mode)
    expected = torch.zeros(4, dtype=D)
    expected[pair[0]], expected[pair[1]] = math.cos(0.3), math.sin(0.3)
    torch.testing.assert_close(out[0, 0, 0], expected)


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
def test_attention_agrees_with_torch_in_every_layout_and_masks_where_true(layout: str) -> None:
    q, k, v = rand(2, 4, 5, 8), rand(2, 2, 5, 8, seed=1), rand(2, 2, 5, 8, seed=2)
    keep = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(3)) < 0.7
    keep |= torch.eye(5, dtype=torch.bool)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=0.3, enable_gqa=True)
    given = [_from_bnsd(x, layout) for x in (q, k, v)]
    out, top, total, _, *rest = ref.npu_fusion_attention(*given, 4, layout, atten_mask=~keep, scale=0.3)
    torch.testing.assert_close(out, _from_bnsd(want, layout))
    assert rest == [0, 0, 0]
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.3).masked_fill(~keep, -torch.inf)
    torch.testing.assert_close(top[..., 0] + total[..., 0].log(), scores.logsumexp(-1))


def _from_bnsd(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "BNSD":
        return x
    x = x.transpose(1, 2)
    return x if layout == "BSND" else x.flatten(2) if layout == "BSH" else x.flatten(2).transpose(0, 1)


def test_attention_scale_defaults_to_one_and_causal_modes_differ_by_their_corner() -> None:
    q, k, v = rand(1, 1, 2, 4), rand(1, 1, 3, 4, seed=1), rand(1, 1, 3, 4, seed=2)
    plain = ref.npu_fusion_attention(q, k, v, 1, "BNSD")[0]
    torch.testing.assert_close(plain, F.scaled_dot_product_attention(q, k, v, scale=1.0))
    compressed = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    for mode, shift in ((2, 0), (3, 1)):
        out = ref.npu_fusion_attention(q, k, v, 1, "BNSD", atten_mask=compressed, sparse_mode=mode)[0]
        keep = torch.ones(2, 3, dtype=torch.bool).tril(shift)
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=1.0))
    with pytest.raises(ValueError, match=r"sparse_mode 3 needs a \(2048, 2048\) mask, got \(2, 3\)"):
        ref.npu_fusion_attention(q, k, v, 1, "BNSD", atten_mask=compressed[:2, :3], sparse_mode=3)
    with pytest.raises(ValueError, match=r"keep_prob = 0\.9"):
        ref.npu_fusion_attention(q, k, v, 1, "BNSD", keep_prob=0.9)


def test_rows_that_attend_to_nothing_are_zero_only_with_inner_precise_two() -> None:
    q, k, v = rand(1, 1, 2, 4), rand(1, 1, 3, 4, seed=1), rand(1, 1, 3, 4, seed=2)
    masked = torch.tensor([[True, True, True], [False, False, False]])
    mean = ref.npu_fusion_attention(q, k, v, 1, "BNSD", atten_mask=masked)[0]
    torch.testing.assert_close(mean[0, 0, 0], v[0, 0].mean(0))
    zero = ref.npu_fusion_attention(q, k, v, 1, "BNSD", atten_mask=masked, inner_precise=2)[0]
    assert zero[0, 0, 0].tolist() == [0.0] * 4
    torch.testing.assert_close(zero[0, 0, 1], mean[0, 0, 1])


@pytest.mark.parametrize(("kind", "groups"), [(1, [2, 0, 3]), (0, [2, 2, 5])])
def test_grouped_matmul_by_counts_and_by_ends(ops: npu_ops.Table, kind: int, groups: list[int]) -> None:
    x, w = rand(5, 4, grad=True), rand(3, 4, 6, seed=1, grad=True)
    experts = [0, 0, 2, 2, 2]
    out = ops["npu_grouped_matmul"]([x], [w], group_list=torch.tensor(groups), group_list_type=kind)[0]
    want = torch.stack([x[i] @ w[e] for i, e in enumerate(experts)])
    torch.testing.assert_close(out, want)
    grad = rand(5, 6, seed=2)
    found = torch.autograd.grad(out, [x, w], grad)
    for ours, torchs in zip(found, torch.autograd.grad(want, [x, w], grad), strict=True):
        torch.testing.assert_close(ours, torchs)


def test_grouped_matmul_leaves_rows_without_a_group_at_zero() -> None:
    out = ref.npu_grouped_matmul(
        [rand(4, 2)], [rand(2, 2, 3, seed=1)], group_list=torch.tensor([3, 1]), group_type=0, split_item=2
    )[0]
    assert (out[:3] != 0).all()
    assert out[3].tolist() == [0.0] * 3


def test_permute_sorts_by_expert_and_returns_the_inverse_map() -> None:
    tokens = torch.tensor([[10.0], [20.0], [30.0]], dtype=D)
    permuted, rows = ref.npu_moe_token_permute(tokens, torch.tensor([[2, 0], [0, 1], [2, 1]]))
    assert permuted[:, 0].tolist() == [10.0, 20.0, 20.0, 30.0, 10.0, 30.0]  # experts 0 0 1 1 2 2
    assert rows.dtype == torch.int32
    assert rows.tolist() == [4, 0, 1, 2, 5, 3]
    weights = torch.tensor([[0.5, 0.25], [1.0, 2.0], [0.0, 3.0]], dtype=D)
    back = ref.npu_moe_token_unpermute(permuted, rows, probs=weights)
    torch.testing.assert_close(back, tokens * weights.sum(1, keepdim=True))


def test_gating_softmax_does_not_renormalise_and_has_the_softmax_derivative(ops: npu_ops.Table) -> None:
    x = rand(6, 5, grad=True)
    weights, experts, rows = ops["npu_moe_gating_top_k_softmax"](x, None, 2)
    probs, order = x.softmax(-1).sort(-1, descending=True)
    torch.testing.assert_close(weights, probs[:, :2])
    assert experts.dtype == torch.int32
    assert torch.equal(experts.long(), order[:, :2])
    assert rows.tolist() == [[i, i + 6] for i in range(6)]
    assert torch.autograd.gradcheck(lambda y: ops["npu_moe_gating_top_k_softmax"](y, None, 2)[0], (x,))
    finished = torch.tensor([True] + [False] * 5)
    assert ref.npu_moe_gating_top_k_softmax(x, finished, 2)[1][0].tolist() == [5, 5]


def test_group_limited_gating_uses_the_bias_for_the_choice_alone() -> None:
    x = torch.tensor([[2.0, -3.0, 1.0, 1.1]], dtype=D)
    bias = torch.tensor([-2.0, 0.0, 0.0, 0.5], dtype=D)  # group 0 scores 0.88 - 2 + 0.05, group 1 0.73 + 0.75 + 0.5
    kwargs: dict[str, Any] = {"k_group": 1, "group_count": 2, "group_select_mode": 1, "norm_type": 1}
    weights, experts, _ = ref.npu_moe_gating_top_k(x, 2, bias=bias, routed_scaling_factor=2.5, **kwargs)
    assert experts.tolist() == [[3, 2]]
    raw = [1 / (1 + math.exp(-1.1)), 1 / (1 + math.exp(-1.0))]
    torch.testing.assert_close(weights[0], torch.tensor([2.5 * r / sum(raw) for r in raw], dtype=D))
    soft, chosen, scores = ref.npu_moe_gating_top_k(x, 1, out_flag=True)  # norm_type 0: softmax, not renormalised
    assert chosen.tolist() == [[0]]
    torch.testing.assert_close(soft[0, 0], x.softmax(-1)[0, 0])
    torch.testing.assert_close(scores, x.softmax(-1))


def make_model(family: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if family == "qwen3_moe":
        config: Any = transformers.Qwen3MoeConfig(
            **COMMON,
            moe_intermediate_size=16,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            mlp_only_layers=[0],
        )
        return transformers.Qwen3MoeForCausalLM(config)
    if family == "mixtral":
        config = transformers.MixtralConfig(**COMMON, num_local_experts=8, num_experts_per_tok=2)
        return transformers.MixtralForCausalLM(config)
    config = transformers.DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4},
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=16,
        first_k_dense_replace=1,
        norm_topk_prob=True,
    )
    model = transformers.DeepseekV3ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(torch.randn(buffer.shape) * 0.3)
    return model


def scores_and_grads(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    ids = torch.randint(1, 40, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[1, :2] = 0
    out = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    logp = out.logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0] * mask
    logp.sum().backward()
    return logp.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_a_whole_model_on_the_reference_operators_equals_eager(
    family: str, ops: npu_ops.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = make_model(family).to(D).eval()
    model = copy.deepcopy(eager)
    npu_ops.install(model, ops)
    eager.set_attn_implementation("sdpa")
    eager.set_experts_implementation("eager")
    # The library casts to fp32 by name inside norms and routers; here these are fp64 as well.
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self.to(D))
    monkeypatch.setattr(torch, "float32", D)
    monkeypatch.setattr(torch, "float", D)
    (want, want_grads), (got, got_grads) = scores_and_grads(eager), scores_and_grads(model)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    assert {n for n, g in got_grads.items() if g is None} == {n for n, g in want_grads.items() if g is None}
    for name, grad in want_grads.items():
        if grad is not None:
            torch.testing.assert_close(got_grads[name], grad, rtol=1e-9, atol=1e-11, msg=name)


def test_every_operator_that_a_family_uses_is_called_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("qwen3_moe", "mixtral", "deepseek_v3"):
        calls: list[str] = []
        monkeypatch.setitem(sys.modules, "torch_npu", fake.make(calls))
        model = make_model(family).eval()
        npu_ops.install(model, npu_ops.table("fused"))
        _, grads = scores_and_grads(model)
        assert set(calls) == set(npu_ops.used_by(model)), family
        router = "model.layers.1.mlp.gate.weight"
        assert grads[router] is not None, family
        assert float(grads[router].norm()) > 1e-3, family


def test_install_is_undone_by_remove_and_a_copy_has_its_own_table(ops: npu_ops.Table) -> None:
    model = make_model("qwen3_moe")
    kinds = [type(m) for m in model.modules()]
    attributes = [sorted(vars(m)) for m in model.modules()]
    npu_ops.install(model, ops)
    assert [type(m) for m in model.modules()] != kinds
    npu_ops.remove(model)
    assert [type(m) for m in model.modules()] == kinds
    assert [sorted(vars(m)) for m in model.modules()] == attributes


def test_a_model_that_the_operators_cannot_compute_is_refused(ops: npu_ops.Table) -> None:
    model = make_model("qwen3_moe")
    model.config.hidden_act = "gelu"
    with pytest.raises(UsageError, match="no activation 'gelu'"):
        npu_ops.install(model, ops)
    model = make_model("deepseek_v3")
    model.config.norm_topk_prob = False
    with pytest.raises(UsageError, match="always renormalises"):
        npu_ops.install(model, ops)
    model.config.model_type = "llama"
    with pytest.raises(UsageError, match="a llama model cannot run on fused operators"):
        npu_ops.install(model, ops)


def test_fused_needs_an_npu() -> None:
    with pytest.raises(MachineError, match="fused operators need an Ascend NPU"):
        npu_ops.table("fused")


def with_ops(ops: str) -> Any:
    side = SMALL.trainer.model_copy(update={"ops": ops})
    return SMALL.model_copy(update={"trainer": side, "rollout": side})


def test_a_run_on_the_operators_of_a_fake_npu_is_the_run_on_the_references(
    bench: Bench, clean: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.trace import first_difference

    reference, _ = bench.run("free", rl=with_ops("reference"))
    monkeypatch.setitem(sys.modules, "torch_npu", fake.make([]))
    fused, _ = bench.run("free", rl=with_ops("fused"))
    assert first_difference(fused, reference) is None
    for name in ("loss", "grad_norm", "kl", "reward"):  # and both are the library's run, up to rounding
        want, got = clean["free"].column(name)[0], fused.column(name)[0]
        assert got == pytest.approx(want, rel=1e-3, abs=1e-5), name


def test_the_fake_refuses_wrong_types_shapes_layouts_and_arguments() -> None:
    npu: Any = fake.make([])
    x = torch.randn(4, 6)
    with pytest.raises(RuntimeError, match="must be one of"):
        npu.npu_rms_norm(x.double(), torch.ones(6).double())
    with pytest.raises(RuntimeError, match="gamma must have shape"):
        npu.npu_rms_norm(x, torch.ones(5))
    with pytest.raises(RuntimeError, match="contiguous"):
        npu.npu_swiglu(x.T)
    with pytest.raises(TypeError, match="unexpected keyword argument 'mode'"):
        npu.npu_rotary_mul(x, x, x, mode="half")
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="head_num 3"):
        npu.npu_fusion_attention(q, q, q, 3, "BNSD")
    with pytest.raises(RuntimeError, match="mask must be bool"):
        npu.npu_fusion_attention(q, q, q, 2, "BNSD", atten_mask=torch.zeros(3, 3))
    groups = torch.tensor([3, 1])
    with pytest.raises(RuntimeError, match="must not decrease"):
        npu.npu_grouped_matmul([x], [torch.randn(2, 6, 3)], group_list=groups, group_type=0, split_item=2)
    with pytest.raises(RuntimeError, match="vector of int64"):
        npu.npu_grouped_matmul([x], [torch.randn(2, 6, 3)], group_list=groups.int(), group_type=0, split_item=2)
    with pytest.raises(RuntimeError, match="sorted_indices must be int32"):
        npu.npu_moe_token_unpermute(x, torch.arange(4))
    with pytest.raises(RuntimeError, match="more than the experts"):
        npu.npu_moe_gating_top_k(x, 3, group_count=3, k_group=1)
    weight = torch.randn(2, 6, 3, requires_grad=True)
    out = npu.npu_grouped_matmul([x], [weight], group_list=groups, group_list_type=1, group_type=0, split_item=2)[0]
    assert not out.requires_grad  # torch_npu registers no derivative


def test_the_references_have_the_signatures_of_torch_npu() -> None:
    wanted = {
        "npu_rms_norm": "self gamma epsilon=1e-06",
        "npu_add_rms_norm": "x1 x2 gamma epsilon=1e-06",
        "npu_swiglu": "self dim=-1",
        "npu_rotary_mul": "input r1 r2 rotary_mode=half rotate=None",
        "npu_moe_token_permute": "tokens indices num_out_tokens=None padded_mode=False",
        "npu_moe_token_unpermute": "permuted_tokens sorted_indices probs=None padded_mode=False restore_shape=None",
        "npu_moe_gating_top_k_softmax": "x finished=None k=1",
    }
    for name, want in wanted.items():
        parameters = inspect.signature(getattr(ref, name)).parameters.values()
        got = " ".join(p.name + ("" if p.default is p.empty else f"={p.default}") for p in parameters)
        assert got == want, name


def test_the_two_overflow_modes_of_one_fault(bench: Bench, tmp_path: Path) -> None:
    from harness.catalogue import find
    from harness.seams import Schedule

    fault = find("saturation_hides_overflow")
    silent, _ = bench.run(fault=fault.ref(schedule=Schedule(2)), steps=3)
    loud, _ = bench.run(fault=fault.ref({"mode": "inf_nan"}, Schedule(2)), steps=3)
    assert math.isfinite(silent.column("loss")[2])
    assert silent.column("skipped_steps")[2] == 0
    assert not math.isfinite(loud.column("loss")[2])
    assert loud.column("skipped_steps")[2] == SMALL.updates_per_rollout


def test_a_correction_bias_in_the_weights_is_what_the_fault_says(ops: npu_ops.Table) -> None:
    from harness.catalogue import find

    clean = ops["npu_moe_gating_top_k"]
    faulty = find("correction_bias_in_weights").factory(clean)
    x, bias = rand(5, 8), rand(8, seed=1) * 0.3
    kwargs: dict[str, Any] = {"k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1}
    weights, experts, _ = faulty(None, x, 2, bias=bias, routed_scaling_factor=2.5, **kwargs)
    assert torch.equal(experts, clean(x, 2, bias=bias, **kwargs)[1])  # the choice is the right one
    biased = (1 / (1 + (-x).exp()) + bias).gather(1, experts.long())
    torch.testing.assert_close(weights, 2.5 * biased / biased.sum(1, keepdim=True))
    same, _, _ = faulty(None, x, 2, bias=torch.zeros(8, dtype=D), routed_scaling_factor=2.5, **kwargs)
    torch.testing.assert_close(same, clean(x, 2, routed_scaling_factor=2.5, **kwargs)[0])
