from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat, SupportsIndex

from trainable_candle import Var
from trainable_candle.optim.groups import GroupedOptimizer

__all__ = [
    "AdamW8bit",
    "Adam8bit",
    "AdamW",
    "Adam",
    "Lion8bit",
    "Lion",
    "Adafactor",
    "CAME",
    "Prodigy",
    "AdamWScheduleFree",
    "Muon",
    "SGD",
]

class AdamW8bit(GroupedOptimizer):
    """
    AdamW with 8-bit states (Dettmers et al. 2022, arXiv:2110.02861), as bitsandbytes' `AdamW8bit`.

    ```python
    optimizer = tc.optim.AdamW8bit(model.parameters(), lr=1e-3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ```

    Args:
        params: variables, or parameter groups: dicts with an entry "params" and hyper-parameters of the group.
        lr: Learning rate, at least 0.
        betas: Decay rates of the first and the second moment, each in [0, 1).
        eps: Added to the root of the second moment, at least 0.
        weight_decay: At least 0: each step multiplies the parameters by `1 - lr * weight_decay`.
        min_8bit_size: Parameters with fewer elements than this number keep their moments unquantized.
        stochastic_rounding: keep bf16 variables and their states in bf16, without f32 master values. Steps compute in f32 and round stochastically, with random bits from the seed of `manual_seed`, the step and the element. Variables of other dtypes are not affected.
        states: where the states of variables on a GPU are: "device" for the memory of the GPU, "host" for pinned memory of the host. "host" saves memory of the GPU, but each step reads and writes the states over the bus. Results do not depend on `states`. f32 master values stay on the GPU. The states of variables on the CPU are always in the memory of the host.

    Raises:
        ArgumentError: if a value is out of range or unknown, if there is no variable, or if a variable appears twice.
        DTypeError: if a variable's dtype is not supported.
        DeviceError: if the variables are on different devices.
        OutOfMemoryError: if the system gives too little pinned memory for the states.
    """
    def __new__(
        cls,
        /,
        params: Iterable[Var] | Mapping[str, Var] | Iterable[Mapping[str, Any]],
        lr: SupportsFloat | SupportsIndex = 0.001,
        betas: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex] = (0.9, 0.999),
        eps: SupportsFloat | SupportsIndex = 1e-08,
        weight_decay: SupportsFloat | SupportsIndex = 0.01,
        *,
        min_8bit_size: int = 4096,
        stochastic_rounding: bool = False,
        states: str = "device",
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> AdamW8bit: ...

class Adam8bit(GroupedOptimizer):
    """
    Adam with 8-bit states (Dettmers et al. 2022, arXiv:2110.02861), as bitsandbytes' `Adam8bit`.

    ```python
    optimizer = tc.optim.Adam8bit(model.parameters(), lr=1e-3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ```

    Args:
        params: variables, or parameter groups: dicts with an entry "params" and hyper-parameters of the group.
        lr: Learning rate, at least 0.
        betas: Decay rates of the first and the second moment, each in [0, 1).
        eps: Added to the root of the second moment, at least 0.
        weight_decay: At least 0: each step multiplies the parameters by `1 - lr * weight_decay`.
        min_8bit_size: Parameters with fewer elements than this number keep their moments unquantized.
        stochastic_rounding: keep bf16 variables and their states in bf16, without f32 master values. Steps compute in f32 and round stochastically, with random bits from the seed of `manual_seed`, the step and the element. Variables of other dtypes are not affected.
        states: where the states of variables on a GPU are: "device" for the memory of the GPU, "host" for pinned memory of the host. "host" saves memory of the GPU, but each step reads and writes the states over the bus. Results do not depend on `states`. f32 master values stay on the GPU. The states of variables on the CPU are always in the memory of the host.

    Raises:
        ArgumentError: if a value is out of range or unknown, if there is no variable, or if a variable appears twice.
        DTypeError: if a variable's dtype is not supported.
        DeviceError: if the variables are on different devices.
        OutOfMemoryError: if the system gives too little pinned memory for the states.
    """
    def __new__(
        cls,
        /,
        params: Iterable[Var] | Mapping[str, Var] | Iterable[Mapping[str, Any]],
        lr: SupportsFloat | SupportsIndex = 0.001,
        betas: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex] = (0.9, 0.999),
        eps: SupportsFloat | SupportsIndex = 1e-08,
        weight_decay: SupportsFloat | SupportsIndex = 0.0,
        *,
        min_8bit_size: int = 4096,
        stochastic_rounding: bool = False,
        states: str = "device",
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> Adam8bit: ...

class AdamW(GroupedOptimizer):
    """
    Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101), as `torch.optim.AdamW`.

    ```python
    optimizer = tc.optim.AdamW(model.parameters(), lr=1e-3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ```

    Args:
        params: variables, or parameter groups: dicts with an entry "params" and hyper-parameters of the group.
        lr: Learning rate, at least 0.
        betas: Decay rates of the first and the second moment, each in [0, 1).
        eps: Added to the root of the second moment, at least 0.
        weight_decay: At least 0. Adam adds `weight_decay * param` to the gradient, an L2 penalty; AdamW leaves the gradient unchanged and multiplies the parameters by `1 - lr * weight_decay` in each step.
        amsgrad: Divide by the root of each element's largest second moment so far, instead of its current second moment.
        maximize: Ascend instead of descend.
        stochastic_rounding: keep bf16 variables and their states in bf16, without f32 master values. Steps compute in f32 and round stochastically, with random bits from the seed of `manual_seed`, the step and the element. Variables of other dtypes are not affected.
        states: where the states of variables on a GPU are: "device" for the memory of the GPU, "host" for pinned memory of the host. "host" saves memory of the GPU, but each step reads and writes the states over the bus. Results do not depend on `states`. f32 master values stay on the GPU. The states of variables on the CPU are always in the memory of the host.

    Raises:
        ArgumentError: if a value is out of range or unknown, if there is no variable, or if a variable appears twice.
        DTypeError: if a variable's dtype is not supported.
        DeviceError: if the variables are on different devices.
        OutOfMemoryError: if the system gives too little pinned memory for the states.
    """
    def __new__(
        cls,
        /,
        params: Iterable[Var] | Mapping[str, Var] | Iterable[Mapping[str, Any]],
        lr: SupportsFloat | SupportsIndex = 0.001,
        betas: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex] = (0.9, 0.999),
        eps: SupportsFloat | SupportsIndex = 1e-08,
        weight_decay: SupportsFloat | SupportsIndex = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        states: str = "device",
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> AdamW: ...

class Adam(GroupedOptimizer):
    """
    Adam (Kingma & Ba 2015, arXiv:1412.6980), as `torch.optim.Adam`.

    ```python
    optimizer = tc.optim.Adam(model.parameters(), lr=1e-3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ```

    Args:
        params: variables, or parameter groups: dicts with an entry "params" and hyper-parameters of the group.
        lr: Learning rate, at least 0.
        betas: Decay rates of the first and the second moment, each in [0, 1).
        eps: Added to the root of the second moment, at least 0.
        weight_decay: At least 0. Adam adds `weight_decay * param` to the gradient, an L2 penalty; AdamW leaves the gradient unchanged and multiplies the parameters by `1 - lr * weight_decay` in each step.
        amsgrad: Divide by the root of each element's largest second moment so far, instead of its current second moment.
        maximize: Ascend instead of descend.
        stochastic_rounding: keep bf16 variables and their states in bf16, without f32 master values. Steps compute in f32 and round stochastically, with random bits from the seed of `manual_seed`, the step and the element. Variables of other dtypes are not affected.
        states: where the states of variables on a GPU are: "device" for the memory of the GPU, "host" for pinned memory of the host. "host" saves memory of the GPU, but each step reads and writes the states over the bus. Results do not depend on `states`. f32 master values stay on the GPU. The states of variables on the CPU are always in the memory of the host.

    Raises:
        ArgumentError: if a value is out of range or unknown, if there is no variable, or if a variable appears twice.
        DTypeError: if a variable's dtype is not supported.
        DeviceError: if the variables are on different devices.
        OutOfMemoryError: if the system gives too little pinned memory for the states.
    """
    def __new__(
        cls,
        /,
        params: Iterable[Var] | Mapping[str, Var] | Iterable[Mapping[str, Any]],
        lr: SupportsFloat | SupportsIndex = 0.001,
        betas: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex] = (0.9, 0.999),
        eps: SupportsFloat | SupportsIndex = 1e-08,
        weight_decay: SupportsFloat | SupportsIndex = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        states: str = "device",
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> Adam: ...

class Lion8bit(GroupedOptimizer):
    """
    Lion with an 8-bit momentum, as bitsandbytes' `Lion8bit`.

    ```python
    optimizer = tc.optim.Lion8bit(model.parameters(), lr=1e-3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ```

    Args:
        params: variables, or parameter groups: dicts with an entry "params" and hyper-parameters of the group.
        lr: Learning rate, at least 0.
        betas: The momentum's weight in the update, and the momentum's decay rate; each in [0, 1).
        weight_decay: At least 0: each step multiplies the parameters by `1 - lr * weight_decay`.
        min_8bit_size: Parameters with fewer elements than this number keep their momentum in f32.
        stochastic_rounding: keep bf16 variables and their states in bf16, without f32 master values. Steps compute in f32 and round stochastically, with random bits from the seed of `manual_seed`, the step and the element. Variables of other dtypes are not affected.
        states: where the states of variables on a GPU are: "device" for the memory of the GPU, "host" for pinned memory of the host. "host" saves memory of the GPU, but each step reads and writes the states over the bus. Results do not depend on `states`. f32 master values stay on the GPU. The states of variables on the CPU are always in the memory of the host.

    Raises:
        ArgumentError: if a value is out of range or unknown, if there is no variable, or if a variable appears twice.
        DTypeError: if a variable's dtype is not supported.
        DeviceError: if the variables are on different devices.
        OutOfMemoryError: if the system gives too little pinned memory for the states.
    """
    def __new__(
        cls,
        /,
        params: Iterable[Var] | Mapping[str, Var] | Iterable[Mapping[str, Any]],
        lr: SupportsFloat | SupportsIndex = 0.0001,
        betas: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex] = (0.9, 0.99),
        weight_decay: SupportsFloat | SupportsIndex = 0.0,
        *,
        min_8bit_size: int = 4096,
        stochastic_rounding: bool = False,
        states: str = "device",
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> Lion8bit: ...

class Lion(GroupedOptimizer):
    """
    Lion (Chen et al. 2023, arXiv:2302.06675): each step moves every parameter by `lr`, against the sign of an interpolation between the momentum and the gradient.

    ```python
    optimizer = tc.optim.Lion(model.parameters(), lr=1e-3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ```

    Args:
        params: variables, or parameter groups: dicts with an entry "params" and hyper-parameters of the group.
        lr: Learning rate, at least 0; usually a third to a tenth of Adam's.
        betas: The momentum's weight in the update, and the momentum's decay rate; each in [0, 1).
        weight_decay: At least 0: each step multiplies the parameters by `1 - lr * weight_decay`.
        stochastic_rounding: keep bf16 variables and their states in bf16, without f32 master values. Steps compute in f32 and round stochastically, with random bits from the seed of `manual_seed`, the step and the element. Variables of other dtypes are not affected.
        states: where the states of variables on a GPU are: "device" for the memory of the GPU, "host" for pinned memory of the host. "host" saves memory of the GPU, but each step reads and writes the states over the bus. Results do not depend on `states`. f32 master values stay on the GPU. The states of variables on the CPU are always in the memory of the host.

    Raises:
        ArgumentError: if a value is out of range or unknown, if there is no variable, or if a variable appears twice.
        DTypeError: if a variable's dtype is not supported.
        DeviceError: if the variables are on different devices.
        OutOfMemoryError: if the system gives too little pinned memory for the states.
    """
    def __new__(
        cls,
        /,
        params: Iterable[Var] | Mapping[str, Var] | Iterable[Mapping[str, Any]],
        lr: SupportsFloat | SupportsIndex = 0.0001,
        betas: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex] = (0.9, 0.99),
        weight_decay: SupportsFloat | SupportsIndex = 0.0,
        *,
        stochastic_rounding: bool = False,
        states: str = "device",
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> Lion: ...

class Adafactor(GroupedOptimizer):
    """
    Adafactor (Shazeer & Stern 2018, arXiv:1804.04235), as `torch.optim.Adafactor`: Adam without a first moment; the second moments of a matrix are estimated from the second moments of its rows and columns.

    ```python
    optimizer = tc.optim.Adafactor(model.parameters(), lr=1e-3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ```

    Args:
        params: variables, or parameter groups: dicts with an entry "params" and hyper-parameters of the group.
        lr: Upper bound of the relative step size; at least 0. The step size of step t is min(lr, 1/√t) times the parameter's root mean square.
        beta2_decay: At most 0: in step t, the squared gradient enters the second moments with weight t^`beta2_decay`.
        eps: Two numbers of at least 0. The square of the first number is the smallest second moment; the first number is by default the machine epsilon of the dtype of the computation. The second number is the smallest root mean square of a parameter in the formula of the step size.
        d: At least 1: the largest root mean square of an update (the gradient divided by the roots of the second moments). A larger update is scaled down to it before the multiplication by the step size.
        weight_decay: At least 0: each step multiplies the parameters by `1 - lr * weight_decay`.
        maximize: Ascend instead of descend.
        stochastic_rounding: keep bf16 variables and their states in bf16, without f32 master values. Steps compute in f32 and round stochastically, with random bits from the seed of `manual_seed`, the step and the element. This optimizer rejects True.
        states: where the states of variables on a GPU are: "device" for the memory of the GPU, "host" for pinned memory of the host. "host" saves memory of the GPU, but each step reads and writes the states over the bus. Results do not depend on `states`. f32 master values stay on the GPU. The states of variables on the CPU are always in the memory of the host.

    Raises:
        ArgumentError: if a value is out of range or unknown, if there is no variable, or if a variable appears twice.
        DTypeError: if a variable's dtype is not supported.
        DeviceError: if the variables are on different devices.
        OutOfMemoryError: if the system gives too little pinned memory for the states.
    """
    def __new__(
        cls,
        /,
        params: Iterable[Var] | Mapping[str, Var] | Iterable[Mapping[str, Any]],
        lr: SupportsFloat | SupportsIndex = 0.01,
        beta2_decay: SupportsFloat | SupportsIndex = -0.8,
        eps: tuple[SupportsFloat | SupportsIndex | None, SupportsFloat | SupportsIndex] = (
            None,
            0.001,
        ),
        d: SupportsFloat | SupportsIndex = 1.0,
        weight_decay: SupportsFloat | SupportsIndex = 0.0,
        *,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        states: str = "device",
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> Adafactor: ...

class CAME(GroupedOptimizer):
    """
    CAME (Luo et al. 2023, arXiv:2307.02047), as `came_pytorch.CAME`: Adafactor with smaller steps where successive updates differ more.

    ```python
    optimizer = tc.optim.CAME(model.parameters(), lr=1e-3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ```

    Args:
        params: variables, or parameter groups: dicts with an entry "params" and hyper-parameters of the group.
        lr: Learning rate, at least 0.
        eps: Two numbers of at least 0: the first is added to squared gradients, the second to the squared differences between the update and the moving average of updates.
        clip_threshold: Above 0: the largest root mean square of an update (the gradient divided by the roots of the second moments). A larger update is scaled down to it.
        betas: Decay rates of three moving averages: updates, squared gradients and squared differences; each in [0, 1).
        weight_decay: At least 0: each step multiplies the parameters by `1 - lr * weight_decay`.
        stochastic_rounding: keep bf16 variables and their states in bf16, without f32 master values. Steps compute in f32 and round stochastically, with random bits from the seed of `manual_seed`, the step and the element. This optimizer rejects True.
        states: where the states of variables on a GPU are: "device" for the memory of the GPU, "host" for pinned memory of the host. "host" saves memory of the GPU, but each step reads and writes the states over the bus. Results do not depend on `states`. f32 master values stay on the GPU. The states of variables on the CPU are always in the memory of the host.

    Raises:
        ArgumentError: if a value is out of range or unknown, if there is no variable, or if a variable appears twice.
        DTypeError: if a variable's dtype is not supported.
        DeviceError: if the variables are on different devices.
        OutOfMemoryError: if the system gives too little pinned memory for the states.
    """
    def __new__(
        cls,
        /,
        params: Iterable[Var] | Mapping[str, Var] | Iterable[Mapping[str, Any]],
        lr: SupportsFloat | SupportsIndex = 0.0002,
        eps: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex] = (1e-30, 1e-16),
        clip_threshold: SupportsFloat | SupportsIndex = 1.0,
        betas: tuple[
            SupportsFloat | SupportsIndex,
            SupportsFloat | SupportsIndex,
            SupportsFloat | SupportsIndex,
        ] = (0.9, 0.999, 0.9999),
        weight_decay: SupportsFloat | SupportsIndex = 0.0,
        *,
        stochastic_rounding: bool = False,
        states: str = "device",
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> CAME: ...

class Prodigy(GroupedOptimizer):
    """
    Prodigy (Mishchenko & Defazio 2023, arXiv:2306.06101), as `prodigyopt.Prodigy`: AdamW that estimates its step size. All groups share one estimate d. Only weight_decay and eps may differ between groups, and a group's lr may be 0. The state dict has `estimate` (4), f64: d, its maximum, its numerator and the number of steps.

    ```python
    optimizer = tc.optim.Prodigy(model.parameters(), lr=1e-3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ```

    Args:
        params: variables, or parameter groups: dicts with an entry "params" and hyper-parameters of the group.
        lr: Factor on the estimated step size, at least 0; 1 unless a schedule changes it. It must be the same in all groups, except that a group may have 0; the variables of such a group do not change.
        betas: Decay rates of the first and the second moment, each in [0, 1); a first rate of 0 keeps no first moment.
        beta3: Decay rate of the sums that give the estimate, in [0, 1); default: the square root of the second beta.
        eps: Above 0: eps times the estimate is added to the root of the second moment.
        weight_decay: At least 0; see `decouple`.
        decouple: Decay weights as AdamW does; otherwise add an L2 penalty to the gradient.
        use_bias_correction: Use Adam's bias correction in the first steps.
        safeguard_warmup: Leave `lr` and bias correction out of the estimate's denominator: a warm-up would make the denominator too small.
        d0: The first estimate, above 0.
        d_coef: Factor on the estimate, above 0; tune the method with it, for example 0.5 or 2.
        growth_rate: At least 1: the largest factor by which the estimate grows in a step; no limit while the estimate is `d0`.
        slice_p: At least 1: the estimate is computed from every `slice_p`-th element; 11 saves almost half of the states' memory.
        stochastic_rounding: keep bf16 variables and their states in bf16, without f32 master values. Steps compute in f32 and round stochastically, with random bits from the seed of `manual_seed`, the step and the element. This optimizer rejects True.
        states: where the states of variables on a GPU are: "device" for the memory of the GPU, "host" for pinned memory of the host. "host" saves memory of the GPU, but each step reads and writes the states over the bus. Results do not depend on `states`. f32 master values stay on the GPU. The states of variables on the CPU are always in the memory of the host.

    Raises:
        ArgumentError: if a value is out of range or unknown, if there is no variable, or if a variable appears twice.
        DTypeError: if a variable's dtype is not supported.
        DeviceError: if the variables are on different devices.
        OutOfMemoryError: if the system gives too little pinned memory for the states.
    """
    def __new__(
        cls,
        /,
        params: Iterable[Var] | Mapping[str, Var] | Iterable[Mapping[str, Any]],
        lr: SupportsFloat | SupportsIndex = 1.0,
        betas: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex] = (0.9, 0.999),
        beta3: SupportsFloat | SupportsIndex | None = None,
        eps: SupportsFloat | SupportsIndex = 1e-08,
        weight_decay: SupportsFloat | SupportsIndex = 0.0,
        decouple: bool = True,
        use_bias_correction: bool = False,
        safeguard_warmup: bool = False,
        d0: SupportsFloat | SupportsIndex = 1e-06,
        d_coef: SupportsFloat | SupportsIndex = 1.0,
        growth_rate: SupportsFloat | SupportsIndex = ...,
        *,
        slice_p: int = 1,
        stochastic_rounding: bool = False,
        states: str = "device",
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> Prodigy: ...

class AdamWScheduleFree(GroupedOptimizer):
    """
    Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682), as `schedulefree.AdamWScheduleFree`. Call `eval()` before validating or saving, to replace the parameters by the average of the iterates, and `train()` before the next step.

    ```python
    optimizer = tc.optim.AdamWScheduleFree(model.parameters(), lr=1e-3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ```

    Args:
        params: variables, or parameter groups: dicts with an entry "params" and hyper-parameters of the group.
        lr: Learning rate, at least 0; do not combine this optimizer with a learning-rate schedule.
        betas: Two numbers below 1. The first, above 0, is the weight of the average in the point at which gradients are computed: `betas[0] * average + (1 - betas[0]) * iterate`. The second, at least 0, is the decay rate of the second moment.
        eps: Added to the root of the second moment, at least 0.
        weight_decay: At least 0: `weight_decay * param` is added to the normalized gradient.
        warmup_steps: The number of warm-up steps: step k of them, from 1, has the learning rate `lr * k / warmup_steps`.
        r: At least 0: the iterate of step k, from 1, has the weight `k^r * lr_max^weight_lr_power` in the average, where `lr_max` is the largest learning rate so far.
        weight_lr_power: At least 0; see `r`.
        stochastic_rounding: keep bf16 variables and their states in bf16, without f32 master values. Steps compute in f32 and round stochastically, with random bits from the seed of `manual_seed`, the step and the element. This optimizer rejects True.
        states: where the states of variables on a GPU are: "device" for the memory of the GPU, "host" for pinned memory of the host. "host" saves memory of the GPU, but each step reads and writes the states over the bus. Results do not depend on `states`. f32 master values stay on the GPU. The states of variables on the CPU are always in the memory of the host.

    Raises:
        ArgumentError: if a value is out of range or unknown, if there is no variable, or if a variable appears twice.
        DTypeError: if a variable's dtype is not supported.
        DeviceError: if the variables are on different devices.
        OutOfMemoryError: if the system gives too little pinned memory for the states.
    """
    def __new__(
        cls,
        /,
        params: Iterable[Var] | Mapping[str, Var] | Iterable[Mapping[str, Any]],
        lr: SupportsFloat | SupportsIndex = 0.0025,
        betas: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex] = (0.9, 0.999),
        eps: SupportsFloat | SupportsIndex = 1e-08,
        weight_decay: SupportsFloat | SupportsIndex = 0.0,
        warmup_steps: int = 0,
        r: SupportsFloat | SupportsIndex = 0.0,
        weight_lr_power: SupportsFloat | SupportsIndex = 2.0,
        *,
        stochastic_rounding: bool = False,
        states: str = "device",
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> AdamWScheduleFree: ...

class Muon(GroupedOptimizer):
    """
    Muon (Jordan et al. 2024), as `torch.optim.Muon` in f32: the update of a matrix is its momentum, made orthogonal; AdamW updates vectors.

    ```python
    optimizer = tc.optim.Muon(model.parameters(), lr=1e-3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ```

    Args:
        params: variables, or parameter groups: dicts with an entry "params" and hyper-parameters of the group.
        lr: Learning rate, at least 0.
        weight_decay: At least 0: each step multiplies the parameters by `1 - lr * weight_decay`.
        momentum: Decay rate of the momentum, in [0, 1).
        nesterov: Nesterov momentum: orthogonalize `(1 - momentum) * g + momentum * m` instead of m, where g is the gradient and m the new momentum.
        ns_coefficients: Coefficients (a, b, c) of the Newton-Schulz iteration: X becomes `a X + b S X + c S^2 X`, where S is `X X^T`.
        eps: Above 0: the iteration starts with the matrix to orthogonalize, divided by the larger of its norm and `eps`.
        ns_steps: The number of steps of the Newton-Schulz iteration, less than 100.
        match_rms_adamw: Scale the update of an A x B matrix by `0.2 * sqrt(max(A, B))`, which suits learning rates of AdamW (torch: `adjust_lr_fn="match_rms_adamw"`). If false, scale it by `sqrt(max(1, A / B))`.
        vector_betas: Decay rates of the first and the second moment of AdamW, which updates vectors; each in [0, 1).
        vector_eps: At least 0: AdamW, which updates vectors, adds this to the root of the second moment.
        stochastic_rounding: keep bf16 variables and their states in bf16, without f32 master values. Steps compute in f32 and round stochastically, with random bits from the seed of `manual_seed`, the step and the element. This optimizer rejects True.
        states: where the states of variables on a GPU are: "device" for the memory of the GPU, "host" for pinned memory of the host. "host" saves memory of the GPU, but each step reads and writes the states over the bus. Results do not depend on `states`. f32 master values stay on the GPU. The states of variables on the CPU are always in the memory of the host.

    Raises:
        ArgumentError: if a value is out of range or unknown, if there is no variable, or if a variable appears twice.
        DTypeError: if a variable's dtype is not supported.
        DeviceError: if the variables are on different devices.
        OutOfMemoryError: if the system gives too little pinned memory for the states.
    """
    def __new__(
        cls,
        /,
        params: Iterable[Var] | Mapping[str, Var] | Iterable[Mapping[str, Any]],
        lr: SupportsFloat | SupportsIndex = 0.001,
        weight_decay: SupportsFloat | SupportsIndex = 0.1,
        momentum: SupportsFloat | SupportsIndex = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[
            SupportsFloat | SupportsIndex,
            SupportsFloat | SupportsIndex,
            SupportsFloat | SupportsIndex,
        ] = (3.4445, -4.775, 2.0315),
        eps: SupportsFloat | SupportsIndex = 1e-07,
        ns_steps: int = 5,
        *,
        match_rms_adamw: bool = False,
        vector_betas: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex] = (
            0.9,
            0.999,
        ),
        vector_eps: SupportsFloat | SupportsIndex = 1e-08,
        stochastic_rounding: bool = False,
        states: str = "device",
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> Muon: ...

class SGD(GroupedOptimizer):
    """
    Stochastic gradient descent with momentum, as `torch.optim.SGD`.

    ```python
    optimizer = tc.optim.SGD(model.parameters(), lr=1e-3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ```

    Args:
        params: variables, or parameter groups: dicts with an entry "params" and hyper-parameters of the group.
        lr: Learning rate, at least 0.
        momentum: At least 0: the factor by which each step multiplies the momentum buffer; with 0 there is no buffer.
        dampening: Each step after the first adds `1 - dampening` times the gradient to the momentum buffer.
        weight_decay: L2 penalty, at least 0: `weight_decay * param` is added to the gradient, after `maximize` has negated it.
        nesterov: Use Nesterov momentum. Needs `momentum > 0` and `dampening == 0`.
        maximize: Ascend instead of descend.
        stochastic_rounding: keep bf16 variables and their states in bf16, without f32 master values. Steps compute in f32 and round stochastically, with random bits from the seed of `manual_seed`, the step and the element. Variables of other dtypes are not affected.
        states: where the states of variables on a GPU are: "device" for the memory of the GPU, "host" for pinned memory of the host. "host" saves memory of the GPU, but each step reads and writes the states over the bus. Results do not depend on `states`. f32 master values stay on the GPU. The states of variables on the CPU are always in the memory of the host.

    Raises:
        ArgumentError: if a value is out of range or unknown, if there is no variable, or if a variable appears twice.
        DTypeError: if a variable's dtype is not supported.
        DeviceError: if the variables are on different devices.
        OutOfMemoryError: if the system gives too little pinned memory for the states.
    """
    def __new__(
        cls,
        /,
        params: Iterable[Var] | Mapping[str, Var] | Iterable[Mapping[str, Any]],
        lr: SupportsFloat | SupportsIndex = 0.001,
        momentum: SupportsFloat | SupportsIndex = 0.0,
        dampening: SupportsFloat | SupportsIndex = 0.0,
        weight_decay: SupportsFloat | SupportsIndex = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        states: str = "device",
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> SGD: ...
