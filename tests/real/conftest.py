"""The real model, SmolLM2-135M-Instruct, where it has been fetched: `make real-model`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hone.data.text.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.model.decoder import Decoder
from hone.model.formats.cache import resolve
from hone.model.formats.folder import load_decoder

NAME = "smollm2-135m"


@pytest.fixture(scope="session")
def folder() -> Path:
    try:
        return resolve(NAME)
    except HoneError as error:
        pytest.skip(f"{error} (`make real-model` does, where there is a network)")


@pytest.fixture(scope="session")
def decoder(folder: Path) -> Decoder:
    torch.set_num_threads(1)
    return load_decoder(folder).eval()


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def theirs(folder: Path) -> Any:
    """The same folder as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def their_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
