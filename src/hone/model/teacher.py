"""A frozen model to learn from: whether it fits, and the comparison with the student's likeliest tokens alone."""

import torch
from torch import Tensor, nn

from hone.errors import HoneError
from hone.model.decoder import Decoder
from hone.model.policy import LogRows, Policy
from hone.types import Batch, Forward


class TopKTeacher:
    """The teacher seen through the student's k likeliest tokens, with one bucket for all the others."""

    def __init__(self, policy: Policy, k: int) -> None:
        self.policy, self.k = policy, k

    @torch.no_grad()
    def __call__(self, batch: Batch, want: frozenset[str]) -> Forward:
        return self.policy(batch, want)

    def rows_beside(self, batch: Batch, student: LogRows) -> LogRows:
        """What the student is compared with, which depends on the student."""
        return lumped(student, self.policy.log_rows(batch), self.k)


def lumped(student: LogRows, teacher: LogRows, k: int) -> LogRows:
    """r' such that KL(q || r') is the KL over q's k likeliest tokens and one bucket of the rest, a divergence too.

    r' = r on those tokens and q r_rest / q_rest on the others. Held fixed it gives the gradient too, where the choice
    of tokens is fixed as well: the sum of dq log(q / r) over them, and dq_rest log(q_rest / r_rest).
    """

    @torch.no_grad()
    def rows(at: slice) -> Tensor:
        logq, logr = student(at), teacher(at)
        if k >= logq.shape[-1]:
            return logr
        kept = torch.zeros_like(logq, dtype=torch.bool).scatter_(-1, logq.topk(k).indices, True)
        rest = [x.masked_fill(kept, -torch.inf).logsumexp(-1, keepdim=True) for x in (logq, logr)]
        return torch.where(kept, logr, logq + (rest[1] - rest[0]))

    return rows


def trimmed(teacher: Decoder, size: int) -> Decoder:
    """The teacher with a head of `size` tokens: what is cut off is padding beyond the tokenizer's last one."""
    had = teacher.config.vocab_size
    if had < size:
        raise HoneError(
            f"the teacher tells {had} tokens apart and the model {size}: distil into a model of {had} tokens or fewer"
        )
    if had > size:
        head = teacher.lm_head
        head.weight = nn.Parameter(head.weight.detach()[:size].clone())
        if head.bias is not None:  # a model of transformers can have one
            head.bias = nn.Parameter(head.bias.detach()[:size].clone())
    return teacher
