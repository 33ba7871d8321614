"""Dictionaries that trainers print: TRL and the HF Trainer, LLaMA-Factory, ms-swift (as Python or as JSON), slime.

A record may be broken over several physical lines, stand behind a progress bar, or be cut short; what can be read of it
for certain (a value with something behind it) is kept, and that is said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from harness.importers.base import Format, Notes, Record
from harness.importers.numbers import NUMBER, clean, number, whole
from harness.importers.scan import scan

RECORD = re.compile(rb"\{\s*['\"](?=[^{}]{0,40}['\"]\s*:)[^{}]{1,60000}(?P<end>\}|(?=\{)|\Z)")
BAR = re.compile(rb"\|\s*(\d+)/\d+ \[[^\]\n]*\][ \t\r]*\Z")
COUNTED = re.compile(rb"\b(?:step|rollout) (\d+): \Z")
BEFORE = 400
"""Bytes before a record in which a progress bar or a counter is looked for."""

PAIR = re.compile(rf"""["']([^"'{{}}]+)["']\s*:\s*(?:["']([^"']*)["']|({NUMBER}))\s*(?=[,}}])""")
KEYS = re.compile(rb"""["'](?:loss|reward|objective/kl|grad_norm|eval_loss)["']\s*:""")
SWIFT = re.compile(rb"""["'](?:global_step/max_steps|train_speed\(iter/s\)|memory\(GiB\)|iteration)["']\s*:""")
SLIME = re.compile(rb"""\{['"](?:train|rollout|perf|eval)/""")
TRL_ONLY = re.compile(rb"""["'](?:rewards/|completion|kl["']|objective/)""")


def place(match: re.Match[bytes], pattern: re.Pattern[bytes]) -> int | None:
    """Return the step that stands before a record on its line."""
    found = pattern.search(match.string[max(0, match.start() - BEFORE) : match.start()])
    return int(found[1]) if found else None


def pairs(raw: bytes) -> tuple[dict[str, float], dict[str, str]]:
    """Take the numbers and the strings of a dictionary, line breaks inside names and values joined."""
    text = clean(raw).replace("\r", "").replace("\n", "")
    values: dict[str, float] = {}
    words: dict[str, str] = {}
    for name, word, digits in PAIR.findall(text):
        value = number(digits or word)
        if value is None or (word and name in ("global_step/max_steps", "iteration")):
            words[name] = word
        else:
            values[name] = value
    return values, words


def read(file: BinaryIO, notes: Notes, _path: Path) -> Iterator[Record]:
    """Yield the training records; validation rows and the summary at the end are skipped."""
    for line, match in scan(file, RECORD, notes):
        raw = match.group()
        values, words = pairs(raw)
        if b"\n" in raw.strip():
            notes.warn(f"the record at line {line} is broken over several lines: they were joined")
        if not match["end"] and values:
            notes.warn(f"the record at line {line} is cut short: its {len(values)} whole values were kept")
            notes.skip("ends of records that are cut short")
        progress = words.get("global_step/max_steps") or words.get("iteration")
        step = whole(number(progress.partition("/")[0])) if progress else None
        for key in ("step", "global_step", "train/step", "rollout/step"):
            step = whole(values.pop(key, None)) if step is None else step
        if step is None:
            step = next((at for p in (BAR, COUNTED) if (at := place(match, p)) is not None), None)
        if any(name.startswith(("eval_", "eval/")) for name in values):
            notes.skip("validation rows")
        elif "train_runtime" in values or "train_loss" in values or "last_model_checkpoint" in words:
            notes.skip("summary rows")
        elif values:
            yield Record(line, values, step)


def _sniff(wanted: Callable[[bytes, re.Match[bytes]], bool]) -> Callable[[bytes, Path], int]:
    def count(head: bytes, path: Path) -> int:
        if path.name == "trainer_state.json":
            return 0
        return sum(wanted(m.group(), m) for m in RECORD.finditer(head))

    return count


def _is_swift(text: bytes, _: re.Match[bytes]) -> bool:
    return bool(SWIFT.search(text))


def _is_llama(text: bytes, match: re.Match[bytes]) -> bool:
    glued = place(match, BAR) is not None
    return bool(glued and KEYS.search(text) and not TRL_ONLY.search(text) and not SWIFT.search(text))


def _is_slime(text: bytes, match: re.Match[bytes]) -> bool:
    return bool(SLIME.match(text)) and place(match, COUNTED) is not None


def _is_trl(text: bytes, match: re.Match[bytes]) -> bool:
    other = _is_swift(text, match) or _is_llama(text, match) or _is_slime(text, match)
    return text.lstrip(b"{ ").startswith(b"'") and bool(KEYS.search(text)) and not other


FORMATS = (
    Format("trl", "dictionaries that TRL and the HF Trainer print", "trl", _sniff(_is_trl), read, hides=True),
    Format("llamafactory", "the same behind a progress bar", "trl", _sniff(_is_llama), read, hides=True),
    Format("ms-swift", "ms-swift's logging.jsonl and console", "trl", _sniff(_is_swift), read, hides=True),
    Format("slime", "slime's console: step N: {...}", "slime", _sniff(_is_slime), read),
)
