import io
import json

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from halfword.checkpoint import checkpoints, read
from halfword.errors import UsageError
from halfword.train.export import export, inspect
from halfword.train.launch import configure
from halfword.train.loop import run
from halfword.train.training import build

QUIET = Console(quiet=True)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def trained(request, tiny, tmp_path):
    config = tiny(run=tmp_path / "run", tie_embeddings=request.param, num_heads=4, num_kv_heads=2)
    return run(config, QUIET)


def _tensors(folder):
    _, newest = next(iter(checkpoints(folder / "checkpoints")))
    return read(newest)[1]


def test_transformers_loads_the_export_and_gives_the_trainers_logits(trained, tmp_path):
    export(trained, tmp_path / "model", "bf16", QUIET)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    ours = build(configure(None, {"resume": "auto", "run": trained, "num_steps": 5})).model
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in _tensors(trained).items()
        if name.startswith("model.")
    }
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    ours.load_state_dict(weights)
    ids = torch.arange(16)[None] + 97
    with torch.no_grad():
        expected, found = ours(ids).float(), theirs(ids).logits.float()
    # Both round activations to BF16 some ten times on the way: 2^-8 each, and logits are small.
    assert (expected - found).abs().max() < 0.02
    generated = theirs.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 20)


def test_the_tokenizer_of_bytes_is_exported_as_one_of_transformers(trained, tmp_path):
    export(trained, tmp_path / "model", "bf16", QUIET)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "Füße, 猫 and\n\n  spaces\t."
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_export_takes_two_bytes_a_parameter_or_four(trained, tmp_path):
    count = sum(
        tensor.numel() for name, tensor in _tensors(trained).items() if name.startswith("model.")
    )
    for dtype, size in (("bf16", 2), ("fp32", 4)):
        export(trained, tmp_path / dtype, dtype, QUIET)
        file = tmp_path / dtype / "model.safetensors"
        header = int.from_bytes(file.read_bytes()[:8], "little")
        assert file.stat().st_size == size * count + header + 8
        assert {tensor.dtype.itemsize for tensor in load_file(file).values()} == {size}


def test_a_run_started_from_fp32_files_has_their_masters_exactly(trained, tmp_path):
    export(trained, tmp_path / "model", "fp32", QUIET)
    training = build(configure(None, {"init": tmp_path / "model", "data": _data(trained)}))
    saved = load_file(tmp_path / "model" / "model.safetensors")
    for name, parameter in training.model.named_parameters():
        assert torch.equal(training.optimizer.master_weight(parameter), saved[name])


def test_resuming_by_auto_starts_from_the_model_where_there_is_no_checkpoint_yet(trained, tmp_path):
    export(trained, tmp_path / "model", "fp32", QUIET)
    flags = {"init": tmp_path / "model", "resume": "auto", "run": tmp_path / "tuned"}
    training = build(configure(None, flags | {"data": _data(trained)}))
    assert training.config.hidden_dim == 32
    saved = load_file(tmp_path / "model" / "model.safetensors")
    for name, parameter in training.model.named_parameters():
        assert torch.equal(training.optimizer.master_weight(parameter), saved[name])


def _data(folder):
    import tomllib

    return tomllib.loads((folder / "config.toml").read_text())["data"]


def test_a_started_run_takes_shape_and_tokenizer_from_the_folder(trained, tmp_path):
    export(trained, tmp_path / "model", "bf16", QUIET)
    config = configure(None, {"init": tmp_path / "model"})
    assert (config.num_layers, config.hidden_dim, config.num_kv_heads) == (2, 32, 2)
    assert config.tokenizer == str(tmp_path / "model")
    with pytest.raises(UsageError, match="--hidden_dim 64: .*model has 32; leave the option out"):
        configure(None, {"init": tmp_path / "model", "hidden_dim": 64})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', must be 'llama'"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, must be 1e-05"),
        ({"rope_theta": 5e5}, "rotary positions must be plain, theta 10000"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary positions must be plain"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "big"}, "hidden_size is 'big', no number or no truth value"),
        ({"rope_scaling": "yes", "rope_parameters": None}, "rotary positions are 'yes'"),
    ],
)
def test_a_model_that_the_trainer_does_not_have_is_refused(trained, tmp_path, change, message):
    export(trained, tmp_path / "model", "bf16", QUIET)
    file = tmp_path / "model" / "config.json"
    table = json.loads(file.read_text()) | change
    file.write_text(json.dumps({k: v for k, v in table.items() if v is not None}))
    with pytest.raises(UsageError, match=message):
        configure(None, {"init": tmp_path / "model"})


def test_damaged_and_missing_weights_are_refused(trained, tmp_path):
    export(trained, tmp_path / "model", "bf16", QUIET)
    file = tmp_path / "model" / "model.safetensors"
    config = configure(None, {"init": tmp_path / "model", "data": _data(trained)})
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UsageError, match="model.safetensors: is damaged or no safetensors file"):
        build(config)
    file.unlink()
    with pytest.raises(UsageError, match="has no .safetensors file"):
        build(config)
    with pytest.raises(UsageError, match="--init .*nowhere: has no config.json"):
        configure(None, {"init": tmp_path / "nowhere"})


def test_an_export_overwrites_nothing(trained, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="--output .*model: holds something; name a new folder"):
        export(trained, tmp_path / "model", "bf16", QUIET)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["mine.txt"]
    with pytest.raises(UsageError, match="--dtype fp8: use bf16 or fp32"):
        export(trained, tmp_path / "other", "fp8", QUIET)


def test_inspect_shows_components_and_that_all_verifies(trained):
    text = io.StringIO()
    inspect(trained, Console(file=text, width=100))
    shown = text.getvalue()
    assert "every file verifies" in shown
    assert "step 5, precision exact (master weights split, moments fp32)" in shown
    rows = {line.split("│")[2].strip(): line.split("│")[4].strip() for line in shown.split("\n")[3:-1] if line.count("│") == 5}  # fmt: skip  # noqa: E501
    assert rows["remainder"] == "2.000" and rows["exp_avg"] == "4.000"


def test_inspect_refuses_what_does_not_verify(trained):
    step, newest = next(iter(checkpoints(trained / "checkpoints")))
    (newest / "state.json").write_text("{}")
    with pytest.raises(UsageError, match="DIR .*step-00000005: state.json is damaged"):
        inspect(newest, QUIET)


@pytest.mark.parametrize(("precision", "size"), [("exact", 12), ("exact-bf16", 8)])
def test_a_full_checkpoint_holds_the_presets_bytes_and_little_else(tiny, tmp_path, precision, size):
    folder = run(tiny(run=tmp_path / "run", precision=precision, hidden_dim=128), QUIET)
    _, newest = next(iter(checkpoints(folder / "checkpoints")))
    stored = sum(path.stat().st_size for path in newest.iterdir())
    count = sum(t.numel() for name, t in _tensors(folder).items() if name.startswith("model."))
    assert 0 <= stored - size * count < 40_000
