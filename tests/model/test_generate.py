"""Generation: the cache changes nothing, the seed decides, the window follows its rule."""

from __future__ import annotations

import pytest
import torch

from dist_train.config.compose import ConfigError
from dist_train.model import build_model, generate
from dist_train.model.attention import LayerCache
from dist_train.model.generate import choose_token
from tests.model.toy import token_rows, toy

PROMPT = [5, 17, 40, 2]


@pytest.mark.parametrize("backend", ["sdpa", "math"])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_logits_with_a_cache_equal_those_without(family, backend):
    config = toy(family, backend)
    model, tokens = build_model(config), token_rows(2)
    caches = [LayerCache(12) for _ in model.blocks]
    pieces = []
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 6), (6, 9), (9, 12)):  # a prompt, single tokens, several at once
            positions = torch.arange(start, stop).expand(2, -1)
            pieces.append(model(tokens[:, start:stop], positions, caches=caches))
        torch.testing.assert_close(torch.cat(pieces, 1), model(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature, top_p", [(0.0, 1.0), (1.0, 1.0), (0.7, 0.8)])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_tokens_with_a_cache_equal_those_without_past_the_window(family, temperature, top_p):
    model = build_model(toy(family, max_positions=12))
    arguments = (model, PROMPT, 40, temperature, top_p, 3, None)  # the window of 12 is refilled several times
    cached, uncached = generate(*arguments), generate(*arguments, cached=False)
    assert cached == uncached and len(cached) == 40 and len(set(cached)) > 1


def test_greedy_takes_the_likeliest_token_of_the_plain_forward():
    model, tokens = build_model(toy()), list(PROMPT)
    for _ in range(6):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert generate(model, PROMPT, 6, 0.0, 1.0, 0, None) == tokens[4:]


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_prompt_longer_than_the_window_loses_its_beginning(family):
    model = build_model(toy(family, max_positions=8))
    long = token_rows(1, 30)[0].tolist()
    assert generate(model, long, 5, 0.0, 1.0, 0, None) == generate(model, long[-8:], 5, 0.0, 1.0, 0, None)
    assert len(generate(build_model(toy(family, max_positions=1)), long, 5, 1.0, 1.0, 0, None)) == 5


def test_the_seed_decides_and_the_global_generator_stays():
    model = build_model(toy())
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = generate(model, PROMPT, 20, 1.0, 1.0, 3, None)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert generate(model, PROMPT, 20, 1.0, 1.0, 3, None) == first
    assert generate(model, PROMPT, 20, 1.0, 1.0, 4, None) != first


def test_dropout_is_off_while_generating_and_the_mode_is_put_back():
    model = build_model(toy(dropout=0.5))
    assert generate(model, PROMPT, 8, 0.0, 1.0, 0, None) == generate(model, PROMPT, 8, 0.0, 1.0, 1, None)
    assert model.training
    generate(model.eval(), PROMPT, 1, 0.0, 1.0, 0, None)
    assert not model.training


def test_it_stops_before_the_end_of_document_and_starts_from_it():
    model = build_model(toy())
    text = generate(model, PROMPT, 12, 1.0, 1.0, 3, None)
    eos = text[5]
    assert generate(model, PROMPT, 12, 1.0, 1.0, 3, eos) == text[: text.index(eos)]
    assert generate(model, [], 0, 1.0, 1.0, 3, eos) == []
    assert generate(model, [], 4, 0.0, 1.0, 3, 52) == generate(model, [52], 4, 0.0, 1.0, 3, 52)


def test_ids_the_tokenizer_lacks_are_never_drawn():
    model = build_model(toy())
    assert max(generate(model, [1], 60, 2.0, 1.0, 0, None)) >= 10
    assert max(generate(model, [1], 60, 2.0, 1.0, 0, None, vocab=10)) < 10


def test_top_p_keeps_the_smallest_set_and_temperature_sharpens():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    generator = torch.Generator().manual_seed(0)

    def share(temperature: float, top_p: float) -> list[float]:
        drawn = [choose_token(logits, temperature, top_p, generator) for _ in range(3000)]
        return [drawn.count(token) / 3000 for token in range(4)]

    close = {"rel": 0, "abs": 0.04}
    assert share(1.0, 1.0) == pytest.approx([0.1, 0.5, 0.15, 0.25], **close)
    assert share(1.0, 0.6) == pytest.approx([0, 2 / 3, 0, 1 / 3], **close)  # 0.5 alone does not reach 0.6
    assert share(1.0, 0.5) == [0, 1, 0, 0]
    assert share(1.0, 1e-9) == [0, 1, 0, 0]
    squares = [p * p / 0.345 for p in (0.1, 0.5, 0.15, 0.25)]
    assert share(0.5, 1.0) == pytest.approx(squares, **close)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"count": -1}, "tokens=-1"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"tokens": []}, "an empty prompt"),
        ({"tokens": [53]}, "token id 53 is outside"),
        ({"tokens": [-1]}, "token id -1 is outside"),
    ],
)
def test_a_value_out_of_range_is_refused(change, message):
    arguments = {"tokens": PROMPT, "count": 1, "temperature": 1.0, "top_p": 1.0, "seed": 0, "eos": None} | change
    with pytest.raises(ConfigError, match=message):
        generate(build_model(toy()), **arguments)
