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

from hone.model import elementwise
from hone.model.fused import Low, adjacent, are_neighbours, lows, plain

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

    def forward(self, x_ND: Tensor, *, plus: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """(y + plus, what each adapter's A made of x)"""
        W = _one(self.weights)
        if plus is not None:
            y = torch.addmm(plus, x_ND, W.t())
            y = y.add_(_one(self.biases)) if self.biases else y
        else:
            y = torch.addmm(_one(self.biases), x_ND, W.t()) if self.biases else x_ND @ W.t()
        inner = [x_ND @ low.A.t() for low in self.lows]
        for low, h in zip(self.lows, inner, strict=True):
            y[:, low.at : low.at + len(low.B)].addmm_(h, low.B.t(), alpha=low.scale)
        return y, inner

    def backward(
        self, x_ND: Tensor, dy_NF: Tensor, inner: Sequence[Tensor], wants: Sequence[bool]
    ) -> tuple[Tensor, Gradients]:
        """dx, and the gradients of `tensors()` that are wanted"""
        dx, n = dy_NF @ _one(self.weights), len(self.weights)
        found: Gradients = [None] * len(wants)
        sizes = [len(w) for w in self.weights]
        if any(wants[:n]):
            found[:n] = (dy_NF.t() @ x_ND).split(sizes)
        if any(wants[n : n + len(self.biases)]):
            found[n : n + len(self.biases)] = dy_NF.sum(0).split(sizes)
        at = n + len(self.biases)
        for low, h in zip(self.lows, inner, strict=True):
            given = dy_NF[:, low.at : low.at + len(low.B)]
            dh = (given @ low.B).mul_(low.scale)
            found[at : at + 2] = [dh.t() @ x_ND, (given.t() @ h).mul_(low.scale)]
            dx.addmm_(dh, low.A)
            at += 2
        return dx, [g if wanted else None for g, wanted in zip(found, wants, strict=True)]


def _one(tensors: tuple[Tensor, ...]) -> Tensor:
    """The tensors as one; a copy where they are no neighbours."""
    if len(tensors) == 1:
        return tensors[0]
    return adjacent(tensors) if are_neighbours(tensors) else torch.cat([x.detach() for x in tensors])


class _NormedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, product: Product, *tensors: Tensor) -> Any:
        y, inner = product.forward(elementwise.norm(x, gain, eps))
        ctx.product, ctx.eps = product, eps
        ctx.save_for_backward(x, gain, *inner)
        return y, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, passed: Tensor) -> Any:
        x, gain, *inner = ctx.saved_tensors
        n = elementwise.norm(x, gain, ctx.eps)
        dn, found = ctx.product.backward(n, dy.contiguous(), inner, ctx.needs_input_grad[4:])
        dx, dgain = elementwise.norm_grad(x, gain, ctx.eps, dn, plus=passed.contiguous())
        return dx, dgain, None, None, *found


class _AddedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor, product: Product, gated: bool, *tensors: Tensor) -> Tensor:
        y, inner = product.forward(elementwise.gate(a) if gated else a, plus=x)
        ctx.product, ctx.gated = product, gated
        ctx.save_for_backward(a, *inner)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        a, *inner = ctx.saved_tensors
        dy = dy.contiguous()
        read = elementwise.gate(a) if ctx.gated else a
        da, found = ctx.product.backward(read, dy, inner, ctx.needs_input_grad[4:])
        return elementwise.gate_grad(a, da) if ctx.gated else da, dy, None, None, *found


def normed_product(x: Tensor, gain: Tensor, eps: float, product: Product) -> tuple[Tensor, Tensor]:
    """(norm(x) W^T + b, x): the x to go on with, so that both its gradients are added where the norm's is made"""
    return _NormedProduct.apply(x, gain, eps, product, *product.tensors())  # pyright: ignore[reportReturnType]


def added_product(a: Tensor, x: Tensor, product: Product) -> Tensor:
    """x + a W^T + b"""
    return _AddedProduct.apply(a, x, product, False, *product.tensors())  # pyright: ignore[reportReturnType]


def gated_product(both: Tensor, x: Tensor, product: Product) -> Tensor:
    """x + (silu(gate) * up) W^T + b; both: gate and up side by side"""
    return _AddedProduct.apply(both, x, product, True, *product.tensors())  # pyright: ignore[reportReturnType]


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        ctx.mark_dirty(x)
        return elementwise.rotate_(x, cos, sin, heads=heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        turned = elementwise.rotate_(
            dy.clone(memory_format=torch.contiguous_format), cos, sin, heads=ctx.heads, back=True
        )
        return turned, None, None, None


def rotated_(x: Tensor, cos: Tensor, sin: Tensor, *, heads: int) -> Tensor:
    """The first heads of x [N, heads in all, E], turned in place"""
    return _Rotated.apply(x, cos, sin, heads)  # pyright: ignore[reportReturnType]
