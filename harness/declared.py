"""What a fault, or a remedy, says about itself: the part of the contract that runs nothing.

Each check returns a sentence about what it found, or raises ``NotMetError``.
"""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

from harness.catalogue import Entry, FaultSpec, RemedySpec, catalogue, remedies
from harness.claims import Claim
from harness.errors import UsageError
from harness.inject import rewrite_config
from harness.seams import Config, FaultRef, Schedule
from harness.spec import RLSpec, load_pair, pair_names, validate

FILL_IN = "FILL IN"  # what ``harness faults new`` leaves for people to replace
DEEPSPEED = {"gradient_clipping": 0.2, "zero_optimization": {"stage": 1}}


class NotMetError(Exception):
    """A check failed; the message is its sentence."""


def documentation(spec: Entry) -> str:
    """The three parts are there and filled in."""
    if not spec.summary.endswith((".", "?")):
        raise NotMetError("the docstring's first line must be one sentence that ends with a full stop")
    for title in spec.titles:
        if not spec.sections.get(title):
            raise NotMetError(f"the docstring has no part {title!r}; it needs {', '.join(spec.titles)}")
    for title, text in {"the first line": spec.summary, **spec.sections}.items():
        if FILL_IN in text:
            raise NotMetError(f"{title} of the docstring is still to be filled in")
    return f"a summary and {', '.join(spec.titles)}"


def references(spec: Entry) -> str:
    """Every reference is a full URL, and there is one."""
    for url in spec.seen_in:
        if not re.fullmatch(r"https://[^\s/]+\.[^\s/]+/\S+", url):
            raise NotMetError(f"seen_in has {url!r}, which is not a full URL (https://...)")
    if not spec.seen_in and not spec.control:
        raise NotMetError("seen_in is empty: give the full URL of a report that you found and read")
    if len(set(spec.seen_in)) != len(spec.seen_in):
        raise NotMetError("seen_in names a report twice")
    return f"{len(spec.seen_in)} reports by full URL" if spec.seen_in else "a control needs no report"


def names(spec: Entry) -> str:
    """Every other entry, pair and verdict that it names exists."""
    if isinstance(spec, RemedySpec):
        wrong = [n for n in spec.for_ if n not in catalogue()]
        if wrong:
            raise NotMetError(f"for_ must name faults of the catalogue, got {', '.join(wrong)}")
        return f"for {', '.join(spec.for_) or 'no fault of the catalogue yet'}"
    assert isinstance(spec, FaultSpec)
    known = set(catalogue()) - {spec.name}
    if wrong := sorted(set(spec.look_alikes) - known):
        raise NotMetError(f"look_alikes names {', '.join(wrong)}, which is no other fault of the catalogue")
    if spec.remedy is not None and spec.remedy not in remedies():
        raise NotMetError(f"remedy names {spec.remedy!r}, which is none; known: {', '.join(remedies())}")
    if spec.pair not in pair_names():
        raise NotMetError(f"pair names {spec.pair!r}, which is none; known: {', '.join(pair_names())}")
    return f"expected on {spec.pair}: {spec.expected_verdict}" + (f" ({spec.reason})" if spec.reason else "")


def claims(spec: Entry) -> str:
    """There are claims, about metrics that exist and can respond in the fault's mode."""
    from harness.fidelity.metrics import METRICS

    assert isinstance(spec, FaultSpec)
    if not spec.expects and not spec.control:
        raise NotMetError("expects is empty: claim what faulted minus clean does, with the words of harness/claims.py")
    for claim in spec.expects:
        if claim.metric not in METRICS:
            raise NotMetError(f"expects speaks of {claim.metric!r}, which is no metric; known: {', '.join(METRICS)}")
        if not METRICS[claim.metric].observable(spec.mode):
            raise NotMetError(
                f"{claim.metric} cannot respond in {spec.mode} mode; claim another metric, or mode='free'"
            )
    return "; ".join(map(str, spec.expects)) or "a control claims nothing"


def round_trip(spec: Entry) -> str:
    """Reference and claims survive pickling and JSON."""
    ref = spec.ref(schedule=Schedule(3, until=9, every=2))
    if pickle.loads(pickle.dumps(ref)) != ref or FaultRef.from_dict(json.loads(json.dumps(ref.to_dict()))) != ref:
        raise NotMetError("the reference does not survive pickling or JSON; options must be bool, int, float or str")
    for claim in getattr(spec, "expects", ()):
        if Claim.from_dict(claim.to_dict()) != claim:
            raise NotMetError(f"the claim {claim} does not survive to_dict")
    return "the reference survives pickling and JSON"


def options(spec: Entry) -> str:
    """An option that does not exist is refused, with the nearest one that does."""
    for given, near in {"no_such_option": "", **{f"{name}x": name for name in spec.defaults}}.items():
        if given in spec.defaults:
            continue
        try:
            spec.ref({given: 1})
        except UsageError as e:
            if "unknown option" not in str(e) or (near and f"did you mean '{near}'" not in str(e)):
                raise NotMetError(
                    f"the refusal of option {given} does not name {near or 'what is known'}: {e}"
                ) from None
        else:
            raise NotMetError(f"option {given} is taken although there is none")
    return ", ".join(f"{k} = {v!r}" for k, v in spec.defaults.items()) or "none, and none is taken"


def configuration(spec: Entry) -> str:
    """A configuration fault changes its own key and keeps every other setting."""
    assert isinstance(spec.seam, Config)
    section, key = spec.seam.section, spec.seam.key
    pair = load_pair(getattr(spec, "pair", "tiny-qwen3-moe"))
    config: dict[str, Any] = pair.rl.model_dump() if section == "rl" else {**DEEPSPEED, **pair.deepspeed}
    before = copy.deepcopy(config)
    new = rewrite_config(spec, spec.ref(), config)  # type: ignore[arg-type]  # only faults have a configuration seam
    if config != before:
        raise NotMetError("it changes the configuration that it was given instead of returning another")
    if new.get(key) == config.get(key):
        raise NotMetError(f"{section}.{key} is what it was: {config.get(key)!r}")
    if other := sorted(k for k in config if k != key and new.get(k, "missing") != config[k]):
        raise NotMetError(f"it changes {', '.join(other)} besides {key}")
    if section == "rl":
        validate(RLSpec, new, "the rewritten rl settings")
    return f"{section}.{key}: {config.get(key)!r} becomes {new.get(key, 'missing')!r}, the rest is kept"


DECLARED: Mapping[str, Callable[[Entry], str]] = {
    "documentation": documentation,
    "references": references,
    "names": names,
    "claims": claims,
    "round trip": round_trip,
    "options": options,
    "configuration": configuration,
}
