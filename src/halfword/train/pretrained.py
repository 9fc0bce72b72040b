"""Model-only checkpoints in Hugging Face layout: for inference, and to start training from.

config.json         a LlamaConfig
model.safetensors   weights under transformers' names, BF16 or FP32
tokenizer.json      with tokenizer_config.json, where the run has a tokenizer
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from halfword.errors import UsageError
from halfword.train.config import TrainConfig
from halfword.train.model import INIT_STD, NORM_EPS, ROPE_THETA

# The settings that give the model's shape, and what LlamaConfig calls them.
SHAPE = {
    "num_layers": "num_hidden_layers",
    "hidden_dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
}
LLAMA_SHAPED = ("llama", "mistral")
# What the trainer's model has no setting for; other values would be computed wrong.
FIXED = {
    "model_type": "llama",
    "rms_norm_eps": NORM_EPS,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}


def write(
    folder: Path, config: TrainConfig, weights: Mapping[str, Tensor], tokenizer: str | None
) -> None:
    """Write a model; the folder appears whole or not at all.

    Args:
        folder: must not exist, or be empty.
        config: of the run that trained it.
        weights: by transformers' names, all of one dtype; a tied output matrix is left out.
        tokenizer: the text of a tokenizer.json; None writes none.

    Raises:
        UsageError: the folder holds something or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError("--output", folder, "holds something; name a new folder")
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        aside.mkdir(parents=True)
        dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        _write_json(aside / "config.json", _llama_config(config, dtype))
        save_file(dict(weights), aside / "model.safetensors", metadata={"format": "pt"})
        if tokenizer is not None:
            (aside / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
            settings = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": config.seq_length,
            }
            _write_json(aside / "tokenizer_config.json", settings)
        os.replace(aside, folder)
    except (OSError, SafetensorError) as error:
        raise UsageError("--output", folder, f"cannot be written: {error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read_shape(folder: Path) -> dict[str, Any]:
    """Return the settings of ``SHAPE`` that a folder's config.json gives.

    Raises:
        UsageError: no such folder, or a model that the trainer does not have.
    """
    file = folder / "config.json"
    table = _read_table("--init", file)
    for key, value in FIXED.items():
        if table.get(key, value) != value:
            raise UsageError("--init", file, f"{key} is {table[key]!r}, must be {value!r}")
    rope = table.get("rope_parameters") or table.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UsageError("--init", file, f"rotary positions are {rope!r}, must be a table")
    theta = rope.get("rope_theta", table.get("rope_theta", ROPE_THETA))
    if theta != ROPE_THETA or rope.get("rope_type", "default") != "default":
        raise UsageError("--init", file, f"rotary positions must be plain, theta {ROPE_THETA:g}")
    return _shape("--init", file, table)


def read_memory_shape(path: Path) -> dict[str, Any]:
    """Return the same of a config.json or its folder, where only shapes need be the trainer's.

    Positions and the norms' epsilon take no memory, so Llama 3 and Mistral are told as well.

    Raises:
        UsageError: no such file, or a model of other shapes.
    """
    file = path / "config.json" if path.is_dir() else path
    table = _read_table("--model", file)
    fixed = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    for key, value in fixed.items():
        if table.get(key, value) != value:
            raise UsageError("--model", file, f"{key} is {table[key]!r}, must be {value!r}")
    if table.get("model_type") not in LLAMA_SHAPED:
        kinds = " or ".join(LLAMA_SHAPED)
        fix = f"model_type is {table.get('model_type')!r}, must be {kinds}; or give --params"
        raise UsageError("--model", file, fix)
    table = {"num_key_value_heads": table.get("num_attention_heads"), **table}
    shape = _shape("--model", file, table)
    own = shape["hidden_dim"] // max(1, shape["num_heads"])
    if (table.get("head_dim") or own) != own:
        fix = f"head_dim is {table['head_dim']!r}, must be hidden_size / num_attention_heads"
        raise UsageError("--model", file, fix)
    return shape


def read_weights(folder: Path, config: TrainConfig) -> dict[str, Tensor]:
    """Return all weights of a folder's .safetensors files, a tied output matrix included.

    Raises:
        UsageError: no such file, or a damaged one.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError("--init", folder, "has no .safetensors file")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                weights |= {name: tensors.get_tensor(name) for name in tensors.keys()}
        except (OSError, SafetensorError):
            raise UsageError("--init", file, "is damaged or no safetensors file") from None
    if config.tie_embeddings and "model.embed_tokens.weight" in weights:
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    return weights


def _read_table(option: str, file: Path) -> dict[str, Any]:
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        where = file.parent if option == "--init" else file
        problem = "has no config.json" if option == "--init" else "cannot be read"
        raise UsageError(option, where, f"{problem}: {error.strerror}") from None
    except (ValueError, RecursionError):  # brackets in brackets without an end
        raise UsageError(option, file, "is not JSON") from None
    if not isinstance(table, dict):
        raise UsageError(option, file, "is not a LlamaConfig")
    return table


def _shape(option: str, file: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    missing = [key for key in SHAPE.values() if key not in table and key != "tie_word_embeddings"]
    if missing:
        raise UsageError(option, file, f"{missing[0]} is missing")
    shape = {name: table.get(key, False) for name, key in SHAPE.items()}
    for name, value in shape.items():
        if type(value) is not (bool if name == "tie_embeddings" else int):
            fix = f"{SHAPE[name]} is {value!r}, no number or no truth value"
            raise UsageError(option, file, fix)
        if name != "tie_embeddings" and value < 1:
            raise UsageError(option, file, f"{SHAPE[name]} is {value}, must be at least 1")
    return shape


def _llama_config(config: TrainConfig, dtype: str) -> dict[str, Any]:
    shape = {key: getattr(config, name) for name, key in SHAPE.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        **FIXED,
        **shape,
        "head_dim": config.hidden_dim // config.num_heads,
        "max_position_embeddings": config.seq_length,
        "rope_theta": ROPE_THETA,
        "initializer_range": INIT_STD,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }


def _write_json(file: Path, table: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
