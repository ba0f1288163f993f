"""Test optimizers, their states and groups, gradient clipping, loss scaling and schedules."""

from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import optim
from trainable_candle.testing import assert_close

BASIC_KINDS = [
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adam8bit,
    optim.AdamW8bit,
    optim.Lion,
    optim.Lion8bit,
]
ALL_KINDS = list(optim.KINDS.values())
GOLDEN = Path(__file__).parents[1] / "golden" / "optim"


def compute_gradient(x, target):
    """Set `x.grad` to the gradient of the squared distance of `x` from `target`."""
    x.zero_grad()
    ((x - target) ** 2).sum().backward()


@pytest.mark.parametrize("kind", BASIC_KINDS)
def test_a_basic_optimizer_finds_the_minimum_of_a_quadratic(kind):
    rng = np.random.default_rng(0)
    target = tc.tensor(rng.uniform(-1, 1, 5000).astype(np.float32))
    x = tc.Var(tc.zeros(5000))
    opt = kind([x], lr=0.01)
    for _ in range(300):
        compute_gradient(x, target)
        opt.step()
    assert (x.detach() - target).abs().max().item() < 0.1


def test_sgd_with_momentum_equals_its_formula():
    rng = np.random.default_rng(1)
    start, gradients = rng.standard_normal(7), rng.standard_normal((5, 7))
    x = tc.Var(start)
    opt = optim.SGD([x], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    p, buffer = start.copy(), None
    for g in gradients:
        x.grad = tc.tensor(g)
        opt.step()
        penalised = g + 0.01 * p
        buffer = penalised if buffer is None else 0.9 * buffer + penalised
        p = p - 0.1 * (penalised + 0.9 * buffer)
    assert_close(x.detach(), p)


@pytest.mark.parametrize("decoupled", [False, True], ids=["Adam", "AdamW"])
def test_adam_equals_its_formula(decoupled):
    rng = np.random.default_rng(2)
    start, gradients = rng.standard_normal(7), rng.standard_normal((5, 7))
    x = tc.Var(start)
    kind = optim.AdamW if decoupled else optim.Adam
    opt = kind([x], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    p, m, v = start.copy(), 0.0, 0.0
    for t, gradient in enumerate(gradients, 1):
        x.grad = tc.tensor(gradient)
        opt.step()
        g = gradient if decoupled else gradient + 0.1 * p
        if decoupled:
            p = p * (1 - 0.1 * 0.1)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        p = p - 0.1 * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-6)
    assert_close(x.detach(), p)


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("adafactor", (37, 29), {}),
        (
            "adafactor_options",
            (37, 29),
            {
                "lr": 0.4,
                "beta2_decay": -0.5,
                "eps": (1e-6, 1.2),
                "d": 1.01,
                "weight_decay": 0.1,
                "maximize": True,
            },
        ),
        ("adafactor_vector", (1073,), {}),
        ("adafactor_matrices", (2, 16, 30), {}),
    ],
)
def test_adafactor_follows_torch(name, shape, options):
    golden = tc.load_file(GOLDEN / "torch.safetensors")
    size = int(np.prod(shape))

    # `p0` is the initial parameter, and `grad.I` the gradient of step I of 8, all (37, 29).
    def part(key):
        """Return the first elements of a golden tensor, in the shape of the case."""
        return golden[key].flatten()[:size].reshape(shape).to("f64")

    x = tc.Var(part("p0"))
    opt = optim.Adafactor([x], **options)
    for i in range(8):
        x.grad = part(f"grad.{i}")
        opt.step()
    assert_close(x.detach(), golden[f"{name}.f64.p"].numpy().reshape(shape))


def test_default_learning_rates_are_1e_3_and_for_lion_1e_4():
    x = tc.Var([1.0])
    assert [kind([x]).lr for kind in BASIC_KINDS] == [1e-3] * 5 + [1e-4] * 2


def test_the_default_weight_decay_of_adamw_is_that_of_torch():
    x = tc.Var([1.0])
    x.grad = tc.zeros(1)
    optim.AdamW([x], lr=1.0).step()
    # The default, 0.01, shrinks 1 to 1 - 1.0 * 0.01; the zero gradient adds nothing.
    assert x.item() == pytest.approx(0.99)


def test_a_step_changes_only_variables_with_a_gradient_and_keeps_the_gradient():
    x, y = tc.Var([1.0]), tc.Var([1.0])
    opt = optim.SGD([x, y], lr=1.0)
    x.grad = tc.ones(1)
    opt.step()
    assert (x.item(), y.item()) == (0, 1)
    assert x.grad.tolist() == [1]


def test_zero_grad_removes_gradients():
    x = tc.Var([1.0])
    opt = optim.SGD([x], lr=1.0)
    x.grad = tc.ones(1)
    opt.zero_grad()
    assert x.grad is None


def test_each_group_has_its_own_learning_rate():
    x, y = tc.Var([1.0]), tc.Var([1.0])
    opt = optim.SGD([{"params": [x]}, {"params": [y], "lr": 0.5}], lr=0.25)
    x.grad = y.grad = tc.ones(1)
    opt.step()
    assert (x.item(), y.item()) == (0.75, 0.5)
    assert opt.lr == 0.25
    assert opt.group_lrs == [0.25, 0.5]
    opt.group_lrs = [1.0, 2.0]
    assert opt.group_lrs == [1, 2]
    opt.lr = 3
    assert opt.group_lrs == [3, 3]
    with pytest.raises(
        tc.ArgumentError, match="SGD: found 1 learning rates, expected one for each of 2 groups"
    ):
        opt.group_lrs = [1.0]
    with pytest.raises(tc.ArgumentError, match="SGD: found lr -1"):
        opt.lr = -1
    assert opt.group_lrs == [3, 3]


def test_parameters_may_be_a_list_an_iterator_a_dict_or_a_tuple():
    layer = tc.nn.Linear.init(3, 2)
    # The layer has 3 * 2 weights and 2 biases, so 8 numbers.
    for params in (
        layer.parameters(),
        iter(layer.parameters()),
        layer.named_parameters(),
        tuple(layer.parameters()),
    ):
        assert repr(optim.Adam(params, lr=0.1)) == "Adam(8 parameters, lr=0.1)"


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_an_optimizer_continues_from_a_loaded_state(kind, dtype):
    rng = np.random.default_rng(3)
    # States of fewer than 4096 values would not be 8-bit.
    start = tc.tensor(rng.standard_normal(5000), dtype=dtype)
    gradients = [tc.tensor(rng.standard_normal(5000), dtype=dtype) for _ in range(6)]
    x = tc.Var(start)
    opt = kind([x], lr=0.01)
    for g in gradients[:3]:
        x.grad = g
        opt.step()
    state = opt.state_dict()
    state_before = {name: t.to("f64").tolist() for name, t in state.items()}
    y = tc.Var(x)
    other = kind([y], lr=1.0)
    other.load_state_dict(state)
    assert other.lr == 0.01  # the saved one, not 1.0
    for g in gradients[3:]:
        for var, optimizer in ((x, opt), (y, other)):
            var.grad = g
            optimizer.step()
    np.testing.assert_array_equal(x.to("f32").detach().numpy(), y.to("f32").detach().numpy())
    assert {name: t.to("f64").tolist() for name, t in state.items()} == state_before
    assert opt.state_bytes == other.state_bytes


def test_8bit_states_are_small():
    x = tc.Var(tc.zeros(1 << 16))
    x.grad = tc.ones(1 << 16)
    bytes_per_value = {}
    for kind in BASIC_KINDS:
        opt = kind([x], lr=1e-3)
        opt.step()
        bytes_per_value[kind.__name__] = opt.state_bytes / x.numel()
    # Adam has two states for each value, Lion one: 4 bytes in f32, 1 byte and a share of a scale
    # in 8 bits.
    assert bytes_per_value["Adam"] == bytes_per_value["AdamW"] == 8
    assert bytes_per_value["Adam8bit"] == bytes_per_value["AdamW8bit"] < 2.1
    assert bytes_per_value["Lion8bit"] < 1.1


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda _: optim.Adam([]), tc.ArgumentError, "Adam: parameter group 0 is empty"),
        (optim.Adam, tc.ArgumentError, "found one tensor, expected a list of Vars"),
        (
            lambda x: optim.Adam([x, tc.ones(1)]),
            tc.ArgumentError,
            "Adam: item 1 is Tensor, expected a Var",
        ),
        (
            lambda x: optim.Adam([x, x]),
            tc.ArgumentError,
            r"Adam: a Var of shape \[1\] in group 0 appears twice",
        ),
        (lambda x: optim.Adam([x], lr=-1), tc.ArgumentError, "Adam: found lr -1"),
        (lambda x: optim.Adam([x], betas=(1.0, 0.9)), tc.ArgumentError, "Adam: found betas"),
        (lambda x: optim.SGD([x], nesterov=True), tc.ArgumentError, "SGD: nesterov needs momentum"),
        (
            lambda _: optim.SGD([{"lr": 1.0}]),
            tc.ArgumentError,
            'SGD: a parameter group has no entry "params"',
        ),
        (
            lambda x: optim.SGD([{"params": [x], "beta": 1}]),
            tc.ArgumentError,
            'SGD: unknown entry "beta" in a parameter group; expected params, lr, momentum',
        ),
        (lambda _: optim.AdamW8bit([tc.Var([1.0], dtype="f64")]), tc.DTypeError, "AdamW8bit"),
        (
            lambda x: optim.Adam([x]).load_state_dict({"nonsense": tc.ones(1)}),
            tc.ConfigError,
            'the entry "kind" is missing',
        ),
        (
            lambda x: optim.Adam([x]).load_state_dict(optim.SGD([x]).state_dict()),
            tc.ConfigError,
            "load_state_dict: Adam: the states were saved by SGD",
        ),
        (
            lambda x: optim.SGD([{"params": [x], "lr": "x"}]),
            TypeError,
            "SGD: lr of a parameter group is 'x', expected a number",
        ),
        (
            lambda x: optim.Adam8bit([{"params": [x], "min_8bit_size": -1}]),
            tc.ArgumentError,
            "Adam8bit: min_8bit_size of a parameter group is -1",
        ),
        (lambda x: optim.Adafactor([x], d=0.5), tc.ArgumentError, "Adafactor: found d 0.5"),
    ],
)
def test_wrong_arguments_are_errors(call, error, text):
    with pytest.raises(error, match=text):
        call(tc.Var([1.0]))


def test_clipping_limits_the_norm_of_gradients():
    x, y, z = tc.Var(tc.ones(2)), tc.Var(tc.ones(1)), tc.Var(tc.ones(1))
    x.grad, y.grad = tc.tensor([3.0, 0.0]), tc.tensor([4.0])
    # `z` has no gradient. The norm of (3, 0, 4) is 5, below the limit of 10.
    assert optim.clip_grad_norm_([x, y, z], 10.0).item() == pytest.approx(5)
    assert x.grad.tolist() == [3, 0]
    # The infinity norm is the largest absolute value, 4. Clipping divides all gradients by 4.
    assert optim.clip_grad_norm_([x, y, z], 1.0, norm_type=float("inf")).item() == pytest.approx(4)
    assert_close(y.grad, [1.0])


def test_clipping_reports_a_norm_of_nan_and_wrong_arguments():
    x = tc.Var(tc.ones(2))
    x.grad = tc.tensor([float("nan"), 0.0])
    with pytest.raises(
        tc.NonFiniteError, match="clip_grad_norm_: the norm of the gradients is NaN"
    ):
        optim.clip_grad_norm_([x], 1.0, error_if_nonfinite=True)
    assert np.isnan(optim.clip_grad_norm_([x], float("inf")).item())
    with pytest.raises(tc.ArgumentError, match="clip_grad_norm_: found max_norm -1"):
        optim.clip_grad_norm_([x], -1)
    with pytest.raises(tc.ArgumentError, match="found norm_type 3, expected 2 or infinity"):
        optim.clip_grad_norm_([x], 1, 3)


def test_a_non_finite_norm_skips_the_step():
    x = tc.Var([1.0])
    opt = optim.Adam([x], lr=0.1)
    for gradient, steps_taken in ((1.0, 1), (float("nan"), 1), (float("inf"), 1), (1.0, 2)):
        x.grad = tc.tensor([gradient])
        before = x.item()
        opt.step(if_finite=optim.clip_grad_norm_([x], 1.0))
        assert (x.item() != before) == np.isfinite(gradient)
        assert opt.state_dict()["step"].tolist() == [steps_taken]
    with pytest.raises(tc.ShapeError, match=r"step: found a norm of shape \[2\]"):
        opt.step(if_finite=tc.ones(2))


def test_the_loss_scaler_skips_non_finite_steps_and_adapts_its_scale():
    x = tc.Var([1.0])
    opt = optim.SGD([x], lr=1.0)
    scaler = optim.GradScaler(init_scale=8.0, growth_interval=2)
    # The scale doubles after `growth_interval` (2) steps with finite gradients. A step with
    # non-finite gradients halves it.
    for expected_scale, expected_x in ((8, 0.5), (16, 0)):
        opt.zero_grad()
        scaler.scale((x * 0.5).sum()).backward()
        scaler.unscale_(opt)
        assert x.grad.tolist() == [0.5]
        assert scaler.step(opt)
        scaler.update()
        assert scaler.get_scale() == expected_scale
        assert x.item() == expected_x
    x.grad = tc.tensor([float("inf")])
    assert not scaler.step(opt)
    scaler.update()
    assert (x.item(), scaler.get_scale()) == (0, 8)
    state = scaler.state_dict()
    other = optim.GradScaler()
    other.load_state_dict(state)
    assert other.state_dict() == state == {"scale": 8, "growth_tracker": 0}


def test_the_loss_scaler_reports_calls_out_of_order_and_wrong_values():
    x = tc.Var([1.0])
    opt = optim.SGD([x], lr=1.0)
    x.grad = tc.ones(1)
    scaler = optim.GradScaler(init_scale=8.0)
    state = scaler.state_dict()
    with pytest.raises(tc.ArgumentError, match=r"GradScaler: update\(\) needs unscaled gradients"):
        scaler.update()
    scaler.unscale_(opt)
    with pytest.raises(tc.ArgumentError, match=r"GradScaler: the gradients were already unscaled"):
        scaler.unscale_(opt)
    with pytest.raises(tc.ConfigError, match='GradScaler: the state has no entry "growth_tracker"'):
        scaler.load_state_dict({"scale": 1.0})
    for tracker in (-3.5, -1, 0.5, float("nan"), float("inf")):
        with pytest.raises(tc.ArgumentError, match="GradScaler: found growth_tracker "):
            scaler.load_state_dict({"scale": 1.0, "growth_tracker": tracker})
    assert scaler.state_dict() == state
    with pytest.raises(tc.ArgumentError, match="GradScaler: found backoff_factor 2"):
        optim.GradScaler(backoff_factor=2.0)


# The options of each schedule of 100 steps, and the factor of the learning rate at step s. The
# formula of the factor holds from step 10 to step 100; before it, the factor rises linearly from 0
# (the warm-up). For the polynomial, `lr_end` is the final learning rate of the first group, whose
# initial one is 1.
SCHEDULES = {
    "constant": ({}, lambda _: 1.0),
    "linear": ({}, lambda s: (100 - s) / 90),
    "cosine": ({}, lambda s: 0.5 * (1 + np.cos(np.pi * (s - 10) / 90))),
    "polynomial": (
        {"lr_end": 0.1, "power": 2.0},
        lambda s: 0.9 * (1 - (s - 10) / 90) ** 2 + 0.1,
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_give_their_learning_rates(name):
    options, factor = SCHEDULES[name]
    opt = optim.SGD([{"params": [tc.Var([1.0])]}, {"params": [tc.Var([1.0])], "lr": 2.0}], lr=1.0)
    scheduler = getattr(optim.lr_scheduler, name)(opt, total_steps=100, warmup_steps=10, **options)
    found = []
    for _ in range(101):
        found.append(opt.group_lrs)
        scheduler.step()
    expected = [s / 10 if s < 10 else factor(s) for s in range(101)]
    # The initial learning rates of the two groups are 1 and 2.
    np.testing.assert_allclose(found, [[f, 2 * f] for f in expected], atol=1e-12)
    scheduler.set_step(5)  # half of the warm-up
    assert opt.lr == 0.5
    assert scheduler.last_step == 5
    assert scheduler.base_lrs == [1, 2]


def test_wrong_arguments_of_schedules_are_errors():
    opt = optim.SGD([tc.Var([1.0])], lr=0.1)
    # The final learning rate must be less than the initial one.
    with pytest.raises(tc.ArgumentError, match="lr_scheduler: found lr_end 1"):
        optim.lr_scheduler.polynomial(opt, total_steps=10, lr_end=1.0)
    with pytest.raises(tc.ArgumentError, match="lr_scheduler: found power 0"):
        optim.lr_scheduler.polynomial(opt, total_steps=10, power=0.0)
    with pytest.raises(tc.ArgumentError, match="lr_scheduler: found -1 cosine cycles"):
        optim.lr_scheduler.cosine(opt, total_steps=10, num_cycles=-1.0)
    with pytest.raises(tc.ArgumentError, match="lr_scheduler: step is -1"):
        optim.lr_scheduler.constant(opt).set_step(-1)
    assert opt.lr == 0.1


def test_the_error_for_a_module_says_to_pass_its_parameters() -> None:
    with pytest.raises(TypeError, match=r"AdamW: params is a Linear, .*pass its parameters\(\)"):
        tc.optim.AdamW(tc.nn.Linear(2, 2))


def test_variables_may_be_the_values_of_any_mapping() -> None:
    variables = {"a": tc.Var(tc.ones((2,))), "b": tc.Var(tc.ones((3,)))}
    found = repr(optim.SGD(MappingProxyType(variables), lr=0.1))
    assert found == repr(optim.SGD(variables, lr=0.1))
    assert "(5 parameters" in found
