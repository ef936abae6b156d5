"""The tensors of a checkpoint in safetensors files, and an optimiser's moments by name."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hone.errors import HoneError


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Safetensors, contiguous and without shared storage."""
    plain, seen = dict[str, Tensor](), set[int]()
    for name, x in tensors.items():
        found = x.detach().cpu().contiguous()
        place = found.untyped_storage().data_ptr()
        plain[name] = found.clone() if place in seen else found
        seen.add(place)
    save_file(plain, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """What `save_tensors` wrote, or HoneError. Copies: a view of the mapped file would go with the file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise HoneError(f"{path} cannot be read ({error}): use an earlier checkpoint") from error


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state, named by the parameter's place in it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{i}.{key}": torch.as_tensor(x)
        for i, p in enumerate(parameters)
        for key, x in optimizer.state.get(p, {}).items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put the state back where `optimizer_tensors` found it."""
    parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
    for name, x in tensors.items():
        index, _, key = name.partition(".")
        if int(index) >= len(parameters):
            raise HoneError(
                f"the checkpoint's optimiser has parameter {index}, this model has {len(parameters)}: "
                "resume with the settings the run was started with"
            )
        parameter = parameters[int(index)]
        # the step count lies on the CPU, but for fused kernels
        device = parameter.device if x.ndim or optimizer.defaults.get("fused") else x.device
        optimizer.state[parameter][key] = x.to(device)
