"""The judge of the digits demo (a classifier) on real images, and `spread` against scipy."""

import subprocess
import sys

import numpy as np
import pytest
from scipy.spatial.distance import pdist

from trainable_candle.demo import digits
from trainable_candle.demo.judge import Judge, spread, verdict

# The judge is fitted on the held-out images, because the demo trains its models on the others.
TRAIN, HELD_OUT = digits.split(digits.load())


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(HELD_OUT)


def test_the_judge_recognises_digits_that_it_was_not_trained_on(judge: Judge) -> None:
    assert judge.accuracy(TRAIN) > 0.97


def test_share_is_the_share_of_images_that_show_the_digit(judge: Judge) -> None:
    # 30 of 40 images show a one.
    ones, sevens = HELD_OUT.only(1).pixels[:30], HELD_OUT.only(7).pixels[:10]
    assert judge.share(np.concatenate([ones, sevens]), 1) == pytest.approx(0.75)


def test_spread_is_the_mean_pairwise_distance() -> None:
    pixels = TRAIN.only(4).pixels
    assert spread(pixels) == pytest.approx(
        pdist(pixels.reshape(len(pixels), -1).astype(float)).mean()
    )


def test_spread_of_copies_is_zero() -> None:
    assert spread(np.repeat(TRAIN.pixels[:1], 20, axis=0)) == 0.0


def test_spread_needs_two_images() -> None:
    with pytest.raises(ValueError, match="found 1 images, expected at least 2"):
        spread(TRAIN.pixels[:1])


def test_real_images_of_the_digit_pass(judge: Judge) -> None:
    # Real images stand for samples: a base that does not know the digit 0 draws 6, and with the
    # LoRA it draws 0.
    before, after = HELD_OUT.only(6).pixels, HELD_OUT.only(0).pixels
    result = verdict(judge, digit=0, before=before, after=after, train=TRAIN)
    assert result.share_before == 0.0
    assert result.share_after == 1.0
    assert result.spread_ratio == pytest.approx(1.0, abs=0.1)
    assert result.judge_accuracy == judge.accuracy(TRAIN)
    assert result.passed
    assert "100.0%" in str(result)


def test_copies_of_one_image_of_the_digit_do_not_pass(judge: Judge) -> None:
    copies = np.repeat(HELD_OUT.only(0).pixels[:1], 50, axis=0)
    before = HELD_OUT.only(6).pixels
    result = verdict(judge, digit=0, before=before, after=copies, train=TRAIN)
    assert (result.share_after, result.spread_ratio) == (1.0, 0.0)
    assert not result.passed


def test_the_error_without_scikit_learn_says_how_to_install_it() -> None:
    # None in `sys.modules` makes an import fail as if the module were not installed.
    code = "import sys; sys.modules['sklearn.svm'] = None; import trainable_candle.demo.judge"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert 'pip install "trainable-candle[demo]"' in run.stderr
