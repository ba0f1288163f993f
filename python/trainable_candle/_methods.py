"""Methods of tensors that users of torch expect, composed of other methods.

For type checkers, `ComposedMethods` is a base class of `Tensor`; at run time, `attach` adds its
methods to `Tensor`. A method runs on the tensor's device unless its docstring names the host.
Gradients flow through a method if they do so in torch. The exceptions are `sign`, `floor`, `ceil`
and `round`, whose gradients would be zero. `own(self)` returns `self`, typed as a `Tensor`.
"""

from __future__ import annotations

import math
from inspect import isfunction
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainable_candle import _arguments, _core, _division
from trainable_candle._explained import explained
from trainable_candle._in_place import VarMethods
from trainable_candle._parts import (
    argmin_of,
    dim_index,
    integers_from,
    is_tensor,
    mask,
    no_tape,
    norm_of,
    numpy_key,
    on_host,
    order_of,
    own,
    reduced,
    sizes_of,
    triangle,
    true,
)
from trainable_candle.errors import ArgumentError, ShapeError

if TYPE_CHECKING:
    from trainable_candle._core import Tensor

__all__ = ["ComposedMethods", "Sorted"]

_FLOATS = ("f32", "f16", "bf16", "f64")
_NOT_METHODS = (
    "__dict__", "__doc__", "__firstlineno__", "__module__", "__static_attributes__", "__weakref__"
)  # fmt: skip
"""Attributes that Python gives to every class."""


class Sorted(NamedTuple):
    """Sorted values, and their indices in the input."""

    values: Tensor
    indices: Tensor


class ComposedMethods:
    """The methods that `attach` adds to `Tensor`."""

    # Dtypes, devices and shapes.

    def half(self) -> Tensor:
        """Convert to f16."""
        return own(self).to("f16")

    def bfloat16(self) -> Tensor:
        """Convert to bf16."""
        return own(self).to("bf16")

    def double(self) -> Tensor:
        """Convert to f64."""
        return own(self).to("f64")

    def long(self) -> Tensor:
        """Convert to i64."""
        return own(self).to("i64")

    def type(self, dtype: Any) -> Tensor:
        """Convert to a dtype."""
        return own(self).to(dtype)

    def cpu(self) -> Tensor:
        """Move to the CPU."""
        return own(self).to("cpu")

    def cuda(self, device: int | str = "cuda") -> Tensor:
        """Move to a GPU.

        Raises:
            CudaUnavailableError, DeviceError: If there is no such GPU.
        """
        return own(self).to(f"cuda:{device}" if isinstance(device, int) else device)

    def type_as(self, other: Tensor) -> Tensor:
        """Convert to the dtype of another tensor."""
        return own(self).to(other.dtype)

    def expand_as(self, other: Tensor) -> Tensor:
        """Repeat dimensions of size 1, so that the shape is that of another tensor."""
        return own(self).expand(other.shape)

    def view_as(self, other: Tensor) -> Tensor:
        """Return the elements in the shape of another tensor."""
        return own(self).reshape(other.shape)

    def new_zeros(self, *size: Any) -> Tensor:
        """Return zeros in the given shape, with this tensor's dtype and device."""
        return _core.zeros(sizes_of(size), dtype=own(self).dtype, device=own(self).device)

    def new_ones(self, *size: Any) -> Tensor:
        """Return ones in the given shape, with this tensor's dtype and device."""
        return _core.ones(sizes_of(size), dtype=own(self).dtype, device=own(self).device)

    def clone(self) -> Tensor:
        """Return a copy, through which gradients flow."""
        tensor = own(self)
        return tensor * 1 if tensor.requires_grad else _core.tensor(tensor)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of a dimension."""
        shape = own(self).shape
        return shape if dim is None else shape[dim_index("size", shape, dim)]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return own(self).ndim

    @property
    def mT(self) -> Tensor:  # noqa: N802 - torch's name
        """The tensor with its last two dimensions exchanged."""
        return own(self).transpose(-2, -1)

    def t(self) -> Tensor:
        """Transpose a matrix; return a vector as it is.

        Raises:
            ShapeError: If there are more than two dimensions.
        """
        tensor = own(self)
        if tensor.ndim > 2:
            raise ShapeError(f"t: the shape is {tensor.shape}, expected at most two dimensions")
        return tensor.transpose(0, 1) if tensor.ndim == 2 else tensor

    # Logic. `mask` checks that an operand is a mask, and makes a tensor of a bool, on the device of
    # its last argument. `true` returns the mask of the elements that are not zero.

    def __and__(self, other: Any) -> Tensor:
        """Return the mask (u8) of the elements where both masks are true.

        Raises:
            DTypeError: If an operand is neither u8 nor bool.
        """
        return mask("and", self) * mask("and", other, self)

    def __or__(self, other: Any) -> Tensor:
        """Return the mask (u8) of the elements where at least one of the masks is true.

        Raises:
            DTypeError: If an operand is neither u8 nor bool.
        """
        return mask("or", self).maximum(mask("or", other, self))

    def __xor__(self, other: Any) -> Tensor:
        """Return the mask (u8) of the elements where exactly one of the masks is true.

        Raises:
            DTypeError: If an operand is neither u8 nor bool.
        """
        return mask("xor", self) != mask("xor", other, self)

    def __invert__(self) -> Tensor:
        """Return the mask (u8) of the elements where this mask is false.

        Raises:
            DTypeError: If the tensor is not u8.
        """
        return mask("invert", self) == 0

    def all(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        """Return whether all elements, or all along dimensions, are nonzero, as u8."""
        return reduced(true(self), "min", dim, keepdim)

    def any(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        """Return whether any element, or any along dimensions, is nonzero, as u8."""
        return reduced(true(self), "max", dim, keepdim)

    def isnan(self) -> Tensor:
        """Return the mask (u8) of elements that are NaN."""
        tensor = own(self).detach()
        return tensor != tensor  # noqa: PLR0124 - NaN alone differs from itself

    def isfinite(self) -> Tensor:
        """Return the mask (u8) of elements that are neither NaN nor infinite."""
        tensor = own(self).detach()
        return (tensor - tensor) == 0

    def isinf(self) -> Tensor:
        """Return the mask (u8) of elements that are infinite."""
        tensor = own(self).detach()
        return tensor.abs() == math.inf

    # Numbers.

    def sign(self) -> Tensor:
        """Return the sign of each element: -1, 0 or 1; 0 for NaN."""
        tensor = own(self).detach()
        return (tensor > 0).to(tensor.dtype) - (tensor < 0).to(tensor.dtype)

    def floor(self) -> Tensor:
        """Round down."""
        tensor = own(self).detach()
        if tensor.dtype not in _FLOATS:
            return tensor
        # From the magnitude `integers_from(tensor)` on, values are integers or non-finite, and stay
        # as they are. The product makes them 0 or NaN, because they may be too large for i64.
        is_small = (tensor.abs() < integers_from(tensor)).to(tensor.dtype)
        truncated = (tensor * is_small).to("i64").to(tensor.dtype)
        down = truncated - (truncated > tensor).to(tensor.dtype)
        return _core.where(is_small > 0, down, tensor)

    def ceil(self) -> Tensor:
        """Round up."""
        return -(-own(self)).floor()

    def round(self) -> Tensor:
        """Round to the nearest integer; a half is rounded to the even neighbour."""
        tensor = own(self).detach()
        if tensor.dtype not in _FLOATS:
            return tensor
        down = tensor.floor()
        is_odd = down - (down * 0.5).floor() * 2
        fraction = tensor - down
        step = (fraction > 0.5).to(tensor.dtype) + (fraction == 0.5).to(tensor.dtype) * is_odd
        return _core.where(tensor.abs() < integers_from(tensor), down + step, tensor)

    def __floordiv__(self, other: Any) -> Tensor:
        """Divide and round down, on the host.

        Raises:
            ArgumentError: If both operands are integers and an element of the divisor is 0.
            ShapeError: If the shapes do not broadcast.
            DeviceError: If the operands are on different devices.
        """
        return _division.floor_divided("floordiv", own(self), other)

    def __rfloordiv__(self, other: Any) -> Tensor:
        """Divide by this tensor and round down, on the host; errors are those of `//`."""
        return _division.floor_divided("floordiv", other, own(self))

    def __mod__(self, other: Any) -> Tensor:
        """Return the remainder, with the divisor's sign, on the host; errors are those of `//`."""
        return _division.remainder("mod", own(self), other)

    def __rmod__(self, other: Any) -> Tensor:
        """Return the remainder of a division by this tensor, as `%` does; the host computes it."""
        return _division.remainder("mod", other, own(self))

    def rsqrt(self) -> Tensor:
        """Return 1 / sqrt(x)."""
        return own(self).sqrt().reciprocal()

    def log1p(self) -> Tensor:
        """Return log(1 + x), accurate for small x (Higham, Accuracy and Stability, 1.14.1)."""
        x = own(self)
        u = x + 1
        # The factor x / (u - 1) corrects the rounding of u. Where u is 1, the result is x, and the
        # numbers 1 and 2 keep the unused branch and its gradients finite.
        is_one = (u.detach() - 1) == 0
        divisor = _core.where(is_one, 1.0, u - 1)
        argument = _core.where(is_one, 2.0, u)
        return _core.where(is_one, x, argument.log() * x / divisor)

    def erf(self) -> Tensor:
        """Return the error function."""
        x = own(self)
        is_zero = x.detach() == 0
        # With z = x * sqrt(2), solve gelu(z) = z / 2 * (1 + erf(x)) for erf. At x = 0 this would
        # divide by 0, so use 2 x / sqrt(pi) there, which has erf's value and derivative.
        z = _core.where(is_zero, 1.0, x) * math.sqrt(2)
        return _core.where(is_zero, x * (2 / math.sqrt(math.pi)), z.gelu() * 2 / z - 1)

    def clip(self, min: Any = None, max: Any = None) -> Tensor:
        """Limit to a range; the same as `clamp`."""
        return own(self).clamp(min, max)

    # Reductions.

    def std(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the standard deviation; takes the arguments of `var`."""
        return own(self).var(*args, **kwargs).sqrt()

    def norm(self, p: float | str = 2, dim: Any = None, keepdim: bool = False) -> Tensor:
        """Return the p-norm of all elements, or the p-norms along dimensions.

        Raises:
            ArgumentError: If p is neither a number above 0, which may be infinite, nor "fro" (2).
        """
        return norm_of(own(self), p, dim, keepdim)

    def prod(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Return the product of all elements, or the products along a dimension."""
        x = own(self)
        over_all = dim is None
        if dim is None:
            x, dim = x.reshape((-1,)), 0
        dim = dim_index("prod", x.shape, dim)
        if not x.shape[dim]:
            # The product of no elements is 1, and their sum is 0 in the shape of the result.
            return (x.sum() if over_all else x.sum(dim, keepdim=keepdim)) + 1
        # Multiply the first half by the second, until one element is left.
        while (count := x.shape[dim]) > 1:
            half = count // 2
            products = x.narrow(dim, 0, half) * x.narrow(dim, half, half)
            unpaired = [x.narrow(dim, 2 * half, 1)] if count % 2 else []
            x = _core.cat([products, *unpaired], dim)
        return x if keepdim and not over_all else x.squeeze(dim)  # `keepdim` needs a `dim`

    def argmin(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Return the index of the smallest of all elements, or the indices along a dimension."""
        return argmin_of(own(self).detach(), dim, keepdim)

    def sort(self, dim: int = -1, descending: bool = False) -> Sorted:
        """Return the values in order along a dimension, and their indices; the host sorts."""
        x = own(self)
        order = order_of("sort", x, dim, descending=descending)
        return Sorted(x.gather(dim, order), order)

    def argsort(self, dim: int = -1, descending: bool = False) -> Tensor:
        """Return the indices that sort the values along a dimension; the host sorts."""
        return order_of("argsort", own(self), dim, descending=descending)

    def topk(self, k: int, dim: int = -1, largest: bool = True) -> Sorted:
        """Return the k largest or smallest values in order, and their indices; the host sorts.

        Raises:
            ArgumentError: If the tensor lacks the dimension, or k is not from 0 to its size.
        """
        x = own(self)
        axis = dim_index("topk", x.shape, dim)
        if not 0 <= k <= x.shape[axis]:
            raise ArgumentError(f"topk: k is {k}, expected 0 to {x.shape[axis]}")
        order = order_of("topk", x, axis, descending=largest).narrow(axis, 0, k).contiguous()
        return Sorted(x.gather(axis, order), order)

    # Selection and repetition.

    def where(self, condition: Tensor, other: Any) -> Tensor:
        """Return this tensor where the condition is not zero, elsewhere `other`."""
        return _core.where(condition, own(self), other)

    def masked_fill(self, mask: Tensor, value: float) -> Tensor:
        """Return `value` where the mask is not zero, elsewhere this tensor."""
        return _core.where(mask, value, own(self))

    def repeat(self, *sizes: Any) -> Tensor:
        """Repeat along every dimension as often as `sizes` says for it.

        More sizes than dimensions make new dimensions in front.

        Raises:
            ArgumentError: If there are fewer sizes than dimensions.
        """
        x, counts = own(self), sizes_of(sizes)
        if len(counts) < x.ndim:
            raise ArgumentError(
                f"repeat: found {len(counts)} sizes for the shape {x.shape}, expected at least "
                f"{x.ndim}"
            )
        x = x.reshape((1,) * (len(counts) - x.ndim) + x.shape)
        for dim, count in enumerate(counts):
            if count != 1:
                x = _core.cat([x] * count, dim) if count else x.narrow(dim, 0, 0)
        return x

    def tile(self, *sizes: Any) -> Tensor:
        """Repeat like `repeat`; fewer sizes than dimensions are for the last dimensions."""
        counts = sizes_of(sizes)
        return own(self).repeat((1,) * (own(self).ndim - len(counts)) + counts)

    def repeat_interleave(self, repeats: int, dim: int | None = None) -> Tensor:
        """Repeat each slice along a dimension, by default each element of the flattened tensor."""
        x = own(self)
        if dim is None:
            x, dim = x.reshape((-1,)), 0
        dim = dim_index("repeat_interleave", x.shape, dim)
        expanded = (*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :])
        joined = (*x.shape[:dim], x.shape[dim] * repeats, *x.shape[dim + 1 :])
        return x.unsqueeze(dim + 1).expand(expanded).reshape(joined)

    def flip(self, *dims: Any) -> Tensor:
        """Reverse the order of elements along dimensions."""
        x = own(self)
        for dim in sizes_of(dims):
            axis = dim_index("flip", x.shape, dim)
            x = x[(slice(None),) * axis + (slice(None, None, -1),)]
        return x

    def roll(self, shifts: int, dims: int | None = None) -> Tensor:
        """Shift elements along a dimension or in the flattened tensor; they wrap around."""
        x = own(self)
        if dims is None:
            return x.reshape((-1,)).roll(shifts, 0).reshape(x.shape)
        axis = dim_index("roll", x.shape, dims)
        size = x.shape[axis]
        moved = shifts % size if size else 0
        if not moved:
            return x
        parts = [x.narrow(axis, size - moved, moved), x.narrow(axis, 0, size - moved)]
        return _core.cat(parts, axis)

    def unbind(self, dim: int = 0) -> list[Tensor]:
        """Return the slices along a dimension, each without that dimension."""
        x = own(self)
        axis = dim_index("unbind", x.shape, dim)
        return [x.narrow(axis, n, 1).squeeze(axis) for n in range(x.shape[axis])]

    def tril(self, diagonal: int = 0) -> Tensor:
        """Keep the lower triangle of matrices, up to a diagonal, and make the rest zero.

        Positive diagonals are above the main one. The host makes the mask of the triangle.
        """
        return triangle(own(self), lambda rows, columns: columns - rows <= diagonal)

    def triu(self, diagonal: int = 0) -> Tensor:
        """Keep the upper triangle of matrices, from a diagonal on, like `tril`."""
        return triangle(own(self), lambda rows, columns: columns - rows >= diagonal)

    def scatter(self, dim: int, index: Tensor, src: Any) -> Tensor:
        """Return this tensor with `src` at the indices along a dimension, like torch's `scatter`.

        The host reads the indices. If several values have the same index, the last value is taken.
        Gradients flow to this tensor and to `src`.
        """
        x = own(self)
        axis = dim_index("scatter", x.shape, dim)
        targets = np.indices(index.shape)
        targets[axis] = index.numpy()
        # The positions of the elements to set, in the flattened tensor.
        flat = np.ravel_multi_index(tuple(targets.reshape(x.ndim, -1)), x.shape)
        # `is_set` and `sources` have one number for each element of the flattened result: whether
        # it is from `src`, and from which element.
        is_set = np.zeros(x.numel(), np.uint8)
        is_set[flat] = 1
        condition = _core.tensor(is_set.reshape(x.shape), device=x.device)
        if isinstance(src, (int, float)):
            return _core.where(condition, float(src) if x.dtype in _FLOATS else src, x)
        if not index.numel():
            # Nothing is set, and `src` may have no element to pick.
            return _core.where(condition, x, x)
        sources = np.zeros(x.numel(), np.int64)
        sources[flat] = np.arange(flat.size)
        # As in torch, `src` may be larger than `index`; the rest of it is not used.
        values = src[tuple(slice(0, size) for size in index.shape)].reshape((-1,))
        picked = values.index_select(0, _core.tensor(sources, device=x.device)).reshape(x.shape)
        return _core.where(condition, picked, x)

    # In-place operations of torch.

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set elements of a variable, on the host; elements of other tensors cannot be set.

        Raises:
            TypeError: If this tensor is not a variable.
        """
        tensor = own(self)
        if not isinstance(tensor, _core.Var):
            raise TypeError(
                "a Tensor does not change; make another with tc.where, masked_fill or scatter, or "
                "use a tc.Var, whose elements can be set"
            )
        with no_tape():
            new = on_host(tensor).copy()
            new[numpy_key(key)] = on_host(value) if is_tensor(value) else value
            tensor.set(_core.tensor(new, dtype=tensor.dtype, device=tensor.device))

    @property
    def grad(self) -> Tensor | None:
        """None, because `backward` sets only the gradients of variables."""
        return None

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Return a variable with this value or, if `requires_grad` is False, a detached tensor.

        This tensor does not change.
        """
        tensor = own(self)
        if requires_grad:
            return tensor if isinstance(tensor, _core.Var) else _core.Var(tensor)
        return tensor.detach()


def attach() -> None:
    """Add the methods and properties to `Tensor` and `Var`."""
    _arguments.attach()  # `axis` as a name of `dim`, the attribute `device`, advice in errors
    for source, target in ((ComposedMethods, _core.Tensor), (VarMethods, _core.Var)):
        for name, member in vars(source).items():
            if name not in _NOT_METHODS:
                # `explained`: the messages of the method's errors begin with its name.
                setattr(target, name, explained(member) if isfunction(member) else member)
