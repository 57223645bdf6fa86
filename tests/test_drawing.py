import numpy as np

from brt import drawing


def test_smoothing_keeps_constants_and_stays_between() -> None:
    np.testing.assert_allclose(drawing.smoothed(np.full(300, 3.0)), 3.0)
    noisy = np.random.default_rng(0).normal(size=400)
    smooth = drawing.smoothed(noisy)
    assert smooth.std() < 0.5 * noisy.std()
    assert noisy.min() <= smooth.min() and smooth.max() <= noisy.max()


def test_logarithmic_ticks_are_plain_numbers() -> None:
    figure, (axes, other) = drawing.new_figure(2)
    drawing.logarithmic(axes, [0.55, 0.9])
    axes.set_ylim(0.55, 0.9)
    drawing.logarithmic(other, [0.0, 1.0])
    figure.draw_without_rendering()
    labels = {label.get_text() for label in axes.get_yticklabels(minor=True)}
    assert {"0.6", "0.7", "0.8"} <= labels and other.get_yscale() == "linear"
