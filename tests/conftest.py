"""What the tests of several folders share lies in this one, for pytest puts a conftest's folder on the path."""

import torch

from hone.model.kernels.cpp.library import library

torch.set_num_threads(1)  # the machine's cores are shared, and one thread gives the same sums everywhere
library()  # where it is still to be compiled, that is told on stderr now, and not in the middle of some test
