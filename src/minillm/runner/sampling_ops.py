"""Drawing a token from rows of logits: pure tensor functions without state, for any device.

Every result depends on the row alone, bit for bit, whatever rows are beside it. Floating-point sums over a vocabulary
would break that (their order depends on shapes), so probabilities are held as *weights*: the integers
floor(2^40 * exp((l - max) / temperature)). Each weight is an elementwise function of its logit; the sums that select
the nucleus and the token are integer sums, exact in any order, grouping and size of batch. A token less likely than
the best one by more than a factor 2^40 has weight 0: 1e-12, far below what a float32 cumulative sum resolves.

Candidates are ordered by (logit descending, id ascending), so ties go to the lowest id. The draw itself inverts the
cumulative weights in the order of ids, with one uniform number per row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_WEIGHT_SCALE = 2.0**40
_HEAD = 128
_BINS = 2048
_BINS_PER_NAT = 64.0
_LARGEST_KEY = (1 << 31) - 1
_DIGITS = ((21, 11), (10, 11), (0, 10))
"""(shift, bits) of a 32-bit key's digits, highest first."""
# Slices bound the temporary memory; on a CPU they also stay in the cache (5 rows of 49,152). 2^22 weights of up to
# 2^40 each cannot overflow an int64 sum.
_SLICE_ELEMENTS = {"cpu": 1 << 18}
_SLICE_ELEMENTS_OTHER = 1 << 22


class DrawParams(NamedTuple):
    """Parameters of R rows, each [R], and which of them are used at all. Off: top_k >= V, top_p = 1, min_p = 0."""

    temperature: Tensor
    """float32, > 0."""
    min_p: Tensor
    """float32."""
    top_p: Tensor
    """float64, > 0."""
    top_k: Tensor
    """int64, >= 1."""
    uniform: Tensor
    """float64 in (0, 1)."""
    any_min_p: bool = True
    any_top_p: bool = True
    any_top_k: bool = True

    def select(self, which: slice | Tensor) -> DrawParams:
        """The parameters of some of the rows, by slice or by int64 indices."""
        return self._replace(**{name: getattr(self, name)[which] for name in self._fields[:5]})


class Workspace:
    """Large temporaries, kept from call to call: touching fresh memory can cost more than the arithmetic on it.

    A tensor taken under a name is valid until the name is taken again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return buffer[:size].view(shape)


def draw_from_all(logits: Tensor, maxima: Tensor, params: DrawParams, workspace: Workspace) -> Tensor:
    """Draw from rows of logits [R, V] with maxima [R], all of them finite; returns ids int64 [R].

    Rows without top_k and top_p need the cumulative weights alone. Rows with top_p try the 128 most likely tokens first
    (:func:`_draw_from_head`); the others, and rows with a large top_k, find the cut in a histogram
    (:func:`_draw_filtered`), so even a flat distribution is never sorted as a whole. One row of 49,152 on one core of
    a Xeon with AVX-512: 0.15 ms plain, 0.4 ms in the head, 1 to 2 ms by histogram; a sort takes 3 ms.

    On a GPU the number of candidates must not be asked for, since that would wait for the device: there the cuts of
    top_k and top_p are found by :func:`_keep_prefix_dense` over whole rows. The tokens are the same.
    """
    num_rows, vocab_size = logits.shape
    step = max(1, _SLICE_ELEMENTS.get(logits.device.type, _SLICE_ELEMENTS_OTHER) // vocab_size)
    parts = [
        _draw_slice(logits[i : i + step], maxima[i : i + step], params.select(slice(i, i + step)), workspace)
        for i in range(0, num_rows, step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _draw_slice(logits: Tensor, maxima: Tensor, params: DrawParams, workspace: Workspace) -> Tensor:
    scaled, weights = _weights(logits, maxima, params, workspace)
    if logits.device.type != "cpu":
        return _draw_dense(weights, logits, params, workspace)
    if params.any_top_k:
        return _draw_filtered(scaled, weights, logits, params, workspace)
    if not params.any_top_p:
        return _draw(weights, params.uniform, workspace)
    tokens, known = _draw_from_head(weights, logits, params)
    if not known.all():
        rest = known.logical_not().nonzero()[:, 0]
        tokens[rest] = _draw_filtered(scaled[rest], weights[rest], logits[rest], params.select(rest), workspace)
    return tokens


def _draw_from_head(weights: Tensor, logits: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
    """Draw with top_p from the most likely tokens of rows [R, V]: ids [R], and whether each is the row's token.

    It is if the nucleus ends among tokens above the least value of the head; past that the row must be searched.
    """
    head = min(_HEAD, logits.shape[1])
    values, ids = logits.topk(head, dim=-1)
    certain = values > values[:, -1:] if head < logits.shape[1] else torch.ones_like(values, dtype=torch.bool)
    ids = ids.gather(-1, _order_keys(values, ids).sort(dim=-1, descending=True).indices)
    candidates = weights.gather(-1, ids)
    limit = _mass_limit(weights.sum(-1), params.top_p)
    known = (candidates * certain).sum(-1) >= limit
    return _draw_candidates(ids, candidates, limit, params.uniform), known


def draw_from_top_k(logits: Tensor, maxima: Tensor, params: DrawParams, k: int, workspace: Workspace) -> Tensor:
    """As :func:`draw_from_all` for rows that all have top_k <= k, with k small: only k candidates are looked at."""
    values, ids = top_k_lowest_id(logits, k)
    _, weights = _weights(values, maxima, params, workspace)
    rank = torch.arange(weights.shape[1], device=logits.device)
    weights.masked_fill_(rank >= params.top_k[:, None], 0)
    return _draw_candidates(ids, weights, _mass_limit(weights.sum(-1), params.top_p), params.uniform)


def _draw_candidates(ids: Tensor, weights: Tensor, limit: Tensor, uniform: Tensor) -> Tensor:
    """Draw from candidates [R, K] in (logit descending, id ascending) order, cut where `limit` [R] is reached."""
    preceding = weights.cumsum(-1) - weights
    weights = weights.masked_fill(preceding >= limit[:, None], 0)
    ids, order = ids.sort(dim=-1)
    picked = _draw(weights.gather(-1, order), uniform)
    return ids.gather(-1, picked[:, None])[:, 0]


def top_k_lowest_id(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row as (values, ids), each [R, k], in the order (value descending, id ascending).

    torch.topk leaves open which of equal values it returns. On a CPU only the rows where that matters (the k-th and
    the next value are equal) are done again with unique keys; elsewhere all are, which needs no synchronisation.
    """
    vocab_size = logits.shape[-1]
    k = min(k, vocab_size)
    if k == 0:
        return logits[:, :0], torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    every = torch.arange(vocab_size, device=logits.device)
    if logits.device.type != "cpu":
        ids = _order_keys(logits, every).topk(k, dim=-1).indices
        return logits.gather(-1, ids), ids
    values, ids = logits.topk(min(k + 1, vocab_size), dim=-1)
    order = _order_keys(values, ids).sort(dim=-1, descending=True).indices[:, :k]
    if k < vocab_size:
        tied = values[:, k - 1] == values[:, k]
        tied &= values[:, k] > -torch.inf
    values, ids = values.gather(-1, order), ids.gather(-1, order)
    if k < vocab_size and tied.any():
        ids[tied] = _order_keys(logits[tied], every).topk(k, dim=-1).indices
    return values, ids


def _order_keys(values: Tensor, ids: Tensor) -> Tensor:
    """Unique int64 keys whose order is (value, then lower id first); values float32."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0: they are equal and must tie
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(torch.int64) << 32) - ids


def _weights(logits: Tensor, maxima: Tensor, params: DrawParams, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """(l - max) / temperature as float32, and the integer weights, 0 where min_p cuts; both shaped as `logits`."""
    scaled = workspace.take("scaled", logits.shape, torch.float32)
    torch.sub(logits, maxima[:, None], out=scaled).div_(params.temperature[:, None])
    relative = torch.exp(scaled, out=workspace.take("relative", logits.shape, torch.float32))
    if params.any_min_p:
        enough = workspace.take("flags", logits.shape, torch.bool)
        relative.mul_(torch.ge(relative, params.min_p[:, None], out=enough))
    weights = workspace.take("weights", logits.shape, torch.int64)
    return scaled, weights.copy_(relative.mul_(_WEIGHT_SCALE))


def _mass_limit(total: Tensor, top_p: Tensor) -> Tensor:
    """A token stays while the weight before it is below this: ceil(top_p * total), at least 1 as top_p > 0."""
    return torch.where(top_p >= 1.0, total, (top_p * total).ceil().to(torch.int64))


def _draw(weights: Tensor, uniform: Tensor, workspace: Workspace | None = None) -> Tensor:
    """Invert the cumulative weights [R, N] at `uniform` [R]: the first index whose cumulative weight exceeds it."""
    out = workspace.take("cumulative", weights.shape, torch.int64) if workspace else None
    cumulative = torch.cumsum(weights, -1, out=out)
    total = cumulative[:, -1]
    target = torch.minimum((uniform * total).to(torch.int64), total - 1)
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def _draw_dense(weights: Tensor, logits: Tensor, params: DrawParams, workspace: Workspace) -> Tensor:
    """As :func:`_draw_filtered` without asking the device how many candidates there are; `weights` is overwritten."""
    if params.any_top_k or params.any_top_p:
        zero = torch.zeros((), dtype=torch.int64, device=logits.device)
        keys = (_order_keys(logits, zero) >> 32).neg_().add_(_LARGEST_KEY)
        if params.any_top_k:
            one = (zero + 1).expand_as(weights)
            weights.mul_(_keep_prefix_dense(keys, one, params.top_k))
        if params.any_top_p:
            weights.mul_(_keep_prefix_dense(keys, weights, _mass_limit(weights.sum(-1), params.top_p)))
    return _draw(weights, params.uniform, workspace)


def _keep_prefix_dense(keys: Tensor, measure: Tensor, limit: Tensor) -> Tensor:
    """Tokens of rows [R, V] before which the row has less than `limit` [R] of `measure`: bool [R, V].

    "Before" is the order (key ascending, id ascending); keys are of 32 bits. The cut's key is found from its highest
    digit to its lowest, by a histogram over the digits of those keys that agree with it so far (a radix select); the
    order of ids matters only among tokens of that very key. `limit` is at least 1.
    """
    before = torch.zeros_like(limit)
    cut = torch.zeros_like(limit)
    agrees = torch.ones(keys.shape, dtype=torch.bool, device=keys.device)
    for shift, bits in _DIGITS:
        digits = (keys >> shift).bitwise_and_((1 << bits) - 1)
        histogram = torch.zeros((len(keys), 1 << bits), dtype=torch.int64, device=keys.device)
        cumulative = histogram.scatter_add_(1, digits, measure * agrees).cumsum_(1)
        # The first digit at which the limit is reached; the last one if it never is (then all is kept).
        digit = torch.searchsorted(cumulative, (limit - before)[:, None]).clamp_(max=(1 << bits) - 1)
        before += cumulative.gather(1, (digit - 1).clamp_(min=0)).masked_fill_(digit == 0, 0)[:, 0]
        cut += digit[:, 0] << shift
        agrees &= digits == digit
    tied = measure * agrees
    within = (before[:, None] + tied.cumsum(1) - tied) < limit[:, None]
    return (keys < cut[:, None]).logical_or_(agrees.logical_and_(within))


class _Candidates(NamedTuple):
    """Tokens of R rows that may survive the filters, flat, in the order (row, id); at least one for each row."""

    row: Tensor
    token: Tensor
    bin: Tensor
    logit: Tensor
    weight: Tensor


def _draw_filtered(scaled: Tensor, weights: Tensor, logits: Tensor, params: DrawParams, workspace: Workspace) -> Tensor:
    """Draw with top_k, then top_p, from rows [R, V]; `scaled` is overwritten. Returns ids int64 [R].

    The order of tokens is first seen in coarse steps, bins of 1/64 nat of the scaled logit. A histogram over the bins
    tells which bin a cut falls into, so only tokens up to that bin are looked at further and only that bin is sorted.
    Rows without top_k are best kept apart from rows with it: the mass that top_p cuts is that which top_k leaves.
    """
    num_rows = len(logits)
    bins = workspace.take("bins", scaled.shape, torch.int64)
    bins.copy_(scaled.mul_(-_BINS_PER_NAT).clamp_(max=_BINS - 1))
    histogram = torch.zeros((num_rows, _BINS), dtype=torch.int64, device=bins.device)
    if params.any_top_k:
        one = torch.ones((), dtype=torch.int64, device=bins.device).expand_as(bins)
        last_bin = _cut_bin(histogram.scatter_add_(1, bins, one).cumsum_(1), params.top_k)
    else:
        mass = histogram.scatter_add_(1, bins, weights).cumsum_(1)
        total = mass[:, -1]
        last_bin = _cut_bin(mass, _mass_limit(total, params.top_p))
    kept = torch.le(bins, last_bin, out=workspace.take("flags", bins.shape, torch.bool))
    where = kept.view(-1).nonzero()[:, 0]
    row = where // logits.shape[1]
    columns = (tensor.reshape(-1).index_select(0, where) for tensor in (bins, logits, weights))
    flat = _Candidates(row, where - row * logits.shape[1], *columns)
    if params.any_top_k:
        flat = _keep_prefix(flat, torch.ones_like(flat.weight), params.top_k)
        total = torch.zeros_like(params.top_k).scatter_add_(0, flat.row, flat.weight)
    if params.any_top_p:
        flat = _keep_prefix(flat, flat.weight, _mass_limit(total, params.top_p))
    return _draw_flat(flat, params.uniform)


def _cut_bin(cumulative: Tensor, limit: Tensor) -> Tensor:
    """The first bin [R, 1] whose cumulative measure [R, bins] exceeds `limit` [R]; the number of bins if none."""
    return torch.searchsorted(cumulative, limit[:, None], right=True)


def _keep_prefix(flat: _Candidates, measure: Tensor, limit: Tensor) -> _Candidates:
    """Set the weight of each candidate to 0 before which its row has `limit` [R] of `measure` or more.

    "Before" is the order (logit descending, id ascending). ``measure`` is 1 per candidate (top_k) or its weight.
    """
    num_rows = len(limit)
    histogram = torch.zeros(num_rows * _BINS, dtype=torch.int64, device=limit.device)
    histogram.scatter_add_(0, flat.row * _BINS + flat.bin, measure)
    cumulative = histogram.view(num_rows, _BINS).cumsum(1)
    cut = _cut_bin(cumulative, limit)
    before = torch.where(cut > 0, cumulative.gather(1, (cut - 1).clamp_(min=0)), 0)[:, 0]
    distance = flat.bin - cut[:, 0].index_select(0, flat.row)
    boundary = (distance == 0).nonzero()[:, 0]
    # Two stable sorts of entries that come in the order (row, id).
    order = boundary[flat.logit[boundary].sort(descending=True, stable=True).indices]
    order = order[flat.row[order].sort(stable=True).indices]
    row, amount = flat.row[order], measure[order]
    preceding = amount.cumsum(0) - amount
    first_of_row = torch.searchsorted(row, torch.arange(num_rows, device=row.device))
    base = torch.cat((preceding, preceding.new_zeros(1)))[first_of_row]
    dropped = order[before[row] + preceding - base[row] >= limit[row]]
    weight = flat.weight.masked_fill(distance > 0, 0)
    weight[dropped] = 0
    return flat._replace(weight=weight)


def _draw_flat(flat: _Candidates, uniform: Tensor) -> Tensor:
    """As :func:`_draw` for candidates in one flat list; returns token ids [R]."""
    cumulative = flat.weight.cumsum(0)
    rows = torch.arange(len(uniform), device=uniform.device)
    last = torch.searchsorted(flat.row, rows, right=True) - 1
    base = torch.cat((cumulative.new_zeros(1), cumulative[last[:-1]]))
    total = cumulative[last] - base
    target = torch.minimum((uniform * total).to(torch.int64), total - 1)
    return flat.token[torch.searchsorted(cumulative, base + target, right=True)]
