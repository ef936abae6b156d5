"""The files of checkpoints: a folder is complete or absent. It is written aside, hashed, synced and renamed.

Nothing is pickled. Weights and optimiser moments are safetensors, everything else is JSON.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hone.errors import HoneError, Unsaved
from hone.storage import names
from hone.storage.textfile import read_text

# --- folders ---


def _nothing() -> None:
    """The default of what is done between two files."""


def save_folder(folder: Path, write: Callable[[Path], None], *, between: Callable[[], None] = _nothing) -> Path:
    """Call `write` on a folder aside, then rename it to `folder`; on any failure nothing is left behind.

    between: called before each file is made safe, and before the folder takes its place; what it raises ends it.
    """
    aside, before = _aside(folder), _aside(folder, "old.tmp")
    for left in (aside, before):  # of a killed process that had this one's number
        shutil.rmtree(left, ignore_errors=True)
    try:
        folder.parent.mkdir(exist_ok=True)  # and no folder above it: where a run's is gone, it is gone
        aside.mkdir()
        write(aside)
        files = sorted(p for p in aside.rglob("*") if p.is_file())
        manifest = dict[str, str]()
        for path in files:
            between()
            manifest[str(path.relative_to(aside))] = digest(path)
            sync(path)
        (aside / names.MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in (aside / names.MANIFEST, *(p for p in aside.rglob("*") if p.is_dir()), aside):
            sync(path)
        between()
        if folder.exists():
            os.replace(folder, before)  # removing it first would leave neither for as long as that takes
        os.replace(aside, folder)
        sync(folder.parent)
    except Exception as error:
        if number := _disk_error(error):
            raise _not_saved(folder, number) from error
        raise
    finally:
        if before.exists() and not folder.exists():
            os.replace(before, folder)
        for left in (aside, before):
            shutil.rmtree(left, ignore_errors=True)
    return folder


def _aside(path: Path, ending: str = "tmp") -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{ending}")


def _disk_error(error: Exception) -> int:
    """What the disk answered, 0 for another error; libraries in Rust wrap it in exceptions of their own."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    number = re.search(r"\(os error (\d+)\)", str(error))
    return int(number[1]) if number else 0


def _not_saved(path: Path, number: int) -> HoneError:
    remedies = {
        errno.EEXIST: "something that is no folder is in the way, remove it",
        errno.ELOOP: "a link to itself is in the way, remove it",
        errno.ENOENT: "its folder was removed or renamed meanwhile, start the run again",
        errno.EACCES: "see who may write there, or set out= to another folder",
        errno.EPERM: "see who may write there, or set out= to another folder",
        errno.EROFS: "make the disk writable, or set out= to another one",
        errno.EISDIR: "a folder is in the way, remove it",
        errno.ENOTDIR: "a file is in the way, remove it",
    }
    remedy = remedies.get(number, "free some space or set out= to another disk")
    return Unsaved(
        f"could not save {path}: {os.strerror(number)}; {remedy}, what was saved before is untouched",
        elsewhere=number in remedies,  # else the run itself goes on where it is, when there is space
    )


def sweep(folder: Path) -> None:
    """Remove what a killed process was writing aside in this folder, and bring back what it had put aside."""
    for path in folder.glob(".*.old.tmp"):
        name = path.name[1:].removesuffix(".old.tmp").rpartition(".")[0]
        if not (folder / name).exists():  # killed between two renames: neither of the two was in its place
            os.replace(path, folder / name)
    for path in folder.glob(".*.tmp"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def verify(folder: Path) -> None:
    """Every file of the manifest is there and has its hash, or HoneError."""
    try:
        manifest: Any = json.loads(read_text(folder / names.MANIFEST))
    except (OSError, ValueError, RecursionError) as error:
        raise HoneError(
            f"{folder} is not a complete checkpoint: no readable {names.MANIFEST}; use an earlier one"
        ) from error
    if not isinstance(manifest, dict) or not manifest:
        raise HoneError(f"{folder} is not a complete checkpoint: {names.MANIFEST} names no file; use an earlier one")
    if folder.is_symlink():
        raise HoneError(f"{folder} is a link, and may lead out of the run: copy the checkpoint itself there")
    for name, expected in manifest.items():
        path = folder / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise HoneError(
                f"{folder / names.MANIFEST} names {name}, which is outside of it: use an earlier checkpoint"
            )
        if not path.is_file() or digest(path) != expected:
            raise HoneError(f"{path} is missing or damaged: use an earlier checkpoint")


def digest(path: Path) -> str:
    """SHA-256 of the file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make what was written to the file, or the names in the folder, outlive a loss of power."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in its place would be waited for
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a small file in one step; on any failure the old one stays and nothing is left behind."""
    aside = _aside(path)
    try:
        # a lone surrogate, as in a file name that is not UTF-8, becomes its JSON escape
        aside.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))
        sync(aside)
        os.replace(aside, path)
        sync(path.parent)
    except OSError as error:
        raise _not_saved(path, _disk_error(error)) from error
    finally:
        aside.unlink(missing_ok=True)


# --- which checkpoint ---


def name_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return names.STEP.format(step)


def checkpoints(root: Path) -> dict[int, Path]:
    """The folders by their step, oldest first, whole or not."""
    folders = [path for path in root.glob("*") if path.is_dir()]
    return dict(sorted((int(match[1]), path) for path in folders if (match := names.STEPS.fullmatch(path.name))))


Spare = Callable[[Collection[int]], Collection[int]]  # of these steps, those to keep beside the newest


def save(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    *,
    keep: int = 2,
    spare: Spare = lambda steps: (),
    between: Callable[[], None] = _nothing,
) -> Path:
    """A new checkpoint; `latest` names it, then all but the newest `keep`, and those to spare, are removed."""
    folder = save_folder(root / name_of(step), write, between=between)
    point(root, names.LATEST, folder)
    found = checkpoints(root)
    earlier = [n for n in found if n <= step]
    later = [n for n in found if n > step]  # damaged, or this run would have gone on from them
    spared = spare(earlier)
    for old in (*earlier[: -max(keep, 1)], *later):
        if old not in spared:
            _remove(found[old])
    return folder


def _remove(folder: Path) -> None:
    """Rename it first, so that a kill leaves nothing that looks like a damaged checkpoint."""
    aside = _aside(folder)
    os.replace(folder, aside)
    shutil.rmtree(aside)


def point(root: Path, name: str, folder: Path) -> None:
    """Let the file `name` (latest, best) say which folder it is."""
    if not (root / name).is_file() or (root / name).read_bytes() != folder.name.encode():
        write_atomically(root / name, folder.name)


def latest(
    root: Path, *, every: int = 1, but: Collection[str] = (), note: Callable[[str], None] = lambda text: None
) -> Path | None:
    """The newest checkpoint that is whole, or None where there is none; `note` is told why one is passed over.

    every: of steps that are multiples of it; but: and not of these names.
    """
    found = [path for step, path in checkpoints(root).items() if step % every == 0 and path.name not in but]
    for folder in reversed(found):
        try:
            verify(folder)
        except HoneError as error:
            note(f"passed over {folder.name}: {error}")
            continue
        return folder
    return None


def read_json(path: Path, *, remedy: str = "use an earlier checkpoint") -> Any:
    """The file's content, or HoneError."""
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise HoneError(f"{path} cannot be read ({error}): {remedy}") from error


def best(scores: Mapping[int, float], *, lowest: bool = False) -> int | None:
    """The step with the best score, the first of equals; None where no score is a number.

    >>> best({2: 0.5, 4: 0.7, 6: 0.7, 8: math.nan}), best({2: 0.5, 4: 0.7}, lowest=True), best({})
    (4, 2, None)
    """
    finite = {step: score for step, score in scores.items() if math.isfinite(score)}
    if not finite:
        return None
    top = min(finite.values()) if lowest else max(finite.values())
    return min(step for step, score in finite.items() if score == top)


def milestones(steps: Collection[int], every: int) -> set[int]:
    """The steps that are multiples of `every`; 0: none.

    >>> sorted(milestones(range(1, 10), 4)), milestones([4], 0)
    ([4, 8], set())
    """
    return {step for step in steps if every and step % every == 0}


# --- tensors ---


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
