"""What differs between two configurations, worst first; what a file leaves out is taken from the defaults if known."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from harness.configs.read import Config
from harness.errors import UsageError, unknown

PARENTS = {"grpo": "hf"}
"""Kinds whose further defaults are those of another kind."""


class Unset(NamedTuple):
    """A key that a file leaves out and whose default is not known, or depends on a version that is not known."""

    says: str = "not set"


@dataclass(frozen=True)
class Setting:
    """A setting by one name over the keys of all frameworks (``settings.yaml``)."""

    name: str
    keys: tuple[str, ...]
    why: str
    reports: int


@dataclass(frozen=True)
class Difference:
    """A key that differs.

    Attributes:
        key: The key; both keys, joined by " | ", if they differ between frameworks.
        a: Value in the first file, or ``Unset``.
        b: Value in the second.
        origins: For each side ``file`` or ``default`` (with the version), or ``unset``.
        setting: What it is one of; None if nothing is known about it.
    """

    key: str
    a: Any
    b: Any
    origins: tuple[str, str]
    setting: Setting | None

    def to_json(self) -> dict[str, Any]:
        """Return JSON data; a value that is not set is None."""
        return {
            "key": self.key,
            "a": None if isinstance(self.a, Unset) else self.a,
            "b": None if isinstance(self.b, Unset) else self.b,
            "origins": list(self.origins),
            "setting": None if self.setting is None else self.setting.name,
            "why": None if self.setting is None else self.setting.why,
            "reports": 0 if self.setting is None else self.setting.reports,
        }


@cache
def settings() -> tuple[Setting, ...]:
    """Read the settings."""
    return tuple(Setting(s["name"], tuple(s["keys"]), s["why"], int(s["reports"])) for s in _load("settings.yaml"))


@cache
def defaults() -> Mapping[str, Any]:
    """Read the defaults."""
    found: Mapping[str, Any] = _load("defaults.yaml")
    return found


@cache
def shared() -> tuple[tuple[str, ...], ...]:
    """Read which keys of different frameworks mean the same, in the same unit."""
    return tuple(tuple(keys) for keys in _load("shared.yaml"))


def _load(name: str) -> Any:
    import yaml

    return yaml.safe_load((files(__package__) / name).read_text(encoding="utf-8"))


def setting_of(key: str) -> Setting | None:
    """Return the setting of a key: an exact key goes before a pattern, a longer pattern before a shorter one."""
    last = key.rsplit(".", 1)[-1]
    found = [
        (p in (key, last), len(p.replace("*", "")), s)
        for s in settings()
        for p in s.keys
        if fnmatch.fnmatchcase(key, p) or fnmatch.fnmatchcase(last, p)
    ]
    return max(found, key=lambda f: f[:2])[2] if found else None


def parse_versions(words: list[str]) -> dict[str, str]:
    """Parse ``package=version`` words.

    Raises:
        UsageError: If one is not of that form, or no defaults of that package are known.
    """
    from packaging.version import InvalidVersion, Version

    found = {}
    known = {str(d["package"]) for d in defaults().values()}
    for word in words:
        package, equals, version = word.partition("=")
        if not equals:
            raise UsageError(f"{word!r} is not of the form package=version, for example deepspeed=0.19.3")
        if package not in known:
            raise unknown("package with known defaults", package, known)
        try:
            found[package] = str(Version(version))
        except InvalidVersion:
            raise UsageError(f"{word!r}: {version!r} is not a version, for example 0.19.3") from None
    return found


def default_of(kind: str, key: str, versions: Mapping[str, str]) -> tuple[Any, str]:
    """Return the default of a key, and where it comes from; ``Unset`` if it is not known or depends on the version."""
    from packaging.specifiers import SpecifierSet

    table = defaults().get(kind)
    entries = table["values"].get(key) if table else None
    if table is None or entries is None:
        return default_of(PARENTS[kind], key, versions) if kind in PARENTS else (Unset(), "unset")
    package = table["package"]
    version = versions.get(package)
    if version is not None:
        for entry in entries:
            if SpecifierSet(entry["versions"], prereleases=True).contains(version):
                return entry["value"], f"default of {package} {version}"
        return Unset(), "unset"
    if len(entries) == 1:
        since = entries[0]["versions"]
        return entries[0]["value"], f"default of {package}{' ' + since if since else ''}"
    says = ", ".join(f"{e['value']} ({package} {e['versions']})" for e in entries)
    return Unset(f"not set: {says}"), f"depends on the version of {package}"


def compare(a: Config, b: Config, versions: tuple[Mapping[str, str], Mapping[str, str]]) -> list[Difference]:
    """Return what differs, by how often such a setting was reported as the cause of trouble, then by key.

    Files of one framework are compared key by key; of two frameworks setting by setting, where each has exactly one
    key of that setting with that last part, or the setting names both keys.
    """
    if a.kind != b.kind and {a.kind, b.kind} != {"hf", "grpo"}:
        found = list(_across(a, b))
    else:
        keys = {*a.values, *b.values, *_defaulted(a.kind), *_defaulted(b.kind)}
        found = [d for key in keys if (d := _one(key, a, b, versions)) is not None]
    return sorted(found, key=lambda d: (-(d.setting.reports if d.setting else -1), d.key))


def _defaulted(kind: str) -> set[str]:
    own = set(defaults().get(kind, {}).get("values", {}))
    return own | (_defaulted(PARENTS[kind]) if kind in PARENTS else set())


def _one(key: str, a: Config, b: Config, versions: tuple[Mapping[str, str], Mapping[str, str]]) -> Difference | None:
    sides = [
        (config.values[key], "file") if key in config.values else default_of(config.kind, key, known)
        for config, known in zip((a, b), versions, strict=True)
    ]
    (left, from_a), (right, from_b) = sides
    if key not in a.values and key not in b.values and (isinstance(left, Unset) or isinstance(right, Unset)):
        if left == right or not _varies(left, right):
            return None
    elif same(left, right):
        return None
    if same(left, right):
        return None
    return Difference(key, left, right, (from_a, from_b), setting_of(key))


def _varies(left: Any, right: Any) -> bool:
    """Whether a default that neither file sets may differ: one side is known and the other depends on its version."""
    return any(isinstance(x, Unset) and x.says != Unset().says for x in (left, right))


def same(a: Any, b: Any) -> bool:
    """Whether two values mean the same: numbers by value, words without regard to case, None and empty alike."""
    if isinstance(a, Unset) or isinstance(b, Unset):
        return isinstance(a, Unset) and isinstance(b, Unset) and a == b
    if isinstance(a, bool) or isinstance(b, bool):
        words = {"true": True, "false": False}
        a, b = (words.get(x.lower(), x) if isinstance(x, str) else x for x in (a, b))
        return type(a) is type(b) and a == b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return float(a) == float(b) or (a != a and b != b)
    if isinstance(a, str) and isinstance(b, str):
        return a.strip().lower() == b.strip().lower()
    return bool(a == b)


def _across(a: Config, b: Config) -> list[Difference]:
    found = []
    for keys in shared():
        left, right = (next((k for k in keys if k in c.values), None) for c in (a, b))
        if left is None or right is None or same(a.values[left], b.values[right]):
            continue
        key = left if left == right else f"{left} | {right}"
        found.append(Difference(key, a.values[left], b.values[right], ("file", "file"), setting_of(left)))
    return found
