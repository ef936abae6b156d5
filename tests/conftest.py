"""What the tests of several folders share lies in this one, for pytest puts a conftest's folder on the path."""

import torch

torch.set_num_threads(1)  # the machine's cores are shared, and one thread gives the same sums everywhere
