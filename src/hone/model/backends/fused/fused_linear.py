"""Products of a layer with what stands beside them, each with a gradient written by hand.

Layers that read one input are one product, forward and backward; a norm or gate before it is computed again in the
backward pass instead of being kept; the residual is added inside the product; frozen weights get no gradient.
Shapes: N tokens, D inputs, F outputs of all layers together.
"""

# pyright: reportIncompatibleMethodOverride=false
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hone.model.backends.adjacent import Low, adjacent, are_neighbours, lows, plain
from hone.model.backends.fused import elementwise

Gradients = list[Tensor | None]


@dataclass(frozen=True, slots=True)
class Product:
    """y = x W^T + b for linear layers that read the same x, and their adapters."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    lows: tuple[Low, ...]

    @staticmethod
    def of(*layers: nn.Module) -> "Product":
        each = [plain(layer) for layer in layers]
        biases = tuple(base.bias for base in each if base.bias is not None)
        return Product(tuple(base.weight for base in each), biases, tuple(lows(*layers)))

    def tensors(self) -> tuple[Tensor, ...]:
        """What autograd has to know of, in the order of `backward`'s gradients."""
        return (*self.weights, *self.biases, *(x for low in self.lows for x in (low.A, low.B)))

    def forward(self, x_ND: Tensor, *, plus: Tensor | None = None, spend: bool = False) -> tuple[Tensor, list[Tensor]]:
        """(y + plus, what each adapter's A made of x); spend: in the memory of plus, but under autocast, which casts"""
        W = _one(self.weights)
        if plus is not None:
            spend = spend and not torch.is_autocast_enabled(plus.device.type)
            y = plus.addmm_(x_ND, W.t()) if spend else torch.addmm(plus, x_ND, W.t())
            y = y.add_(_one(self.biases)) if self.biases else y
        else:
            y = torch.addmm(_one(self.biases), x_ND, W.t()) if self.biases else x_ND @ W.t()
        inner = [x_ND @ low.A.t() for low in self.lows]
        for low, h in zip(self.lows, inner, strict=True):
            y[:, low.at : low.at + len(low.B)].addmm_(h, low.B.t(), alpha=low.scale)
        return y, inner

    def backward(self, dy_NF: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(dx, what each adapter's B made of dy)"""
        dx, back = dy_NF @ _one(self.weights), list[Tensor]()
        for low in self.lows:
            back.append((dy_NF[:, low.at : low.at + len(low.B)] @ low.B).mul_(low.scale))
            dx.addmm_(back[-1], low.A)
        return dx, back

    def gradients(
        self, x_ND: Tensor, dy_NF: Tensor, inner: Sequence[Tensor], back: Sequence[Tensor], wants: Sequence[bool]
    ) -> Gradients:
        """Those of `tensors()` that are wanted."""
        n, found = len(self.weights), Gradients([None] * len(wants))
        sizes = [len(w) for w in self.weights]
        if any(wants[:n]):
            found[:n] = (dy_NF.t() @ x_ND).split(sizes)
        if any(wants[n : n + len(self.biases)]):
            found[n : n + len(self.biases)] = dy_NF.sum(0).split(sizes)
        at = n + len(self.biases)
        for low, h, dh in zip(self.lows, inner, back, strict=True):
            given = dy_NF[:, low.at : low.at + len(low.B)]
            found[at : at + 2] = [dh.t() @ x_ND, (given.t() @ h).mul_(low.scale)]
            at += 2
        return [g if wanted else None for g, wanted in zip(found, wants, strict=True)]


def _one(tensors: tuple[Tensor, ...]) -> Tensor:
    """The tensors as one; a copy where they are no neighbours."""
    if len(tensors) == 1:
        return tensors[0]
    return adjacent(tensors) if are_neighbours(tensors) else torch.cat([x.detach() for x in tensors])


@dataclass(frozen=True, slots=True)
class Turned:
    """Outputs that are queries, keys and values [N, H or K, E], of which the first two are turned by these angles."""

    cos: Tensor
    sin: Tensor
    H: int
    K: int
    E: int


class _NormedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, eps: float, product: Product, turned: Turned | None, *tensors: Tensor
    ) -> Any:
        n, again = elementwise.norm_and_copy(x, gain, eps)
        y, inner = product.forward(n)
        ctx.product, ctx.eps, ctx.turned = product, eps, turned
        ctx.save_for_backward(x, gain, *inner)
        if turned is None:
            return y, again
        H, K = turned.H, turned.K
        heads = elementwise.rotate_(y.view(len(y), H + 2 * K, turned.E), turned.cos, turned.sin, heads=H + K)
        return *heads.split([H, K, K], 1), again

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> Any:
        (x, gain, *inner), turned, passed = ctx.saved_tensors, ctx.turned, given[-1]
        if turned is None:
            dy = given[0].contiguous()
        else:
            dq, dk, dv, _ = given
            dy = elementwise.rotate_back(dq, dk, dv, turned.cos, turned.sin).flatten(1)
        n, back = ctx.product.backward(dy)
        dx, dgain = elementwise.norm_grad(x, gain, ctx.eps, n, plus=passed.contiguous(), again=True)
        found = ctx.product.gradients(n, dy, inner, back, ctx.needs_input_grad[5:])
        return dx, dgain, None, None, None, *found


class _AddedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor, product: Product, gated: bool, *tensors: Tensor) -> Tensor:
        y, inner = product.forward(elementwise.gate(a) if gated else a, plus=x, spend=True)
        if y is x:
            ctx.mark_dirty(x)
        ctx.product, ctx.gated = product, gated
        ctx.save_for_backward(a, *inner)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        a, *inner = ctx.saved_tensors
        dy = dy.contiguous()
        da, back = ctx.product.backward(dy)
        read = a
        if ctx.gated:
            read, da = da, elementwise.gate_grad(a, da)
        found = ctx.product.gradients(read, dy, inner, back, ctx.needs_input_grad[4:])
        return da, dy, None, None, *found


def normed_product(
    x: Tensor, gain: Tensor, eps: float, product: Product, *, own: bool = False
) -> tuple[Tensor, Tensor]:
    """(norm(x) W^T + b, x): a copy to go on with, which the kernel that reads x makes at half a copy's price, and whose
    gradient is added where the norm's is made. own: nobody else holds x, which goes on itself where no gradient is."""
    if own and not torch.is_grad_enabled():
        return product.forward(elementwise.norm(x, gain, eps))[0], x
    return _NormedProduct.apply(x, gain, eps, product, None, *product.tensors())  # pyright: ignore[reportReturnType]


def turned_product(
    x: Tensor, gain: Tensor, eps: float, product: Product, turned: Turned
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same where the product is queries, keys and values: (q, k, v, x), the first two turned"""
    return _NormedProduct.apply(x, gain, eps, product, turned, *product.tensors())  # pyright: ignore[reportReturnType]


def added_product(a: Tensor, x: Tensor, product: Product) -> Tensor:
    """x + a W^T + b, in the memory of x"""
    return _AddedProduct.apply(a, x, product, False, *product.tensors())  # pyright: ignore[reportReturnType]


def gated_product(both: Tensor, x: Tensor, product: Product) -> Tensor:
    """x + (silu(gate) * up) W^T + b, in the memory of x; both: gate and up side by side"""
    return _AddedProduct.apply(both, x, product, True, *product.tensors())  # pyright: ignore[reportReturnType]


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.mark_dirty(x)
        return elementwise.rotate_(x, cos, sin, heads=x.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        dy = dy.clone(memory_format=torch.contiguous_format)
        return elementwise.rotate_(dy, cos, -sin, heads=dy.shape[1]), None, None


def rotated_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The heads of x [N, heads, E], turned in place"""
    return _Rotated.apply(x, cos, sin)  # pyright: ignore[reportReturnType]
