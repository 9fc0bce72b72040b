"""The model against transformers, and its BF16 arithmetic against FP32."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from halfword.train import matmul
from halfword.train.model import IGNORED, Llama, build_model, loss_sum

VOCAB_SIZE = 61
SHAPES: list[dict[str, Any]] = [
    {},
    {"num_kv_heads": 1},
    {"num_heads": 4, "num_kv_heads": 2, "tie_embeddings": True},
    {"hidden_dim": 48, "num_heads": 3, "ffn_dim": 50, "num_layers": 1},
]


def transformers_twin(config) -> transformers.LlamaForCausalLM:
    shape = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=config.hidden_dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        tie_word_embeddings=config.tie_embeddings,
        max_position_embeddings=config.seq_length,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(shape)


def token_ids(*shape: int) -> Tensor:
    return torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_gradients_match_transformers(tiny, shape) -> None:
    config = tiny(**shape)
    ours, theirs = Llama(config, VOCAB_SIZE), transformers_twin(config)
    ours.load_state_dict(theirs.state_dict())  # strict: the names and shapes are the same
    ids = token_ids(3, config.seq_length - 1)
    our_logits, their_logits = ours(ids), theirs(ids).logits
    torch.testing.assert_close(our_logits, their_logits, rtol=1e-5, atol=1e-5)
    for logits in (our_logits, their_logits):
        loss_sum(logits, ids).backward()
    their_gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight.grad, their_gradients[name], rtol=1e-4, atol=1e-4)


def test_tied_embeddings_are_one_parameter(tiny) -> None:
    names = [name for name, _ in Llama(tiny(tie_embeddings=True), 10).named_parameters()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_weights_are_bf16_and_rotary_tables_fp32(tiny) -> None:
    model = build_model(tiny(), VOCAB_SIZE, torch.device("cpu"))
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert model(token_ids(2, 16)).dtype == torch.bfloat16


def test_first_weights_depend_on_the_seed_alone(tiny) -> None:
    device = torch.device("cpu")
    models = [
        build_model(config, VOCAB_SIZE, device)
        for config in (tiny(precision="bf16"), tiny(precision="fp32-master"), tiny(seed=1))
    ]
    weights = [torch.nn.utils.parameters_to_vector(model.parameters()) for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_activation_checkpointing_changes_no_bit(tiny) -> None:
    ids = token_ids(2, 16)
    gradients = []
    for checkpointing in (False, True):
        config = tiny(activation_checkpointing=checkpointing)
        model = build_model(config, VOCAB_SIZE, torch.device("cpu"))
        loss_sum(model(ids), ids).backward()
        gradients.append([weight.grad for weight in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_ignored_targets_add_nothing_to_the_loss() -> None:
    logits = torch.randn(2, 3, VOCAB_SIZE, requires_grad=True)
    targets = torch.tensor([[1, 2, IGNORED], [IGNORED, IGNORED, 3]])
    counted = logits[[0, 0, 1], [0, 1, 2]]
    expected = F.cross_entropy(counted, torch.tensor([1, 2, 3]), reduction="sum")
    torch.testing.assert_close(loss_sum(logits, targets), expected)
    nothing = loss_sum(logits, torch.full((2, 3), IGNORED))
    nothing.backward()
    assert nothing.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.fixture
def without_bf16_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "native_bf16_matmul", lambda device_type: False)


@pytest.mark.usefixtures("without_bf16_instructions")
def test_products_in_fp32_are_rounded_once_and_kept_in_bf16() -> None:
    x = torch.randn(2, 7, 33).bfloat16().requires_grad_()
    weight = torch.randn(19, 33).bfloat16().requires_grad_()
    grad = torch.randn(2, 7, 19).bfloat16()
    kept: list[torch.dtype] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.dtype) or tensor, lambda tensor: tensor
    ):
        product = matmul.linear(x, weight)
    product.backward(grad)
    x32, weight32 = x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    product32 = F.linear(x32, weight32)
    product32.backward(grad.float())
    assert set(kept) == {torch.bfloat16}
    assert torch.equal(product, product32.bfloat16())
    # Another order of the same sums may round the other way: one BF16 step.
    torch.testing.assert_close(x.grad, x32.grad.bfloat16(), rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(weight.grad, weight32.grad.bfloat16(), rtol=2**-7, atol=1e-6)


@pytest.mark.usefixtures("without_bf16_instructions")
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_in_fp32_equals_attention_of_fp32_inputs(kv_heads: int) -> None:
    query = torch.randn(2, 4, 9, 8).bfloat16()
    key, value = torch.randn(2, 2, kv_heads, 9, 8).bfloat16()
    expected = matmul.attention(query.float(), key.float(), value.float())
    assert torch.equal(matmul.attention(query, key, value), expected.bfloat16())


def test_embedding_gradients_of_frequent_tokens_are_summed_in_fp32() -> None:
    weight = torch.zeros(3, 4).bfloat16().requires_grad_()
    ids = torch.ones(1000, dtype=torch.int64)
    # In BF16 a sum of ones stays at 256.
    matmul.embedding(ids, weight).sum().backward()
    assert weight.grad.tolist() == [[0.0] * 4, [1000.0] * 4, [0.0] * 4]


@pytest.mark.parametrize(
    "device_type, capabilities, native",
    [
        ("cuda", {}, True),
        ("cpu", {"avx2": True}, False),
        ("cpu", {"avx512_bf16": True}, True),
        ("cpu", {"amx_bf16": True}, True),
        ("cpu", {"amx_bf16": False, "neon": True}, False),
        ("cpu", {"bf16": True}, True),
    ],
)
def test_bf16_products_are_native_where_there_are_instructions_for_them(
    monkeypatch, device_type, capabilities, native
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert matmul.native_bf16_matmul.__wrapped__(device_type) is native
