import hashlib
import json
import math
import pickle
import struct
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.trace import (
    StepRecord,
    Trace,
    TraceWriter,
    decode_line,
    encode_line,
    first_difference,
    from_json_value,
    read_jsonl,
    read_parquet,
    to_json_value,
    write_parquet,
)

NAN, INF = math.nan, math.inf
FIVE = {"nan": NAN, "inf": INF, "minus": -INF, "zero": -0.0, "missing": None}
names = st.sampled_from(["loss", "grad_norm", "grad_norm/router", "kl", "μ"])
records = st.dictionaries(names, st.floats(allow_nan=True, allow_infinity=True), max_size=4)
traces = st.lists(records, max_size=8).map(lambda rows: Trace(StepRecord(2 * i, m) for i, m in enumerate(rows)))
quick = settings(max_examples=60, deadline=None, derandomize=True)


def bits(value):
    return "missing" if value is None else "nan" if value != value else struct.pack(">d", value)


def cells(trace):
    return {(s, m): bits(v) for m in trace.metrics for s, v in zip(trace.steps, trace.column(m), strict=True)}


def five():
    rows = [
        {"a": 1.0},
        {"a": v, "b": 0.5} if (v := FIVE["nan"]) else {},
        {"a": INF},
        {"a": -INF},
        {"a": -0.0},
        {"b": 0.0},
    ]
    return Trace(StepRecord(i, m) for i, m in enumerate(rows))


@quick
@given(traces)
def test_json_lines_round_trip_keeps_every_bit(trace):
    again = Trace(decode_line(encode_line(r)) for r in trace)
    assert cells(again) == cells(trace)
    assert again == trace
    assert again.digest() == trace.digest()


@quick
@given(trace=traces)
def test_parquet_round_trip_keeps_every_bit(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("t") / "trace.parquet"
    write_parquet(trace, path)
    again = read_parquet(path)
    assert again.steps == trace.steps
    assert cells(again) == cells(trace)
    assert [p.name for p in path.parent.iterdir()] == ["trace.parquet"]


def test_five_kinds_stay_five_kinds_on_disk(tmp_path):
    write_parquet(five(), tmp_path / "t.parquet")
    column = pq.read_table(tmp_path / "t.parquet")["a"]
    assert column.is_null().to_pylist() == [False, False, False, False, False, True]
    values = column.to_pylist()
    assert math.isnan(values[1])
    assert values[2:4] == [INF, -INF]
    assert math.copysign(1, values[4]) == -1.0
    again = read_parquet(tmp_path / "t.parquet")
    assert len({bits(v) for v in again.column("a")}) == 6  # 1.0 and the five kinds
    assert again.column("b") == [None, 0.5, None, None, None, 0.0]


def test_encode_line_is_strict_json_with_strings_for_non_finite():
    line = encode_line(StepRecord(3, {"loss": 0.1, "kl": NAN, "up": INF, "down": -INF, "z": -0.0}))
    assert json.loads(line, parse_constant=lambda c: pytest.fail(c)) == {
        "step": 3, "loss": 0.1, "kl": "nan", "up": "inf", "down": "-inf", "z": 0.0,
    }  # fmt: skip
    assert '"z": -0.0' in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("[]", "integer 'step'"),
        ('{"loss": 1.0}', "integer 'step'"),
        ('{"step": 1.0}', "integer 'step'"),
        ('{"step": true}', "integer 'step'"),
        ('{"step": 1, "loss": null}', "null"),
        ('{"step": 1, "loss": "high"}', "'high'"),
        ('{"step": 1, "loss": true}', "True"),
        ('{"step": 1, "loss": NaN}', "NaN"),
        ('{"step": 1, "loss": 1, "loss": 2}', "twice"),
        ('{"step": -1}', "-1"),
    ],
)
def test_decode_line_refuses(line, what):
    with pytest.raises(ValueError, match=what):
        decode_line(line)


def test_json_value_round_trip():
    assert [to_json_value(v) for v in (NAN, INF, -INF, None, 1.5)] == ["nan", "inf", "-inf", None, 1.5]
    assert to_json_value(-0.0) == 0.0
    assert math.copysign(1, to_json_value(-0.0)) == -1
    assert [bits(from_json_value(to_json_value(v))) for v in (NAN, INF, -INF, None, -0.0, 0.0)] == [
        bits(v) for v in (NAN, INF, -INF, None, -0.0, 0.0)
    ]


def test_writer_flushes_each_step_and_a_cut_line_is_dropped_with_a_warning(tmp_path, caplog):
    path = tmp_path / "spool.jsonl"
    with TraceWriter(path) as writer:
        for i in range(3):
            writer.write(StepRecord(i, {"loss": i / 7}))
            assert len(path.read_text().splitlines()) == i + 1  # on disk before the next step
    whole = path.read_bytes()
    assert read_jsonl(path).column("loss") == [0.0, 1 / 7, 2 / 7]
    path.write_bytes(whole[:-4])
    assert read_jsonl(path).steps == (0, 1)
    assert "spool.jsonl:3" in caplog.text
    path.write_bytes(whole[:-1])  # only the newline is lost: the line is whole
    assert read_jsonl(path).steps == (0, 1, 2)


def test_read_jsonl_names_the_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"step": 0}\n{"step": \n{"step": 2}\n')
    with pytest.raises(UsageError, match=r"bad.jsonl:2: not a step record"):
        read_jsonl(path)
    path.write_text('{"step": 4}\n{"step": 4}\n')
    with pytest.raises(UsageError, match=r"bad.jsonl:2: step 4 follows step 4"):
        read_jsonl(path)
    path.write_text('{"step": 0}\n{"st\n')  # cut, but with a newline: not what a kill leaves
    with pytest.raises(UsageError, match=r"bad\.jsonl:2"):
        read_jsonl(path)
    path.write_bytes(b"")
    assert read_jsonl(path) == Trace()
    with pytest.raises(UsageError, match="cannot be read"):
        read_jsonl(tmp_path / "absent.jsonl")


def test_writer_refuses_disorder(tmp_path):
    with pytest.raises(ValueError, match="not open"):
        TraceWriter(tmp_path / "a").write(StepRecord(0, {}))
    with TraceWriter(tmp_path / "a") as writer:
        writer.write(StepRecord(5, {}))
        with pytest.raises(ValueError, match=r"step 5 was written .* after step 5"):
            writer.write(StepRecord(5, {}))


def test_digest_is_the_documented_encoding():
    trace = Trace([StepRecord(1, {"b": 2.0}), StepRecord(4, {"a": -NAN, "b": -0.0})])
    nan = bytes.fromhex("7ff8000000000000")
    text = struct.pack(">q", 2) + struct.pack(">qq", 1, 4)
    text += struct.pack(">q", 1) + b"a" + b"\x00\x01" + nan + nan
    text += struct.pack(">q", 1) + b"b" + b"\x01\x01" + struct.pack(">dd", 2.0, -0.0)
    assert trace.digest() == hashlib.sha256(text).hexdigest()


def test_digest_and_equality_tell_the_kinds_apart():
    kinds = [Trace([StepRecord(0, {"k": 1.0, **({} if v is None else {"m": v})})]) for v in (*FIVE.values(), 0.0)]
    assert len({t.digest() for t in kinds}) == 6
    assert all((a == b) == (i == j) for i, a in enumerate(kinds) for j, b in enumerate(kinds))
    other_nan = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    assert Trace([StepRecord(0, {"m": other_nan})]).digest() == Trace([StepRecord(0, {"m": NAN})]).digest()


@quick
@given(traces, traces)
def test_first_difference_agrees_with_a_naive_search(a, b):
    rows_a, rows_b = ({r.step: r for r in t} for t in (a, b))
    expected = None
    for step in sorted({*rows_a, *rows_b}):
        if (step in rows_a) != (step in rows_b):
            expected = (step, "step")
            break
        keys = sorted({*rows_a[step].metrics, *rows_b[step].metrics})
        left, right = rows_a[step].metrics, rows_b[step].metrics
        differing = [k for k in keys if bits(left.get(k)) != bits(right.get(k))]
        if differing:
            expected = (step, differing[0])
            break
    assert first_difference(a, b) == expected
    assert (expected is None) == (a == b)


def test_sequence_window_and_columns():
    trace = Trace(StepRecord(i, {"x": float(i)}) for i in range(0, 10, 2))
    assert trace.window(2, 7).steps == (2, 4, 6)
    assert trace.window(20, 30) == Trace()
    assert trace[-1] == StepRecord(8, {"x": 8.0})
    assert trace[1:3].column("x") == [2.0, 4.0]
    assert trace.column("absent") == [None] * 5
    with pytest.raises(IndexError):
        trace[5]
    values, present = five().array("a")
    assert present.tolist() == [True] * 5 + [False]
    assert str(values.tolist()) == "[1.0, nan, inf, -inf, -0.0, nan]"
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 2.0
    assert not five().array("absent")[1].any()


def test_a_trace_survives_pickling():
    assert pickle.loads(pickle.dumps(five())) == five()
    assert pickle.loads(pickle.dumps(five()[1])) == five()[1]


def test_records_are_checked_and_read_only():
    record = StepRecord(0, {"x": 1})
    assert type(record.metrics["x"]) is float
    with pytest.raises(TypeError):
        record.metrics["x"] = 2.0
    for bad in ("", "step"):
        with pytest.raises(ValueError, match="name of a metric"):
            StepRecord(0, {bad: 1.0})
    with pytest.raises(TypeError, match="loss must be a number at step 3"):
        StepRecord(3, {"loss": None})
    with pytest.raises(TypeError, match=r"step must be an integer, got 1\.5"):
        StepRecord(1.5, {})
    with pytest.raises(ValueError, match="step 1 follows step 1"):
        Trace([StepRecord(1, {}), StepRecord(1, {})])
    with pytest.raises(ValueError, match="2 values for 1 steps"):
        Trace.from_columns([0], {"x": [1.0, 2.0]})


@pytest.mark.parametrize(
    ("table", "what"),
    [
        (pa.table({"loss": pa.array([1.0])}), "one column 'step'"),
        (
            pa.table({"step": pa.array([0, 1]), "loss": pa.array([1, 2])}),
            "column loss must be double, got int64",
        ),
        (pa.table({"step": pa.array([0, None], pa.int64())}), "1 nulls"),
        (pa.table({"step": pa.array([1, 0])}), "step 0 follows step 1"),
    ],
)
def test_read_parquet_names_what_is_wrong(tmp_path, table, what):
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(UsageError, match=what):
        read_parquet(tmp_path / "x.parquet")


def test_read_parquet_of_something_else(tmp_path):
    (tmp_path / "x.parquet").write_text("hello")
    with pytest.raises(UsageError, match=r"x\.parquet cannot be read as Parquet"):
        read_parquet(tmp_path / "x.parquet")


def test_a_failed_write_leaves_nothing(tmp_path):
    (tmp_path / "t.parquet").mkdir()
    with pytest.raises(OSError, match=r"t\.parquet"):
        write_parquet(five(), tmp_path / "t.parquet")
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_import_needs_the_standard_library_only():
    code = "import sys, harness.trace; print(sorted({'numpy', 'pyarrow', 'torch', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
