"""A decoder spread over ranks by FSDP2: each holds a part of every weight, and a layer is put together to compute.

Gradients are sums over ranks, never means: weights of the loss carry the global denominators.
Loading torch's sharding takes half a second. The functions here load it, so that a run on one rank does without.
"""

import copy
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hone.dist.collect import is_sharded
from hone.errors import HoneError
from hone.model.decoder import TABLE, Decoder
from hone.model.formats.foreign import Foreign

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

M = TypeVar("M", bound=nn.Module)


def mesh_of(device: torch.device) -> DeviceMesh:
    """All ranks in a line."""
    return init_device_mesh(device.type, (dist.get_world_size(),))


def shard(decoder: Decoder, mesh: DeviceMesh, *, half: torch.dtype | None = None) -> None:
    """Each layer a unit of its own; embedding, last norm and head one more, which stays together until the backward
    pass ends: log-probs are computed from the head's weight after the decoder has returned.

    half: what is computed in, where that is not the type of the weights; gradients are summed in the weights' own.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if isinstance(decoder, Foreign):
        raise HoneError("a model that runs through transformers cannot be spread over ranks: set train.shard=none")
    # torch warns of outputs that are views, which nothing may write to: no layer writes to its input
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    wide = next((p.dtype for p in decoder.parameters() if p.requires_grad), None) if half else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=wide, cast_forward_inputs=False)
    for layer in decoder.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(decoder, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    decoder.compute_dtype = half
    for unit in fsdp_units(decoder):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def fsdp_units(module: nn.Module) -> "Iterator[FSDPModule]":
    """What is put together at once."""
    from torch.distributed.fsdp import FSDPModule

    return (m for m in module.modules() if isinstance(m, FSDPModule))


def reshard(module: nn.Module) -> None:
    """No rank holds more than its part: what was put together would not see a step of the optimiser."""
    for unit in fsdp_units(module):
        unit.reshard()


@torch.no_grad()
def full_tensor(x: Tensor) -> Tensor:
    """The tensor that ranks hold parts of; every rank takes part, and has it."""
    return cast("DTensor", x).full_tensor() if is_sharded(x) else x.detach()


def full_from_part(part: Tensor, like: Tensor) -> Tensor:
    """The whole of what ranks hold parts of as they do of `like`, such as its moments."""
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((like.shape[0], *part.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    mesh = cast("DTensor", like).device_mesh
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride).full_tensor()


def cut_part(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, cut as `like` is: along its first dimension."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = cast("DTensor", like).device_mesh
    return distribute_tensor(full.to(mesh.device_type), mesh, [Shard(0)], src_data_rank=None).to_local()


def meta_copy(module: M) -> M:
    """The same module without numbers: on the meta device, at no memory cost; weights that are tied stay so."""
    tensors = {id(x): x for x in (*module.parameters(), *module.buffers())}
    memo = {
        key: nn.Parameter(x.detach().to("meta"), x.requires_grad) if isinstance(x, nn.Parameter) else x.to("meta")
        for key, x in tensors.items()
    }
    return copy.deepcopy(module, memo)


def materialise(module: M, device: torch.device) -> M:
    """A skeleton with memory of its own, its weights not yet filled in."""
    decoders = [(m, m.tied) for m in module.modules() if isinstance(m, Decoder)]
    module.to_empty(device=device)
    for decoder, tied in decoders:
        decoder.rotations(min(decoder.config.max_position_embeddings, TABLE), device=device)
        if tied:  # each of the two names was given memory
            decoder.lm_head.weight = decoder.model.embed_tokens.weight
    return module
