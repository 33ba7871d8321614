from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import __version__
from tests.cli.test_run import run

HEAVY = {"torch", "transformers", "numpy", "pandas", "pyarrow", "mlflow", "plotly", "sklearn", "scipy", "deepspeed"}


@pytest.mark.parametrize(
    "argv", [["--help"], ["faults", "list"], ["faults", "show", "grad_overflow"], ["run", "--help"]]
)
def test_light_commands_import_nothing_heavy(argv: list[str]) -> None:
    script = (
        "import sys\n"
        "from harness.cli import main\n"
        "try:\n"
        f"    main({argv!r})\n"
        "finally:\n"
        f"    print('heavy:', sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "heavy: []\n"


def test_specs_load_without_torch() -> None:
    script = "import sys, harness.spec, harness.plan, harness.experiment; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "False\n"


def test_faults_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["faults", "list"], capsys)
    assert code == 0
    assert "grad_overflow" in out
    assert "null_weights_nudged" not in out
    code, out, _ = run(["faults", "list", "--family", "routing", "--json"], capsys)
    data = json.loads(out)
    assert data["schema"] == "harness/faults@1"
    assert {f["name"] for f in data["faults"]} >= {"norm_topk_prob_ignored", "router_logits_bf16"}
    assert {f["family"] for f in data["faults"]} == {"routing"}
    keys = {"name", "family", "seam", "mode", "seen_in", "expects", "severity", "remedy", "needs", "summary"}
    assert all(keys <= set(f) for f in data["faults"])
    code, _, err = run(["faults", "list", "--family", "rooting"], capsys)
    assert code == 2
    assert "did you mean 'routing'" in err


def test_faults_show(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["faults", "show", "grad_overflow"], capsys)
    assert code == 0
    assert "What breaks: every tensor's norm is squared" in out
    assert "https://github.com/facebookresearch/fairscale/issues/263" in out
    code, out, _ = run(["faults", "show", "grad_overflow", "--json"], capsys)
    assert set(json.loads(out)["faults"][0]["sections"]) == {"What breaks", "In the wild", "Looks like"}
    assert run(["faults", "show", "nope"], capsys)[0] == 2


@pytest.mark.parametrize(
    ("words", "inside", "outside"),
    [
        (["--moe"], "router_logits_bf16", "grad_overflow"),
        (["--seam", "router"], "norm_topk_prob_ignored", "swiglu_gate_up_swap"),
        (["--seam", "stage", "--family", "precision"], "grad_overflow", "rmsnorm_no_fp32_upcast"),
        (["--mode", "free"], "actor_update_omitted", "grad_overflow"),
        (["--engine", "deepspeed"], "deepspeed_clipping_default", "grad_overflow"),
        (["--engine", "torch"], "grad_overflow", "deepspeed_clipping_default"),
    ],
)
def test_faults_list_by(words: list[str], inside: str, outside: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["faults", "list", *words, "--json"], capsys)
    names = {f["name"] for f in json.loads(out)["faults"]}
    assert code == 0
    assert inside in names
    assert outside not in names


def test_faults_list_refuses_and_may_be_empty(capsys: pytest.CaptureFixture[str]) -> None:
    for words, near in [
        (["--seam", "roter"], "did you mean 'router'"),
        (["--mode", "reply"], "did you mean 'replay'"),
        (["--engine", "deepsped"], "did you mean 'deepspeed'"),
    ]:
        code, _, err = run(["faults", "list", *words], capsys)
        assert (code, near in err) == (2, True), err
    code, out, err = run(["faults", "list", "--moe", "--family", "framework"], capsys)
    assert (code, out, err) == (0, "", "harness: no fault is all of that\n")
    _, out, _ = run(["faults", "list", "--moe", "--family", "framework", "--json"], capsys)
    assert json.loads(out)["faults"] == []


def test_faults_show_says_what_to_expect_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(["faults", "show", "norm_topk_prob_ignored"], capsys)
    assert "verdict      PARTIAL on tiny-qwen3-moe" in out
    assert "0.19 in the original and 0.56 in the proxy" in out
    _, out, _ = run(["faults", "show", "noop", "--json"], capsys)
    assert json.loads(out)["faults"][0]["expected_verdict"] == "NO_EFFECT"


def test_remedies_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["faults", "remedies"], capsys)
    assert code == 0
    assert "For: grad_overflow." in out
    _, out, _ = run(["faults", "remedies", "--json"], capsys)
    (found,) = [r for r in json.loads(out)["remedies"] if r["name"] == "truncated_importance_sampling"]
    assert found["options"] == {"cap": 2.0}
    code, out, _ = run(["faults", "show", "resync"], capsys)
    assert code == 0
    assert "What it costs: " in out
    assert "for          stale_rollout_weights" in out


def test_faults_new_then_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root = tmp_path / "mine"
    root.mkdir()
    (root / "__init__.py").write_text("", encoding="utf-8")
    argv = ["faults", "new", "second_moment_wrong", "--family", "optimizer", "--seam", "step", "--out", str(root)]
    code, out, _ = run(argv, capsys)
    path = root / "optimizer" / "second_moment_wrong.py"
    assert code == 0
    assert f"harness faults check {path}" in out
    assert (root / "optimizer" / "__init__.py").read_text(encoding="utf-8") == '"""Faults of this family."""\n'
    before = path.read_text(encoding="utf-8")
    code, _, err = run(argv, capsys)
    assert (code, "exists already" in err) == (2, True)
    assert path.read_text(encoding="utf-8") == before
    try:
        code, out, _ = run(["faults", "check", str(path), "--json"], capsys)
        assert code == 1
        data = json.loads(out)
        assert data["schema"] == "harness/contract@1"
        (found,) = data["faults"]
        outcomes = {c["name"]: c["outcome"] for c in found["checks"]}
        assert (found["name"], found["met"]) == ("second_moment_wrong", False)
        assert {n for n, o in outcomes.items() if o == "fail"} == {"documentation", "references", "claims", "acts"}
    finally:
        from harness import catalogue

        del catalogue._REGISTERED["second_moment_wrong"]
    for words, message in [
        (["Bad-Name"], "is no name for a fault"),
        (["good_name", "--family", "optimiser"], "did you mean 'optimizer'"),
        (["good_name", "--mode", "reply"], "did you mean 'replay'"),
    ]:
        code, _, err = run(["faults", "new", *words], capsys)
        assert (code, message in err) == (2, True), err


def test_faults_check_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["faults", "check", "deepspeed_clipping_default"], capsys)
    assert code == 0
    assert "  pass  configuration     deepspeed.gradient_clipping: 0.02 becomes 'missing', the rest is kept" in out
    assert out.endswith("deepspeed_clipping_default meets its contract\n")
    assert run(["faults", "check", "nope"], capsys)[0] == 2
    assert run(["faults", "check", "nope.py"], capsys)[0] == 2


def test_version_and_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"], capsys)[:2] == (0, f"harness {__version__}\n")
    code, out, err = run([], capsys)
    assert "Usage" in out + err
    assert code in (0, 2)  # typer's own choice for a bare command


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path))
    code, out, _ = run(["doctor", "--json"], capsys)
    data = json.loads(out)
    assert code == 0
    assert data["missing"] == []
    assert data["home"] == str(tmp_path)
    assert {d["kind"]: d["usable"] for d in data["devices"]}["cpu"] is True
    from harness.cli import machine

    monkeypatch.setattr(machine, "REQUIRED", ("torch", "no-such-library"))
    code, out, _ = run(["doctor"], capsys)
    assert code == 3
    assert "missing: pip install no-such-library" in out


def test_doctor_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.cli import machine
    from harness.rl import device

    def broken() -> list[device.Device]:
        raise OSError("libtorch.so: cannot open")

    monkeypatch.setenv("HARNESS_HOME", str(tmp_path))
    monkeypatch.setattr(device, "devices", broken)
    monkeypatch.setattr(machine, "LEAST_FREE_GB", 1e12)
    code, out, _ = run(["doctor"], capsys)
    assert code == 3
    assert "problem: torch is installed but cannot be loaded (OSError: libtorch.so: cannot open): reinstall it" in out
    assert f"problem: {tmp_path} has " in out
    assert "free some space, or set HARNESS_HOME" in out


def test_ui_runs_the_server_and_reports_its_failure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness import tracking

    asked = []
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path))
    monkeypatch.setattr(tracking, "serve", lambda home, port: asked.append((home, port)) or len(asked) - 1)
    code, out, err = run(["ui", "--port", "5055"], capsys)
    assert (code, out) == (0, "")
    assert "http://127.0.0.1:5055" in err
    assert run(["ui"], capsys)[0] == 3
    assert asked == [(tmp_path, 5055), (tmp_path, 5000)]
    assert run(["ui", "--port", "0"], capsys)[0] == 2


def test_faults_json_to_a_file_keeps_the_list(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "faults.json"
    code, out, _ = run(["faults", "list", f"--json={target}"], capsys)
    assert code == 0
    names = [f["name"] for f in json.loads(target.read_text(encoding="utf-8"))["faults"]]
    assert sorted(line.split()[1] for line in out.splitlines()) == sorted(names)
    code, out, _ = run(["faults", "show", "noop", f"--json={target}"], capsys)
    assert out.startswith("noop (controls)")
    assert json.loads(target.read_text(encoding="utf-8"))["faults"][0]["remedy"] is None


def test_proxy_build(capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path) -> None:
    out_folder = tmp_path / "proxy"
    argv = ["proxy", "build", str(checkpoint), "--experts", "4", "--out", str(out_folder), "--tokens", "300"]
    code, out, _ = run(argv, capsys)
    assert code == 0
    assert "4 experts per layer" in out
    assert json.loads((out_folder / "manifest.json").read_text())["experts"] == 4
    code, out, _ = run([*argv, "--json"], capsys)
    assert json.loads(out)["schema"] == "harness/proxy@1"
    for words, message in [
        (["proxy", "build", "/nowhere", "--experts", "4", "--out", str(tmp_path / "x")], "/nowhere is not a folder"),
        (
            ["proxy", "build", "tiny-qwen3", "--experts", "4", "--out", str(tmp_path / "x")],
            "unknown checkpoint folder or original 'tiny-qwen3'; did you mean 'tiny-qwen3-moe'",
        ),
        ([*argv[:-2], "--strategy", "facilty"], "the nearest are: facility"),
        ([*argv[:4], "1", "--out", str(tmp_path / "x")], "num_experts_per_tok = 2"),
    ]:
        code, _, err = run(words, capsys)
        assert (code, message in err) == (2, True), err
        assert not (tmp_path / "x").exists()


def test_proxy_profile_inspect_verify(capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path) -> None:
    profile, out_folder = tmp_path / "profile.safetensors", tmp_path / "proxy"
    code, out, _ = run(
        ["proxy", "profile", str(checkpoint), "--tokens", "300", "--out", str(profile), "--json"], capsys
    )
    data = json.loads(out)
    assert (code, data["schema"], data["tokens"] >= 300) == (0, "harness/proxy-profile@1", True)
    assert {layer: x["experts"] for layer, x in data["layers"].items()} == {"0": 8, "1": 8}
    build = ["proxy", "build", str(checkpoint), "--experts", "4", "--out", str(out_folder), "--profile", str(profile)]
    code, out, _ = run([*build, "--dry-run", "--json"], capsys)
    planned = json.loads(out)
    assert (code, out_folder.exists()) == (0, False)
    code, out, err = run([*build, "--json"], capsys)
    manifest = json.loads(out)
    assert (code, manifest["parameters"]) == (0, planned["parameters"])
    assert planned["bytes"]["proxy"] == 4 * planned["parameters"]["proxy"]
    assert manifest["smallest_for_mass"] == data["smallest_for_mass"]
    code, out, _ = run(["proxy", "inspect", str(out_folder), "--json"], capsys)
    seen = json.loads(out)
    assert (code, seen["experts"], seen["experts_per_token"], seen["manifest"]) == (0, 4, 2, True)
    assert seen["parameters"] == manifest["parameters"]["proxy"]
    verify = ["proxy", "verify", str(out_folder), "--against", str(checkpoint)]
    code, out, _ = run([*verify, "--json"], capsys)
    proved = json.loads(out)
    assert (code, proved["compared"], len(proved["layers"])) == (0, proved["tensors"], 2)
    assert all(0 < x["kept_mass"] < 1 for x in proved["layers"])
    code, out, err = run([*verify, "--floor", "0.3"], capsys)  # neither of these random models can do the tasks
    assert code == 1
    assert "fails the ability gate" in err
    assert "exact match: original 0.0%, proxy 0.0%" in out
    code, _, err = run(["proxy", "verify", str(out_folder), "--floor", "0.3"], capsys)
    assert (code, "--against DIR" in err) == (2, True)
    profile.write_bytes(b"no profile")
    code, _, err = run([*build[:-3], str(tmp_path / "other"), "--profile", str(profile)], capsys)
    assert (code, "is not a profile that" in err) == (2, True)
    assert not (tmp_path / "other").exists()


def test_profile_serves_a_search_and_a_strategy_that_asks_for_outputs(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> None:
    profile = str(tmp_path / "p.safetensors")
    take = ["proxy", "profile", str(checkpoint), "--tokens", "200", "--out", profile]
    build = ["proxy", "build", str(checkpoint), "--experts", "4", "--tokens", "200", "--profile", profile, "--json"]
    assert run(take, capsys)[0] == 0
    code, out, _ = run([*build, "--strategy", "swap", "--out", str(tmp_path / "swap")], capsys)
    manifest = json.loads(out)
    assert (code, manifest["search_calibration"]) == (0, manifest["calibration"])
    code, _, err = run([*build, "--strategy", "reconstruction", "--out", str(tmp_path / "r")], capsys)
    assert (code, "outputs, which the profile does not hold" in err) == (2, True)
    assert run([*take, "--outputs"], capsys)[0] == 0
    code, out, _ = run([*build, "--strategy", "reconstruction", "--out", str(tmp_path / "r")], capsys)
    assert (code, json.loads(out)["search_calibration"]) == (0, None)


def test_verify_of_a_proxy_with_fewer_layers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from harness.testing import make_checkpoint

    source = make_checkpoint(tmp_path / "source", layers=4)
    out = str(tmp_path / "p")
    argv = ["proxy", "build", str(source), "--experts", "4", "--layers", "3", "--tokens", "200", "--out", out]
    assert run(argv, capsys)[0] == 0
    code, text, err = run(["proxy", "verify", out, "--against", str(source), "--json"], capsys)
    assert code == 0, err
    kept = json.loads((tmp_path / "p" / "manifest.json").read_text())["kept_layers"]
    assert [x["layer"] for x in json.loads(text)["layers"]] == kept


def test_proxy_build_by_the_weights_alone(capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path) -> None:
    argv = ["proxy", "build", str(checkpoint), "--experts", "4", "--out", str(tmp_path / "p"), "--calibration", "none"]
    code, out, _ = run([*argv, "--json"], capsys)
    manifest = json.loads(out)
    assert (code, manifest["calibration"], manifest["smallest_for_mass"]) == (0, "none", None)
    code, _, err = run([*argv[:-2], "--calibration", "random", "--dtype", "fp8"], capsys)
    assert (code, "unknown dtype 'fp8'" in err) == (2, True)


def test_proxy_compare_strategies(capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path) -> None:
    argv = ["proxy", "compare-strategies", str(checkpoint), "--experts", "4", "--draws", "2", "--sequences", "32"]
    argv += ["--strategy", "first", "--strategy", "random", "--problems", "20", "--log", str(tmp_path / "log.jsonl")]
    code, out, _ = run([*argv, "--json"], capsys)
    data = json.loads(out)
    assert (code, data["schema"]) == (0, "harness/proxy-strategies@1")
    assert {(row["experts"], row["strategy"], len(row["scores"])) for row in data["rows"]} == {
        (4, "first", 2),
        (4, "random", 2),
    }
    log = (tmp_path / "log.jsonl").read_text()
    assert len(log.splitlines()) == 5  # the original, and two strategies on two draws
    code, out, _ = run(argv, capsys)
    assert code == 0
    assert "above random" in out
    assert (tmp_path / "log.jsonl").read_text() == log
    code, _, err = run([*argv, "--strategy", "facilty"], capsys)
    assert (code, "the nearest are: facility" in err) == (2, True)


def test_full_disk_is_a_sentence(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    import proxies.build

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "p"))

    monkeypatch.setattr(proxies.build, "write_checkpoint", full)
    argv = ["proxy", "build", str(checkpoint), "--experts", "4", "--out", str(tmp_path / "p"), "--tokens", "100"]
    code, _, err = run(argv, capsys)
    assert code == 3
    assert "No space left on device; what was finished is kept" in err
    assert not (tmp_path / "p").exists()


def test_debug_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--debug", "faults", "show", "nope"], ["faults", "show", "nope", "--debug"]):
        code, _, err = run(argv, capsys)
        assert code == 2
        assert "Traceback" in err


def test_a_proxy_needs_a_tokenizer(capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((checkpoint / name).read_bytes())
    code, _, err = run(["proxy", "build", str(bare), "--experts", "4", "--out", str(tmp_path / "x")], capsys)
    assert code == 2
    assert f"{bare} has no tokenizer (none of tokenizer.json, " in err
    assert not (tmp_path / "x").exists()
    (bare / "tokenizer.json").write_text("{", encoding="utf-8")
    code, _, err = run(["proxy", "build", str(bare), "--experts", "4", "--out", str(tmp_path / "x")], capsys)
    assert code == 2
    assert f"{bare} has a tokenizer that cannot be loaded" in err
    assert not (tmp_path / "x").exists()
