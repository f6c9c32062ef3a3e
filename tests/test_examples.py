"""The example scripts, on a model small enough for seconds: what they promise in --help and in their docstrings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

TINY = ["--steps=12", "--batch-size=4", "--context=16", "--layers=2", "--width=32", "--heads=2", "--threads=1"]
TINY += ["--lr=1e-2", "--warmup=2", "--eval-interval=4", "--sample=10"]
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def restored_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def train_gpt(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import train_gpt

    return train_gpt


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import demo

    return demo


def train(train_gpt, path: Path, *options: str) -> dict:
    """Runs train_gpt on the tiny model and returns its record."""
    assert train_gpt.main([*TINY, f"--json={path}", *options]) == 0
    return json.loads(path.read_text())


def losses(record: dict) -> list[float]:
    return [float.fromhex(loss) for loss in record["losses"]]


def bits(value):
    """Turns a checkpoint into a value that == compares bit by bit."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list):
        return [bits(item) for item in value]
    return value


def refusal(main, capsys, *options: str) -> str:
    """Returns the last line that a command writes when it refuses its options."""
    with pytest.raises(SystemExit) as exit_info:
        main([*TINY, *options])
    assert exit_info.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_training_lowers_the_loss(train_gpt, tmp_path, capsys):
    record = train(train_gpt, tmp_path / "record.json", "--prompt=def ")
    got = losses(record)
    assert len(got) == 12
    assert got[0] > 5  # ln 256 = 5.55: an untrained model knows nothing
    assert got[-1] < got[0] - 1, [loss.hex() for loss in got]
    assert list(record["validation_losses"]) == ["4", "8", "12"]
    assert len(record["optimizer_seconds"]) == 12
    assert 0 < sum(record["optimizer_seconds"]) < sum(record["seconds"])
    out = capsys.readouterr().out
    assert "roundpipe: " in out
    assert "\ndef " in out


@pytest.mark.parametrize("optimizer", ["torch", "torch-foreach"])
def test_every_bit_equal_optimizer_gives_the_same_losses(train_gpt, tmp_path, optimizer):
    want = train(train_gpt, tmp_path / "want.json", f"--optimizer={optimizer}")
    got = train(train_gpt, tmp_path / "got.json")
    assert got["losses"] == want["losses"]
    assert got["validation_losses"] == want["validation_losses"]


def test_fused_optimizer_trains(train_gpt, tmp_path):
    got = losses(train(train_gpt, tmp_path / "record.json", "--optimizer=torch-fused"))
    assert got[-1] < got[0] - 1, [loss.hex() for loss in got]


@pytest.mark.parametrize("first", ["roundpipe", "torch", "torch-foreach"])
def test_resumed_run_equals_the_uninterrupted_one(train_gpt, tmp_path, first):
    whole, part = tmp_path / "whole.pt", tmp_path / "part.pt"
    want = train(train_gpt, tmp_path / "want.json", f"--checkpoint={whole}")
    train(train_gpt, tmp_path / "part.json", f"--checkpoint={part}", "--stop-at=5", f"--optimizer={first}")
    got = train(train_gpt, tmp_path / "got.json", f"--checkpoint={part}", f"--resume={part}")
    assert got["first_step"] == 5
    assert got["losses"] == want["losses"][5:]
    assert got["validation_losses"] == {done: want["validation_losses"][done] for done in ("8", "12")}
    got, want = (torch.load(path, weights_only=True) for path in (part, whole))
    assert bits(got["model"]) == bits(want["model"])
    assert bits(got["optimizer"]["state"]) == bits(want["optimizer"]["state"])
    assert bits(got["generator"]) == bits(want["generator"])
    assert sorted(path.name for path in tmp_path.glob("*.pt*")) == ["part.pt", "whole.pt"]


def test_failed_save_keeps_the_old_checkpoint(train_gpt, tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    train(train_gpt, tmp_path / "record.json", f"--checkpoint={path}", "--stop-at=5")
    before = path.read_bytes()

    def fail(saved, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        train_gpt.main([*TINY, f"--resume={path}", f"--checkpoint={path}"])
    assert path.read_bytes() == before


def test_resume_refuses_what_it_cannot_continue(train_gpt, tmp_path, capsys):
    path, junk, text = tmp_path / "run.pt", tmp_path / "junk.pt", tmp_path / "text.txt"
    train(train_gpt, tmp_path / "record.json", f"--checkpoint={path}")
    junk.write_bytes(b"no checkpoint")
    text.write_bytes(bytes(range(256)) * 4)
    main = train_gpt.main
    assert "has 12 steps already" in refusal(main, capsys, f"--resume={path}")
    assert "was made with --heads 2, not 4" in refusal(main, capsys, f"--resume={path}", "--heads=4")
    assert "was made from another text" in refusal(main, capsys, f"--resume={path}", f"--text={text}")
    assert "is not a checkpoint" in refusal(main, capsys, f"--resume={junk}")
    assert "No such file" in refusal(main, capsys, f"--resume={tmp_path / 'missing.pt'}")


def test_text_option_trains_on_given_files(train_gpt, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"ab" * 500)
    got = losses(train(train_gpt, tmp_path / "one.json", f"--text={text}", "--steps=30"))
    assert got[-1] < 1, "two letters in turn are easily learned"
    train(train_gpt, tmp_path / "two.json", f"--text={text}", f"--text={text}")


def test_files_are_held_out_whole(train_gpt, tmp_path):
    paths = [tmp_path / f"{i:02}.txt" for i in range(20)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * 20)
    text = train_gpt.Text.load(paths, context=16)
    held_out = set(text.validation.tolist())
    assert held_out == {1, 11}
    assert set(text.train.tolist()) == set(range(20)) - held_out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--heads=3"], "--width 32 is not a multiple of --heads 3"),
        (["--steps=0"], "--steps is 0, want at least 1"),
        (["--lr=nan"], "--lr is nan, want a finite number from 0 up"),
        (["--beta2=1"], r"--beta2 is 1.0, want a number in \[0, 1\)"),
        (["--clip=0"], "--clip is 0.0, want a number above 0"),
        (["--threads=0"], "--threads is 0, want at least 1"),
        (["--json=missing/record.json"], "record.json cannot be written: there is no folder missing"),
        (["--text=missing.txt"], "No such file or directory: 'missing.txt'"),
    ],
)
@pytest.mark.parametrize("script", ["train_gpt", "demo"])
def test_bad_option_is_refused_in_a_sentence(request, capsys, script, options, sentence):
    main = request.getfixturevalue(script).main
    assert re.search(sentence, refusal(main, capsys, *options))


def test_short_text_is_refused_in_a_sentence(train_gpt, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_bytes(b"x" * 100)
    got = refusal(train_gpt.main, capsys, f"--text={text}")
    assert "the validation text has 10 bytes, want at least 17 (--context + 1)" in got


def test_demo_finds_equal_bits_and_writes_its_results(demo, tmp_path, capsys):
    plot, record = tmp_path / "demo.png", tmp_path / "demo.json"
    status = demo.main([*TINY, f"--plot={plot}", f"--json={record}"])
    out = capsys.readouterr().out
    assert status == 0, out
    assert "bits identical: yes, at all 12 steps" in out
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")
    got = json.loads(record.read_text())
    assert got["difference"] is None
    assert got["losses"][demo.TORCH] == got["losses"][demo.ROUNDPIPE]
    assert {len(seconds) for seconds in got["optimizer_seconds"].values()} == {12}


def test_demo_finds_a_perturbed_optimizer(demo, tmp_path, capsys):
    assert demo.main([*TINY, f"--plot={tmp_path / 'demo.png'}", "--perturb"]) == 1
    assert re.search(r"bits identical: NO\nstep 1: \S+\[\d+\] is -?0x1\.\S+ and -?0x1\.", capsys.readouterr().out)


@pytest.mark.parametrize("key", ["param", "exp_avg", "exp_avg_sq", "step"])
def test_demo_sees_one_flipped_bit(demo, tmp_path, key):
    (tmp_path / "text.txt").write_bytes(bytes(range(256)) * 4)
    args = demo.make_parser().parse_args([*TINY, f"--text={tmp_path / 'text.txt'}"])
    config, text = demo.read_arguments(args)
    a, b = (demo.Trainer(config, text, name) for name in ("torch", "roundpipe"))
    a.step()
    b.step()
    assert demo.trainer_difference(a, b) is None
    param = b.model.norm.weight
    tensor = param.detach() if key == "param" else b.optimizer.state[param][key]
    tensor.view(torch.int32).flatten()[-1] ^= 1
    name = "norm.weight" if key == "param" else f"{key} of norm.weight"
    difference = demo.trainer_difference(a, b)
    assert difference.startswith(f"{name}[{tensor.numel() - 1}] is "), difference
    assert difference.endswith(f"; 1 of its {tensor.numel()} elements differ"), difference
