"""Impossible sizes and numbers raise errors; sizes do so before memory is allocated.

Empty tensors and large integers work.
"""

import pytest

import trainable_candle as tc

HUGE = 10**13
"""The elements of an f32 tensor of 40 TB."""


# In each case, the result or an `expand`ed operand has at least 2**41 elements of at least 4 bytes.
# Only the result of `==` has elements of 1 byte (u8): 2**46 of them. `expand` checks the size of
# its view, although a view takes no memory, so the cases with an `expand`ed operand raise the error
# there.
@pytest.mark.parametrize(
    "make",
    [
        lambda: tc.zeros(HUGE),
        lambda: tc.ones(1).expand(HUGE),
        lambda: tc.ones(3, 4).broadcast_to(2**62, 3, 4),
        lambda: tc.zeros(2**23, 1) == tc.zeros(1, 2**23),
        lambda: tc.zeros(2**21, 1) + tc.zeros(1, 2**21),
        lambda: tc.zeros(2**21, 1) @ tc.zeros(1, 2**21),
        lambda: tc.where(tc.zeros(2**21, 1) == 0.0, tc.zeros(1, 2**21), tc.zeros(1)),
        lambda: tc.zeros(0, 2**41).sum(0),
        lambda: tc.cat([tc.zeros(1).expand(2**42)] * 2),
        lambda: tc.nn.functional.scaled_dot_product_attention(
            tc.zeros(1).expand(2**40, 4), tc.zeros(3, 4), tc.zeros(3, 4)
        ),
        lambda: tc.zeros(4, 8).embedding(tc.tensor([1]).expand(2**42)),
        lambda: tc.zeros(4, 1).gather(0, tc.tensor([[1]]).expand(2**42, 1)),
        lambda: tc.full((2**42,), 1),
    ],
    ids=[
        "zeros",
        "expand",
        "overflow",
        "compare",
        "add",
        "matmul",
        "where",
        "empty sum",
        "cat",
        "attention",
        "embedding",
        "gather",
        "full of integers",
    ],
)
def test_a_tensor_larger_than_memory_is_an_error(make) -> None:
    with pytest.raises(tc.OutOfMemoryError, match="tensor of shape"):
        make()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: tc.zeros(2**63), tc.ArgumentError, "zeros: shape is 9223372036854775808"),
        (lambda: tc.zeros(2**200), tc.ArgumentError, "zeros: shape is an integer of 201 bits"),
        (lambda: tc.zeros(1.5), TypeError, "zeros: shape is 1.5, expected an integer"),
        (lambda: tc.zeros(2, "x"), TypeError, r"zeros: shape\[1\] is 'x', expected an integer"),
        (lambda: tc.ones(2).sum(0.5), TypeError, "sum: dim is 0.5, expected an integer"),
        (lambda: tc.eye(-1), tc.ArgumentError, "eye: n is -1, expected an integer of at least 0"),
        (lambda: tc.ones(2).narrow(0, -1, 2), tc.ArgumentError, "narrow: start is -1"),
        (lambda: tc.ones(2).chunk(-1), tc.ArgumentError, "chunk: chunks is -1"),
        (
            lambda: tc.ones(4).split([-1, 4]),
            tc.ArgumentError,
            r"split: split_size_or_sections\[0\] is -1",
        ),
        (lambda: tc.manual_seed(-1), tc.ArgumentError, "manual_seed: seed is -1, expected"),
        (lambda: tc.LoraConfig(r=-1), tc.ArgumentError, "LoraConfig: r is -1"),
        (
            lambda: tc.LoraConfig(target_modules=3),
            TypeError,
            "LoraConfig: target_modules is a value of type int, expected a name or a list",
        ),
        (
            lambda: tc.nn.Linear.init(-1, 2),
            tc.ArgumentError,
            "Linear.init: in_features is -1",
        ),
        (
            lambda: conv2d(padding="same"),
            TypeError,
            "conv2d: padding is 'same', expected an integer",
        ),
        (lambda: conv2d(padding=-1), tc.ArgumentError, "conv2d: padding is -1"),
        (lambda: conv2d(stride=(1, 2, 3)), tc.ArgumentError, "conv2d: stride has 3 numbers"),
    ],
)
def test_impossible_arguments_are_reported(call, error, text) -> None:
    with pytest.raises(error, match=text):
        call()


def conv2d(**options):
    """Convolve an image of 4 x 4 pixels with a kernel of 2 x 2."""
    return tc.nn.functional.conv2d(tc.ones(1, 1, 4, 4), tc.ones(1, 1, 2, 2), **options)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: tc.full((2,), -1, dtype="u8"), "full: the number -1 does not fit into u8"),
        (
            lambda: tc.full((2,), 10**30, dtype="i64"),
            r"full: the number 1.*e30 does not fit",
        ),
        (lambda: tc.full((2,), 10**400), "full: "),
        (lambda: tc.tensor([1]) + 2**63, r"add: the number 9\.22.*e18 does not fit into i64"),
        (lambda: tc.tensor([1]) * -(10**400), "mul: the number -inf does not fit into i64"),
        (lambda: tc.tensor([1], dtype="u8") * 256, "mul: the number 256 does not fit into u8"),
        (lambda: tc.ones(1) + 10**400, "add: the integer is too large for a floating point"),
    ],
)
def test_numbers_that_do_not_fit_the_dtype_are_errors(call, text) -> None:
    with pytest.raises(tc.ArgumentError, match=text):
        call()


def test_large_integers_are_exact() -> None:
    # No float of 64 bits has this value.
    odd = 2**62 + 1
    assert tc.full((2,), odd).tolist() == [odd, odd]
    assert (tc.tensor([0]) + odd).item() == odd


def test_an_integer_tensor_is_not_filled_with_a_fraction() -> None:
    with pytest.raises(tc.DTypeError, match=r"full: i64 cannot hold 1\.5, which is a float"):
        tc.full((2,), 1.5, dtype="i64")


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf")])
def test_eps_of_a_norm_is_checked(eps) -> None:
    functional, x = tc.nn.functional, tc.ones(2, 4)
    for norm in (
        lambda: functional.layer_norm(x, 4, eps=eps),
        lambda: functional.add_layer_norm(x, x, 4, eps=eps),
        lambda: functional.modulated_layer_norm(x, x, x, eps=eps),
        lambda: functional.rms_norm(x, 4, eps=eps),
        lambda: functional.group_norm(x, 2, eps=eps),
        # The arguments after `x` are the weight, the cosines and the sines.
        lambda: functional.rms_norm_rope(x, None, tc.ones(2, 2), tc.ones(2, 2), eps=eps),
    ):
        with pytest.raises(tc.ArgumentError, match=r"_norm(_rope)?: eps is .*expected a number"):
            norm()


def test_scales_of_nan_and_integer_losses_are_errors() -> None:
    x, nan = tc.ones(4, 4), float("nan")
    with pytest.raises(tc.ArgumentError, match="scaled_dot_product_attention: the scale is NaN"):
        tc.nn.functional.scaled_dot_product_attention(x, x, x, scale=nan)
    grad_output, down, up = x, tc.ones(2, 4), tc.ones(4, 2)
    with pytest.raises(tc.ArgumentError, match="lora_backward: the scale is NaN"):
        tc.lora_backward(grad_output, x, down, up, nan)
    with pytest.raises(tc.DTypeError, match="GradScaler: the loss is i64"):
        tc.optim.GradScaler().scale(tc.tensor(1))


def test_an_empty_tensor_of_any_shape_has_a_repr() -> None:
    assert repr(tc.zeros(0, 2**31, 2**31)) == (
        "tensor([], shape=[0, 2147483648, 2147483648], dtype=f32)"
    )


def test_a_layer_may_have_no_output_features() -> None:
    base_weight, rank, alpha = tc.zeros(0, 4), 2, 1
    layer = tc.nn.LoRALinear(base_weight, rank, alpha)
    assert layer(tc.zeros(3, 4)).shape == (3, 0)


def test_a_tensor_with_the_reserved_name_of_metadata_is_not_saved(tmp_path) -> None:
    with pytest.raises(tc.ArgumentError, match="__metadata__"):
        tc.save_file({"__metadata__": tc.zeros(1)}, tmp_path / "t.safetensors")
    assert list(tmp_path.iterdir()) == []
