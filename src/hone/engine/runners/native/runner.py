"""The runner whose layers are C++."""

from hone.engine.runner import Runner
from hone.engine.runners.native.layers import NativeInvariantLayers, NativeLayers, why_not_covered
from hone.engine.runners.registry import Needs, RunnerBackend
from hone.engine.runners.torch.layers import TorchLayers
from hone.engine.runners.torch.runner import TorchRunner, rows_that_fit
from hone.model.decoder import Decoder


class NativeRunner(TorchRunner):
    """The torch runner with layers in C++."""

    @staticmethod
    def layers_for(*, invariant: bool, int8: bool) -> type[TorchLayers]:
        return NativeInvariantLayers if invariant else NativeLayers


class NativeBackend(RunnerBackend):
    """Small and large models in float32 on a CPU."""

    name, priority = "native", 1

    def covers(self, decoder: Decoder, needs: Needs) -> str | None:
        return "weights in 8 bits" if needs.int8 else why_not_covered(decoder) or None

    def make(self, decoder: Decoder, needs: Needs) -> Runner:
        rows = rows_that_fit(decoder, needs)
        return NativeRunner(
            decoder, max_rows=rows, capacity=needs.capacity, switch=needs.switch, invariant=needs.invariant
        )


BACKENDS = (NativeBackend(),)
