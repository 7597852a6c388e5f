"""The bench on the built-in model: what it reports is what it did."""

from __future__ import annotations

import json

import pytest

from npuserve.service import cli

SMALL = ["--kv-cache-memory", "64MiB", "--threads", "1"]


def test_one_object_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "step", "--batch", "1,3", "--context", "40", "--prompt", "70", "--tokens", "4",
                     "--max-num-batched-tokens", "32", "--json", *SMALL]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert set(row) == {"batch", "context", "decode_tokens_per_second", "step_ms_p50", "prefill_tokens_per_second",
                            "ttft_ms_p50", "weights_bytes", "peak_rss_bytes"}
        assert row["context"] == 40
        assert row["prefill_tokens_per_second"] == pytest.approx(70 / row["ttft_ms_p50"] * 1e3)
        assert row["peak_rss_bytes"] > row["weights_bytes"] > 1 << 20


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "step", "--batch", "2", "--context", "8", "--prompt", "8", "--tokens", "2", *SMALL]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["batch", "context"]
    assert row.split()[:2] == ["2", "8"]


@pytest.mark.parametrize(("arguments", "said"), [
    (["--context", "600"], "max_model_len is 512"),
    (["--batch", "64", "--context", "300", "--prompt", "100", "--kv-cache-memory", "8MiB",
      "--max-num-batched-tokens", "4096"],
     "the KV cache holds"),
])
def test_what_does_not_fit_is_said(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "step", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("batch", ["0", "1,,2", "x", "-1"])
def test_nonsense_batches(batch: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "step", "--batch", batch])
    assert "must be at least 1" in capsys.readouterr().err
