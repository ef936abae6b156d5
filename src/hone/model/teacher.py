"""Teachers of distillation: a head of the student's size, and a KL over the student's k likeliest tokens."""

import torch
from torch import Tensor, nn

from hone.errors import HoneError
from hone.model.decoder import Decoder
from hone.model.policy import LogRows, Policy
from hone.types import Batch, Forward


class TopKTeacher:
    """A teacher that is compared on the student's k likeliest tokens, with one bucket for all others."""

    def __init__(self, policy: Policy, k: int) -> None:
        self.policy, self.k = policy, k

    @torch.no_grad()
    def __call__(self, batch: Batch, want: frozenset[str]) -> Forward:
        return self.policy(batch, want)

    def rows_for(self, batch: Batch, student: LogRows) -> LogRows:
        """The distribution with which the student is compared."""
        return bucket_rest(student, self.policy.log_rows(batch), self.k)


def bucket_rest(student: LogRows, teacher: LogRows, k: int) -> LogRows:
    """r' such that KL(q || r') is the KL over q's k likeliest tokens and one bucket of all others.

    r' = r on those tokens and q r_rest / q_rest on the others. r' is a constant to the gradient, as is the choice of
    tokens. The gradient is then that of the KL: the sum of dq log(q / r) over them, and dq_rest log(q_rest / r_rest).
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


def trim_head(teacher: Decoder, size: int) -> Decoder:
    """The teacher with a head of `size` tokens. Rows beyond the tokenizer's last token are padding and are cut off."""
    rows = teacher.config.vocab_size
    if rows < size:
        raise HoneError(
            f"the teacher has {rows} tokens and the model {size}: distil into a model of {rows} tokens or fewer"
        )
    if rows > size:
        head = teacher.lm_head
        head.weight = nn.Parameter(head.weight.detach()[:size].clone())
        if head.bias is not None:  # a model of transformers can have one
            head.bias = nn.Parameter(head.bias.detach()[:size].clone())
    return teacher
