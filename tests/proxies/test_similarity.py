"""The three model-side factors, against numbers computed by hand from the whole models."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from proxies.build import build
from proxies.similarity import similarity


@pytest.fixture(scope="module")
def proxy(original, batches, tmp_path_factory):
    out = tmp_path_factory.mktemp("similar") / "p4"
    build(original, out, 4, batches)
    return out


def whole(folder, batches):
    """Per layer: choices [N, K], weights [N, K] (None for a dense layer), hidden states after the layer [N, H]."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    chosen, weights, states = {}, {}, {}
    keep = []

    def routed(layer):
        def hook(_module, args):
            chosen.setdefault(layer, []).append(args[1][keep[-1]])
            weights.setdefault(layer, []).append(args[2][keep[-1]])

        return hook

    def left(layer):
        return lambda _m, _a, out: states.setdefault(layer, []).append(out.flatten(0, 1)[keep[-1]])

    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(left(number))
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.register_forward_pre_hook(routed(number))
    with torch.no_grad():
        for tokens, mask in batches:
            keep.append(mask.reshape(-1).bool())
            model(input_ids=tokens, attention_mask=mask)
    join = lambda d: {k: torch.cat(v) for k, v in d.items()}  # noqa: E731
    return join(chosen), join(weights), join(states)


def test_factors_are_those_of_the_whole_models(original, proxy, batches):
    kept = {int(k): v for k, v in json.loads((proxy / "manifest.json").read_text())["kept_experts"].items()}
    large, small = whole(original, batches), whole(proxy, batches)
    found = similarity(original, proxy, kept, batches)
    assert [x.layer for x in found] == [0, 1, 2]
    for x in found:
        cosine = torch.cosine_similarity(large[2][x.layer], small[2][x.layer], dim=-1).mean()
        assert x.hidden_cosine == pytest.approx(float(cosine), abs=1e-5)
        if x.layer == 1:  # dense
            assert (x.kept_mass, x.load_overlap, x.load_entropy) == (None, None, None)
            continue
        chosen, weights = large[0][x.layer], large[1][x.layer]
        inside = torch.isin(chosen, torch.tensor(kept[x.layer]))
        assert x.kept_mass == pytest.approx(float(weights[inside].sum() / weights.sum()), abs=1e-6)
        share = torch.tensor([float((chosen == e).sum()) for e in kept[x.layer]])
        other = torch.tensor([float((small[0][x.layer] == e).sum()) for e in range(4)])
        overlap = torch.minimum(share / share.sum(), other / other.sum()).sum()  # the other form of 1 - distance
        assert x.load_overlap == pytest.approx(float(overlap), abs=1e-6)
        entropy = torch.distributions.Categorical(probs=other).entropy() / torch.tensor(4.0).log()
        assert x.load_entropy[1] == pytest.approx(float(entropy), abs=1e-5)


def test_a_model_is_like_itself(original, batches):
    every = {0: list(range(8)), 2: list(range(8))}
    for x in similarity(original, original, every, batches):
        assert x.hidden_cosine == pytest.approx(1.0, abs=1e-6)
        if x.kept_mass is not None:
            assert x.kept_mass == pytest.approx(1.0)
            assert x.load_overlap == pytest.approx(1.0)
            assert x.load_entropy[0] == x.load_entropy[1]


def test_layers_that_were_dropped_are_passed_over(original, batches, tmp_path):
    """Dropping a layer changes nothing before it, and the layer after it is compared with its own original."""
    from tests.proxies.conftest import save_model

    deep = save_model(tmp_path / "deep", num_hidden_layers=4, mlp_only_layers=[])
    manifest = build(deep, tmp_path / "proxy", 4, batches, layers=3)
    layers = manifest["kept_layers"]
    kept = {int(k): v for k, v in manifest["kept_experts"].items()}
    found = similarity(deep, tmp_path / "proxy", kept, batches, layers)
    assert [x.layer for x in found] == layers
    large, small = whole(deep, batches), whole(tmp_path / "proxy", batches)
    for position, x in enumerate(found):
        cosine = torch.cosine_similarity(large[2][x.layer], small[2][position], dim=-1).mean()
        assert x.hidden_cosine == pytest.approx(float(cosine), abs=1e-5)
        inside = torch.isin(large[0][x.layer], torch.tensor(kept[x.layer]))
        assert x.kept_mass == pytest.approx(float(large[1][x.layer][inside].sum() / large[1][x.layer].sum()), abs=1e-6)
