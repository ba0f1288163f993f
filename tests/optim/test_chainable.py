"""Test schedulers with torch's names against formulas, and against torch where it is installed."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle.errors import ArgumentError
from trainable_candle.optim import lr_scheduler as ours

LR = (0.1, 0.02)
"""The initial learning rates of the two parameter groups."""


def optimizer() -> Any:
    """Return an optimizer with one parameter group for each rate in `LR`."""
    groups = [{"params": [tc.Var(tc.zeros(1))], "lr": lr} for lr in LR]
    return tc.optim.SGD(groups, lr=1.0)


def rates(scheduler: Any, steps: int = 30) -> list[list[float]]:
    """Return the groups' learning rates before the first step and after each of `steps` steps."""
    seen = [[group["lr"] for group in scheduler.optimizer.param_groups]]
    for _ in range(steps):
        scheduler.step()
        seen.append([group["lr"] for group in scheduler.optimizer.param_groups])
    return seen


# Each case makes a scheduler. `s` is a module of schedulers, ours or torch's; `o` is an optimizer;
# `e` is an epoch, the number of steps of the scheduler so far. The numbers are torch's positional
# parameters, such as factors, numbers of epochs and milestones; their values are arbitrary.


def chained(s: Any, o: Any) -> Any:
    return s.ChainedScheduler([s.LinearLR(o, 0.2, 1.0, 7), s.ExponentialLR(o, 0.9)])


def sequential(s: Any, o: Any) -> Any:
    parts = [s.LinearLR(o, 0.1, 1.0, 5), s.CosineAnnealingLR(o, 10, 0.001), s.StepLR(o, 3)]
    return s.SequentialLR(o, parts, [5, 15])


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "lambda": lambda s, o: s.LambdaLR(o, lambda e: min(1.0, e / 10)),
    "lambdas": lambda s, o: s.LambdaLR(o, [lambda e: 0.9**e, lambda e: 1 / (1 + e)]),
    "multiplicative": lambda s, o: s.MultiplicativeLR(o, lambda e: 0.95 if e % 2 else 1.01),
    "step": lambda s, o: s.StepLR(o, 4, 0.5),
    "multi_step": lambda s, o: s.MultiStepLR(o, [3, 7, 7, 20], 0.3),
    "exponential": lambda s, o: s.ExponentialLR(o, 0.9),
    "constant": lambda s, o: s.ConstantLR(o, 0.25, 6),
    "linear": lambda s, o: s.LinearLR(o, 0.1, 0.8, 12),
    "polynomial": lambda s, o: s.PolynomialLR(o, 12, 2.0),
    "cosine": lambda s, o: s.CosineAnnealingLR(o, 8, 0.001),
    "restarts": lambda s, o: s.CosineAnnealingWarmRestarts(o, 4, 2, 0.001),
    "even_restarts": lambda s, o: s.CosineAnnealingWarmRestarts(o, 4),
    "one_cycle": lambda s, o: s.OneCycleLR(o, 0.3, 40),
    "straight_cycle": lambda s, o: s.OneCycleLR(o, 0.3, 40, anneal_strategy="linear"),
    "chained": chained,
    "sequential": sequential,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_learning_rates_equal_those_of_torch(case: str) -> None:
    torch = pytest.importorskip("torch")
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in LR]
    # torch's OneCycleLR also changes the momentum, ours does not. Only the rates are compared.
    theirs = CASES[case](torch.optim.lr_scheduler, torch.optim.SGD(groups, lr=1.0, momentum=0.9))
    found = rates(CASES[case](ours, optimizer()))
    for lrs, expected in zip(found, rates(theirs), strict=True):
        assert lrs == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.filterwarnings("ignore")
def test_learning_rates_on_plateaus_equal_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    losses = [1.0, 0.9, 0.91, 0.9, 0.89999, 0.95, 0.7, 0.71, 0.72, 0.73, 0.74, 0.6] * 3
    for mode in ("min", "max"):
        for threshold_mode in ("rel", "abs"):
            parameter = torch.nn.Parameter(torch.zeros(1))
            torch_optimizer = torch.optim.SGD([parameter], lr=LR[0])
            settings = {"factor": 0.5, "patience": 1, "cooldown": 1, "min_lr": 1e-3}
            settings |= {"mode": mode, "threshold_mode": threshold_mode}
            found = ours.ReduceLROnPlateau(optimizer(), **settings)
            theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(torch_optimizer, **settings)
            for loss in losses:
                found.step(loss)
                theirs.step(loss)
                # torch's optimizer has only the first of our groups.
                expected = torch_optimizer.param_groups[0]["lr"]
                assert found.get_last_lr()[0] == pytest.approx(expected)


def test_learning_rates_equal_the_formulas() -> None:
    cosine = rates(ours.CosineAnnealingLR(optimizer(), 8), 20)
    for epoch, (lr, _) in enumerate(cosine):
        expected = LR[0] * (1 + math.cos(math.pi * epoch / 8)) / 2
        assert lr == pytest.approx(expected, abs=1e-12)
    warm = rates(ours.LinearLR(optimizer(), 0.5, 1.0, 4), 6)
    assert [lr for lr, _ in warm] == pytest.approx([0.05, 0.0625, 0.075, 0.0875, 0.1, 0.1, 0.1])
    halved = rates(ours.LambdaLR(optimizer(), lambda epoch: 0.5**epoch), 3)
    assert [lr for _, lr in halved] == pytest.approx([0.02, 0.01, 0.005, 0.0025])


@pytest.mark.parametrize("case", CASES)
def test_a_scheduler_continues_from_a_loaded_state(case: str) -> None:
    o = optimizer()
    scheduler = CASES[case](ours, o)
    rates(scheduler, 6)
    state, optimizer_state = scheduler.state_dict(), o.state_dict()
    expected = rates(scheduler, 12)
    other = optimizer()
    resumed = CASES[case](ours, other)
    other.load_state_dict(optimizer_state)
    resumed.load_state_dict(state)
    assert rates(resumed, 12) == expected


def test_a_parameter_group_accepts_a_rate_and_new_entries_but_no_other_momentum() -> None:
    o = optimizer()
    for group in o.param_groups:
        group["lr"] *= 0.5
    assert o.group_lrs == pytest.approx([0.05, 0.01])
    assert [len(group["params"]) for group in o.param_groups] == [1, 1]
    o.param_groups[0]["name"] = "first"
    assert o.param_groups[0]["name"] == "first"
    assert "name" not in o.param_groups[1]
    with pytest.raises(ArgumentError, match="momentum is fixed, only lr can be set"):
        o.param_groups[0]["momentum"] = 0.5


def test_wrong_arguments_are_reported() -> None:
    with pytest.raises(TypeError, match=r"optimizer is int, expected an optimizer of tc\.optim"):
        ours.StepLR(3, 2)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="step_size is 0, expected at least 1"):
        ours.StepLR(optimizer(), 0)
    with pytest.raises(ArgumentError, match="one for each of 2 groups"):
        ours.LambdaLR(optimizer(), [lambda epoch: epoch])
    with pytest.raises(ArgumentError, match="was made for another optimizer"):
        ours.ChainedScheduler([ours.StepLR(optimizer(), 1)], optimizer())
    with pytest.raises(TypeError, match="fused is 3, expected True, False or None"):
        tc.optim.SGD([tc.Var(tc.zeros(1))], lr=0.1, fused=3)  # type: ignore[call-arg]


class WithLastEpoch:
    """A stand-in for a module of schedulers: it calls the module's classes with `last_epoch=9`."""

    def __init__(self, schedulers: Any) -> None:
        self._schedulers = schedulers

    def __getattr__(self, name: str) -> Any:
        return partial(getattr(self._schedulers, name), last_epoch=9)


@pytest.mark.parametrize("case", [name for name in CASES if name not in {"chained", "sequential"}])
@pytest.mark.filterwarnings("ignore")
def test_a_scheduler_continues_from_last_epoch_if_groups_have_initial_rates(case: str) -> None:
    o = optimizer()
    uninterrupted = CASES[case](ours, o)  # puts "initial_lr" into the groups of `o`
    # A new scheduler with `last_epoch=9` is at epoch 10, and expects that the optimizer has the
    # rates of this epoch already.
    rates(uninterrupted, 10)
    lrs = o.group_lrs
    expected = rates(uninterrupted, 11)
    o.group_lrs = lrs
    assert rates(CASES[case](WithLastEpoch(ours), o), 11) == expected
    with pytest.raises(ArgumentError, match='last_epoch is 9, expected an "initial_lr" in all'):
        CASES[case](WithLastEpoch(ours), optimizer())
    torch = pytest.importorskip("torch")
    if "cycle" in case or case == "restarts":
        # torch's OneCycleLR needs more entries in the groups, and its warm restarts of growing
        # periods count cycles differently.
        return
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr, "initial_lr": initial}
        for lr, initial in zip(lrs, LR, strict=True)
    ]
    theirs = rates(
        CASES[case](WithLastEpoch(torch.optim.lr_scheduler), torch.optim.SGD(groups)), 11
    )
    for found, of_torch in zip(expected, theirs, strict=True):
        assert found == pytest.approx(of_torch, rel=1e-9, abs=1e-15)


def test_one_cycle_accepts_epochs_and_steps_per_epoch() -> None:
    expected = rates(ours.OneCycleLR(optimizer(), 0.3, 40))
    assert rates(ours.OneCycleLR(optimizer(), 0.3, epochs=4, steps_per_epoch=10)) == expected
    with pytest.raises(ArgumentError, match="expected total_steps, or epochs and steps_per_epoch"):
        ours.OneCycleLR(optimizer(), 0.3, epochs=4)


def test_a_cycle_whose_rise_ends_at_its_first_step_starts_with_the_highest_rate() -> None:
    # The rise ends at step 0.1 * 10 - 1 = 0.
    assert rates(ours.OneCycleLR(optimizer(), 0.3, 10, pct_start=0.1), 0) == [[0.3, 0.3]]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: ours.StepLR(o, 2, gamma="x"),
        lambda o: ours.MultiStepLR(o, [2], gamma="x"),
        lambda o: ours.ExponentialLR(o, "x"),
        lambda o: ours.ConstantLR(o, "x"),
        lambda o: ours.PolynomialLR(o, 3, "x"),
        lambda o: ours.CosineAnnealingLR(o, 3, "x"),
        lambda o: ours.CosineAnnealingWarmRestarts(o, 3, 1, "x"),
    ],
    ids=[
        "StepLR",
        "MultiStepLR",
        "ExponentialLR",
        "ConstantLR",
        "PolynomialLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
    ],
)
def test_arguments_that_are_no_numbers_are_errors(make: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"(LR|Restarts): \w+ is 'x', expected a number"):
        make(optimizer())


def test_a_chain_restarts_its_schedulers_at_a_milestone() -> None:
    def chain(o: Any) -> Any:
        return ours.ChainedScheduler([ours.LinearLR(o, 0.25, 1.0, 4), ours.ExponentialLR(o, 0.9)])

    alone = rates(chain(optimizer()), 5)
    o = optimizer()
    joined = rates(ours.SequentialLR(o, [ours.ConstantLR(o, 0.5, 9), chain(o)], [3]), 8)
    for found, expected in zip(joined[3:], alone, strict=True):
        assert found == pytest.approx(expected)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    o = optimizer()
    chain = ours.ChainedScheduler([ours.StepLR(o, 2), ours.ExponentialLR(o, 0.9)])
    initial = chain.state_dict()
    chain.step()
    state = chain.state_dict()
    other = ours.ChainedScheduler([ours.StepLR(o, 2), ours.ExponentialLR(o, 0.9)])
    unfit = [
        {name: value for name, value in state.items() if name != "last_epoch"},
        # The state of the second scheduler is incomplete.
        state | {"schedulers": [state["schedulers"][0], {"last_epoch": 3}]},
    ]
    for wrong in unfit:
        with pytest.raises(ArgumentError, match="the state has"):
            other.load_state_dict(wrong)
        assert other.state_dict() == initial
    plateau = ours.ReduceLROnPlateau(o)
    initial = plateau.state_dict()
    with pytest.raises(ArgumentError, match="ReduceLROnPlateau: the state lacks last_epoch; give"):
        plateau.load_state_dict({"best": 1.0, "num_bad_epochs": 2, "cooldown_counter": 3})
    assert plateau.state_dict() == initial


@pytest.mark.parametrize("name", ["div_factor", "final_div_factor"])
def test_the_divisors_of_one_cycle_must_be_positive(name: str) -> None:
    for value in (0, -1.0, math.nan):
        with pytest.raises(ArgumentError, match=r"OneCycleLR: found div_factor .* both above 0"):
            ours.OneCycleLR(optimizer(), 0.3, 10, **{name: value})
