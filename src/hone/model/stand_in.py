"""Leaves in the place of weights while a pass is recorded."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from hone.model.decoder import Decoder


class StandIns:
    """Leaves that share the weights' memory, for autograd remembers on which stream it first met a weight itself."""

    def __init__(self, decoder: Decoder) -> None:
        self.places = list[tuple[nn.Module, str, nn.Parameter, Tensor]]()
        made = dict[nn.Parameter, Tensor]()
        for module in (*decoder.model.layers.modules(), decoder.model.norm):
            for name, p in module.named_parameters(recurse=False):
                leaf = made.setdefault(p, p.detach().requires_grad_(p.requires_grad))
                self.places.append((module, name, p, leaf))
        self.trained = [(p, leaf) for p, leaf in made.items() if p.requires_grad]

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Inside, the decoder computes with them."""
        try:
            for module, name, _, leaf in self.places:
                module._parameters[name] = leaf  # pyright: ignore[reportArgumentType]
            yield
        finally:
            for module, name, p, _ in self.places:
                module._parameters[name] = p
