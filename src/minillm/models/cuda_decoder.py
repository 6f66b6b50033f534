"""The decoder's forward pass on a GPU: few kernels, every result in memory that is there already.

The same model as :class:`minillm.models.decoder.Decoder`, whose weights it reads, in another division of the work:

```
residual = embed(ids)                                          float32, as in the decoder
per layer   x    = rms_norm(residual += x)                     add_rms_norm
            qkv  = x @ W                                       one product
            q    = rope(norm(q)); K, V of it into the pages    qk_norm_rope_write
            x    = paged attention                             on what is written
            x    = x @ W                                       output product
            x    = rms_norm(residual += x)                     add_rms_norm
            gate, up = x @ W                                   one product
            x    = silu(gate) * up                             silu_and_mul
            x    = x @ W                                       down product
hidden = rms_norm(residual += x)
```
For a few tokens a product is bound by the bytes of its weight, and launches count: then matrix-vector kernels take the
norm in front and the activation or the residual behind into the product. For some ten to some hundred tokens products
take what is behind them, and norms may be deferred (:mod:`minillm.models.deferred_norm`). Six launches a layer, both.

Nothing is allocated and nothing waits, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from minillm.models.decoder import Decoder, DecoderLayer
from minillm.models.deferred_norm import SQUARES_COLUMNS, DeferredNorm
from minillm.models.linear import DenseLinear, Linear

if TYPE_CHECKING:
    from collections.abc import Sequence


MAX_HIDDEN_BYTES = 1 << 16
"""Of a row of hidden states: what the norm's thread block holds in registers."""

_MOST_DEFERRED_COLUMNS = 2048
"""Hidden size up to which norms are deferred: Llama-3.1-8B's 4,096 took 2% longer so, Qwen3-0.6B's 1,024 5% less."""

_MOST_SIZES = 1024
"""Step sizes whose products are remembered."""


class DecoderOps(Protocol):
    """The fused operations (:mod:`minillm.models.cuda_ops` is one set). All on the current stream, none waits.

    Residuals and the weights of norms are float32, all else is in the model's dtype.
    """

    def embed(self, input_ids: Tensor, embedding: Tensor, residual: Tensor) -> Tensor:
        """Rows int64 [T] of embedding [V, H] -> residual [T, H]."""
        ...

    def add_rms_norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        """residual [T, H] += x [T, H] (unless None), then its norm -> out [T, H]."""
        ...

    def qk_norm_rope_write(
        self,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        positions: Tensor,
        inv_freq: Tensor,
        attention_factor: float,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        q_out: Tensor,
        deferred: DeferredNorm | None = None,
    ) -> Tensor:
        """qkv [T, (Hq + 2 Hkv) d]: q normed and rotated -> q_out [T, Hq, d], k likewise and v -> their slots."""
        ...

    def silu_and_mul(self, gate_up: Tensor, out: Tensor, deferred: DeferredNorm | None = None) -> Tensor:
        """[T, 2 I], gate first -> silu(gate) * up, [T, I]."""
        ...

    def small_linear(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        out: Tensor | None = None,
        bias: Tensor | None = None,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        """x @ weight.T + bias of a few rows -> out (float32 too), or added to `residual`.

        With `norm_weight`, x is the residual stream and its norm is multiplied; `gated`: silu(gate) * up of the result.
        """
        ...

    def supports_small_linear(
        self,
        rows: int,
        n: int,
        k: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        gated: bool = False,
        norm: bool = False,
    ) -> bool:
        """Whether `small_linear` takes x [rows, k] with n outputs (gated: n pairs of weight rows)."""
        ...

    def batch_linear(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        out: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
        deferred: DeferredNorm | None = None,
        next_norm: Tensor | None = None,
        next_deferred: DeferredNorm | None = None,
    ) -> Tensor:
        """As `small_linear`, of more rows; the norm of x may be deferred, and that of the residual behind it."""
        ...

    def supports_batch_linear(
        self,
        rows: int,
        n: int,
        k: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        gated: bool = False,
        to_residual: bool = False,
    ) -> bool:
        """Whether `batch_linear` is for x [rows, k] with n outputs (gated: n pairs of weight rows)."""
        ...


class WrittenAttention(Protocol):
    """Attention over pages that this step's keys and values have been written to already."""

    @property
    def caches(self) -> Sequence[tuple[Tensor, Tensor]]:
        """K and V of each layer, [num_blocks, num_kv_heads, block_size, head_dim]."""
        ...

    @property
    def slot_mapping(self) -> Tensor:
        """int64 [T]: KV slots of the step's tokens; negative is padding."""
        ...

    def attend_written(self, layer: int, q: Tensor, out: Tensor) -> None:
        """q [T, Hq, d] -> out [T, Hq, d]."""
        ...


@dataclass(frozen=True, slots=True)
class _Product:
    """x @ weight.T + bias; `turned` is weight.T, kept since making the view costs as much as a launch."""

    weight: Tensor
    turned: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, linear: Linear) -> _Product:
        assert isinstance(linear, DenseLinear)
        return cls(linear.weight, linear.weight.t(), linear.bias)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        if self.bias is None:
            torch.mm(x, self.turned, out=out)
        else:
            torch.addmm(self.bias, x, self.turned, out=out)


class _Layer:
    """A layer's weights, looked up once."""

    def __init__(self, layer: DecoderLayer) -> None:
        self.input_norm, self.post_attention_norm = layer.input_norm.weight, layer.post_attention_norm.weight
        self.q_norm = None if layer.q_norm is None else layer.q_norm.weight
        self.k_norm = None if layer.k_norm is None else layer.k_norm.weight
        self.qkv, self.output = _Product.of(layer.qkv), _Product.of(layer.output)
        self.gate_up, self.down = _Product.of(layer.gate_up), _Product.of(layer.down)


class _BatchProducts(NamedTuple):
    """Which of a layer's products `batch_linear` takes, and whether norms are deferred."""

    qkv: bool
    output: bool
    gate_up: bool
    down: bool
    norms: bool


class Workspace:
    """Activations of a step of up to `capacity` tokens; a step of T tokens uses the first T rows.

    One step at a time: what :meth:`CudaDecoder.forward` returns is in here too, until the next step.
    """

    def __init__(self, model: Decoder, capacity: int) -> None:
        config, dtype, device = model.config, model.dtype, model.device
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def rows(width: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty((capacity, width), dtype=dtype, device=device)

        self.capacity = capacity
        self.residual = rows(config.hidden_size, torch.float32)
        self.hidden, self.branch = rows(config.hidden_size), rows(config.hidden_size)
        self.qkv = rows(q_size + 2 * kv_size)
        self.q, self.attended = rows(q_size), rows(q_size)
        self.gate_up = rows(2 * config.intermediate_size)
        self.activated = rows(config.intermediate_size)
        sums = -(-config.hidden_size // SQUARES_COLUMNS)
        self.squares = torch.empty((sums, capacity), dtype=torch.float32, device=device)

    def first(self, tokens: int) -> _Views:
        """The rows of a step of so many tokens."""
        return _Views(
            self.residual[:tokens],
            self.hidden[:tokens],
            self.branch[:tokens],
            self.qkv[:tokens],
            self.q[:tokens],
            self.attended[:tokens],
            self.gate_up[:tokens],
            self.activated[:tokens],
            self.squares[:, :tokens],
        )


@dataclass(frozen=True, slots=True)
class _Views:
    """A step's part of the workspace, [T, width] each."""

    residual: Tensor
    hidden: Tensor
    branch: Tensor
    """What attention or the MLP adds to the residual."""
    qkv: Tensor
    q: Tensor
    attended: Tensor
    gate_up: Tensor
    activated: Tensor
    squares: Tensor
    """Of rows whose norm is deferred, [ceil(hidden_size / 64), T]."""


def why_not(model: object, cache_dtype: torch.dtype) -> str | None:
    """Why :class:`CudaDecoder` cannot run this model over a cache of this dtype; None if it can."""
    if not isinstance(model, Decoder):
        return f"{type(model).__name__} is no Decoder"
    if cache_dtype != model.dtype:
        return f"the KV cache is in {cache_dtype}, the model in {model.dtype}"
    linears = [linear for layer in model.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    if not all(isinstance(linear, DenseLinear) for linear in (*linears, model.head)):
        return "its weights are packed"
    config, vector = model.config, 16 // model.dtype.itemsize
    sizes = {name: getattr(config, name) for name in ("hidden_size", "intermediate_size", "head_dim")}
    for name, size in sizes.items():
        if size % vector:
            return f"{name}={size} is no multiple of {vector}"
    if config.hidden_size > MAX_HIDDEN_BYTES // model.dtype.itemsize:
        return f"hidden_size={config.hidden_size} takes more than {MAX_HIDDEN_BYTES} bytes a row"
    return None


class CudaDecoder:
    """Runs `model` (one that :func:`why_not` has nothing against) by fused operations. Weights must keep their place.

    `ops` None takes this package's kernels.
    """

    def __init__(self, model: Decoder, ops: DecoderOps | None = None) -> None:
        if ops is None:
            from minillm.models import cuda_ops

            ops = cuda_ops
        config = model.config
        self.model = model
        self._ops = ops
        self._layers = [_Layer(layer) for layer in model.layers]
        self._heads_shape = (-1, config.num_heads, config.head_dim)
        self._eps = config.rms_norm_eps
        self._head = _Product.of(model.head)
        self._wide_logits = model.device.type == "cuda"  # torch has such products on a GPU alone
        self._batch_products: dict[int, _BatchProducts] = {}

    def workspace(self, capacity: int) -> Workspace:
        """Memory for steps of up to `capacity` tokens."""
        return Workspace(self.model, capacity)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: WrittenAttention, workspace: Workspace
    ) -> Tensor:
        """One step over T tokens: int64 [T], int64 [T] -> normalised hidden states [T, hidden_size].

        The result is in the workspace and valid until that is used again.
        """
        tokens = len(input_ids)
        views = workspace.first(tokens)
        self._ops.embed(input_ids, self.model.embedding, views.residual)
        if self._is_few(tokens):
            last = self._few_tokens(positions, attention, views)
        else:
            last = self._many_tokens(positions, attention, views, self._products_of(tokens))
        self._ops.add_rms_norm(last, views.residual, self.model.norm.weight, self._eps, views.hidden)
        return views.hidden

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows [R, hidden_size] -> float32 logits [R, vocab_size], not rounded to the model's dtype in between."""
        head = self._head
        if out is None:
            shape = (len(hidden), head.weight.shape[0])
            out = torch.empty(shape, dtype=torch.float32, device=hidden.device)
        if self._takes(len(hidden), head):
            self._ops.small_linear(hidden, head.weight, out=out, bias=head.bias)
        elif self.model.dtype == torch.float32:
            head(hidden, out)
        elif self._wide_logits and head.bias is None:
            torch.ops.aten.mm.dtype_out(hidden, head.turned, torch.float32, out=out)
        else:
            out.copy_(self.model.compute_logits(hidden))
        return out

    def _is_few(self, tokens: int) -> bool:
        """Whether all products of a layer go through `small_linear`."""
        layer = self._layers[0]
        return (
            self._takes(tokens, layer.qkv, norm=True)
            and self._takes(tokens, layer.output)
            and self._takes(tokens, layer.gate_up, norm=True, gated=True)
            and self._takes(tokens, layer.down)
        )

    def _takes(self, tokens: int, product: _Product, *, norm: bool = False, gated: bool = False) -> bool:
        weight = product.weight
        n = weight.shape[0] // 2 if gated else weight.shape[0]
        supports = self._ops.supports_small_linear
        return supports(tokens, n, weight.shape[1], weight.dtype, weight.device, gated=gated, norm=norm)

    def _products_of(self, tokens: int) -> _BatchProducts:
        """The products of a step that go through `batch_linear`; looked up for every step, so kept by size."""
        found = self._batch_products.get(tokens)
        if found is None:
            layer, supports = self._layers[0], self._ops.supports_batch_linear

            def takes(product: _Product, *, gated: bool = False, to_residual: bool = False) -> bool:
                (n, k), dtype, device = product.weight.shape, product.weight.dtype, product.weight.device
                n = n // 2 if gated else n
                return supports(tokens, n, k, dtype, device, gated=gated, to_residual=to_residual)

            qkv, output = takes(layer.qkv), takes(layer.output, to_residual=True)
            gate_up, down = takes(layer.gate_up, gated=True), takes(layer.down, to_residual=True)
            # Reading a large weight takes longer than the norm in front, whose launch is free then. A library's product
            # adds its bias before the norm could be applied. Rows before their norm may be larger than float16 holds.
            norms = (
                (output and down and self.model.config.hidden_size <= _MOST_DEFERRED_COLUMNS)
                and self.model.dtype != torch.float16
                and (qkv or layer.qkv.bias is None)
                and (gate_up or layer.gate_up.bias is None)
            )
            found = _BatchProducts(qkv, output, gate_up, down, norms)
            if len(self._batch_products) < _MOST_SIZES:
                self._batch_products[tokens] = found
        return found

    def _rotate_and_attend(
        self,
        index: int,
        layer: _Layer,
        positions: Tensor,
        attention: WrittenAttention,
        views: _Views,
        deferred: DeferredNorm | None = None,
    ) -> None:
        """qkv -> attended."""
        rope, q = self.model.rope, views.q.view(self._heads_shape)
        self._ops.qk_norm_rope_write(
            views.qkv,
            layer.q_norm,
            layer.k_norm,
            self._eps,
            positions,
            rope.inv_freq,
            rope.attention_factor,
            *attention.caches[index],
            attention.slot_mapping,
            q,
            deferred,
        )
        attention.attend_written(index, q, views.attended.view(self._heads_shape))

    def _many_tokens(
        self, positions: Tensor, attention: WrittenAttention, views: _Views, products: _BatchProducts
    ) -> Tensor | None:
        """All layers; returns what is still to be added to the residual."""
        ops, eps, residual, hidden = self._ops, self._eps, views.residual, views.hidden
        # Norms that are not deferred leave their rows in the same place.
        deferred = DeferredNorm(hidden, views.squares, eps) if products.norms else None
        last, pending = None, None
        for index, layer in enumerate(self._layers):
            if pending is None:
                ops.add_rms_norm(last, residual, layer.input_norm, eps, hidden)
            if products.qkv:
                ops.batch_linear(hidden, layer.qkv.weight, out=views.qkv, bias=layer.qkv.bias, deferred=pending)
                self._rotate_and_attend(index, layer, positions, attention, views)
            else:
                layer.qkv(hidden, views.qkv)
                self._rotate_and_attend(index, layer, positions, attention, views, pending)
            norm = layer.post_attention_norm
            last, pending = self._add(layer.output, views.attended, views, products.output, norm, deferred)
            if pending is None:
                ops.add_rms_norm(last, residual, norm, eps, hidden)
            if products.gate_up:
                weight, bias, inner = layer.gate_up.weight, layer.gate_up.bias, views.activated
                ops.batch_linear(hidden, weight, out=inner, bias=bias, gated=True, deferred=pending)
            else:
                layer.gate_up(hidden, views.gate_up)
                ops.silu_and_mul(views.gate_up, views.activated, pending)
            following = None if index + 1 == len(self._layers) else self._layers[index + 1].input_norm
            last, pending = self._add(layer.down, views.activated, views, products.down, following, deferred)
        return last

    def _add(
        self,
        product: _Product,
        x: Tensor,
        views: _Views,
        batched: bool,
        norm: Tensor | None,
        deferred: DeferredNorm | None,
    ) -> tuple[Tensor | None, DeferredNorm | None]:
        """Add a product to the residual: (what is still to be added, the norm behind it if it is deferred)."""
        if not batched:
            product(x, views.branch)
            return views.branch, None
        if norm is None:
            deferred = None
        self._ops.batch_linear(
            x,
            product.weight,
            bias=product.bias,
            residual=views.residual,
            next_norm=None if deferred is None else norm,
            next_deferred=deferred,
        )
        return None, deferred

    def _few_tokens(self, positions: Tensor, attention: WrittenAttention, views: _Views) -> Tensor | None:
        """The same where the weights' bytes are what a product costs."""
        linear, eps, residual = self._ops.small_linear, self._eps, views.residual
        for index, layer in enumerate(self._layers):
            qkv, output, gate_up, down = layer.qkv, layer.output, layer.gate_up, layer.down
            norm = layer.input_norm
            linear(residual, qkv.weight, out=views.qkv, bias=qkv.bias, norm_weight=norm, eps=eps)
            self._rotate_and_attend(index, layer, positions, attention, views)
            linear(views.attended, output.weight, bias=output.bias, residual=residual)
            inner, norm = views.activated, layer.post_attention_norm
            linear(residual, gate_up.weight, out=inner, bias=gate_up.bias, norm_weight=norm, eps=eps, gated=True)
            linear(inner, down.weight, bias=down.bias, residual=residual)
        return None
