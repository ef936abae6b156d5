"""What the native backend covers, and the functions that compute it."""

from functools import partial

import torch
from torch import Tensor, nn

from hone.model.backends.native.layer import NativePlan, final_norm, native_layer
from hone.model.backends.native.stack import repeats_tokens, run_stack, runs_by_bundle, stackable
from hone.model.backends.native.vocab import NativeVocab
from hone.model.decoder import Decoder, LayerBackend, Pass
from hone.model.kernels.cpp.library import library
from hone.model.rows import Rows, Tiles


class NativeLayerBackend(LayerBackend):
    """Layers in C++, all at once where the model is small."""

    name, priority = "native", 2

    def covers(self, decoder: Decoder, given: Pass) -> str | None:
        x, mask, config = given.x, given.mask, decoder.config
        # runs compute in float32; float64 is for checks, which set decoder.backends
        kinds = (torch.float32,) if decoder.backends is None else (torch.float32, torch.float64)
        if not x.is_cpu or x.dtype not in kinds:
            return f"{x.dtype} on {x.device}"
        if config.qk_norm or any(config.windows or ()):
            return "norms of queries and keys, or attention windows"
        if isinstance(mask, Tensor) or not x.shape[0] * x.shape[1]:
            return "a mask of its own, or no token"
        if isinstance(mask, Rows) and isinstance(mask.by, Tiles):
            return "rows laid out for GPU kernels, with spans beyond the end of the list"
        found = library()
        if isinstance(found, str):
            return found
        if stackable(decoder, x.dtype) is None and any(p.dtype != x.dtype for p in decoder.parameters()):
            return "weights of several types"
        return None

    def hidden_states(self, decoder: Decoder, given: Pass) -> Tensor:
        plan, model = NativePlan.of(decoder, given), decoder.model
        if plan.stack is None or given.checkpoint_layers:
            return decoder.each_layer(given, partial(native_layer, plan))
        if given.tokens is not None and repeats_tokens(model.embed_tokens, given.tokens):
            stack = plan.stack.from_embedding(model.embed_tokens.weight, given.tokens)
            return final_norm(model.norm, run_stack(given.x, stack, embedding=model.embed_tokens.weight))
        return final_norm(model.norm, run_stack(given.x, plan.stack))

    def reads_many_rows(self, model: nn.Module) -> bool:
        decoder = getattr(model, "decoder", None)
        if not isinstance(decoder, Decoder) or not decoder.takes_rows:  # another library's model has no layers of ours
            return False
        # where layers are checkpointed, each is a function of its own
        return not getattr(model, "checkpoint_layers", None) and runs_by_bundle(decoder)

    def same_bits_as_sampler(self, model: nn.Module) -> bool:
        return self.reads_many_rows(model)


BACKENDS = (NativeLayerBackend(), NativeVocab())
