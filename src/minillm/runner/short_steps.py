"""Steps with a few tokens of prompts as CUDA graphs: a short prompt, what a cached prefix leaves of one, and either of
them beside rows that decode.

Up to some hundred tokens a GPU is done with a layer's kernels before Python has launched the next ones. So these steps
are padded to a few numbers of tokens and captured, as decode steps are. A graph serves any division of its tokens into
decode rows, chunks and padding, since each of attention's kernels finds what is its own on the device:

```
tokens     d d d d d p p p p q q q - - -      5 decode rows, two chunks, padding
decode     lengths of the first rows; -1 where the token is none of a decode row: nothing is done
prefill    the plan's lists name the chunks' tokens and sequences in the whole step
```
So there are two graphs for each size, with and without the decode kernel, and not one for each pair of numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.attention.cuda import CudaAttention
from minillm.core.plan import StepPlan
from minillm.models.cuda_decoder import CudaDecoder
from minillm.runner.batch_builder import StepBatch
from minillm.runner.cuda_batch_builder import CudaBatchBuilder, Padding
from minillm.runner.cuda_graphs import Capture, StepGraphs
from minillm.runner.finite_rows import flag_not_finite

SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
"""Tokens to pad to; padding costs what its share of a step does."""

_LAUNCH_SECONDS = 2e-4
_OPERATIONS_PER_SECOND = 5e14
"""What a layer's launches take from Python, and what a GPU computes in that time (H200, bfloat16): roughly how many
tokens there are below which launching is the slower. It decides on speed only."""


def sizes_for(decoder: CudaDecoder) -> list[int]:
    """The sizes at which launching takes longer than computing."""
    layer = decoder.model.layers[0]
    operations = 2 * sum(x.in_features * x.out_features for x in (layer.qkv, layer.output, layer.gate_up, layer.down))
    most = _LAUNCH_SECONDS * _OPERATIONS_PER_SECOND / operations
    return [size for size in SIZES if size <= most] or [SIZES[0]]


class ShortSteps:
    """Steps with prefill chunks, of at most as many tokens as the largest size, decode rows included.

    `prefills` are the graphs of chunks alone, `mixed` those of decode rows and chunks. `enabled` says whether steps are
    taken at all: not with attention that no graph can hold; it may be turned off to measure what that costs.
    """

    def __init__(
        self,
        decoder: CudaDecoder,
        attention: CudaAttention,
        max_num_seqs: int,
        capture: Capture | None,
        not_finite: Tensor,
    ) -> None:
        """`not_finite` bool [as many tokens as there may be] gets flags of tokens whose hidden state is not finite."""
        sizes = sizes_for(decoder)
        self.prefills, self.mixed = StepGraphs(sizes, capture), StepGraphs(sizes, capture)
        self._decoder, self._attention, self._max_num_seqs = decoder, attention, max_num_seqs
        self._not_finite = not_finite
        self.enabled = attention.prefill_layout is not None
        self._layout: object = None
        most, device = sizes[-1], decoder.model.device
        self._workspace = decoder.workspace(most)
        message = CudaBatchBuilder.message_bytes(most, max_num_seqs)
        self._message = torch.zeros(message, dtype=torch.uint8, device=device)
        self._tables = torch.zeros((max_num_seqs, attention.table_width), dtype=torch.int32, device=device)

    def padding(self, plan: StepPlan) -> Padding | None:
        """What to pad the plan's step to for :meth:`run`; None if it is none of these steps."""
        tokens, graphs = plan.num_tokens, self.prefills
        if not plan.prefills or not self.enabled or tokens > graphs.sizes[-1]:
            return None
        size = graphs.size_for(tokens)
        return Padding(size, min(size, self._max_num_seqs), self._message)

    def run(self, batch: StepBatch) -> Tensor:
        """Hidden states [T, hidden_size] of a padded batch, valid until the next call; flags what is not finite."""
        assert batch.padded is not None
        attention, (input_ids, positions) = self._attention, batch.padded
        attention.begin_padded(batch.metadata, self._tables)

        def step(_: int) -> None:
            attention.gather_tables()
            hidden = self._decoder.forward(input_ids, positions, attention, self._workspace)
            flag_not_finite(hidden, self._not_finite[: len(hidden)])

        layout, size = attention.prefill_layout, len(input_ids)
        if layout is None:  # a long context in pieces
            step(size)
        else:
            if layout != self._layout:  # lists have moved since
                self.prefills.forget()
                self.mixed.forget()
                self._layout = layout
            (self.mixed if batch.metadata.num_decodes else self.prefills).run(size, step)
        return self._workspace.hidden[: batch.num_tokens]

    @property
    def reserved_bytes(self) -> int:
        """Device memory that the graphs may take."""
        return self.prefills.reserved_bytes + self.mixed.reserved_bytes

    def close(self) -> None:
        """Drop the graphs; steps run launch by launch from now on."""
        self.prefills.close()
        self.mixed.close()
