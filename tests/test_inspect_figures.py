"""What is drawn is right, and is what stands in the picture."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="pictures need the extra `inspect`")

import matplotlib
from matplotlib.figure import Figure

from transformer_jax.batch import EOS, unpacked
from transformer_jax.config import OptimizerConfig, Positions, Schedule, SinusoidLayout, TransformerConfig
from transformer_jax.errors import UserError
from transformer_jax.inspect import attention, curves, distributions, influence, positions, residual, scaling
from transformer_jax.inspect.page import Picture, write_page
from transformer_jax.inspect.style import blank, save
from transformer_jax.inspect.trace import softmax, trace
from transformer_jax.nn.transformer import Transformer
from transformer_jax.training.objective import token_losses

SOURCE, TARGET = [5, 6, 7, 10, EOS], [4, 5, EOS]
ROWS, COLUMNS = ["<bos>", "▁$5", "<eos>"], ["▁{a}", "$\\frac", "_b_", "日", "<eos>"]


@pytest.fixture(scope="module")
def model():
    config = TransformerConfig(
        encoder_layers=1, decoder_layers=1, width=16, heads=2, feed_forward=16, source_vocab=11, target_vocab=11
    )
    model = Transformer(config)
    params = jax.jit(model.init)(jax.random.key(0), unpacked(jnp.array([SOURCE]), jnp.array([TARGET])))
    return model, params


@pytest.fixture(scope="module")
def seen(model):
    return trace(*model, SOURCE, TARGET)


def random_weights(*shape: int) -> np.ndarray:
    return softmax(np.random.default_rng(0).normal(size=shape).astype(np.float32))


def texts(figure: Figure) -> list[str]:
    """All text of a figure."""
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def drawn(figure: Figure) -> list[np.ndarray]:
    """The matrices of a figure's heat-maps, without those of its colour bars."""
    return [np.ma.filled(image.get_array(), np.nan) for axes in figure.axes for image in axes.get_images()]


def test_entropy_is_in_bits():
    weights = np.array([[1, 0, 0, 0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0, 0]])
    np.testing.assert_allclose(attention.entropy(weights), [0, 2, 1], atol=1e-6)


def test_an_alignment_is_the_mean_of_the_heads_of_all_layers_or_of_one():
    weights = random_weights(3, 2, 4, 5)
    np.testing.assert_allclose(attention.alignment(weights), sum(weights.reshape(6, 4, 5)) / 6, rtol=1e-5)
    np.testing.assert_allclose(attention.alignment(weights, layer=1), (weights[1, 0] + weights[1, 1]) / 2, rtol=1e-5)


def test_pictures_of_attention_show_the_weights_under_their_tokens():
    weights = random_weights(6, 3, 5)
    one = attention.head_figure(weights[4], ROWS, COLUMNS)
    np.testing.assert_array_equal(drawn(one)[0], weights[4])
    all_heads = attention.heads_figure(weights, ROWS, COLUMNS)
    np.testing.assert_array_equal(drawn(all_heads), weights)
    aligned = attention.alignment_figure(weights[0], ROWS, COLUMNS)
    np.testing.assert_array_equal(drawn(aligned)[0], weights[0])
    for figure in (one, all_heads, aligned):
        assert set(ROWS + COLUMNS) <= set(texts(figure))


def test_a_focus_draws_every_head_and_key_as_strong_as_its_weight():
    weights = random_weights(2, 3, 5)
    axes = attention.focus_figure(weights, 1, ROWS, COLUMNS).axes[0]
    np.testing.assert_allclose([line.get_alpha() for line in axes.lines], weights[:, 1].ravel(), rtol=1e-6)
    np.testing.assert_allclose([bar.get_alpha() for bar in axes.patches], weights[:, 1].ravel(), rtol=1e-6)
    assert [text.get_text() for text in axes.texts if text.get_fontweight() == "bold"] == ["0", "1", ROWS[1]]


def test_the_steps_of_a_head_are_those_of_its_trace(seen):
    one = seen.decoder.layers[0].self_attention
    labels = ["<bos>", "a", "b"]
    scores, scaled, masked, weights = drawn(attention.steps_figure(one, 1, labels, labels))
    np.testing.assert_array_equal(scores, one.scores[1])
    np.testing.assert_array_equal(scaled, one.scaled_scores[1])
    np.testing.assert_array_equal(np.isnan(masked), ~np.tri(3, dtype=bool))
    np.testing.assert_array_equal(weights, one.weights[1])


def test_a_mask_has_minus_infinity_where_a_key_is_hidden():
    figure = attention.mask_figure(np.tri(4, dtype=bool), list("abcd"), list("abcd"))
    assert texts(figure).count("−∞") == 6


def test_encodings_are_alike_by_distance_only():
    table = positions.encodings(20, 16, SinusoidLayout.INTERLEAVED)
    alike = positions.similarities(table)
    for distance in range(20):
        np.testing.assert_allclose(np.diag(alike, distance), alike[0, distance], atol=1e-5)
    assert alike[0, 0] > alike[0, 1] > alike[0, 3]
    np.testing.assert_array_equal(np.sort(table), np.sort(positions.encodings(20, 16, SinusoidLayout.CONCATENATED)))
    interleaved, concatenated = drawn(positions.positions_figure(20, 16))
    np.testing.assert_array_equal(interleaved, table)
    np.testing.assert_array_equal(concatenated[:, :8], table[:, ::2])
    assert positions.table_figure(table).axes


def test_scores_have_variance_d_and_scaled_ones_variance_1():
    widths = (1, 16, 256)
    raw, scaled = (scaling.saturation(widths, scaled=scaled, queries=400) for scaled in (False, True))
    np.testing.assert_allclose(raw.variance, widths, rtol=0.15)
    np.testing.assert_allclose(scaled.variance, 1, rtol=0.15)
    np.testing.assert_allclose(raw.entropy[0], scaled.entropy[0])
    assert raw.entropy[2] < 1 < 4 < scaled.entropy[2]
    assert raw.slope[2] < scaled.slope[2] / 2
    np.testing.assert_allclose(scaled.slope, scaled.slope[0], rtol=0.2)
    assert len(scaling.scaling_figure((1, 16)).axes) == 3


def test_the_slope_of_a_softmax_is_the_norm_of_its_jacobian():
    scores = jnp.array([0.3, -1.0, 2.0, 0.0])
    expected = np.linalg.norm(jax.jacobian(jax.nn.softmax)(scores))
    found = scaling.slope(softmax(np.asarray(scores))[None])
    np.testing.assert_allclose(found, [expected], rtol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_divergences_are_the_loss_that_training_minimises(smoothing):
    targets, logits = np.array([3, 1, 4]), np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    losses = token_losses(jnp.asarray(logits)[None], jnp.asarray(targets)[None], vocab=6, label_smoothing=smoothing)
    asked = distributions.target_distributions(targets, vocab=6, label_smoothing=smoothing)
    np.testing.assert_allclose(asked.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(distributions.divergences(asked, softmax(logits)), losses.smoothed[0], atol=1e-5)
    if not smoothing:
        np.testing.assert_allclose(distributions.cross_entropies(asked, softmax(logits)), losses.nll[0], rtol=1e-5)
    figure = distributions.distributions_figure({"asked": asked, "found": softmax(logits)}, list("abc"), list("uvwxyz"))
    np.testing.assert_array_equal(drawn(figure)[0], asked)


def test_the_likeliest_tokens_come_first():
    found = distributions.likeliest(np.array([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]]), 2)
    assert found.tokens.tolist() == [[1, 2], [0, 2]]
    assert found.probabilities.tolist() == [[0.6, 0.3], [0.5, 0.3]]
    assert "▁x  0.600" in texts(distributions.likeliest_figure(found, [["▁x", "y"], ["z", "y"]], ["<bos>", "▁x"]))


def test_influence_is_the_norm_of_the_jacobian():
    mix, rotate = np.array([[1.0, 0, 2], [0, 3, 0], [1, 1, 1]], np.float32), np.eye(400, dtype=np.float32)
    found = influence.influence(lambda x: jnp.asarray(mix) @ x @ jnp.asarray(rotate), jnp.ones((3, 400)))
    np.testing.assert_allclose(found, mix * 20, rtol=0.15)  # ‖m I‖ = m √400, from eight directions
    assert (np.asarray(found)[mix == 0] == 0).all()


def test_context_flows_both_ways_in_the_encoder_and_only_forward_in_the_decoder(model):
    batch = unpacked(jnp.array([SOURCE]), jnp.array([TARGET]))
    encoder, decoder = (np.asarray(x) for x in influence.influences(*model, batch))
    assert (encoder > 0).all()
    np.testing.assert_array_equal(decoder > 0, np.tri(3, dtype=bool))
    figure = influence.influence_figure(encoder, decoder, COLUMNS, ROWS)
    assert np.isnan(drawn(figure)[1]).sum() == 3


def test_the_stream_has_the_size_of_each_frame(seen):
    sizes = residual.stream(seen.decoder)
    assert sizes.names == ("self-attention 0", "encoder–decoder 0", "feed-forward 0")
    frame = seen.decoder.layers[0].cross_attention.frame
    assert sizes.update[1] == pytest.approx(np.linalg.norm(frame.update) / frame.update.size**0.5)
    np.testing.assert_allclose(sizes.after, 1, rtol=1e-3)  # post-norm, at the start: normalised
    assert len(residual.stream_figure(seen.encoder, seen.decoder).axes) == 2


def test_learning_rates_are_the_papers():
    found = curves.learning_rates(OptimizerConfig(schedule=Schedule.NOAM, warmup=40), width=64, steps=100, points=7)
    steps = found.steps.astype(float)
    np.testing.assert_allclose(found.values, 64**-0.5 * np.minimum(steps**-0.5, steps * 40**-1.5), rtol=1e-5)
    assert found.steps[[0, -1]].tolist() == [1, 100]
    schedules = curves.named_schedules(width=64, steps=100, warmup=40)
    for curve in schedules.values():
        assert curve.values.max() == pytest.approx(64**-0.5 * 40**-0.5, rel=0.01)
    assert set(schedules) <= set(texts(curves.schedules_figure(schedules)))


def test_training_curves_are_what_the_runs_logged(tmp_path):
    for name, losses in (("one", [3.0, 2.0]), ("two", [4.0, 1.0, 0.5])):
        (tmp_path / name).mkdir()
        lines = [{"step": 10 * n, "split": "train", "loss": loss} for n, loss in enumerate(losses, start=1)]
        lines.append({"step": 20, "split": "dev", "loss": 9.0, "bleu": 12.0})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text + '{"step": 3')
    runs = [tmp_path / "one", tmp_path / "two"]
    curve = curves.training_curve(runs[1], "train", "loss")
    assert (curve.steps.tolist(), curve.values.tolist()) == ([10, 20, 30], [4.0, 1.0, 0.5])
    assert not len(curves.training_curve(runs[1], "train", "bleu").steps)
    figure = curves.training_figure(runs)
    lines = [line.get_ydata().tolist() for line in figure.axes[0].lines]
    assert [line for line in lines if line] == [[3.0, 2.0], [9.0], [4.0, 1.0, 0.5], [9.0]]
    assert {"one", "two", "dev"} <= set(texts(figure))


def test_a_directory_without_a_log_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"no metrics\.jsonl with lines here"):
        curves.training_figure([tmp_path])


def test_pictures_are_saved_alike_each_time_and_whatever_the_readers_style(tmp_path):
    def bytes_of(name):
        figure = attention.head_figure(random_weights(3, 5), ROWS, COLUMNS)
        return [path.read_bytes() for path in save(figure, tmp_path / name, "picture")]

    first = bytes_of("one")
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30, "text.usetex": True, "svg.fonttype": "path"}):
        assert bytes_of("two") == first
    svg = first[0].decode()
    assert "$\\frac" in svg  # text, and not read as a formula
    assert "日" in svg


def test_a_page_escapes_what_it_is_given(tmp_path):
    picture = Picture("one", "<b> & </b>", '"text" <script>', blank(1.0, 1.0))
    index = write_page([picture], tmp_path, heading="<h>", lead="a → <i>")
    page = index.read_text(encoding="utf-8")
    assert '<h2 id="one">&lt;b&gt; &amp; &lt;/b&gt;</h2>' in page
    assert "<script>" not in page
    assert "<i>" not in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "one.png", "one.svg"]


def test_models_that_learn_their_positions_show_what_they_add(model):
    config = dataclasses.replace(model[0].config, positions=Positions.LEARNED, max_positions=8)
    learned = Transformer(config)
    params = jax.jit(learned.init)(jax.random.key(0), unpacked(jnp.array([SOURCE]), jnp.array([TARGET])))
    table = trace(learned, params, SOURCE, TARGET).encoder.positions
    assert table is not None
    np.testing.assert_array_equal(drawn(positions.table_figure(table))[0], table)
