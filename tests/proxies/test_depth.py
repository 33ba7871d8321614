import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from proxies.build import build
from proxies.checkpoint import CheckpointError
from proxies.depth import most_influential, shallower
from proxies.profile import profile
from proxies.verify import verify
from tests.proxies.conftest import save_model


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("deep") / "m", num_hidden_layers=5)


def states(folder, batches):
    """Hidden states that enter each layer and leave the last one, on real tokens."""
    model, inside = AutoModelForCausalLM.from_pretrained(folder).eval(), {}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _m, args, out, n=number: inside.setdefault(n, []).append((args[0], out)))
    with torch.no_grad():
        for tokens, mask in batches:
            model(input_ids=tokens, attention_mask=mask)
    keep = [mask.reshape(-1).bool() for _, mask in batches]
    return {
        n: [(a.flatten(0, 1)[k], b.flatten(0, 1)[k]) for (a, b), k in zip(pairs, keep, strict=True)]
        for n, pairs in inside.items()
    }


def test_influence_is_one_minus_the_cosine_through_the_layer(deep, batches):
    found = profile(deep, batches).influence
    for layer, pairs in states(deep, batches).items():
        a, b = (torch.cat(x).double() for x in zip(*pairs, strict=True))
        cosine = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
        assert found[layer] == pytest.approx(float((1 - cosine).mean()), abs=1e-5)
    assert set(found) == set(range(5))


def test_first_and_last_stay_and_the_least_influential_go():
    influence = {0: 0.0, 1: 0.3, 2: 0.1, 3: 0.2, 4: 0.0}
    assert most_influential(influence, 3) == [0, 1, 4]
    assert most_influential(influence, 4) == [0, 1, 3, 4]
    for keep in (1, 5, 6):
        with pytest.raises(CheckpointError, match=f"{keep} layers cannot be kept of 5"):
            most_influential(influence, keep)
    with pytest.raises(CheckpointError, match="their influence is unknown"):
        most_influential({}, 3)


def test_lists_by_layer_follow():
    config = {
        "num_hidden_layers": 4, "layer_types": ["a", "b", "c", "d"], "mlp_only_layers": [0, 2],
        "first_k_dense_replace": 2, "eos_token_id": [1, 2],
    }  # fmt: skip
    assert shallower(config, [0, 2, 3]) == {
        "num_hidden_layers": 3, "layer_types": ["a", "c", "d"], "mlp_only_layers": [0, 1],
        "first_k_dense_replace": 1, "eos_token_id": [1, 2],
    }  # fmt: skip


def test_shallower_proxy_is_the_original_without_the_layers(deep, batches, tmp_path):
    manifest = build(deep, tmp_path / "p", 4, batches, layers=3)
    layers = manifest["kept_layers"]
    assert len(layers) == 3
    assert {layers[0], layers[-1]} == {0, 4}
    assert json.loads((tmp_path / "p" / "config.json").read_text())["num_hidden_layers"] == 3
    assert verify(tmp_path / "p", against=deep).compared == verify(tmp_path / "p").tensors
    flat = build(deep, tmp_path / "flat", 4, batches)
    large = AutoModelForCausalLM.from_pretrained(tmp_path / "flat").eval()
    assert flat["kept_layers"] is None
    large.model.layers = torch.nn.ModuleList(large.model.layers[i] for i in layers)
    large.model.config.num_hidden_layers = large.config.num_hidden_layers = 3
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "p").eval()
    tokens = batches[0][0]
    with torch.no_grad():
        torch.testing.assert_close(
            small(tokens, use_cache=False).logits, large(tokens, use_cache=False).logits, rtol=0, atol=1e-5
        )


def test_pattern_that_the_configuration_cannot_express_is_refused(batches, tmp_path):
    folder = save_model(tmp_path / "m", num_hidden_layers=6, mlp_only_layers=[], decoder_sparse_step=2)
    with pytest.raises(CheckpointError, match=r"these layers cannot be dropped, since config\.json cannot say so"):
        build(folder, tmp_path / "p", 4, batches, layers=5)  # the alternation of dense and sparse breaks
