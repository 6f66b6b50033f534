"""The sampler: from a step's logits to its tokens, for any mixture of parameters at once.

Each sampling row passes, in this order: mask of ids without a token, logit_bias, min_tokens mask, allowed tokens
(a grammar), penalties; then greedy choice, or temperature, min_p, top_k, top_p and one draw. Rows are split by what
they need into at most five groups (greedy; few candidates; the whole vocabulary with top_k, with top_p, plain), each
one batch of tensor operations; nothing loops over requests except to collect rare edits (logit_bias, min_tokens).
On a GPU no call waits for the device.

Randomness (docs/design.md, rule 7): the draw for output i of choice c inverts the row's cumulative distribution, in
the order of token ids, at one Philox number of (seed, c, i). Together with the integer weights of `sampling_ops` the
token is a pure function of the row's logits and (seed, c, i): not of batch mates, their order, or the slices work is
done in.
The alternative, an exponential race over V random numbers per row, would cost V Philox blocks per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minillm.core.sampling_params import SamplingParams
from minillm.memory.staging import Upload, upload_to
from minillm.runner.cuda_sampling import MAX_VOCAB, SamplingKernels, SlotParams, invalid_bitmap
from minillm.runner.logprobs import LogprobTensors, compute_logprobs
from minillm.runner.penalties import PenaltyState
from minillm.runner.philox import UniformRows
from minillm.runner.sampling_ops import DrawParams, Workspace, draw_from_all, draw_from_top_k

MAX_CANDIDATES = 256
"""Up to this top_k the candidates are selected with torch.topk."""

_MAX_INDEX = 2**31 - 1

MakeKernels = Callable[[int, int, Tensor | None, torch.device], SamplingKernels]
"""(most rows, first id of the padding, bitmap of other invalid ids, device); :class:`SamplingKernels` is one."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What one call sampled. ``token_ids`` int64 [R] and ``failed`` bool [R] are on the device.

    A failed row had no finite maximum (NaN or inf in its logits, or every token masked): its token is 0, a valid
    id, so that a step already under way can embed it. ``logprobs`` scores the rows ``logprob_rows`` (positions in
    the call) that asked for it; None if none did.
    """

    token_ids: Tensor
    failed: Tensor
    logprobs: LogprobTensors | None
    logprob_rows: list[int]


class SamplerState:
    """Sampling parameters of each row (sequence slot), as host arrays, with the penalty counts on the device.

    ``on_device`` says to keep the parameters of the draw there too, for the kernels.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device | str,
        eos_token_ids: Sequence[int] = (),
        upload: Upload | None = None,
        on_device: bool = False,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.upload = upload if upload is not None else upload_to(self.device)
        self.version = 0
        """Grows with every change of a row, so that what was derived from the rows can be kept until then."""
        self._eos_token_ids = tuple(eos_token_ids)
        self.assigned = np.zeros(max_num_seqs, dtype=bool)
        self.greedy = np.zeros(max_num_seqs, dtype=bool)
        self.temperature = np.ones(max_num_seqs)
        self.min_p = np.zeros(max_num_seqs)
        self.top_p = np.ones(max_num_seqs)
        self.top_k = np.full(max_num_seqs, vocab_size, dtype=np.int64)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self.uniforms = UniformRows(max_num_seqs)
        self.slot_params = SlotParams(max_num_seqs, self.device, self.upload) if on_device else None
        self.penalties = PenaltyState(max_num_seqs, vocab_size, self.device, self.upload)
        self.bias: dict[int, tuple[Tensor, Tensor]] = {}
        self.stop_ids: dict[int, Tensor] = {}

    def assign(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        choice: int = 0,
        prompt_ids: Sequence[int] = (),
        output_ids: Sequence[int] = (),
    ) -> None:
        """Give the row to a request, on admission, on resumption or as a fork; whatever it held before is dropped.

        `output_ids` are the tokens generated so far: they count as output for penalties. Raises
        InvalidParameterError if the parameters name an id outside the vocabulary.
        """
        params.check_token_ids(self.vocab_size)
        self.release(row)
        self.penalties.assign(row, params, prompt_ids, output_ids)
        self.uniforms.assign(row, seed, choice)
        self.greedy[row] = params.is_greedy or params.top_k == 1 or params.top_p == 0.0
        self.temperature[row] = params.temperature
        self.min_p[row] = params.min_p
        self.top_p[row] = params.top_p
        self.top_k[row] = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        if self.slot_params is not None:
            self._send_params(row, seed, choice)
        if params.logit_bias:
            ids = np.array(list(params.logit_bias), dtype=np.int64)
            values = np.array(list(params.logit_bias.values()), dtype=np.float32)
            self.bias[row] = (self.upload(ids), self.upload(values))
        stops = sorted({i for i in (*self._eos_token_ids, *params.stop_token_ids) if i < self.vocab_size})
        self.min_tokens[row] = min(params.min_tokens, _MAX_INDEX) if stops else 0
        if self.min_tokens[row]:
            self.stop_ids[row] = self.upload(np.array(stops, dtype=np.int64))
        self.assigned[row] = True
        self.version += 1

    def _send_params(self, row: int, seed: int, choice: int) -> None:
        assert self.slot_params is not None
        seed &= 2**64 - 1
        self.slot_params.host[row] = (
            self.temperature[row],
            self.min_p[row],
            self.top_p[row],
            self.top_k[row],
            seed - 2**64 if seed >= 2**63 else seed,
            choice,
            self.greedy[row],
        )
        self.slot_params.changed(row)

    def release(self, row: int) -> None:
        """Drop what the row holds; idempotent."""
        self.assigned[row] = False
        self.penalties.release(row)
        self.bias.pop(row, None)
        self.stop_ids.pop(row, None)
        self.min_tokens[row] = 0
        self.version += 1

    def append(self, rows: Sequence[int], tokens: Tensor) -> None:
        """Count `tokens` (int64 [R], on the device) as output of `rows`, each row at most once in a call."""
        self.penalties.append(np.asarray(rows, dtype=np.int64), tokens)


@dataclass(frozen=True, slots=True)
class RowKinds:
    """What the rows of a call ask for; as long as no row is assigned anew, the same rows ask for the same."""

    random: bool
    """Whether any is not greedy."""
    filtered: bool
    """Whether any of those has top_k or top_p."""
    biased: list[int]
    """Positions with a logit_bias."""
    min_tokens: int
    """The greatest."""
    penalised: bool
    """Whether any has penalties."""
    scored: np.ndarray
    """Positions that want logprobs."""
    scored_on_device: Tensor | None
    num_logprobs: list[int]

    def may_edit(self, indices: np.ndarray) -> bool:
        """Whether a row's logits are changed before the choice, at these output indices."""
        return bool(self.biased or self.penalised or (self.min_tokens and (indices < self.min_tokens).any()))


@dataclass(frozen=True, slots=True)
class _Group:
    """Random rows of a call that are drawn together, with all their parameters but the uniform numbers."""

    positions: np.ndarray
    rows: np.ndarray
    where: Tensor
    """`positions` on the device."""
    params: DrawParams
    few: bool
    """Whether top_k is small enough to look at that many candidates only."""
    largest_top_k: int


class Sampler:
    """Samples a step's rows from their logits, by the parameters in its ``state``."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        eos_token_ids: Sequence[int] = (),
        invalid_token_ids: Sequence[int] = (),
        upload: Upload | None = None,
        make_kernels: MakeKernels | None = None,
    ) -> None:
        """`vocab_size` is the width of the logits; `invalid_token_ids` are ids that stand for no token (padding).
        `upload` None makes one for `device`, `make_kernels` None those of a GPU (on a CPU, tensor operations)."""
        device = torch.device(device)
        if make_kernels is None and device.type == "cuda" and vocab_size <= MAX_VOCAB:
            make_kernels = SamplingKernels
        self.state = SamplerState(max_num_seqs, vocab_size, device, eos_token_ids, upload, make_kernels is not None)
        self._upload = self.state.upload
        self._workspace = Workspace(self.state.device)
        self._groups: list[_Group] = []
        self._groups_of: tuple[int, bytes] = (-1, b"")
        self._last_rows: tuple[list[int], np.ndarray] = ([], np.empty(0, dtype=np.int64))
        self._kinds: RowKinds | None = None
        self._kinds_of: tuple[int, bytes] = (-1, b"")
        invalid = sorted(set(invalid_token_ids))
        if invalid and not 0 <= invalid[0] <= invalid[-1] < vocab_size:
            raise ValueError(f"invalid_token_ids {invalid[0]}..{invalid[-1]} outside the vocabulary of {vocab_size}")
        self._first_padding = vocab_size
        while invalid and invalid[-1] == self._first_padding - 1:
            self._first_padding = invalid.pop()
        self._invalid_ids = torch.tensor(invalid, dtype=torch.int64, device=device)
        self.kernels: SamplingKernels | None = None
        if make_kernels is not None and self._first_padding:
            bitmap = torch.from_numpy(invalid_bitmap(invalid, vocab_size)).to(device) if invalid else None
            self.kernels = make_kernels(max_num_seqs, self._first_padding, bitmap, device)
        self._sent = torch.empty(2 * max_num_seqs, dtype=torch.int32, device=device)
        self._sent_views: dict[int, tuple[Tensor, Tensor]] = {}

    def sample(
        self, logits: Tensor, rows: Sequence[int], indices: Sequence[int], allowed: Tensor | None = None
    ) -> SampleResult:
        """Sample one token for each of R sampling rows.

        ``logits`` float32 [R, V] (for kernels, bfloat16 too), left as they are but for invalid ids, which may become
        -inf; ``rows``, the slot of each; ``indices``, the output index that each samples. ``allowed``: which tokens may
        come, bool [R, V] or a bitmask int32 [R, ceil(V / 32)] (bit i of word w is token 32 w + i). The same slot may
        come more than once.
        """
        row_array = self._row_array(rows)
        index_array = np.asarray(indices, dtype=np.int64)
        self._check(logits, len(row_array), len(index_array))
        if not len(row_array):
            empty = torch.zeros(0, dtype=torch.int64, device=logits.device)
            return SampleResult(empty, empty.bool(), None, [])
        kinds = self.kinds(row_array)
        if self.kernels is not None:
            logits, tokens, failed = self._sample_by_kernels(logits, row_array, index_array, allowed, kinds)
        else:
            self._mask_invalid(logits)
            work = self._edit(logits, row_array, index_array, allowed, kinds)
            maxima, tokens = _row_maxima(work)
            failed = _not_finite(maxima)
            if work is not logits:
                failed |= self._hidden_failures(logits)
            if kinds.random:
                self._draw_random(work, maxima, failed, tokens, row_array, index_array)
            tokens.masked_fill_(failed, 0)
        logprobs = None
        if kinds.scored_on_device is not None:
            scored = _take(logits, kinds.scored, kinds.scored_on_device)
            logprobs = compute_logprobs(scored, tokens[kinds.scored_on_device], kinds.num_logprobs)
        return SampleResult(tokens, failed, logprobs, kinds.scored.tolist())

    def _row_array(self, rows: Sequence[int]) -> np.ndarray:
        """`rows` as int64 [R]; in decoding they are mostly those of the last call, and comparing lists is cheap."""
        if not isinstance(rows, list):
            return np.asarray(rows, dtype=np.int64)
        known, array = self._last_rows
        if rows != known:
            array = np.array(rows, dtype=np.int64)
            self._last_rows = (list(rows), array)
        return array

    def kinds(self, rows: np.ndarray) -> RowKinds:
        """What these rows (slots, int64 [R], R > 0) ask for; ValueError if one is not assigned."""
        state = self.state
        key = (state.version, rows.tobytes())
        if self._kinds is None or key != self._kinds_of:
            if not state.assigned[rows].all():
                raise ValueError(f"rows {rows[~state.assigned[rows]].tolist()} are not assigned")
            random = ~state.greedy[rows]
            scored = np.flatnonzero(state.num_logprobs[rows] >= 0)
            self._kinds = RowKinds(
                random=bool(random.any()),
                filtered=bool((random & ((state.top_k[rows] < state.vocab_size) | (state.top_p[rows] < 1.0))).any()),
                biased=[i for i, row in enumerate(rows.tolist()) if row in state.bias] if state.bias else [],
                min_tokens=int(state.min_tokens[rows].max()),
                penalised=state.penalties.any_of(rows),
                scored=scored,
                scored_on_device=self._upload(scored) if len(scored) else None,
                num_logprobs=state.num_logprobs[rows[scored]].tolist(),
            )
            self._kinds_of = key
        return self._kinds

    def _sample_by_kernels(
        self, logits: Tensor, rows: np.ndarray, indices: np.ndarray, allowed: Tensor | None, kinds: RowKinds
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(logits that logprobs may score, tokens, failed)."""
        assert self.kernels is not None and self.state.slot_params is not None
        edit = allowed is not None or kinds.may_edit(indices)
        if edit or len(kinds.scored):
            logits = logits.float()  # as it is, if it is float32
            self._mask_invalid(logits)
        work = self._edit(logits, rows, indices, allowed, kinds) if edit else logits
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        failed = torch.empty(len(rows), dtype=torch.bool, device=logits.device)
        slots, output_indices = self._send(rows, indices)
        self.kernels.sample(
            work,
            slots,
            output_indices,
            self.state.slot_params.on_device(),
            tokens,
            failed,
            random=kinds.random,
            filtered=kinds.filtered,
        )
        if work is not logits:
            failed |= self._hidden_failures(logits)
            tokens.masked_fill_(failed, 0)
        return logits, tokens, failed

    def _send(self, rows: np.ndarray, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Both as int32 on the device, where the next call overwrites them, in stream order."""
        count = len(rows)
        views = self._sent_views.get(count)
        if views is None:
            if 2 * count > len(self._sent):
                self._sent = torch.empty(4 * count, dtype=torch.int32, device=self.state.device)
                self._sent_views.clear()
            views = self._sent_views[count] = (self._sent[:count], self._sent[count : 2 * count])
        both = np.empty(2 * count, dtype=np.int32)
        both[:count] = rows
        both[count:] = indices
        self._upload.into(self._sent, both)
        return views

    @staticmethod
    def _hidden_failures(logits: Tensor) -> Tensor:
        """Rows in which an edit may hide a NaN or inf of the model behind its mask."""
        return _not_finite(logits.amax(-1))

    def score(self, logits: Tensor, next_ids: Tensor, num_top: int) -> LogprobTensors:
        """Score a chunk of a prompt: row i of `logits` [R, V] predicts ``next_ids[i]``. For `prompt_logprobs`."""
        self._mask_invalid(logits)
        return compute_logprobs(logits, next_ids, [num_top] * len(next_ids))

    def _check(self, logits: Tensor, num_rows: int, num_indices: int) -> None:
        expected = (num_rows, self.state.vocab_size)
        right = logits.dtype == torch.float32 or (self.kernels is not None and logits.dtype == torch.bfloat16)
        if logits.shape != expected or not right or num_indices != num_rows:
            raise ValueError(
                f"logits {tuple(logits.shape)} {logits.dtype} and {num_indices} indices for {num_rows} rows; "
                f"float32 {expected} is needed"
            )

    def _mask_invalid(self, logits: Tensor) -> None:
        if self._first_padding < self.state.vocab_size:
            logits[:, self._first_padding :] = -torch.inf
        if len(self._invalid_ids):
            logits.index_fill_(-1, self._invalid_ids, -torch.inf)

    def _edit(
        self, logits: Tensor, rows: np.ndarray, indices: np.ndarray, allowed: Tensor | None, kinds: RowKinds
    ) -> Tensor:
        """The logits after bias, masks and penalties: a copy, or `logits` itself where no row needs any."""
        if allowed is None and not kinds.may_edit(indices):
            return logits
        state, biased = self.state, kinds.biased
        held_back = np.flatnonzero(indices < state.min_tokens[rows])
        penalised = state.penalties.active(rows)
        if not (biased or len(held_back) or len(penalised) or allowed is not None):
            return logits
        work = self._workspace.take("logits", logits.shape, torch.float32).copy_(logits)
        flat = work.view(-1)
        width = state.vocab_size
        if biased:
            ids = torch.cat([state.bias[int(rows[i])][0] + i * width for i in biased])
            flat[ids] += torch.cat([state.bias[int(rows[i])][1] for i in biased])
        if len(held_back):
            stops = torch.cat([state.stop_ids[int(rows[i])] + i * width for i in held_back.tolist()])
            flat.index_fill_(0, stops, -torch.inf)
        if allowed is not None:
            work.masked_fill_(_allowed_bits(allowed, width).logical_not(), -torch.inf)
        if len(penalised):
            state.penalties.apply(work, penalised, rows[penalised])
        return work

    def _draw_random(
        self, work: Tensor, maxima: Tensor, failed: Tensor, tokens: Tensor, rows: np.ndarray, indices: np.ndarray
    ) -> None:
        """Overwrite `tokens` [R] at the rows that are not greedy."""
        if work.device.type != "cpu" or failed.any():
            # NaN must not reach the integer weights; a row of zeros is as good as any, its token is dropped.
            work = work.masked_fill(failed[:, None], 0.0)
            maxima = maxima.masked_fill(failed, 0.0)
        for group in self._grouped(rows):
            uniforms = self.state.uniforms.take(group.rows, indices[group.positions])
            params = group.params._replace(uniform=self._upload(uniforms))
            group_logits = _take(work, group.positions, group.where)
            group_maxima = _take(maxima, group.positions, group.where)
            if group.few:
                drawn = draw_from_top_k(group_logits, group_maxima, params, group.largest_top_k, self._workspace)
            else:
                drawn = draw_from_all(group_logits, group_maxima, params, self._workspace)
            tokens[group.where] = drawn

    def _grouped(self, rows: np.ndarray) -> list[_Group]:
        """The random rows by what they need; kept while the same rows come with the same parameters, as in decoding."""
        state = self.state
        key = (state.version, rows.tobytes())
        if key != self._groups_of:
            random = ~state.greedy[rows]
            by_rank = random & (state.top_k[rows] < state.vocab_size)
            few = by_rank & (state.top_k[rows] <= MAX_CANDIDATES)
            by_mass = random & ~by_rank & (state.top_p[rows] < 1.0)
            parts = (few, by_rank & ~few, by_mass, random & ~by_rank & ~by_mass)
            self._groups = [self._group(np.flatnonzero(part), rows, part is few) for part in parts if part.any()]
            self._groups_of = key
        return self._groups

    def _group(self, positions: np.ndarray, rows: np.ndarray, few: bool) -> _Group:
        state = self.state
        rows = rows[positions]
        min_p, top_p, top_k = state.min_p[rows], state.top_p[rows], state.top_k[rows]
        packed = self._upload(np.stack((state.temperature[rows], min_p, top_p, top_k)))
        params = DrawParams(
            temperature=packed[0].float(),
            min_p=packed[1].float(),
            top_p=packed[2],
            top_k=packed[3].to(torch.int64),
            uniform=packed[0],
            any_min_p=bool((min_p > 0.0).any()),
            any_top_p=bool((top_p < 1.0).any()),
            any_top_k=bool((top_k < state.vocab_size).any()),
        )
        return _Group(positions, rows, self._upload(positions), params, few, int(top_k.max()))


def _take(tensor: Tensor, positions: np.ndarray, where: Tensor) -> Tensor:
    """Rows `positions` of the tensor (`where`: the same on its device); no copy if they are all of them."""
    return tensor if len(positions) == len(tensor) else tensor.index_select(0, where)


def _row_maxima(work: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's maximum and where it is first; NaN counts as the greatest.

    On a CPU by numpy, whose argmax is vectorised: 8 x 49152 take 35 us on one thread, torch's `max` 185.
    """
    if work.device.type != "cpu":
        maxima, tokens = work.max(dim=-1)
        return maxima, tokens
    tokens = torch.from_numpy(work.numpy().argmax(-1))
    return work.gather(-1, tokens[:, None])[:, 0], tokens


def _not_finite(maxima: Tensor) -> Tensor:
    """Rows whose maximum is NaN or infinite; `x - x` is 0 for all other numbers (two operations, not six)."""
    return (maxima - maxima) != 0.0


def _allowed_bits(allowed: Tensor, vocab_size: int) -> Tensor:
    """The mask as bool [R, V], whichever form it came in."""
    if allowed.dtype == torch.bool:
        return allowed
    bits = (allowed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=allowed.device)) & 1
    return bits.view(len(allowed), -1)[:, :vocab_size].bool()
