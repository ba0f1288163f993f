"""Linear layers: plain, and frozen ones with a LoRA or DoRA adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from trainable_candle._core import Adapter, Tensor, Var, draw_from, init_linear
from trainable_candle._core import linear as _linear
from trainable_candle.errors import ShapeError
from trainable_candle.nn.module import Module

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DoRALinear", "Linear", "LoRALinear"]


def _check_tensors(layer: str, weight: object, bias: object) -> None:
    """Raise a `TypeError` unless the weight is a tensor and the bias a tensor or None."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"{layer}: the weight is {type(weight).__name__}, expected a Tensor")
    if bias is not None and not isinstance(bias, Tensor):
        raise TypeError(f"{layer}: the bias is {type(bias).__name__}, expected a Tensor or None")


class Linear(Module):
    """A linear layer, y = x @ weight.T + bias.

    `Linear(64, 32)` makes a trainable layer with torch's initial values, as `Linear.init` does.
    `Linear(weight, bias)` uses existing tensors: a `Tensor` is frozen, a `Var` is trained.

        layer = tc.nn.Linear(64, 32)
        assert layer(tc.randn(5, 64)).shape == (5, 32)

    Args:
        weight: The weight, (out_features, in_features), or the number of input features.
        shift: The bias, (out_features,), or the number of output features.
        bias: In `Linear(weight, bias=...)`, the bias. In `Linear(64, 32, bias=...)`, whether there
            is a bias (default: True).
        dtype: The floating point dtype of new parameters; default f32. Ignored with tensors.
        device: The device of new parameters. Ignored with tensors.

    Raises:
        TypeError: If the first two arguments are neither two numbers of features nor tensors; the
            bias may be None. If the bias is given twice.
        ShapeError: If the weight is not a matrix or the bias does not fit it.
        ArgumentError: If a number of features is negative.
        DTypeError: If `dtype` is not a floating point one.
        DeviceError, CudaUnavailableError: If the device is unknown or cannot be used.
        OutOfMemoryError: If new parameters do not fit into memory.
    """

    def __init__(
        self,
        weight: Tensor | int,
        shift: Tensor | int | None = None,
        /,
        bias: Tensor | bool | None = None,
        dtype: str | None = None,
        device: str = "cpu",
    ) -> None:
        if isinstance(weight, int) and isinstance(shift, int):
            if isinstance(bias, Tensor):
                raise TypeError(
                    "Linear: the bias is a Tensor, expected True or False beside numbers of "
                    "features; with existing tensors, give the weight, too"
                )
            with_bias = bias is None or bool(bias)
            weight, shift = init_linear(weight, shift, with_bias, dtype, device)
        else:
            if shift is not None and bias is not None:
                raise TypeError("Linear: the bias is given twice; leave out the argument `bias`")
            shift = bias if shift is None else shift
        self._adopt(weight, shift)

    def _adopt(self, weight: object, bias: object) -> None:
        """Make two tensors the layer's parameters, after checking their types and shapes."""
        _check_tensors("Linear", weight, bias)
        weight, bias = cast("Tensor", weight), cast("Tensor | None", bias)
        if weight.ndim != 2:
            raise ShapeError(
                f"Linear: the weight has shape {weight.shape}, expected (out_features, in_features)"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ShapeError(
                f"Linear: the bias has shape {bias.shape}, expected {weight.shape[:1]}"
            )
        self.weight = weight
        self.bias = bias

    @classmethod
    def init(
        cls,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: str | None = None,
        device: str = "cpu",
    ) -> Self:
        """Make a trainable layer with torch's initial values.

        Both parameters are drawn uniformly between -1 / sqrt(in_features) and
        1 / sqrt(in_features).

        Args:
            in_features: The size of the input's last dimension.
            out_features: The size of the result's last dimension.
            bias: Whether there is a bias.
            dtype: The floating point dtype of the parameters; default f32.
            device: The device of the parameters.

        Raises:
            TypeError: If a number of features is not an integer.
            ArgumentError: If a number of features is negative.
            DTypeError: If the dtype is not a floating point one.
            DeviceError, CudaUnavailableError: If the device is unknown or cannot be used.
            OutOfMemoryError: If the parameters do not fit into memory.
        """
        return cls(*init_linear(in_features, out_features, bias, dtype, device))

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features).

        Raises:
            ShapeError, DTypeError, DeviceError: If the input does not fit.
        """
        return _linear(input, self.weight, self.bias)

    def _facts(self) -> str:
        outputs, inputs = self.weight.shape
        return f"{inputs}, {outputs}, bias={self.bias is not None}"


class _AdaptedLinear(Module):
    """The base class of `LoRALinear` and `DoRALinear`: a frozen linear layer with an adapter."""

    _kind: ClassVar[str]
    """The kind of adapter, the first argument of the extension's class `Adapter`."""
    _names: ClassVar[tuple[str, ...]]
    """The attributes that hold the adapter's parameters, in the order of `Adapter.vars`."""

    def __init__(
        self,
        base_weight: Tensor,
        rank: int,
        alpha: float,
        bias: Tensor | None = None,
        dropout: float = 0.0,
        rslora: bool = False,
        qat: str | None = None,
        qat_activations: bool = False,
    ) -> None:
        _check_tensors(type(self).__name__, base_weight, bias)
        self.weight = base_weight.detach()
        self.bias = None if bias is None else bias.detach()
        # The arguments that `Adapter` takes after the kind, the weight and the bias.
        self._how: tuple[Any, ...] = (rank, alpha, dropout, rslora, qat, qat_activations)
        self._adapter = Adapter(self._kind, self.weight, self.bias, *self._how)
        self.enabled = True  # whether `forward` uses the adapter
        # The tensors that share memory with the adapter's variables, by attribute.
        self._shared: dict[str, Tensor] = {}
        self._shared.update(zip(self._names, self._adapter.vars(), strict=True))
        self.__dict__.update(self._shared)

    def __copy__(self) -> Self:
        """Return a layer that shares this layer's parameters."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Return what `pickle` and `copy.deepcopy` copy; `_make_adapter` makes the rest again."""
        return {k: v for k, v in self.__dict__.items() if k not in {"_adapter", "_shared"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes, and make an adapter with the restored parameters."""
        self.__dict__.update(state)
        self._make_adapter()

    def _tensors_replaced(self) -> None:
        """Make a new adapter if its parameters were replaced; the old one has the old parameters.

        `Module` calls this method after `to` or `requires_grad_` has replaced tensors.
        """
        if any(getattr(self, name) is not value for name, value in self._shared.items()):
            self._make_adapter()

    def _make_adapter(self) -> None:
        """Make an adapter with the attributes' values; its variables become the attributes.

        As in a new layer, the adapter's variables are f32 and on the device of the weight. An
        attribute that is not a variable becomes a frozen tensor over the variable's memory.
        """
        weight = self.weight.detach()
        bias = None if self.bias is None else self.bias.detach()
        # The adapter's initial values are overwritten. They come from a separate generator, which
        # has the seed 0, so that the library's generator does not advance.
        self._adapter = draw_from(0, lambda: Adapter(self._kind, weight, bias, *self._how))
        self._shared = {}
        for name, var in zip(self._names, self._adapter.vars(), strict=True):
            value = getattr(self, name)
            var.set(value.detach().to(var.dtype).to(var.device))
            self._shared[name] = var if isinstance(value, Var) else var.detach()
        self.__dict__.update(self._shared)

    @property
    def scale(self) -> float:
        """The factor of lora_up @ lora_down: alpha / rank, with `rslora` alpha / sqrt(rank)."""
        return self._adapter.scale

    def get_vars(self) -> list[Var]:
        """Return the adapter's parameters as variables, also after `requires_grad_(False)`."""
        return self._adapter.vars()

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features).

        Raises:
            ShapeError, DTypeError, DeviceError: If the input does not fit.
        """
        if not self.enabled:
            return _linear(input, self.weight, self.bias)
        self._adapter.set_training(self.training)
        return self._adapter.forward(input, self.weight, self.bias)

    def _facts(self) -> str:
        outputs, inputs = self.weight.shape
        rank = self.get_vars()[0].shape[0]  # `lora_down` is (rank, in_features)
        return (
            f"{inputs}, {outputs}, rank={rank}, scale={self.scale:g}, bias={self.bias is not None}"
        )

    def merge(self) -> Tensor:
        """Return the weight with which a `Linear` with the same bias equals this layer.

        The results differ where this layer applies dropout, or rounds its inputs
        (`qat_activations`).
        """
        return self._adapter.merged_weight(self.weight)


class LoRALinear(_AdaptedLinear):
    """A frozen linear layer with LoRA (Hu et al. 2021, arXiv:2106.09685).

    y = x @ W.T + b + scale * (x @ lora_down.T) @ lora_up.T, as one operation. `lora_down` (rank,
    in_features) and `lora_up` (out_features, rank) are f32 variables. Initially `lora_down` has
    random values, as the weight of a linear layer in torch, and `lora_up` is zero.

        layer = tc.nn.LoRALinear(tc.randn(32, 64), rank=4, alpha=4)
        assert layer(tc.randn(5, 64)).shape == (5, 32)

    Args:
        base_weight: W, (out_features, in_features); frozen.
        rank: The rank of the LoRA, at least 1.
        alpha: Determines the scale, alpha / rank.
        bias: b, (out_features,); frozen.
        dropout: The probability with which an element of the adapter's input is set to 0 in
            training.
        rslora: Whether the scale is alpha / sqrt(rank) instead (Kalajdzievski 2023,
            arXiv:2312.03732).
        qat: The format that the adapted weight W + scale * lora_up @ lora_down is rounded to, as
            `nn.functional.fake_quantize` does; None: no rounding.
        qat_activations: Whether the input is rounded too, with a scale for each vector of
            in_features; needs `qat` "int8" or "fp8".

    Raises:
        TypeError: If the weight is not a tensor, or the bias is neither a tensor nor None.
        ShapeError: If the weight is not a matrix or the bias does not fit it.
        ArgumentError: If the rank is below 1, alpha is not finite, the dropout is not in [0, 1), or
            `qat` is unknown.
        ConfigError: If `qat` is combined with dropout, in_features is not a multiple of the
            format's group size, or `qat_activations` does not fit `qat`.
    """

    _kind = "lora"
    _names = ("lora_down", "lora_up")
    lora_down: Var
    lora_up: Var


class DoRALinear(_AdaptedLinear):
    """A frozen linear layer with DoRA (Liu et al. 2024, arXiv:2402.09353).

    The rows of the adapted weight are those of V = W + scale * lora_up @ lora_down, scaled to the
    norms in `magnitude` (out_features,). Initially, `magnitude` has the norms of the rows of W. The
    backward pass treats the norms of the rows of V as constants, as in the paper and in peft.

        layer = tc.nn.DoRALinear(tc.randn(32, 64), rank=4, alpha=4)
        assert layer(tc.randn(5, 64)).shape == (5, 32)

    Args:
        base_weight: W, (out_features, in_features); frozen.
        rank: The rank of the adapter, at least 1.
        alpha: Determines the scale, alpha / rank.
        bias: The bias of the layer, (out_features,); frozen.
        dropout: The probability with which an element of the adapter's input is set to 0 in
            training.
        rslora: Whether the scale is alpha / sqrt(rank) instead.
        qat: The format that the adapted weight is rounded to, as `nn.functional.fake_quantize`
            does; None: no rounding.
        qat_activations: Whether the input is rounded too, with a scale for each vector of
            in_features; needs `qat` "int8" or "fp8".

    Raises:
        TypeError: If the weight is not a tensor, or the bias is neither a tensor nor None.
        ShapeError: If the weight is not a matrix or the bias does not fit it.
        ArgumentError: If the rank is below 1, alpha is not finite, the dropout is not in [0, 1), or
            `qat` is unknown.
        ConfigError: If `qat` is combined with dropout, in_features is not a multiple of the
            format's group size, or `qat_activations` does not fit `qat`.
    """

    _kind = "dora"
    _names = ("lora_down", "lora_up", "magnitude")
    lora_down: Var
    lora_up: Var
    magnitude: Var
