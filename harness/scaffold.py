"""Writes the file of a new fault, with the parts that its author has to fill in."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from typing import Any

from harness.catalogue import catalogue, remedies
from harness.declared import FILL_IN
from harness.errors import UsageError, unknown
from harness.rl.stages import Stage
from harness.seams import OPERATORS, ROLES, SECTIONS, Config, Module, Operator, Probe

KINDS = ("module:ROLE[:SIDE]", "operator:KIND[:SIDE]", "probe:METRIC", "config:SECTION.KEY")
VALUES: dict[Stage, str] = {
    Stage.PROMPTS: "",
    Stage.LOGPROBS: "micro",
    Stage.LOSS: "forward",
    Stage.SCALE: "loss",
    Stage.BACKWARD: "scaled",
    Stage.REDUCE: "mini",
    Stage.UNSCALE: "grads",
    Stage.CLIP: "grads",
    Stage.STEP: "grads",
    Stage.SYNC: "update",
}

TEMPLATE = '''"""{fill}: what is wrong, in a few words."""

from harness.catalogue import fault
from harness.seams import {imported}


@fault(
    seam={seam},{mode}
    seen_in=[],  # {fill}: full URLs of reports that you found and read
    expects=[],  # {fill}: claims about faulted minus clean, for example Rises("kl") of harness.claims
)
def {name}(clean):
    """{fill}: one sentence that says what is wrong.

    What breaks: {fill}: the mechanism.
    In the wild: {fill}: where it was seen, and what it cost.
    Looks like: {fill}: what the traces show.
    """

    def faulty({parameters}):
        return {call}

    return faulty
'''


@dataclass(frozen=True)
class Place:
    """How a seam is written in a fault's file.

    Attributes:
        imported: What is imported from ``harness.seams``.
        seam: The seam as an expression.
        parameters: Parameters of the faulty callable.
        call: How it calls the clean one.
    """

    imported: str
    seam: str
    parameters: str
    call: str


def check_name(name: str) -> str:
    """Return a name that a new fault may have.

    Raises:
        UsageError: If it is no lower-case Python name, or taken.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise UsageError(
            f"{name!r} is no name for a fault: lower-case words joined by underscores, as in grad_overflow"
        )
    if name in catalogue() or name in remedies():
        raise UsageError(f"the name {name} is taken; harness faults show {name} says by what")
    return name


def place(seam: str) -> Place:
    """Parse a seam as the command line gives it.

    Args:
        seam: Stages joined by commas (``loss``, ``old_logprobs,logprobs``), or one of ``KINDS``.

    Raises:
        UsageError: If there is no such seam; the nearest names are in the message.
    """
    kind, colon, rest = seam.partition(":")
    if not colon:
        return _stages(seam.split(","))
    if kind in ("module", "operator"):
        what, _, side = rest.partition(":")
        known = ROLES if kind == "module" else OPERATORS
        if what not in known:
            raise unknown(f"{kind} of a seam:", what, known)
        made = _made(Module if kind == "module" else Operator, what, *([side] if side else []))
        arguments = f'"{what}"' + (f', side="{side}"' if side else "")
        name = type(made).__name__
        return Place(name, f"{name}({arguments})", "ctx, module, *args, **kwargs", "clean(module, *args, **kwargs)")
    if kind == "probe" and rest:
        return Place("Probe", f'Probe("{_made(Probe, rest).name}")', "ctx, seen", "clean(seen)")
    if kind == "config":
        section, dot, key = rest.partition(".")
        if section not in SECTIONS or not dot or not key:
            raise unknown("configuration section of a seam:", rest, [f"{s}.KEY" for s in SECTIONS])
        made = _made(Config, section, key)
        return Place("Config", f'Config("{section}", key="{key}")', "config", f'{{**config, "{made.key}": None}}')
    raise unknown("kind of seam", seam, KINDS)


def _made(kind: Any, *arguments: str) -> Any:
    try:
        return kind(*arguments)
    except ValueError as e:
        raise UsageError(str(e)) from None


def _stages(names: list[str]) -> Place:
    stages = []
    for name in names:
        if name not in [s.value for s in Stage]:
            raise unknown("stage of a seam:", name, [*(s.value for s in Stage), *KINDS])
        stages.append(Stage(name))
    words = [f"Stage.{s.name}" for s in stages]
    values = {VALUES.get(s, "batch") for s in stages}
    value = values.pop() if len(values) == 1 else "*values"
    arguments = f"ctx, {value}" if value else "ctx"
    return Place("Stage", words[0] if len(words) == 1 else f"({', '.join(words)})", arguments, f"clean({arguments})")


def source(name: str, seam: str, mode: str = "replay") -> str:
    """Return the text of a new fault's file.

    Args:
        name: Name of the fault.
        seam: Where it attaches; see ``place``.
        mode: Mode in which it shows.

    Raises:
        UsageError: If the name or the seam will not do.
    """
    where = place(seam)
    return TEMPLATE.format(
        fill=FILL_IN,
        name=check_name(name),
        imported=where.imported,
        seam=where.seam,
        mode='\n    mode="free",' if mode == "free" else "",
        parameters=where.parameters,
        call=where.call,
    )
