import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.config import PlanConfig, PlanKind
from transformer_jax.data import plan as plan_module
from transformer_jax.data.plan import (
    Shape,
    best_fit,
    bucket_lengths,
    epoch_pairs,
    evaluation_plan,
    make_plan,
    padding_waste,
    summary,
    weighted,
)
from transformer_jax.errors import UserError

KINDS = pytest.mark.parametrize("kind", list(PlanKind))


def sentence_lengths(pairs, *, seed=0, longest=60):
    """Lengths distributed as those of real text: log-normal, the two sides of a pair alike."""
    rng = np.random.default_rng(seed)
    source = np.exp(rng.normal(2.7, 0.35, pairs))
    target = source * np.exp(rng.normal(0.03, 0.15, pairs))
    return np.clip(np.stack([source, target], axis=1), 2, longest).astype(np.int32)


@st.composite
def corpora(draw, kind):
    """A config, lengths that it takes, and a seed."""
    longest = draw(st.integers(1, 30))
    pair = st.tuples(st.integers(1, longest), st.integers(1, longest))
    lengths = np.array(draw(st.lists(pair, min_size=1, max_size=80)), np.int32)
    rows_multiple = draw(st.sampled_from([1, 2, 8]))
    config = PlanConfig(
        kind=kind,
        tokens=longest * rows_multiple * draw(st.integers(1, 5)) + draw(st.integers(0, 7)),
        shapes=draw(st.integers(1, 6)),
        row_length=longest,
        rows_multiple=rows_multiple,
    )
    return config, lengths, draw(st.integers(0, 3))


def assert_keeps_the_contract(config, lengths, batches):
    """Each pair once; rows × padded length within the budget; every row holds what is in it; few shapes."""
    pairs = np.concatenate([batch.pairs for batch in batches])
    np.testing.assert_array_equal(np.sort(pairs), np.arange(len(lengths)))
    for batch in batches:
        rows, source, target = batch.shape
        assert rows * max(source, target) <= config.tokens
        assert rows % config.rows_multiple == 0
        assert (np.diff(batch.rows) >= 0).all()
        assert batch.rows[0] >= 0
        assert batch.rows[-1] < rows
        used = np.zeros((rows, 2), np.int64)
        np.add.at(used, batch.rows, lengths[batch.pairs])
        assert (used <= (source, target)).all()


@settings(max_examples=60, deadline=None)
@given(corpora(PlanKind.BUCKETS))
def test_buckets_hold_each_pair_once_within_the_budget(example):
    config, lengths, seed = example
    batches = make_plan(config, lengths)(lengths, seed=seed, epoch=1)
    assert_keeps_the_contract(config, lengths, batches)
    assert len({batch.shape for batch in batches}) <= config.shapes
    assert all(len(set(batch.rows)) == len(batch.rows) for batch in batches), "one pair a row"


@settings(max_examples=60, deadline=None)
@given(corpora(PlanKind.PACKING))
def test_packing_holds_each_pair_once_within_the_budget_in_one_shape(example):
    config, lengths, seed = example
    batches = make_plan(config, lengths)(lengths, seed=seed, epoch=1)
    assert_keeps_the_contract(config, lengths, batches)
    assert len({batch.shape for batch in batches}) == 1


@KINDS
def test_a_plan_follows_from_its_arguments_alone_and_epochs_differ(kind):
    lengths = sentence_lengths(500)
    config = PlanConfig(kind=kind, tokens=512, row_length=64)

    def batches(*, seed, epoch):
        plan = make_plan(config, lengths)
        return [batch.pairs.tolist() for batch in plan(lengths, seed=seed, epoch=epoch)]

    assert batches(seed=1, epoch=2) == batches(seed=1, epoch=2)
    assert batches(seed=1, epoch=2) != batches(seed=1, epoch=3)
    assert batches(seed=1, epoch=2) != batches(seed=2, epoch=2)
    together = [{frozenset(pairs) for pairs in batches(seed=1, epoch=epoch)} for epoch in (2, 3)]
    assert len(together[0] & together[1]) < 3, "batches are put together anew, not only put in another order"


@KINDS
def test_batches_are_not_sorted_by_length(kind):
    lengths = sentence_lengths(4000)
    batches = make_plan(PlanConfig(kind=kind, tokens=512, row_length=64), lengths)(lengths, seed=0, epoch=0)
    mean = np.array([lengths[batch.pairs].mean() for batch in batches])
    assert abs(np.corrcoef(mean, np.arange(len(mean)))[0, 1]) < 0.3


@pytest.mark.parametrize("tokens", [2048, 4096])
def test_twelve_buckets_waste_little(tokens):
    lengths = sentence_lengths(29_000)
    batches = make_plan(PlanConfig(tokens=tokens, shapes=12), lengths)(lengths, seed=0, epoch=0)
    assert padding_waste(batches, lengths) < 0.12


@pytest.mark.parametrize("row_length", [64, 128, 256])
def test_packing_wastes_little(row_length):
    lengths = sentence_lengths(29_000)
    config = PlanConfig(kind=PlanKind.PACKING, row_length=row_length)
    assert padding_waste(make_plan(config, lengths)(lengths, seed=0, epoch=0), lengths) < 0.05


def test_packing_goes_pool_by_pool(monkeypatch):
    lengths = sentence_lengths(500)
    monkeypatch.setattr(plan_module, "POOL", 64)
    config = PlanConfig(kind=PlanKind.PACKING, tokens=512, row_length=64)
    assert_keeps_the_contract(config, lengths, make_plan(config, lengths)(lengths, seed=0, epoch=0))


def test_best_fit_puts_a_pair_where_it_leaves_least_room():
    """7 + 3 and 5 × 2 fill two rows of 10; the 3 anywhere else would leave a 2 over for a third row."""
    lengths = np.array([[2, 2]] * 5 + [[3, 3], [7, 7]])
    assert best_fit(lengths, row_length=10).tolist() in ([0] * 5 + [1] * 2, [1] * 5 + [0] * 2)


def test_buckets_are_the_lengths_themselves_when_there_are_few():
    lengths = np.array([[3, 9], [9, 3], [9, 9], [3, 9], [5, 5]])
    assert bucket_lengths(lengths, 4) == [(5, 5), (3, 9), (9, 3), (9, 9)]


def test_more_shapes_pad_less():
    lengths = sentence_lengths(5000)
    waste = [
        padding_waste(make_plan(PlanConfig(tokens=512, shapes=shapes), lengths)(lengths, seed=0, epoch=0), lengths)
        for shapes in (1, 2, 4, 8, 16)
    ]
    assert waste == sorted(waste, reverse=True)


def test_shapes_of_long_documents_are_chosen_as_well():
    lengths = sentence_lengths(2000, longest=5000) * 50
    config = PlanConfig(tokens=20_000)
    assert_keeps_the_contract(config, lengths, make_plan(config, lengths)(lengths, seed=0, epoch=0))


def test_leftovers_fill_a_larger_shape_rather_than_leave_rows_empty():
    lengths = np.array([[4, 4]] * 6 + [[5, 5]] * 3)
    batches = make_plan(PlanConfig(tokens=20, shapes=2), lengths)(lengths, seed=0, epoch=0)
    assert sorted(batch.shape for batch in batches) == [Shape(4, 5, 5), Shape(5, 4, 4)]


def test_leftovers_that_nearly_fill_a_batch_stay_in_their_shape():
    lengths = np.array([[4, 4]] * 9 + [[15, 15]] * 1)
    batches = make_plan(PlanConfig(tokens=20, shapes=2), lengths)(lengths, seed=0, epoch=0)
    assert sorted(batch.shape for batch in batches) == [Shape(1, 15, 15), Shape(5, 4, 4), Shape(5, 4, 4)]


def test_a_corpus_smaller_than_a_batch_does_not_fill_it_with_empty_rows():
    lengths = np.array([[4, 4]] * 13)
    (batch,) = make_plan(PlanConfig(tokens=4096, rows_multiple=8), lengths)(lengths, seed=0, epoch=0)
    assert batch.shape == (16, 4, 4)


def test_waste_counts_both_sides_and_empty_rows():
    lengths = np.array([[3, 1], [2, 4]])
    (batch,) = make_plan(PlanConfig(tokens=16, shapes=1, rows_multiple=4), lengths)(lengths, seed=0, epoch=0)
    assert batch.shape == (4, 3, 4)
    assert padding_waste([batch], lengths) == pytest.approx(1 - 10 / 28)


def test_a_summary_tells_padding_shapes_and_batches(monkeypatch):
    lengths = np.array([[4, 4]] * 9 + [[10, 4]] * 2)
    plan = make_plan(PlanConfig(tokens=20, shapes=2), lengths)
    assert summary(plan, lengths) == "11 pairs: 3 batches an epoch in 2 shapes, 7.4 % padding"
    monkeypatch.setattr(plan_module, "SAMPLE", 10)
    many = summary(plan, np.concatenate([lengths] * 100))
    assert many.startswith("1,100 pairs: about ")


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (PlanConfig(tokens=40, rows_multiple=2), ["data.plan.tokens", "(40)", "data.max_length"]),
        (PlanConfig(kind=PlanKind.PACKING, tokens=64, row_length=20), ["data.plan.row_length to 21"]),
    ],
)
def test_a_pair_over_the_budget_is_refused_by_name(config, names):
    lengths = np.array([[5, 5], [9, 21], [21, 4]])
    with pytest.raises(UserError) as error:
        make_plan(config, lengths)
    for name in [*names, "2 of 3 pairs", "pair 1 ", "9 and 21"]:
        assert name in str(error.value)


@KINDS
def test_an_epoch_with_longer_pairs_than_the_plan_was_made_for_is_refused(kind):
    plan = make_plan(PlanConfig(kind=kind, row_length=5), np.array([[5, 5]]))
    with pytest.raises(UserError, match=r"pair 0 .* with 5 and 6"):
        plan(np.array([[5, 6]]), seed=0, epoch=0)


def test_room_can_be_made_for_longer_pairs_of_later_epochs():
    lengths = sentence_lengths(500, longest=20)
    config = PlanConfig(tokens=512, shapes=4)
    plan = make_plan(config, lengths, longest=30)
    later = np.concatenate([lengths, [[30, 30]]])
    assert_keeps_the_contract(config, later, plan(later, seed=0, epoch=1))
    assert len(plan.shapes) <= 4


def test_a_budget_too_small_for_a_row_is_refused():
    with pytest.raises(UserError, match=r"data\.plan\.tokens is 100.*Raise data\.plan\.tokens to 512"):
        make_plan(PlanConfig(kind=PlanKind.PACKING, tokens=100, row_length=64, rows_multiple=8), np.array([[5, 5]]))


@KINDS
def test_a_corpus_without_pairs_is_refused(kind):
    with pytest.raises(UserError, match="no pairs"):
        make_plan(PlanConfig(kind=kind), np.empty((0, 2), np.int32))


@KINDS
def test_evaluation_has_each_pair_once_and_takes_any_length(kind):
    lengths = np.concatenate([sentence_lengths(100), [[300, 20]]])
    batches = evaluation_plan(PlanConfig(kind=kind, tokens=128, row_length=32, rows_multiple=8), lengths)
    assert_keeps_the_contract(PlanConfig(tokens=2400, rows_multiple=8), lengths, batches)
    assert evaluation_plan(PlanConfig(), np.empty((0, 2), np.int32)) == []


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    weight=st.sampled_from([0.0, 0.3, 0.5, 1.0, 2.5]),
    epoch=st.integers(0, 50),
)
def test_a_corpus_is_seen_as_often_as_its_weight_says(sizes, weight, epoch):
    weights = [weight] + [1.0] * (len(sizes) - 1)
    seen = np.zeros(sum(sizes), np.int64)
    np.add.at(seen, epoch_pairs(sizes, weights, seed=0, epoch=epoch), 1)
    assert (seen[sizes[0] :] == 1).all()
    assert set(seen[: sizes[0]]) <= {int(np.floor(weight)), int(np.ceil(weight))}
    assert abs(seen[: sizes[0]].sum() - weight * sizes[0]) < 1


def test_the_pairs_of_a_weighted_corpus_are_seen_equally_often_in_the_long_run():
    seen = np.bincount(np.concatenate([epoch_pairs([7, 5], [0.4, 2.5], seed=0, epoch=epoch) for epoch in range(10)]))
    assert seen.tolist() == [4] * 7 + [25] * 5


@KINDS
def test_a_weighted_plan_holds_the_pairs_of_its_epoch(kind):
    lengths = sentence_lengths(60)
    sizes, weights = (40, 20), (0.5, 3.0)
    plan = weighted(make_plan(PlanConfig(kind=kind, tokens=256, row_length=64), lengths), sizes, weights)
    pairs = np.concatenate([batch.pairs for batch in plan(lengths, seed=1, epoch=2)])
    np.testing.assert_array_equal(np.sort(pairs), np.sort(epoch_pairs(sizes, weights, seed=1, epoch=2)))


@pytest.mark.parametrize("weights", [(1.0,), (1.0, -1.0), (0.0, 0.0)])
def test_weights_that_make_no_sense_are_refused(weights):
    plan = make_plan(PlanConfig(), np.array([[5, 5]]))
    with pytest.raises(UserError, match=r"data\.weights is .*expected 2 numbers"):
        weighted(plan, (1, 1), weights)
