"""`npuserve quantize`: options, calibration text, messages. Checkpoints are tested in tests/npu/quantize/."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from npuserve.cli.main import main
from npuserve.cli.quantize import calibration_ids, default_texts, texts_of, topics
from npuserve.npu import storyteller
from npuserve.npu.model.config import ModelConfig
from npuserve.service.config import ConfigError
from npuserve.service.text.tokenizer_loader import load_tokenizer
from tests.support.models import random_model, saved

QUICK = ["--samples", "2", "--sample-tokens", "32"]


@pytest.mark.slow
def test_quantize_built_in_model_has_int8_layers(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["quantize", "", str(out), *QUICK]) == 0
    output = capsys.readouterr().out
    layers = ModelConfig.from_folder(storyteller.FOLDER).num_layers
    assert output.startswith(f"{out}: {7 * layers} of {7 * layers} linear layers in w8a8, ")
    assert "smoothed after input_layernorm: strength " in output
    assert ModelConfig.from_folder(out).quantization
    assert {path.name for path in storyteller.FOLDER.iterdir()} == {path.name for path in out.iterdir()}

    assert main(["quantize", "", str(out), "--calibration", "none", "--overwrite"]) == 0
    assert "smoothed" not in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_quantize_with_text_strength_and_ignored_layers(tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text('{"text": "Once upon a time", "id": 1}\n\n{"text": "there was a kernel."}\n')
    arguments = ["--calibration", str(tmp_path / "texts.jsonl"), "--smoothing", "0.25", "--ignore", "re:.*mlp"]
    assert main(["quantize", "", str(tmp_path / "out"), *arguments]) == 0
    assert "strength 0.25 to 0.25, median 0.25" in capsys.readouterr().out
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert quantization["ignore"] == ["lm_head", "re:.*mlp"]


def _file(name: str, content: bytes) -> list[str]:
    Path(name).write_bytes(content)
    return ["--calibration", name]


@pytest.mark.parametrize(("arguments", "message"), [
    (lambda: ["", "there"], "out: there exists; --overwrite replaces it"),
    (lambda: ["", "file", "--overwrite"], "out: file is no folder"),
    (lambda: ["", "no/such/out"], "out: there is no folder "),
    (lambda: ["", "o" * 300], "cannot be used: File name too long"),
    (lambda: ["", "~nobody-here/out"], "out: ~nobody-here/out: the home directory is unknown"),
    (lambda: ["", "out", "--calibration", "~nobody-here/a.txt"], "calibration: ~nobody-here/a.txt: the home directory"),
    (lambda: ["model", "model", "--overwrite"], "out: model is within the model's folder model"),
    (lambda: ["model", "model/out"], "out: model/out is within the model's folder model"),
    (lambda: ["there/inner", "there", "--overwrite"], "out: there holds the model's folder there/inner"),
    (lambda: ["./absent", "out"], "model: there is no folder ./absent"),
    (lambda: ["model", "out"], "model: model/config.json: no such file"),
    (lambda: ["", "out", *_file("empty.txt", b"")], "calibration: empty.txt has no text"),
    (lambda: ["", "out", *_file("blank.txt", b" \n\n ")], "calibration: blank.txt has no text"),
    (lambda: ["", "out", *_file("empty.jsonl", b"\n\n")], "calibration: empty.jsonl has no text"),
    (lambda: ["", "out", *_file("bad.jsonl", b'{"text": "a"}\n\n{"text')],
     "calibration: bad.jsonl, line 3: is not JSON"),
    (lambda: ["", "out", *_file("deep.jsonl", b"[" * 100_000)], "calibration: deep.jsonl, line 1: is not JSON"),
    (lambda: ["", "out", *_file("half.jsonl", b'{"text": "a\\ud800"}')],
     "calibration: half.jsonl, line 1: has half a surrogate pair"),
    (lambda: ["", "out", *_file("other.jsonl", b'{"texts": []}\n')],
     'calibration: other.jsonl, line 1: must be an object with a string "text"'),
    (lambda: ["", "out", *_file("bytes.txt", b"\xff\xfe\xff")], "calibration: bytes.txt is not text in UTF-8"),
    (lambda: ["", "out", "--calibration", "absent.txt"], "calibration: absent.txt cannot be read: No such file"),
    (lambda: ["", "out", "--calibration", "none", "--samples", "2"], "samples: nothing is smoothed with"),
    (lambda: ["", "out", "--calibration", "none", "--smoothing", "0.5"], "smoothing: nothing is smoothed with"),
    (lambda: ["", "out", "--sample-tokens", "60000"], "sample_tokens: 60000 is more than the model's"),
    (lambda: ["", "out", "--ignore", "up_proj", *QUICK], "ignore: 'up_proj' names no linear layer"),
])
def test_quantize_invalid_argument_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "there/inner"):
        Path(folder).mkdir(parents=True)
    Path("file").write_text("")
    given = arguments()
    before = sorted(tmp_path.rglob("*"))
    assert main(["quantize", *given]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("option", ["--smoothing=1.5", "--smoothing=much", "--samples=0", "--scheme=w2a16"])
def test_quantize_option_out_of_range_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        main(["quantize", "", "out", option])
    assert f"argument {option.split('=')[0]}" in capsys.readouterr().err


def test_quantize_tokenizer_beyond_the_vocabulary_is_one_sentence(tmp_path, capsys):
    folder = saved(random_model("llama"), tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(storyteller.FOLDER / name, folder)
    assert main(["quantize", str(folder), str(tmp_path / "out"), *QUICK]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("npuserve:")]
    assert re.search(r"makes token id \d+ of the calibration text, and the model's ids are in \[0, 99\]$", line)


def test_default_texts_are_every_other_topic():
    used = default_texts()
    assert used == topics()[::2]
    assert sum(map(len, used)) > 50_000
    assert len(topics()) - len(used) >= 30


def test_calibration_ids_are_spread_over_the_text(tmp_path):
    tokenizer = load_tokenizer(storyteller.FOLDER)
    assert tokenizer
    path = tmp_path / "text.txt"
    path.write_text("".join(f"This is sentence {number}.\n" for number in range(2000)))
    ids = tokenizer.encode(path.read_text()[: 4 * 64 * 8], add_special_tokens=False)
    begin = tokenizer.encode("a")[: len(tokenizer.encode("a")) - len(tokenizer.encode("a", add_special_tokens=False))]
    pieces = calibration_ids(storyteller.FOLDER, str(path), samples=4, length=64)
    assert len(pieces) == 4
    step = 64 - len(begin)
    all_pieces = [begin + ids[at : at + step] for at in range(0, len(ids), step)]
    indices = [all_pieces.index(piece) for piece in pieces]
    assert indices == sorted(set(indices))
    assert indices[-1] >= len(all_pieces) // 2
    few = calibration_ids(storyteller.FOLDER, str(path), samples=10_000, length=64)
    assert len(few) > 100
    assert all(len(piece) == 64 for piece in few)


def test_calibration_ids_short_text_is_one_sequence(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time")
    (piece,) = calibration_ids(storyteller.FOLDER, str(path), samples=8, length=64)
    assert 1 <= len(piece) < 64


def test_texts_of_yields_the_whole_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a line\n" * 2500 + "the end")
    assert "".join(texts_of(path)) == path.read_text()


def test_calibration_ids_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no tokenizer for a calibration text; use --calibration none"):
        calibration_ids(tmp_path, "", 1, 16)


@pytest.mark.slow
@pytest.mark.usefixtures("without_nohup")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_quantize_ended_by_a_signal_leaves_no_files(tmp_path, number, code):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "npuserve.cli", "quantize", "", str(out), "--samples", "60000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        while not any(tmp_path.iterdir()) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        _, output = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, output
    assert not any(tmp_path.iterdir())
