"""Batches of ranks: what makes a step never depends on who reads it; evaluation counts each row once."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
import torch

from dist_train.config.compose import ConfigError
from dist_train.config.schema import DataConfig, TrainConfig
from dist_train.data import EvalBatches, MicroBatch, TrainBatches, prepare
from tests.data.corpora import corpus_of, numbered, slow_row, split_of

CORPUS = corpus_of(split_of(numbered([13, 1, 40, 7, 90, 2, 61, 33, 5, 70])))
TRAIN = TrainConfig(global_batch=12, micro_batch=1, seq_len=8, seed=5)


def ids_of(train: TrainConfig, step: int, dp: int = 1, corpus=CORPUS) -> list[int]:
    """Rows of a step over all ranks, in the order of ranks and micro-batches."""
    ranks = [TrainBatches(corpus, train, True, dp, r) for r in range(dp)]
    return [i for rank in ranks for batch in rank.step(step) for i in batch.sample_ids]


def with_batch(micro_batch: int, global_batch: int = 12) -> TrainConfig:
    return TrainConfig(global_batch=global_batch, micro_batch=micro_batch, seq_len=8, seed=5)


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_F28_the_rows_of_a_step_do_not_depend_on_ranks_or_micro_batches(dp: int, micro_batch: int) -> None:
    for step in (0, 1, 3, 17):
        assert ids_of(with_batch(micro_batch, 24), step, dp) == ids_of(with_batch(1, 24), step)


def test_F28_fewer_and_more_ranks_read_on_without_repeat_or_gap() -> None:
    whole = [i for step in range(6) for i in ids_of(TRAIN, step)]
    for first, second in ((4, 2), (4, 1), (2, 4)):
        resumed = [i for step in range(6) for i in ids_of(TRAIN, step, first if step < 3 else second)]
        assert resumed == whole


def test_F22_position_counts_samples_with_accumulation() -> None:
    rows = TrainBatches(CORPUS, TRAIN, True, 1, 0).rows_per_epoch
    assert rows == 41
    consumed = [i for step in range(8) for i in ids_of(with_batch(4), step)]  # accumulation 3
    assert [i for step in range(4, 8) for i in ids_of(with_batch(2), step)] == consumed[48:]  # accumulation 6 after a resume
    assert sorted(consumed[:rows]) == list(range(rows)) and sorted(consumed[rows : 2 * rows]) == list(range(rows))
    assert consumed[:rows] != consumed[rows : 2 * rows]


def test_F22_another_global_batch_goes_on_at_the_sample_where_the_last_ended() -> None:
    stream = [i for step in range(10) for i in ids_of(TRAIN, step)]
    after = TrainBatches(CORPUS, with_batch(2, global_batch=20), True, 1, 0)
    position = 5 * 12
    for _ in range(2):
        assert [i for batch in after.at(position) for i in batch.sample_ids] == stream[position : position + 20]
        position += 20


def test_F26_resuming_in_a_later_epoch_reads_the_same_rows() -> None:
    train = with_batch(2, global_batch=4)
    corpus = corpus_of(split_of(numbered([8 * 40 + 1])))  # 40 rows: 10 steps an epoch
    steps = [ids_of(train, step, corpus=corpus) for step in range(35)]
    for resume in (5, 14, 23, 10):
        fresh = TrainBatches(corpus, train, True, 1, 0)
        assert [[i for b in fresh.step(s) for i in b.sample_ids] for s in range(resume, 35)] == steps[resume:]
    epochs = [sum(steps[e : e + 10], []) for e in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]


def test_the_seed_and_shuffle_move_the_order() -> None:
    other = TrainConfig(global_batch=12, micro_batch=1, seq_len=8, seed=6)
    assert ids_of(other, 0) != ids_of(TRAIN, 0)
    plain = TrainBatches(CORPUS, TRAIN, False, 1, 0)
    assert [i for b in plain.step(1) for i in b.sample_ids] == list(range(12, 24))


def test_F25_batches_hold_what_their_sample_ids_say() -> None:
    batches = TrainBatches(CORPUS, with_batch(3), True, 2, 1)
    assert len(batches) == 2 == len(batches.step(0))
    for batch in batches.step(2):
        assert batch.tokens_BT.shape == (3, 8) and batch.documents_BT.dtype == torch.int32
        assert {t.dtype for t in (batch.tokens_BT, batch.labels_BT, batch.positions_BT)} == {torch.int64}
        for b, row in enumerate(batch.sample_ids):
            fields = (batch.tokens_BT[b], batch.labels_BT[b], batch.positions_BT[b], batch.documents_BT[b])
            assert list(zip(*(f.tolist() for f in fields))) == slow_row(CORPUS.train[0], row * 8, min(row * 8 + 8, 322), 8)
        assert batch.live_tokens == int((batch.labels_BT != -100).sum()) == batch.to("cpu").live_tokens


def test_live_tokens_of_a_batch_made_by_hand() -> None:
    labels = torch.tensor([[1, -100, 3]])
    batch = MicroBatch(torch.zeros(1, 3, dtype=torch.int64), labels, labels, labels.int(), sample_ids=(0,))
    assert batch.live_tokens == 2 and batch.to("meta").tokens_BT.device.type == "meta"


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1.0, 1.0), (3.0, 1.0)])
def test_blends_are_a_pure_function_and_use_each_sources_rows_once_per_epoch(weights: tuple[float, float]) -> None:
    corpus = corpus_of(split_of(numbered([8 * 30 + 1])), split_of(numbered([8 * 21 + 1])), weights=weights)
    train = with_batch(1, global_batch=10)
    stream = [i for step in range(20) for i in ids_of(train, step, corpus=corpus)]
    assert [i for step in range(20) for i in ids_of(train, step, 5, corpus)] == stream
    first = [i for i in stream if i < 30]
    assert abs(len(first) / len(stream) - weights[0] / sum(weights)) <= 0.01
    second = [i for i in stream if i >= 30]
    assert sorted(first[:30]) == list(range(30)) and sorted(second[:21]) == list(range(30, 51))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [0, 1, 5, 7, 8])
def test_F24_F27_evaluation_counts_each_row_once_in_equal_numbers_of_batches(ranks: int, rows: int) -> None:
    lengths = [9, 3, 8 * rows - 12 + 1] if rows > 1 else [8 * rows + 1] * bool(rows)
    corpus = corpus_of(CORPUS.train[0], evaluation=split_of(numbered(lengths)))
    batches = [list(EvalBatches(corpus, 8, 2, ranks, r)) for r in range(ranks)]
    assert {len(b) for b in batches} == {len(EvalBatches(corpus, 8, 2, ranks, 0))} == {-(-rows // (2 * ranks))}
    ids = Counter(i for rank in batches for batch in rank for i in batch.sample_ids)
    ids.pop(-1, None)
    assert ids == Counter(range(rows))
    live = sum(batch.live_tokens for rank in batches for batch in rank)
    labels = sum(int(batch.labels_BT[batch.labels_BT != -100].sum()) for rank in batches for batch in rank)
    assert live == corpus.evaluation[0].predicted
    assert labels == sum(token for document in numbered(lengths) for token in document[1:])


def test_F24_one_sample_for_four_ranks_leaves_three_with_padding_that_counts_nothing() -> None:
    corpus = corpus_of(CORPUS.train[0], evaluation=split_of(numbered([6])))
    batches = [list(EvalBatches(corpus, 8, 1, 4, r)) for r in range(4)]
    assert [[b.live_tokens for b in rank] for rank in batches] == [[5], [0], [0], [0]]
    assert [[b.sample_ids for b in rank] for rank in batches] == [[(0,)], [(-1,)], [(-1,)], [(-1,)]]


def test_a_batch_that_does_not_divide_is_refused_with_the_multiple_needed() -> None:
    with pytest.raises(ConfigError, match="multiple of 10"):
        TrainBatches(CORPUS, with_batch(5), True, 2, 0)


def test_F12_a_source_with_nothing_to_predict_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"source 1 has 3 tokens in 3 documents.*seq_len=8"):
        TrainBatches(corpus_of(CORPUS.train[0], split_of([[1], [2], [3]])), TRAIN, True, 1, 0)


def test_synthetic_batches_are_a_function_of_the_seed_with_unequal_live_tokens() -> None:
    config = DataConfig(source="synthetic", tokenizer_vocab=53)
    first, again = prepare(config), prepare(config)
    assert first.fingerprint == again.fingerprint != prepare(DataConfig(source="synthetic", tokenizer_vocab=54)).fingerprint
    train = TrainConfig(global_batch=16, micro_batch=4, seq_len=128)
    for step in (0, 9):
        pairs = list(zip(TrainBatches(first, train, True, 1, 0).step(step), TrainBatches(again, train, True, 1, 0).step(step)))
        assert all(torch.equal(a.tokens_BT, b.tokens_BT) and torch.equal(a.labels_BT, b.labels_BT) for a, b in pairs)
        assert len({a.live_tokens for a, _ in pairs}) > 1
        assert max(int(a.tokens_BT.max()) for a, _ in pairs) == 52  # the end token


def test_synthetic_documents_have_the_lengths_asked_for_and_can_be_learned() -> None:
    corpus = prepare(DataConfig(source="synthetic", tokenizer_vocab=53, synthetic_min_tokens=4, synthetic_max_tokens=96))
    split = corpus.train[0]
    lengths = np.diff(split.offsets)
    assert lengths.min() >= 4 and lengths.max() <= 96 and len(set(lengths.tolist())) > 60
    assert split.documents + corpus.evaluation[0].documents == 512 and corpus.evaluation[0].documents > 0
    assert np.all(split.tokens[split.offsets[1:] - 1] == 52)
    inner = np.ones(len(split.tokens) - 1, dtype=bool)
    inner[split.offsets[1:-1] - 1] = False  # the next token is in another document
    follows = (split.tokens[:-1] * 5 + 3) % 52 == split.tokens[1:]
    assert 0.8 < follows[inner].mean() < 0.95


def test_a_step_of_8_rows_of_128_tokens_takes_about_a_millisecond() -> None:
    corpus = corpus_of(split_of(numbered([100] * 600)))
    batches = TrainBatches(corpus, TrainConfig(global_batch=8, micro_batch=8, seq_len=128), True, 1, 0)
    seconds = []
    for step in range(50):
        start = time.perf_counter()
        batches.step(step)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 2e-3  # the fastest, because a busy machine slows any of them; per-token Python takes 5 ms and more
