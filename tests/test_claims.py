import json

import pytest

from harness.claims import CLAIMS, Claim, Falls, Flat, NonFinite, Rises, Scatters, Shifts, Spikes, Stays, Zero
from harness.errors import UsageError


def test_each_word_reads_as_a_sentence():
    assert [str(kind("kl")) for kind in (Falls, Rises, NonFinite, Flat, Zero, Stays, Shifts, Spikes, Scatters)] == [
        "kl falls",
        "kl rises",
        "kl becomes non-finite",
        "kl stops changing",
        "kl becomes zero",
        "kl does not respond",
        "kl shifts",
        "kl spikes",
        "kl scatters",
    ]
    assert str(NonFinite("grad_norm")) == "grad_norm becomes non-finite"


@pytest.mark.parametrize("kind", CLAIMS.values())
def test_json_round_trip(kind):
    claim = kind("grad_norm/router")
    again = Claim.from_dict(json.loads(json.dumps(claim.to_dict())))
    assert again == claim
    assert type(again) is kind


def test_same_metric_with_another_word_is_another_claim():
    assert len({kind("loss") for kind in CLAIMS.values()}) == 9
    assert Falls("loss") != Rises("loss")


def test_what_is_refused():
    with pytest.raises(UsageError, match="unknown claim 'Fall'; did you mean 'Falls'"):
        Claim.from_dict({"claim": "Fall", "metric": "loss"})
    with pytest.raises(ValueError, match="got \\['claim'\\]"):
        Claim.from_dict({"claim": "Falls"})
    with pytest.raises(ValueError, match="name of a metric"):
        Falls("")
    with pytest.raises(TypeError, match="needs a word"):
        Claim("loss")
