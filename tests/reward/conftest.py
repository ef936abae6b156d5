"""What the tests of rewards share."""

import pytest

from hone.reward.sandbox.sandbox import Sandbox, SandboxError


@pytest.fixture(scope="session")
def needs_sandbox():
    """Skips, with the reason, where the machine cannot hold a program; that the sandbox refuses there is tested too."""
    try:
        Sandbox(slots=1).close()
    except SandboxError as error:
        if "has ended" in str(error):  # its own server crashed: that is no lack of the machine
            raise
        pytest.skip(str(error))
