"""The contract itself: every check fails for the fault that breaks it, and only that."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import catalogue
from harness.catalogue import find, find_entry
from harness.contract import Workplace, applies, check_fault, load_file
from harness.errors import UsageError
from harness.mechanism import mechanism
from harness.scaffold import source

HEAD = '''"""Faults that break the contract."""
from harness.catalogue import fault
from harness.claims import *
from harness.seams import *

URL = "https://example.org/report"
LEAKS = {}


def written(name, **given):
    def register(function):
        function.__name__ = name
        function.__doc__ = """Breaks something.

        What breaks: this.
        In the wild: nowhere.
        Looks like: that.
        """ if given.pop("documented", True) else "Breaks something"
        settings = {"seam": Stage.LOSS, "seen_in": [URL], "expects": [Shifts("loss")], **given}
        return fault(**settings)(function)

    return register
'''

# name: (the check that must fail, a word of its sentence, the decorator's arguments, the body)
SCALED = """
    def faulty(ctx, forward):
        from dataclasses import replace
        loss = clean(ctx, forward)
        return replace(loss, value=loss.value * 2)
    return faulty
"""
BAD = {
    "undocumented": ("documentation", "full stop", "documented=False", SCALED),
    "without_reports": ("references", "seen_in is empty", "seen_in=[]", SCALED),
    "short_reference": ("references", "not a full URL", "seen_in=['org/repo#1']", SCALED),
    "without_claims": ("claims", "expects is empty", "expects=[]", SCALED),
    "claims_nonsense": ("claims", "'nonsense', which is no metric", "expects=[Rises('nonsense')]", SCALED),
    "claims_reward_in_replay": ("claims", "cannot respond in replay", "expects=[Falls('reward')]", SCALED),
    "looks_like_nothing": ("names", "no_such_fault", "look_alikes=['no_such_fault']", SCALED),
    "remedy_of_nobody": ("names", "no_such_remedy", "remedy='no_such_remedy'", SCALED),
    "pair_of_nobody": ("names", "no-such-pair", "pair='no-such-pair'", SCALED),
    "does_nothing": ("acts", "the clean run's", "", "    return lambda ctx, forward: clean(ctx, forward)\n"),
    "raises": ("fires", "raises KeyError at", "", "    return lambda ctx, forward: {}['x']\n"),
    "at_no_probe": ("fires", "no probe 'nothing'", "seam=Probe('nothing')", "    return clean\n"),
    "global_random": (
        "deterministic",
        "differ in",
        "",
        """
    def faulty(ctx, forward):
        import time
        from dataclasses import replace
        loss = clean(ctx, forward)
        return replace(loss, value=loss.value * (1 + time.perf_counter_ns() % 1000 / 1000))
    return faulty
""",
    ),
    "leaves_a_patch": (
        "undone",
        "torch.nn.functional.glu",
        "",
        """
    import torch
    glu = torch.nn.functional.glu
    torch.nn.functional.glu = lambda *args: glu(*args)
"""
        + SCALED,
    ),
    "draws_global_numbers": (
        "undone",
        "global random numbers",
        "",
        """
    def faulty(ctx, forward):
        import torch
        from dataclasses import replace
        loss = clean(ctx, forward)
        return replace(loss, value=loss.value * (2 + 0 * torch.rand(())))
    return faulty
""",
    ),
    "hooks_left": (
        "undone",
        "hooks of trainer",
        "",
        """
    def faulty(ctx, forward):
        from dataclasses import replace
        ctx.trainer.model.register_forward_hook(lambda *args: None)
        loss = clean(ctx, forward)
        return replace(loss, value=loss.value * 2)
    return faulty
""",
    ),
    "eight_experts_only": (
        "other experts",
        "raises RuntimeError",
        "",
        """
    def faulty(ctx, forward):
        from dataclasses import replace
        if ctx.trainer.model.config.num_experts != 8:
            raise RuntimeError("eight experts only")
        loss = clean(ctx, forward)
        return replace(loss, value=loss.value * 2)
    return faulty
""",
    ),
    "probe_that_trains": (
        "measurement only",
        " changes as well, although only the measurement entropy is to lie",
        "seam=Probe('entropy'), expects=[Shifts('entropy')]",
        """
    def faulty(ctx, seen):
        import torch
        with torch.no_grad():
            for p in ctx.trainer.model.parameters():
                p.mul_(1.5)
        return clean(seen) * 2
    return faulty
""",
    ),
    "config_of_others": (
        "configuration",
        "it changes zero_optimization besides gradient_clipping",
        "seam=Config('deepspeed', key='gradient_clipping')",
        "    return lambda config: {'gradient_clipping': 9.0, 'zero_optimization': {'stage': 3}}\n",
    ),
    "config_as_it_was": (
        "configuration",
        "rl.lr is what it was",
        "seam=Config('rl', key='lr')",
        "    return lambda config: dict(config)\n",
    ),
    "config_in_place": (
        "configuration",
        "instead of returning another",
        "seam=Config('rl', key='lr')",
        "    return lambda config: config.update(lr=1.0) or config\n",
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("contract"))


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch

    known, glu = dict(catalogue.catalogue()), torch.nn.functional.glu
    yield
    torch.nn.functional.glu = glu
    catalogue._REGISTERED.clear()
    catalogue._REGISTERED.update(known)


@pytest.mark.parametrize("name", BAD)
def test_each_check_fails_for_the_fault_that_breaks_it(name: str, place: Workplace, tmp_path: Path) -> None:
    check, words, given, body = BAD[name]
    file = tmp_path / "plugin" / f"{name}.py"
    file.parent.mkdir()
    file.write_text(HEAD + f"\n\n@written({name!r}, {given})\ndef {name}(clean):\n{body}", encoding="utf-8")
    (entry,) = load_file(file)
    failed = {c.name: c.sentence for c in check_fault(entry, place) if c.outcome == "fail"}
    assert words in failed[check]
    static = ("documentation", "references", "names", "claims", "configuration", "acts", "measurement only")
    if check in (*static, "other experts"):
        assert set(failed) == {check}


def test_a_remedy_for_a_fault_that_does_not_exist(place: Workplace, tmp_path: Path) -> None:
    file = tmp_path / "plugin" / "cures.py"
    file.parent.mkdir()
    file.write_text(
        HEAD.replace("import fault", "import fault, remedy")
        + '''

@remedy(seam=Stage.LOSS, for_=["grad_overflow", "no_such_fault"], seen_in=[URL])
def cures_nothing(clean):
    """Lets everything pass.

    What it does: nothing.
    In the wild: nowhere.
    What it costs: nothing.
    """
    return lambda ctx, forward: clean(ctx, forward)
''',
        encoding="utf-8",
    )
    try:
        (entry,) = load_file(file)
        failed = {c.name: c.sentence for c in check_fault(entry, place) if c.outcome == "fail"}
    finally:
        del catalogue._REMEDIES["cures_nothing"]
    assert failed == {"names": "for_ must name faults of the catalogue, got no_such_fault"}


def test_scaffold_imports_passes_lint_and_says_what_to_fill_in(place: Workplace, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    stages = ("loss", "prompts", "old_logprobs,logprobs", "clip,sync")
    for i, seam in enumerate((*stages, "module:router:trainer", "operator:experts", "probe:entropy", "config:rl.lr")):
        file = tmp_path / "mine" / f"bare_{i}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(source(f"bare_{i}", seam), encoding="utf-8")
        (entry,) = load_file(file)
        failed = {c.name: c.sentence for c in check_fault(entry, place) if c.outcome == "fail"}
        assert set(failed) == {"documentation", "references", "claims", "configuration" if entry.config else "acts"}
        assert failed["documentation"] == "the first line of the docstring is still to be filled in"
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [*ruff, *command, "--no-cache", "--config", str(root / "pyproject.toml"), str(tmp_path / "mine")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("seam", "message"),
    [
        ("lose", "did you mean 'loss'"),
        ("module:roter", "did you mean 'router'"),
        ("module:router:both_sides", "side 'both_sides' does not exist"),
        ("config:rl", "unknown configuration section"),
        ("hook:x", "unknown kind of seam"),
    ],
)
def test_scaffold_refuses_seams_that_do_not_exist(seam: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        source("some_name", seam)


@pytest.mark.parametrize("name", ["BadName", "two words", "lambda", "grad-overflow", "_x", "x__y"])
def test_scaffold_refuses_names(name: str) -> None:
    with pytest.raises(UsageError, match="is no name for a fault"):
        source(name, "loss")


def test_scaffold_refuses_a_name_that_is_taken() -> None:
    with pytest.raises(UsageError, match="the name grad_overflow is taken"):
        source("grad_overflow", "loss")


def test_a_file_of_the_catalogue_is_its_own_entry(tmp_path: Path) -> None:
    assert load_file(Path(find("grad_overflow").source)) == [find("grad_overflow")]
    for text, message in [("x = 1\n", "defines no fault"), ("def (\n", "cannot be imported: SyntaxError")]:
        file = tmp_path / "nothing.py"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match=message):
            load_file(file)
    with pytest.raises(UsageError, match="is not a file"):
        load_file(tmp_path / "missing.py")


def test_checks_that_do_not_apply_are_left_out() -> None:
    config, stage = find("deepspeed_clipping_default"), find("grad_overflow")
    assert applies("configuration", config)
    assert not applies("asleep", config)
    assert applies("asleep", stage)
    assert not applies("configuration", stage)
    assert {c.name: c.outcome for c in check_fault(config)}["configuration"] == "pass"


def test_mechanism_ignores_names_and_constants_but_not_code(tmp_path: Path) -> None:
    file = tmp_path / "three.py"
    body = '''

@fault(seam={seam}, seen_in=[URL], expects=[])
def {name}(clean, *, {option}={value}):
    """Says {name}."""

    def {inner}(ctx, forward):
        {var} = clean(ctx, forward)
        return {var}.{method}({option})

    return {inner}
'''
    one = {"seam": "Stage.LOSS", "name": "one", "option": "a", "value": 1, "inner": "f", "var": "x", "method": "times"}
    variants = [
        one,
        {**one, "name": "two", "option": "factor", "value": 0.5, "inner": "faulty", "var": "y"},
        {**one, "name": "three", "method": "plus"},
        {**one, "name": "four", "seam": "Stage.CLIP"},
        {**one, "name": "five", "seam": "Module('norm', side='trainer')"},
        {**one, "name": "six", "seam": "Module('norm', side='rollout')"},
    ]
    file.write_text(HEAD + "".join(body.format(**v) for v in variants), encoding="utf-8")
    load_file(file)
    one_, two, three, four, five, six = (mechanism(find_entry(v["name"])) for v in variants)
    assert one_ == two
    assert five == six
    assert len({one_, three, four, five}) == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"expected_verdict": "PARTIAL"}, "needs its measured reason"),
        ({"expected_verdict": "MAYBE", "reason": "x"}, "no verdict 'MAYBE'"),
        ({"severity": "size"}, "is not one of its options"),
    ],
)
def test_decorator_refuses(given: dict[str, str], message: str) -> None:
    from harness.seams import Stage

    def some_fault(clean: object) -> object:
        return clean

    with pytest.raises(ValueError, match=message):
        catalogue.fault(seam=Stage.LOSS, seen_in=[], expects=[], **given)(some_fault)
