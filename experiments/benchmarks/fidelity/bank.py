"""The arms of the study: planned by content address, run within a budget, read back as sets of traces."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from harness import pairs, plan
from harness.catalogue import FaultSpec, catalogue, find
from harness.experiment import fired, run_arms
from harness.fidelity import ArmSet
from harness.plan import NULL, Arm, Planner, Request
from harness.seams import FaultRef, Schedule
from harness.spec import Mode, PairSpec, load_pair
from harness.store import Store, StoredRun
from harness.trace import Trace

CHUNK = 32


@dataclass(frozen=True)
class Subject:
    """One model under study.

    Attributes:
        pair: Name of the pair.
        experts: Experts kept; 0 for the original.
        strategy: Selection strategy of a proxy.
        folder: Checkpoint folder of a stand-in that was made otherwise.
    """

    pair: str
    experts: int = 0
    strategy: str = ""
    folder: str = ""

    @property
    def model(self) -> str:
        """Which of the two models of a pair it is."""
        return "proxy" if self.experts or self.folder else "original"

    @property
    def name(self) -> str:
        """What it is called in a table."""
        made = Path(self.folder).name if self.folder else f"{self.strategy}-{self.experts}"
        return f"{self.pair}/{made if self.model == 'proxy' else 'original'}"


def default_proxy(pair: str) -> Subject:
    """The proxy that a pair names itself."""
    spec = load_pair(pair).proxy
    return Subject(pair, spec.experts or 0, spec.strategy, spec.folder or "")


def studied() -> list[FaultSpec]:
    """The faults of the catalogue that run on the torch engine, controls left out."""
    return [f for f in catalogue().values() if not f.control and f.engine in (None, "torch") and not f.config]


@dataclass
class Bank:
    """Plans, runs and reads arms.

    Attributes:
        home: Where originals, proxies and runs are kept.
        steps: Steps of an arm; None for the pair's.
    """

    home: Path
    steps: int | None = None
    _pairs: dict[Subject, PairSpec] = field(default_factory=dict)
    _models: dict[Subject, dict[str, pairs.Prepared]] = field(default_factory=dict)
    _planners: dict[tuple[Any, ...], Planner] = field(default_factory=dict)

    @cached_property
    def store(self) -> Store:
        """Where the runs lie."""
        return Store(self.home / "store")

    def pair(self, subject: Subject) -> PairSpec:
        """The pair with the subject as its proxy."""
        if subject not in self._pairs:
            spec = load_pair(subject.pair)
            change: dict[str, Any] = {}
            if subject.folder:
                change |= {"folder": subject.folder, "experts": None}
            elif subject.experts:
                change |= {"experts": subject.experts, "strategy": subject.strategy, "folder": None}
            proxy = type(spec.proxy).model_validate({**spec.proxy.model_dump(), **change})
            steps = spec.steps if self.steps is None else self.steps
            self._pairs[subject] = spec.model_copy(update={"proxy": proxy, "steps": steps})
        return self._pairs[subject]

    def models(self, subject: Subject) -> dict[str, pairs.Prepared]:
        """Both models of the subject's pair, made if they are not there, able or not."""
        if subject not in self._models:
            self._models[subject] = pairs.make(self.pair(subject), self.home, lambda *_: None)
        return self._models[subject]

    def experts(self, pair: str) -> int:
        """Experts per layer of a pair's original."""
        from proxies.checkpoint import read_json
        from proxies.families import family_of_config

        config = read_json(self.models(default_proxy(pair))["original"].folder / "config.json")
        return family_of_config(config).experts(config)

    def ability(self, subject: Subject) -> dict[str, float]:
        """Exact-match rate of original, proxy and chance."""
        return pairs.rates(self.pair(subject), self.models(subject), self.home, lambda *_: None)

    def arm(
        self, subject: Subject, fault: FaultSpec, condition: str, seed: int, *, draw: int = 0, severity: Any = None
    ) -> Arm:
        """Plan one arm of one subject: ``clean``, ``null`` (the draw-th), ``faulted`` or ``tape``."""
        pair = self.pair(subject)
        onset = pair.onset
        ref = fault.ref({} if severity is None else {str(fault.severity): severity}, Schedule(onset))
        mode: Mode = fault.mode
        key = (subject, fault.name, severity)
        if key not in self._planners:
            request = Request(pair, ref, mode, "torch", (0,))
            self._planners[key] = Planner(request, self.models(subject), self.store)
        planner = self._planners[key]
        installed: FaultRef | None = None
        if condition == "faulted":
            installed = ref
        elif condition == "null":
            until = onset + 1 if mode == "replay" else None
            installed = find(NULL[mode]).ref({"draw": draw}, Schedule(onset, until=until))
        kind: Any = condition
        return planner.arm(subject.model, kind, seed, installed)

    def arms(
        self, subject: Subject, fault: FaultSpec, seeds: Sequence[int], *, draws: Sequence[int] = (0,), **options: Any
    ) -> list[Arm]:
        """All arms that one fault needs on one subject, tapes first."""
        found = []
        for seed in seeds:
            if fault.mode == "replay":
                found.append(self.arm(subject, fault, "tape", seed))
            found.append(self.arm(subject, fault, "clean", seed))
            found += [self.arm(subject, fault, "null", seed, draw=d) for d in draws]
            if not fault.control:
                found.append(self.arm(subject, fault, "faulted", seed, **options))
        return found

    def read(self, subject: Subject, fault: FaultSpec, seeds: Sequence[int], **options: Any) -> ArmSet | None:
        """The stored traces of one fault on one subject; None if an arm has not been run."""
        runs: dict[str, dict[int, StoredRun]] = {}
        for condition in ("clean", "null", "faulted"):
            extra = options if condition == "faulted" else {}
            for seed in seeds:
                run = self.store.get(self.arm(subject, fault, condition, seed, **extra).job.key)
                if run is None:
                    return None
                runs.setdefault(condition, {})[seed] = run
        traces = {c: {s: self._trace(r) for s, r in by.items()} for c, by in runs.items()}
        did = {s: fired(fault, runs["faulted"][s], runs["clean"][s]) for s in seeds}
        return ArmSet(**traces, fired=did)

    _traces: dict[str, Trace] = field(default_factory=dict)

    def _trace(self, run: StoredRun) -> Trace:
        if run.key not in self._traces:
            self._traces[run.key] = run.trace()
        return self._traces[run.key]

    def null_set(
        self, subject: Subject, fault: FaultSpec, seeds: Sequence[int], draws: tuple[int, int]
    ) -> ArmSet | None:
        """Two null draws of healthy runs, the second in the place of the faulted arm."""
        found: list[Mapping[int, Trace]] = []
        for condition, draw in (("clean", 0), ("null", draws[0]), ("null", draws[1])):
            runs = {s: self.store.get(self.arm(subject, fault, condition, s, draw=draw).job.key) for s in seeds}
            if any(r is None for r in runs.values()):
                return None
            found.append({s: self._trace(r) for s, r in runs.items() if r is not None})
        return ArmSet(found[0], found[2], found[1], dict.fromkeys(seeds, 1))

    def run(self, wanted: Iterator[Arm], until: float, workers: int) -> tuple[int, int]:
        """Run arms in order, some at a time, until a point in time.

        Args:
            wanted: Arms, the most wanted first; those that are stored cost nothing.
            until: ``time.monotonic()`` at which no more are started.
            workers: Worker processes.

        Returns:
            Arms that are stored now, and arms that failed.
        """
        done, failed, chunk = 0, 0, list[Arm]()
        for arm in wanted:
            if self.store.get(arm.job.key) is not None:
                done += 1
                continue
            chunk.append(arm)
            if len(chunk) >= CHUNK * workers:
                done, failed = self._flush(chunk, done, failed, workers)
                chunk = []
                if time.monotonic() > until:
                    return done, failed
        return self._flush(chunk, done, failed, workers)

    def _flush(self, chunk: list[Arm], done: int, failed: int, workers: int) -> tuple[int, int]:
        results = run_arms(chunk, self.store, workers, None)
        good = sum(isinstance(r, StoredRun) for r in results.values())
        return done + good, failed + len(results) - good


__all__ = ["Bank", "Subject", "default_proxy", "plan", "studied"]
