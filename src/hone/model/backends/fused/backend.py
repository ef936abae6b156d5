"""What the fused backend covers, and the functions that compute it."""

from functools import partial

from torch import Tensor

from hone.model.backends.fused.cuda_graphs import CudaGraphs
from hone.model.backends.fused.fused_linear import fused_layer
from hone.model.backends.fused.shared_attention import SharedAttention
from hone.model.backends.fused.streams import CudaStreams
from hone.model.backends.fused.vocab import FusedVocab
from hone.model.decoder import Decoder, LayerBackend, Pass


class FusedLayers(LayerBackend):
    """Layers in as few products as they can be."""

    name, priority = "fused", 1

    def covers(self, decoder: Decoder, given: Pass) -> str | None:
        return None if given.x.is_cuda or decoder.backends is not None else "on a CPU plain layers are as fast"

    def hidden_states(self, decoder: Decoder, given: Pass) -> Tensor:
        return decoder.each_layer(given, partial(fused_layer, given.rotation()))


BACKENDS = (FusedLayers(), SharedAttention(), FusedVocab(), CudaGraphs(), CudaStreams())
