"""The models against their second writing in fp64, documents kept apart, positions kept whole."""

from __future__ import annotations

import pytest
import torch

from dist_train.config.compose import ConfigError
from dist_train.model import build_model
from dist_train.ops.cross_entropy import cross_entropy_sum
from dist_train.remat import apply_remat
from tests.model.reference import reference_logits
from tests.model.toy import shake, token_rows, toy

VARIANTS = [
    ("llama", {}),
    ("llama", {"kv_heads": 1, "tie_embeddings": True, "rope_theta": 500.0}),
    ("llama", {"kv_heads": 4, "bias": True, "norm_eps": 1e-2}),
    ("gpt", {}),
    ("gpt", {"activation": "relu", "tie_embeddings": False, "bias": False, "kv_heads": 2}),
]


def lengths_to_documents(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    documents = torch.cat([torch.full((length,), i, dtype=torch.int32) for i, length in enumerate(lengths)])
    return torch.cat([torch.arange(length) for length in lengths])[None], documents[None]


@pytest.mark.parametrize("backend", ["sdpa", "math"])
@pytest.mark.parametrize("family, changes", VARIANTS)
def test_logits_err_at_most_twice_a_plain_fp32_writing(family, changes, backend):
    config = toy(family, backend, **changes)
    model = build_model(config)
    shake(model)
    tokens = token_rows()
    logits = model(tokens)
    assert logits.shape == (3, 12, 53) and logits.dtype == torch.float32
    for row in range(3):
        exact = reference_logits(model.state_dict(), config.model, tokens[row].tolist())
        plain = reference_logits(model.state_dict(), config.model, tokens[row].tolist(), torch.float32)
        allowed = 2 * (plain - exact).abs().max() + 1e-6 * exact.abs().max()
        assert (logits[row] - exact).abs().max() <= allowed


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_gradients_equal_those_of_the_fp64_writing(family):
    config = toy(family)
    model = build_model(config)
    shake(model)
    tokens = token_rows()[0]
    labels = tokens.roll(-1)
    objective, _ = cross_entropy_sum(model(tokens[None]), labels[None])
    objective.backward()
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    full = weights | ({"head.weight": weights["embed.weight"]} if config.model.tie_embeddings else {})
    logits = reference_logits(full, config.model, tokens.tolist())
    (-logits.log_softmax(-1)[torch.arange(12), labels].sum()).backward()
    for name, parameter in model.named_parameters():
        exact = weights[name].grad
        shift_invariant = family == "gpt" and name.endswith(".k.bias")  # adds the same to every score of a query
        scale = 10.0 if shift_invariant else exact.abs().max()
        assert shift_invariant == bool(exact.abs().max() < 1e-10), name
        assert (parameter.grad - exact).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("backend", ["sdpa", "math"])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_F25_documents_of_a_row_do_not_see_each_other(family, backend, remat):
    model = build_model(toy(family, backend))
    apply_remat(model, remat)
    positions, documents = lengths_to_documents([5, 1, 6])
    tokens = token_rows(1)
    changed = tokens.clone()
    changed[0, :5] = (changed[0, :5] + 7) % 53
    before, after = model(tokens, positions, documents), model(changed, positions, documents)
    assert torch.equal(before[0, 5:], after[0, 5:])
    assert not torch.equal(before[0, :5], after[0, :5])

    labels = tokens.roll(-1)
    labels[0, [4, 5, 11]] = -100  # the last token of a document predicts nothing
    model.zero_grad()
    objective, packed = cross_entropy_sum(before, labels)
    objective.backward()
    packed_gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    alone = torch.zeros(())
    for span in (slice(0, 5), slice(5, 6), slice(6, 12)):
        logits = model(tokens[:, span])
        torch.testing.assert_close(before[:, span], logits, rtol=1e-5, atol=1e-5)
        objective, entropy = cross_entropy_sum(logits, labels[:, span])
        objective.backward()
        alone = alone + entropy
    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=0)
    for gradient, parameter in zip(packed_gradients, model.parameters()):
        scale = max(parameter.grad.abs().max().item(), 0.1)  # the gradient of gpt's key bias is zero but for rounding
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("backend", ["sdpa", "math"])
def test_F25_no_gradient_flows_into_another_document(backend):
    model = build_model(toy("llama", backend))
    positions, documents = lengths_to_documents([5, 1, 6])
    captured = []
    model.embed.register_forward_hook(lambda module, args, out: captured.append(out.retain_grad() or out))
    logits = model(token_rows(1), positions, documents)
    logits[0, 6:].square().sum().backward()
    gradient = captured[0].grad
    assert torch.all(gradient[0, :6] == 0) and gradient[0, 6:].abs().min() > 0


def test_one_document_a_row_equals_the_fast_causal_path():
    for family in ("llama", "gpt"):
        model, tokens = build_model(toy(family)), token_rows()
        documents = torch.zeros(3, 12, dtype=torch.int32)
        torch.testing.assert_close(model(tokens, None, documents), model(tokens), rtol=1e-5, atol=1e-5)


def test_logits_never_depend_on_later_tokens():
    for family in ("llama", "gpt"):
        model, tokens = build_model(toy(family)), token_rows()
        changed = tokens.clone()
        changed[:, 7:] = (changed[:, 7:] + 1) % 53
        before, after = model(tokens), model(changed)
        assert torch.equal(before[:, :7], after[:, :7]) and not torch.equal(before[:, 7], after[:, 7])


def test_positions_count_relative_in_llama_and_absolute_in_gpt():
    tokens, shifted = token_rows(), torch.arange(9, 21).expand(3, 12)
    llama, gpt = build_model(toy("llama")), build_model(toy("gpt"))
    torch.testing.assert_close(llama(tokens), llama(tokens, shifted), rtol=1e-4, atol=1e-4)
    assert (gpt(tokens) - gpt(tokens, shifted)).abs().max() > 1e-2
    stretched = torch.arange(12).expand(3, 12) * 2
    assert (llama(tokens) - llama(tokens, stretched)).abs().max() > 1e-2


def test_a_gpt_row_longer_than_its_position_table_is_an_index_error():
    with pytest.raises(IndexError):
        build_model(toy("gpt", max_positions=8))(token_rows())


def test_F45_a_model_cast_to_bf16_keeps_fp32_angles_and_no_buffer_to_spoil():
    model = build_model(toy()).to(torch.bfloat16)
    model.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    assert list(model.buffers()) == []
    assert model(token_rows()).dtype == torch.bfloat16
    context = model.context(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[255, 256, 257]]), None, model.embed.weight.dtype)
    assert {table.dtype for table in context.rotation} == {torch.float32}
    near, far = (model(torch.tensor([[7, 8]]), torch.tensor([[0, gap]])) for gap in (256, 257))
    assert not torch.equal(near, far)


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_F45_bf16_logits_err_at_most_twice_a_plain_bf16_writing(family):
    config = toy(family)
    model = build_model(config).to(torch.bfloat16)
    tokens = token_rows()
    logits, ours, plain = model(tokens), 0.0, 0.0
    for row in range(3):
        arguments = model.state_dict(), config.model, tokens[row].tolist()
        exact = reference_logits(*arguments)
        ours = max(ours, (logits[row] - exact).abs().max().item())
        plain = max(plain, (reference_logits(*arguments, torch.bfloat16) - exact).abs().max().item())
    assert ours <= 2 * plain


def test_dropout_draws_from_the_global_generator_and_only_in_training():
    for family in ("llama", "gpt"):
        model, tokens = build_model(toy(family, dropout=0.5)), token_rows()
        torch.manual_seed(3)
        first, second = model(tokens), model(tokens)
        torch.manual_seed(3)
        assert torch.equal(first, model(tokens)) and not torch.equal(first, second)
        model.eval()
        assert torch.equal(model(tokens), model(tokens))


def test_each_place_of_dropout_is_used():
    model, tokens = build_model(toy("gpt", dropout=0.5)), token_rows()
    exact = model.eval()(tokens)
    places = {name: module for name, module in model.named_modules() if hasattr(module, "dropout")}
    assert set(places) == {"", "blocks.0", "blocks.0.attention.core", "blocks.1", "blocks.1.attention.core"}
    for module in places.values():
        place = module.dropout if isinstance(module.dropout, torch.nn.Module) else module
        place.training = True
        assert not torch.equal(model(tokens), exact)
        place.training = False
    assert torch.equal(model(tokens), exact)


def test_a_tied_head_is_the_embeddings_own_parameter():
    tied, untied = build_model(toy(tie_embeddings=True)), build_model(toy(tie_embeddings=False))
    assert tied.head.weight is tied.embed.weight
    assert "head.weight" not in dict(tied.named_parameters()) and "head.weight" in dict(untied.named_parameters())
    assert not torch.equal(untied.head.weight, untied.embed.weight)


def test_parameter_names_are_stable():
    names = [name for name, _ in build_model(toy(layers=1, tie_embeddings=False)).named_parameters()]
    assert names == [
        "embed.weight",
        "blocks.0.attention_norm.weight",
        *(f"blocks.0.attention.{part}.weight" for part in ("q", "k", "v", "out")),
        "blocks.0.mlp_norm.weight",
        *(f"blocks.0.mlp.{part}.weight" for part in ("gate", "up", "down")),
        "norm.weight",
        "head.weight",
    ]
    gpt = dict(build_model(toy("gpt", layers=1)).named_parameters())
    assert {"positions.weight", "blocks.0.mlp_norm.bias", "blocks.0.attention.q.bias", "norm.bias"} <= set(gpt)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"family": "rnn", "kv_heads": 2}, "model.family=rnn"),
        ({"activation": "gelu"}, "model.activation=gelu"),
        ({"family": "gpt", "activation": "silu"}, "model.activation=silu"),
        ({"init": "zeros"}, "model.init=zeros"),
        ({"hidden": 18}, "model.hidden=18: must be a multiple of model.heads=4"),
        ({"kv_heads": 3}, "multiple of model.kv_heads=3"),
        ({"hidden": 12}, "model.hidden / model.heads = 3"),
        ({"layers": 0}, "model.layers=0"),
        ({"dropout": 1.0}, "model.dropout=1.0"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused_with_its_rule(change, message):
    with pytest.raises(ConfigError, match=message):
        build_model(toy(**({"family": "llama"} | change)))


def test_an_unknown_attention_backend_is_refused():
    with pytest.raises(ConfigError, match="attention=paged"):
        build_model(toy(attention="paged"))
