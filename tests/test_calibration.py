import json

import pytest
import torch

from harness.calibration import calibration, load_tokenizer
from harness.errors import UsageError


def test_random_tokens_need_no_tokenizer_and_are_keyed_by_the_seed(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50}))
    first, again, other = (calibration(tmp_path, "random", 3000, seed=s) for s in (0, 0, 1))
    assert [tuple(t.shape) for t, _ in first] == [(8, 128)] * 3
    assert torch.equal(torch.cat([t for t, _ in first]), torch.cat([t for t, _ in again]))
    assert not torch.equal(first[0][0], other[0][0])
    assert 0 <= min(int(t.min()) for t, _ in first) <= max(int(t.max()) for t, _ in first) < 50
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="vocab_size = None"):
        calibration(tmp_path, "random", 10)


def test_tasks_until_there_are_enough_tokens(checkpoint):
    batches = calibration(checkpoint, "task:add", 1500)
    counts = [int(mask.sum()) for _, mask in batches]
    assert sum(counts) >= 1500 > sum(counts[:-1])
    text = load_tokenizer(checkpoint).decode(batches[0][0][0][batches[0][1][0].bool()], skip_special_tokens=True)
    left, right = text.replace(" ", "").split("=")
    assert int(right) == sum(int(part) for part in left.split("+"))
    with pytest.raises(UsageError, match="unknown task 'ad'; did you mean 'add'"):
        calibration(checkpoint, "task:ad", 10)
    assert calibration(checkpoint, "none", 10) is None


def test_file_of_texts(checkpoint, tmp_path):
    path = tmp_path / "texts.jsonl"
    lines = [{"text": "12+30=42"}, {"prompt": "5+5=", "answer": "10"}, {"prompt": "<ab="}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    tokenizer = load_tokenizer(checkpoint)
    ((tokens, mask),) = calibration(checkpoint, str(path), 1000)
    texts = ["12+30=42", "5+5=10", "<ab="]
    assert [t[m.bool()].tolist() for t, m in zip(tokens, mask, strict=True)] == [
        tokenizer(t)["input_ids"] for t in texts
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no usable text"),
        ("\n\n", "holds no usable text"),
        ('{"text": "1"}\n{"text": ', "line 2: not valid JSON"),
        ('{"question": "1"}', "line 1: no text"),
        ("[1, 2]", "line 1: no text"),
    ],
)
def test_file_without_text_is_refused(checkpoint, tmp_path, content, message):
    path = tmp_path / "texts.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        calibration(checkpoint, str(path), 100)


def test_what_does_not_exist_is_refused(checkpoint, tmp_path):
    with pytest.raises(UsageError, match=r"calibration 'texts.jsonl' is not a file; others: task"):
        calibration(checkpoint, "texts.jsonl", 100)
    with pytest.raises(UsageError, match="has no tokenizer"):
        calibration(tmp_path, "task", 100)
