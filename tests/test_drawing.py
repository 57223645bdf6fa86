import numpy as np

from brt import drawing


def test_smoothing_keeps_constants_and_stays_between() -> None:
    np.testing.assert_allclose(drawing.smoothed(np.full(300, 3.0)), 3.0)
    noisy = np.random.default_rng(0).normal(size=400)
    smooth = drawing.smoothed(noisy)
    assert smooth.std() < 0.5 * noisy.std()
    assert noisy.min() <= smooth.min() and smooth.max() <= noisy.max()
