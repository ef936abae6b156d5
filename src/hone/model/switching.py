"""Which adapter a runner computes with."""

from contextlib import AbstractContextManager, nullcontext

from hone.errors import HoneError
from hone.rollout.runner import Switch


class Switching:
    """switch: partial(use_adapter, decoder), for `use`."""

    switch: Switch | None
    adapter: str | None = None  # None: the weights as they are

    def use(self, adapter: str | None) -> None:
        """From now on compute with this adapter; None: the weights as they are. HoneError where there is none."""
        if adapter is not None:
            if self.switch is None:
                raise HoneError("this runner was given no adapters: give it switch=..., or leave the adapter out")
            with self.switch(adapter):
                pass  # a name that is not there is said now
        self.adapter = adapter

    def adapted(self) -> AbstractContextManager[None]:
        """Inside, the adapter is on."""
        return nullcontext() if self.adapter is None or self.switch is None else self.switch(self.adapter)
