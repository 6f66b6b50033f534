"""Log-probabilities of given tokens and of the most likely ones, for sampled tokens and for prompts.

They are those of the model's own distribution: log-softmax of the logits before logit_bias, penalties, temperature
and filters, as vLLM reports by default (`raw_logprobs`); only ids without a token are masked out beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.core.plan import TokenLogprobs
from minillm.runner.sampling_ops import top_k_lowest_id


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of R positions, on the device until :meth:`to_list`.

    ``token_ids`` int64 [R], ``logprobs`` float32 [R], ``ranks`` int64 [R] (1 = most likely; equals are ranked by id),
    ``top_ids`` int64 and ``top_logprobs`` float32 [R, max k], most likely first, and ``num_top``, k of each position.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    num_top: Sequence[int]

    def moved(self, move: Callable[[Tensor], Tensor]) -> LogprobTensors:
        """The same with each tensor replaced by `move` of it."""
        return LogprobTensors(
            token_ids=move(self.token_ids),
            logprobs=move(self.logprobs),
            ranks=move(self.ranks),
            top_ids=move(self.top_ids),
            top_logprobs=move(self.top_logprobs),
            num_top=self.num_top,
        )

    def to_list(self) -> list[TokenLogprobs]:
        """On the host, one entry per position; waits for the device."""
        columns = (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        rows = zip(*(column.tolist() for column in columns), self.num_top, strict=True)
        return [
            TokenLogprobs(token, logprob, rank, top_ids[:k], top_logprobs[:k])
            for token, logprob, rank, top_ids, top_logprobs, k in rows
        ]


def compute_logprobs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> LogprobTensors:
    """Score `token_ids` int64 [R] against `logits` float32 [R, V], with the ``num_top[i]`` most likely of row i.

    The token itself is reported apart: it is among the most likely only if it belongs there. -inf is possible for a
    masked id; a row that is not finite gives NaN.
    """
    token_logits = logits.gather(-1, token_ids[:, None])
    normaliser = logits.logsumexp(-1, keepdim=True)
    lower_id = torch.arange(logits.shape[-1], device=logits.device) < token_ids[:, None]
    ahead = (logits > token_logits).sum(-1) + (logits == token_logits).logical_and_(lower_id).sum(-1)
    top_logits, top_ids = top_k_lowest_id(logits, max(num_top, default=0))
    return LogprobTensors(
        token_ids=token_ids,
        logprobs=(token_logits - normaliser)[:, 0],
        ranks=ahead + 1,
        top_ids=top_ids,
        top_logprobs=top_logits - normaliser,
        num_top=list(num_top),
    )
