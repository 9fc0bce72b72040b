"""The command line: spellings, exit codes, Ctrl-C, and one line for every mistake."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w

import halfword
from halfword.cli import main
from halfword.train.config import TrainConfig
from halfword.train.launch import WIKITEXT_103
from halfword.train.reading import load_config

CONFIGS = Path(__file__).parent.parent / "configs"
TINY = (
    "--num_layers 1 --hidden-dim 16 --num_heads 2 --seq-length 8 --batch_size 2 "
    "--threads 1 --device cpu"
).split()


@pytest.fixture(autouse=True)
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a folder with some files to be wrong about."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = {
        "text.txt": b"the cat sat on the mat. " * 40,
        "empty.txt": b"",
        "short.txt": b"cat",
        "latin1.txt": "gr\u00fcn".encode("latin-1"),
        "zeros.txt": bytes(100),
        "text.md": b"# Title",
        "not_json.jsonl": b'{"text": "a"}\n{"text": \n',
        "surrogate.jsonl": b'{"text": "\\ud800"}\n',
        "no_text.jsonl": b'{"text": "a"}\n{"words": "b"}\n',
        "damaged.parquet": b"PAR1 no more",
        "tokenizer.json": b"{}",
        "unknown_key.toml": b"hidden_dims = 64",
        "broken.toml": b"num_layers = = 4",
        "fp16.json": b'{"fp16": {"enabled": true}}',
        "losses.csv": b"step,loss\n0,2.5\n1,2.25\n",
        "nan.csv": b"step,loss\n0,2.5\n1,nan\n",
        "words.csv": b"some,words\n0,2.5\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "no_text").mkdir()
    (tmp_path / "old_run").mkdir()
    (tmp_path / "old_run" / "config.toml").touch()
    return tmp_path


BAD_TRAIN = {
    "--data missing.txt": "--data missing.txt: does not exist",
    "--data empty.txt": "--data empty.txt: is empty",
    "--data latin1.txt": "--data latin1.txt: is not text in UTF-8 (byte 2)",
    "--data zeros.txt": "--data zeros.txt: holds NUL characters: it is binary",
    "--data text.md": "--data text.md: unknown kind of file; use a .txt, .jsonl, .parquet file",
    "--data no_text": "--data no_text: holds no .txt, .jsonl, .parquet file",
    "--data not_json.jsonl": "--data not_json.jsonl: line 2 is not JSON",
    "--data no_text.jsonl": '--data no_text.jsonl: line 2 has no string "text"',
    "--data surrogate.jsonl": "--data surrogate.jsonl: line 1 has half of a surrogate pair in it",
    f"--data {'x' * 300}.txt": f"--data {'x' * 300}.txt: cannot be read: File name too long",
    "--data damaged.parquet": "--data damaged.parquet: is not Parquet, or damaged",
    "--data short.txt": "--seq_length 8: too long for the training text, which has 3 tokens",
    "--eval_data missing.txt": "--eval_data missing.txt: does not exist",
    "--eval_data empty.txt": "--eval_data empty.txt: is empty",
    "--data text.txt --dataset wikitext": "--dataset wikitext: give it or --data, not both",
    "--tokenizer bpe:10": "--tokenizer bpe:10: bpe:N needs a whole number N of at least 256",
    "--tokenizer gpt9": "--tokenizer gpt9: no such file",
    "--tokenizer tokenizer.json": "--tokenizer tokenizer.json: is not a tokenizer.json",
    f"--tokenizer {'x' * 300}": f"--tokenizer {'x' * 300}: no such file",
    f"--hidden_dim {10**12}": f"--hidden_dim {10**12}: should be less than or equal to 65536",
    "--hidden_dim 65536 --vocab_size 16777216": "--hidden_dim 65536: the model cannot be made: ",
    "--vocab_size 100": "--vocab_size 100: too few for the tokenizer, which has 256",
    "--num_heads 3": "--num_heads 3: does not divide --hidden_dim 16",
    "--num_kv_heads 4": "--num_kv_heads 4: does not divide --num_heads 2",
    "--num_layers 0": "--num_layers 0: should be greater than or equal to 1",
    "--num_layers two": "--num_layers: should be a valid integer",
    "--seq_length 100000": "--seq_length 100000: too long for the training text",
    "--batch_size 0": "--batch_size 0: should be greater than or equal to 1",
    "--gradient_accumulation_steps 0": "--gradient_accumulation_steps 0: should be greater than",
    "--num_steps 0": "--num_steps 0: should be greater than or equal to 1",
    "--learning_rate -1": "--learning_rate -1.0: should be greater than 0",
    "--learning_rate nan": "--learning_rate nan: should be a finite number",
    "--learning_rate inf": "--learning_rate inf: should be a finite number",
    "--beta1 1": "--beta1 1.0: should be less than 1",
    "--max_grad_norm -1": "--max_grad_norm -1.0: should be greater than or equal to 0",
    "--lr_schedule step": "--lr_schedule step: should be 'constant', 'linear', 'cosine' or 'wsd'",
    "--lr_warmup_steps 9 --num_steps 5": "--lr_warmup_steps 9: more than --num_steps 5",
    "--precision fp8": "--precision fp8: should be 'fp32-master', 'exact', 'exact-bf16', 'bf16'",
    "--master_weights int8": "--master_weights int8: should be 'split', 'split24', 'fp32'",
    "--moments fp8": "--moments fp8: should be 'fp32', 'bf16', 'bf16-sr' or 'int8'",
    "--optimizer adagrad": "--optimizer adagrad: should be 'adamw'",
    "--device tpu9": "--device tpu9: no such device; use auto, cpu or cuda",
    "--device meta": "--device meta: not available on this machine; use cpu",
    "--threads 0": "--threads 0: should be greater than or equal to 1",
    "--seed -1": "--seed -1: should be greater than or equal to 0",
    "--config missing.toml": "--config missing.toml: cannot be read: No such file or directory",
    "--config broken.toml": "--config broken.toml: is not TOML: Invalid value (at line 1",
    "--config zeros.txt": "--config zeros.txt: is not TOML",
    "--config unknown_key.toml": "unknown_key.toml: hidden_dims: unknown key; did you mean",
    "--run old_run": "--run old_run: holds a run; give --overwrite to replace it",
    "--run no_text/.. ": "--run no_text/..: holds other files; name a new or an empty folder",
    "--run text.txt": "--run text.txt: is a file; name a folder",
    "--run text.txt/run": "--run text.txt/run: cannot be written: Not a directory",
    "--loss_log_file text.txt/a.csv": "--loss_log_file text.txt/a.csv: cannot be written: File",
    "--run old_run --overwrite --loss_log_file text.txt/a.csv": "--loss_log_file text.txt/a.csv:",
    "--run old_run --overwrite --vocab_size 9": "--vocab_size 9: too few for the tokenizer",
    "--overwrite": "--overwrite True: name the folder to replace by --run",
    "--use_real_data --data text.txt": "--use_real_data True: is --dataset Salesforce/wikitext/",
    "--deepspeed_config missing.json": "--deepspeed_config missing.json: cannot be read: No such",
    "--deepspeed_config zeros.txt": "--deepspeed_config zeros.txt: is not JSON",
    "--deepspeed_config fp16.json": "fp16.json: fp16.enabled true: halfword trains BF16 weights",
    "--deepspeed_config fp16.json --config broken.toml": "--deepspeed_config fp16.json: give it or",
    "--frobnicate": "--frobnicate: no such option",
    "--num-layrs 4": "--num_layrs: no such option; did you mean --num_layers?",
    "--run": "--run: requires an argument",
    "more words": "got unexpected extra argument(s) (more words)",
}


def everything_below(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def assert_refused_in_one_line(arguments: list[str], message: str, folder: Path, capsys) -> None:
    before = everything_below(folder)
    code = main(arguments)
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith(message), captured.err
    assert captured.err.count("\n") == 1 and captured.err.endswith("\n")
    assert everything_below(folder) == before


@pytest.mark.parametrize("options", BAD_TRAIN)
def test_bad_input_to_train_is_one_line_and_leaves_nothing(options, work_folder, capsys) -> None:
    arguments = ["train", *TINY, *options.split()]
    if "--data" not in options and "--dataset" not in options:
        arguments += ["--data", "text.txt"] if options != "--run" else []
    message = f"halfword train: {BAD_TRAIN[options]}"
    assert_refused_in_one_line(arguments, message, work_folder, capsys)


BAD_COMPARE = {
    "": "RUN RUN ...: missing",
    "losses.csv losses.csv": "--output: missing",
    "losses.csv losses.csv -o": "-o: requires an argument",
    "losses.csv -o out": "RUN losses.csv: a comparison needs two runs or more",
    "losses.csv missing.csv -o out": "RUN missing.csv: does not exist",
    "losses.csv words.csv -o out": "RUN words.csv: has the header 'some,words'",
    "losses.csv old_run -o out": "RUN old_run: is not a run: it holds no metrics.csv",
    "losses.csv empty.txt -o out": "RUN empty.txt: is empty",
    "losses.csv latin1.txt -o out": "RUN latin1.txt: is not text",
    "losses.csv losses.csv -o text.txt": "--output text.txt: is a file; name a folder",
    "losses.csv losses.csv -o out --smooth": "--smooth: no such option",
}


@pytest.mark.parametrize("options", BAD_COMPARE)
def test_bad_input_to_compare_is_one_line_and_leaves_nothing(options, work_folder, capsys) -> None:
    message = f"halfword compare: {BAD_COMPARE[options]}"
    assert_refused_in_one_line(["compare", *options.split()], message, work_folder, capsys)


BAD_REPORT = {
    "": "RUN ...: missing",
    "missing.csv": "RUN missing.csv: does not exist",
    "old_run": "RUN old_run: is not a run: it holds no metrics.csv",
    "losses.csv words.csv": "RUN words.csv: has the header 'some,words'",
    "losses.csv -o old_run": "--output old_run: is a folder; name a file, as report.html",
    "losses.csv -o losses.csv": "--output losses.csv: is one of the runs; name another",
    "losses.csv -o words.csv": "--output words.csv: is no page's name; name a file that ends",
    "losses.csv -o text.txt/a.html": "--output text.txt/a.html: cannot be written (Not a directory",
}


@pytest.mark.parametrize("options", BAD_REPORT)
def test_bad_input_to_report_is_one_line_and_leaves_nothing(options, work_folder, capsys) -> None:
    message = f"halfword report: {BAD_REPORT[options]}"
    assert_refused_in_one_line(["report", *options.split()], message, work_folder, capsys)


def test_a_report_is_written_and_its_exit_code_tells_of_nan(work_folder, capsys) -> None:
    assert main(["report", "losses.csv"]) == 0
    assert capsys.readouterr().out.endswith("Written: report.html\n")
    Path("nan.csv").write_text("step,loss\n0,nan\n")
    assert main(["report", "losses.csv", "nan.csv", "-o", "nan.html"]) == 1
    assert Path("nan.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("trian", "halfword: no such command 'trian'. Did you mean 'train'?"),
        ("--frobnicate", "halfword: --frobnicate: no such option"),
    ],
)
def test_an_unknown_command_is_one_line(arguments, message, work_folder, capsys) -> None:
    assert_refused_in_one_line(arguments.split(), message, work_folder, capsys)


OWN_OPTIONS = ["config", "deepspeed_config", "deepspeed", "local_rank", "use_real_data"]


def test_help_shows_every_setting_in_its_underscore_form(capsys) -> None:
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"--{name} " in shown for name in [*TrainConfig.model_fields, *OWN_OPTIONS])
    assert "--num-layers" not in shown
    assert main([]) == 0
    assert "train" in capsys.readouterr().out


def test_version_is_shown(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"halfword {halfword.__version__}\n"


def test_flags_reach_the_run_in_either_spelling(work_folder: Path) -> None:
    (work_folder / "some.toml").write_text(tomli_w.dumps({"num_steps": 9, "num_layers": 3}))
    options = "--config some.toml --data text.txt --num-steps 2 --tie-embeddings".split()
    assert main(["train", *TINY, *options]) == 0
    config = load_config(work_folder / "runs" / "exact" / "config.toml", {})
    assert (config.num_steps, config.num_layers, config.tie_embeddings) == (2, 1, True)
    assert main(["train", *TINY, *options, "--no-tie_embeddings"]) == 0
    assert (work_folder / "runs" / "exact-2" / "summary.json").exists()


def test_compare_tells_a_nan_by_its_exit_code(work_folder: Path) -> None:
    assert main("compare losses.csv losses.csv -o out".split()) == 0
    assert main("compare losses.csv nan.csv -o out".split()) == 1


@pytest.mark.parametrize("config", sorted(CONFIGS.iterdir()), ids=lambda path: path.name)
def test_shipped_configs_train_on_the_embedded_text_scaled_down(config: Path, work_folder) -> None:
    """Those that name a data set without it, for it may be out of reach."""
    option = "--config" if config.suffix == ".toml" else "--deepspeed_config"
    lines = config.read_text().splitlines(keepends=True)
    Path(config.name).write_text("".join(x for x in lines if not x.startswith("dataset = ")))
    scale = "--num_steps 3 --lr_warmup_steps 1 --tokenizer bytes --gradient_accumulation_steps 2"
    command = ["train", *TINY, *scale.split(), "--eval_data", "text.txt", "--run", "run"]
    assert main([*command, option, config.name]) == 0
    assert len((work_folder / "run" / "metrics.csv").read_text().splitlines()) == 4


def test_the_commands_of_deepspeeds_example_run_nearly_as_they_are(work_folder, capsys) -> None:
    shape = "--num_layers 1 --hidden_dim 16 --num_heads 2 --batch_size 1 --seq_length 8 --threads 1"
    flags = f"{shape} --num_steps 4 --activation_checkpointing --seed 42 --warmup_steps 2"
    more = "--log_interval 2 --learning_rate 1e-4 --vocab_size 300 --local_rank 0 --deepspeed"
    for name in ("baseline", "bf16_full"):
        places = f"--loss_log_file logs/{name}_loss.csv --data text.txt"
        given = ["--deepspeed_config", str(CONFIGS / f"{name}.json")]
        assert main(["train", *given, *f"{flags} {more} {places}".split()]) == 0
        shown = capsys.readouterr().out
        assert shown.count("The command line wins: --batch_size 1 (not train_micro_batch") == 1
        assert "--deepspeed has no effect here\n--local_rank has no effect here\n" in shown
    names = ["logs/baseline_loss.csv", "logs/bf16_full_loss.csv"]
    for name in names:
        lines = Path(name).read_text().splitlines()
        assert lines[0] == "step,loss" and [x.split(",")[0] for x in lines[1:]] == list("0123")
    assert main(["compare", *names, "-o", "new/loss_comparison.png"]) == 0
    assert [path.name for path in Path("new").iterdir()] == ["loss_comparison.png"]
    assert sorted(path.name for path in Path("runs").iterdir()) == ["bf16", "fp32-master"]


def test_real_data_is_wikitext_103(monkeypatch, work_folder) -> None:
    asked = []
    splits = {"train": "the cat sat on the mat. " * 40, "validation": "a cat"}

    def read(name: str, *, with_validation: bool) -> tuple[str, str]:
        asked.append(name)
        return splits["train"], splits["validation"]

    monkeypatch.setattr("halfword.train.text._read_dataset", read)
    assert main(["train", *TINY, "--num_steps", "1", "--use_real_data", "--run", "run"]) == 0
    assert asked == [WIKITEXT_103] == ["Salesforce/wikitext/wikitext-103-raw-v1"]
    assert load_config(work_folder / "run" / "config.toml", {}).dataset == WIKITEXT_103


def test_ctrl_c_leaves_complete_files_and_a_run_in_use_is_locked(work_folder: Path, capsys) -> None:
    command = [sys.executable, "-m", "halfword", "train", *TINY, "--data", "text.txt"]
    process = subprocess.Popen(
        [*command, "--run", "run", "--num_steps", "1000000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(Path(halfword.__file__).parent.parent)},
    )  # fmt: skip
    metrics = work_folder / "run" / "metrics.csv"
    for _ in range(600):
        if metrics.exists() and metrics.read_text().count("\n") > 3:
            break
        time.sleep(0.1)
    assert main(["train", *TINY, "--data", "text.txt", "--run", "run", "--overwrite"]) == 2
    in_use = "halfword train: --run run: is in use by another halfword process\n"
    assert capsys.readouterr().err == in_use
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    summary = json.loads((work_folder / "run" / "summary.json").read_text())
    steps = summary["results"]["steps"]
    assert process.returncode == 130
    assert errors == "halfword train: interrupted\n"
    assert output.splitlines()[-1] == f"stopped after {steps} steps; run written to run"
    assert summary["status"] == "interrupted" and summary["evaluations"] == []
    assert len(metrics.read_text().splitlines()) == 1 + steps
    assert (work_folder / "run" / "memory.json").exists()
    assert not (work_folder / "run" / ".lock").exists()


def test_ctrl_c_before_training_is_one_line(monkeypatch, work_folder: Path, capsys) -> None:
    def interrupt(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("halfword.train.training.load_corpus", interrupt)
    assert main(["train", *TINY, "--run", "run"]) == 130
    assert capsys.readouterr().err == "halfword train: interrupted\n"
    assert not (work_folder / "run").exists()
