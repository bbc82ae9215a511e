"""Head and loss of a causal language model, computed in slices of tokens.

The full logits exist only if they are read. The model's own forward computes the logits of each
slice, so soft-capping and scaling work as in the model: the decoder is replaced by a stand-in that
returns the slice of the hidden state. Tokens with an ignored label are removed before the head. In
training, the gradients of the hidden state and of the head weights are computed in the same pass,
slice by slice, so the logits are computed once. Losses over log-probabilities need a second pass.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.capture.derivatives import differentiable_once
from lohan.capture.fake import buffers_at
from lohan.capture.placeholders import lacks_values
from lohan.device.base import to_device
from lohan.engine.gradients import scale_
from lohan.engine.wrapping import GroupUses, WrappedSite
from lohan.errors import DataError, ModelError

if TYPE_CHECKING:
    from lohan.engine.executor import Executor

IGNORED = -100
# Maps the log-probabilities of the labelled tokens, row after row, to this rank's share of a loss.
# The second argument sums a number over all ranks; all ranks must call it equally often.
LogpLoss = Callable[[torch.Tensor, Callable[[float], float]], torch.Tensor]
OnLogits = Callable[[torch.Tensor, torch.Tensor], None]  # logits, and the tokens to predict
_NOT_FOR_DECODER = (
    "labels",
    "shift_labels",
    "ignore_index",
    "logits_to_keep",
    "num_items_in_batch",
    "return_dict",
)


def find_decoder(model: nn.Module) -> nn.Module | None:
    """Return the decoder of a causal language model with the plain next-token loss, or None.

    The function tests the model on a small input instead of relying on its class; see Note [testing
    the loss].
    """
    causal: Any = model
    if isinstance(model.forward, SlicedHead):
        return model.forward.decoder
    if not hasattr(model, "get_decoder") or not hasattr(model, "loss_function"):
        return None
    loss = vars(model).get("_loss_function")
    tried = _TRIED.get(model)
    # User code may have replaced the loss function or the forward since the last test.
    if tried is None or tried[0] is not loss or "forward" in vars(model):
        head = causal.get_output_embeddings()
        declared = causal.get_decoder()
        parts = [declared] if declared is not model else list(model.children())
        fits = (part for part in parts if _is_next_token(model, part, head))
        decoder = next(fits, None)
        tried = loss, None if decoder is None else weakref.ref(decoder)
        if "forward" not in vars(model):
            _TRIED[model] = tried
    return None if tried[1] is None else tried[1]()


_TRIED: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any]] = weakref.WeakKeyDictionary()

# Note [testing the loss] A class name does not determine the loss: models shift labels or not, add
# terms, or have layers between decoder and head. Therefore the model's own forward is called once,
# with stand-ins for decoder and head that return a few hidden states and logits and need no
# weights. The head is sliced if the loss is that of the next token, if there is no trained
# parameter and no matrix between decoder and head, and if the decoder gets the tokens unchanged.


def shifts_labels(model: nn.Module) -> bool:
    """Return whether the loss of a causal language model shifts the labels by one token.

    Almost all models do. Call this before the blocks are wrapped; the answer is cached.
    """
    if model not in _SHIFTS:
        _SHIFTS[model] = find_decoder(model) is not None or not _takes_labels_as_they_are(model)
    return _SHIFTS[model]


_SHIFTS: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def _takes_labels_as_they_are(model: nn.Module) -> bool:
    causal: Any = model
    try:
        head, declared = causal.get_output_embeddings(), causal.get_decoder()
        width, count = next(p for p in head.parameters() if p.ndim == 2).shape[::-1]
    except (AttributeError, StopIteration):
        return False
    ids = torch.arange(8)[None] % count
    hidden = torch.zeros(1, 8, width, dtype=next(model.parameters()).dtype)
    logits = torch.randn(1, 8, count, generator=torch.Generator().manual_seed(0))
    wanted = nn.functional.cross_entropy(logits[0], ids[0])
    for part in [declared] if declared is not model else model.children():
        try:
            with (
                torch.random.fork_rng(devices=[]),
                torch.no_grad(),
                _standing_in(part, lambda *_, **__: _stand_in(hidden)),
                _standing_in(head, lambda _: logits),
            ):
                loss = model.forward(input_ids=ids, labels=ids).loss
        except Exception:  # The model has more parts than a decoder and a head.
            continue
        if torch.allclose(loss.float(), wanted, rtol=1e-4):
            return True
    return False


def _is_next_token(model: nn.Module, decoder: Any, head: Any) -> bool:
    if not isinstance(decoder, nn.Module) or not isinstance(head, nn.Module) or decoder is head:
        return False
    weight = next((p for p in head.parameters() if p.ndim == 2), None)
    if weight is None or min(weight.shape) < 2:
        return False
    inside = {id(p) for module in (decoder, head) for p in module.parameters()}
    between = [p for p in model.parameters() if id(p) not in inside]
    inner_modules = {id(module) for part in (decoder, head) for module in part.modules()}
    called: list[nn.Module] = []
    decoder_inputs: list[Any] = []
    generator = torch.Generator().manual_seed(0)
    torch_device = torch.device("cpu") if lacks_values(weight) else weight.device
    ids = torch.arange(8, device=torch_device)[None] % weight.shape[0]
    labels = ids.flip(1).contiguous()
    labels[0, 3] = IGNORED
    hidden = torch.randn(1, 8, weight.shape[1], generator=generator).to(torch_device, weight.dtype)
    hidden.requires_grad_()
    logits = torch.randn(1, 8, weight.shape[0], generator=generator).to(torch_device)

    def ready(*args: Any, **kwargs: Any) -> Any:
        decoder_inputs.extend((*args, *kwargs.values()))
        return _stand_in(hidden)

    def fake_head(x: torch.Tensor) -> torch.Tensor:
        return logits[:, : x.shape[1]] + x.to(logits.dtype).sum(-1, keepdim=True)

    def record_call(module: nn.Module, _: Any) -> None:
        if id(module) not in inner_modules:
            called.append(module)

    extra = {"output_router_logits": False} if "output_router_logits" in _names(model) else {}
    hook = torch.nn.modules.module.register_module_forward_pre_hook(record_call)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            buffers_at(model, torch_device),
            torch.enable_grad(),
            _standing_in(decoder, ready),
            _standing_in(head, fake_head),
        ):
            plain = model.forward(input_ids=None)
            out = model.forward(input_ids=ids, labels=labels, **extra)
        wanted = nn.functional.cross_entropy(
            out.logits[0, :-1].float(), labels[0, 1:], ignore_index=IGNORED
        )
        same = torch.equal(plain.logits, out.logits) and torch.allclose(out.loss, wanted, rtol=1e-4)
        learns = [p for p in between if p.requires_grad and not lacks_values(p)]
        reached = torch.autograd.grad(out.loss, [hidden, *learns], allow_unused=True)
    # The model needs other inputs than tokens, or has more parts than a decoder and a head.
    except Exception:
        return False
    finally:
        hook.remove()
    matrices = any(p.ndim >= 2 for module in called for p in module.parameters(recurse=False))
    return (
        same
        and reached[0] is not None
        and all(grad is None for grad in reached[1:])
        and not matrices
        and any(value is ids for value in decoder_inputs)
    )


def _names(model: nn.Module) -> Iterable[str]:
    return inspect.signature(model.forward).parameters


def _stand_in(hidden: Any) -> Any:
    """Return the output of a decoder that contains only a hidden state."""
    return _stand_in_type()(last_hidden_state=hidden)


# The type is created once, because transformers registers every such type with pytree permanently.
@cache
def _stand_in_type() -> type:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Ready(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return Ready


@contextmanager
def _standing_in(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Temporarily replace `module.forward`."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


@dataclass(frozen=True)
class ShiftedLabels:
    """The labels of a batch, prepared for the head before the decoder runs."""

    labels: torch.Tensor  # as they are passed to the model
    # for each token, the label of the next token; all rows are concatenated
    following: torch.Tensor
    rows: torch.Tensor  # indices of the tokens that have such a label
    count: float | None  # the number of labels in the whole batch, if the caller passes it


def labelled_rows(
    labels: torch.Tensor, following: torch.Tensor | None = None, ignored: int = IGNORED
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the label of the next token for each token, and the indices of tokens that have one.

    `following` are these labels if the caller has shifted them; `ignored` marks tokens without one.
    """
    if following is None:
        following = nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
    following = following.reshape(-1)
    if ignored != IGNORED:
        following = following.masked_fill(following == ignored, IGNORED)
    return following, (following != IGNORED).nonzero().squeeze(1)


class LazyLogits:
    """A mixin for outputs of transformers that computes the logits when they are read.

    The logits of all tokens are then computed at once, with a graph. If only the loss is read,
    logits are never allocated. An output that is used as a tuple, or iterated, has them at their
    place among the other fields.
    """

    make_logits: Callable[[], torch.Tensor] | None = None
    lists_logits = True  # whether an output that is iterated has logits

    def __getattribute__(self, name: str) -> Any:
        if name == "logits":
            object.__getattribute__(self, "_compute_logits")()
        return super().__getattribute__(name)

    def _compute_logits(self) -> None:
        make, self.make_logits = self.make_logits, None
        if make is None:
            return
        output: Any = self
        output.logits = make()
        names = [field.name for field in fields(output)]
        for name in names[names.index("logits") + 1 :]:
            if name in output:
                output.move_to_end(name)

    def _prepare_items(self) -> None:
        if self.lists_logits:
            self._compute_logits()

    def __getitem__(self, key: Any) -> Any:
        output: Any = self
        if key == "logits":
            return output.logits
        if isinstance(key, str):
            return OrderedDict.__getitem__(output, key)
        return output.loss if key == 0 else output.to_tuple()[key]

    def get(self, key: Any, default: Any = None) -> Any:
        present = key in self
        return self[key] if present else default

    def __contains__(self, key: Any) -> bool:
        lazy = key == "logits" and self.make_logits is not None
        return lazy or super().__contains__(key)  # type: ignore[misc]

    def __len__(self) -> int:
        self._prepare_items()
        return super().__len__()  # type: ignore[misc]

    def __iter__(self) -> Any:
        self._prepare_items()
        return super().__iter__()  # type: ignore[misc]

    def keys(self) -> Any:
        self._prepare_items()
        return super().keys()  # type: ignore[misc]

    def values(self) -> Any:
        self._prepare_items()
        return super().values()  # type: ignore[misc]

    def items(self) -> Any:
        self._prepare_items()
        return super().items()  # type: ignore[misc]


class SlicedHead:
    """The replacement of the model's forward; calls with labels compute the loss in slices."""

    # Settings that users of the session may change. They survive a change of plan.
    SETTINGS = ("ranks_apart", "slice_loss", "on_logits")

    def __init__(self, executor: Executor, model: nn.Module, decoder: nn.Module) -> None:
        self.executor = executor
        self.model = model
        self.decoder = decoder
        self.runs_whole = False
        self.ranks_apart = False  # whether the loss is that of this rank's tokens, as under DDP
        # whether outputs that are iterated have logits; False where only the loss is used
        self.lists_logits = True
        # Returns the sum of a slice's losses, given its logits and the tokens to predict.
        self.slice_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = partial(
            nn.functional.cross_entropy, reduction="sum"
        )
        # A callback that gets the logits of every slice and the tokens to predict.
        self.on_logits: OnLogits | None = None
        # The labels of the batch that is being passed to the model.
        self._shifted_labels: ShiftedLabels | None = None
        executor.hooks.inputs_moved = self._read_labels
        head = model.get_output_embeddings()  # type: ignore[operator]
        self.wrapped: WrappedSite | None = next(
            (r for r in executor.hooks.wrapped_sites if r.module is head), None
        )
        self._original: Callable[..., Any] = model.forward
        self._removed = False
        self._loss_function = getattr(model, "loss_function", None)
        self._head_forward = head.forward
        self._signature = inspect.signature(model.forward)
        # transformers' generation inspects the signature to find the inputs of the model.
        self.__signature__ = self._signature
        model.forward = self

    def remove(self) -> None:
        self._removed = True
        if vars(self.model).get("forward") is self:
            del self.model.forward

    def _changed(self) -> bool:
        """Return whether user code has replaced the loss or the head's forward since `attach`.

        In that case the model runs unchanged and computes all logits at once.
        """
        if self._removed:
            return True
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        changed = (
            head.forward != self._head_forward
            or getattr(self.model, "loss_function", None) != self._loss_function
        )
        if changed and self.executor.collectives.process_group.several:
            raise ModelError(
                f"the loss_function of {type(self.model).__name__}, or the forward of its head, "
                "was replaced after the model was attached, which several processes cannot "
                "follow; replace it before the model is attached"
            )
        return changed

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Temporarily let the model run unchanged, so that it computes all logits at once."""
        self.runs_whole = True
        try:
            yield
        finally:
            self.runs_whole = False

    @contextmanager
    def only_loss(self) -> Iterator[None]:
        """Temporarily return outputs that have no logits if they are iterated."""
        self.lists_logits = False
        try:
            yield
        finally:
            self.lists_logits = True

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Temporarily use the loss of this rank's tokens only."""
        before, self.ranks_apart = self.ranks_apart, True
        try:
            yield
        finally:
            self.ranks_apart = before

    def _read_labels(self, inputs: dict[str, Any], moved: dict[str, Any]) -> None:
        """Find the labelled tokens on the host, while the inputs are copied to the device.

        Reading the labels on the device would wait for compute.
        """
        labels, count = inputs.get("labels"), inputs.get("num_items_in_batch")
        if isinstance(labels, torch.Tensor) and labels.device.type == "cpu":
            following, rows = labelled_rows(labels)
            following, rows = to_device(self.executor.device, (following, rows))
            label_count = float(count) if count is not None else None
            self._shifted_labels = ShiftedLabels(moved["labels"], following, rows, label_count)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        shifted, self._shifted_labels = self._shifted_labels, None

        logp_loss: LogpLoss | None = kwargs.pop("logp_loss", None)
        bound = self._signature.bind(*args, **kwargs).arguments
        named = {**bound, **bound.pop("kwargs", {})}
        labels = named.get("labels")
        if labels is None or self.runs_whole or self._changed():
            return self._original(*args, **kwargs)
        following, ignored = named.get("shift_labels"), named.get("ignore_index", IGNORED)
        is_usual = following is None and ignored == IGNORED
        if shifted is None or shifted.labels is not labels or not is_usual:
            count = named.get("num_items_in_batch")
            label_count = float(count) if count is not None else None
            rows = labelled_rows(labels, following, ignored)
            shifted = ShiftedLabels(labels, *rows, label_count)
        inputs = {k: v for k, v in named.items() if k not in _NOT_FOR_DECODER}
        out = self.decoder(**inputs)
        self._output_type = type(out)
        loss: Any = self._loss(out.last_hidden_state, shifted, logp_loss)
        hidden = out.last_hidden_state
        if not named.get("output_router_logits", self._routes):
            others = ("past_key_values", "hidden_states", "attentions")
            taken = {name: getattr(out, name, None) for name in others}
            output: Any = _lazy(CausalLMOutputWithPast)(loss=loss, **taken)
        else:
            rest: Any = self._rest(out, args, {**kwargs, "return_dict": True})
            scale = self.executor.record.train_state.loss_scale
            ranks = 1 if self.ranks_apart else self.executor.collectives.process_group.world
            extra = rest.loss / ranks
            value = extra.detach()
            rest.loss = loss + self._over_ranks(value) + scale * (extra - value)
            kind: Any = type(rest)
            output = _lazy(kind)(**{k: v for k, v in rest.items() if k != "logits"})
        object.__setattr__(output, "make_logits", lambda: self._logits(hidden))
        object.__setattr__(output, "lists_logits", self.lists_logits)
        returned = named.get("return_dict")
        if returned is None:
            returned = getattr(self.model.config, "return_dict", True)
        return output if returned else output.to_tuple()

    @property
    def _routes(self) -> bool:
        """True if the model adds the auxiliary loss of its expert routers."""
        return bool(getattr(self.model.config, "output_router_logits", False))

    def _rest(self, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of the model's own forward, with a loss that lacks only the token loss.

        Decoder, head and loss function are replaced by stand-ins, so no logits are
        computed.
        """
        model: Any = self.model
        head: nn.Module = model.get_output_embeddings()
        ready = type(out)({**out, "last_hidden_state": out.last_hidden_state[:, :1]})
        custom_loss = vars(model).get("_loss_function")
        model.loss_function = lambda logits, *_, **__: logits.new_zeros((), dtype=torch.float32)
        try:
            with (
                _standing_in(self.decoder, lambda *_, **__: ready),
                _standing_in(head, lambda hidden: hidden.new_zeros((*hidden.shape[:-1], 1))),
            ):
                rest = self._original(*args, **kwargs)
        finally:
            del model._loss_function
            if custom_loss is not None:
                model.loss_function = custom_loss
        return rest

    def _loss(
        self, hidden: torch.Tensor, shifted: ShiftedLabels, logp_loss: LogpLoss | None
    ) -> torch.Tensor:
        following, rows = shifted.following, shifted.rows
        targets: float = len(rows)
        if not self.ranks_apart:
            targets = self.executor.collectives.all_reduce_sum(targets)
        if targets == 0 and not (self.ranks_apart and shifted.count):
            raise DataError(
                f"a batch of {following.numel()} tokens has no label to learn from (all are "
                f"{IGNORED}); check the data or raise --seq so that answers are not cut off"
            )
        total = float(targets) if shifted.count is None else shifted.count
        if torch.is_grad_enabled():
            return _HeadFunction.apply(
                self, rows, following, total, logp_loss, self.executor.anchor.tensor, hidden
            )
        if logp_loss is not None:
            return self.run_logp_loss(hidden, rows, following, logp_loss, grad=False)[0]
        return self.run(hidden, rows, following, total, grad=False)[0]

    def run(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        labels: torch.Tensor,
        total: float,
        *,
        grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss and, with `grad`, the gradient of `hidden`.

        The gradients of the weights are added to the sink.
        """
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        losses = []
        step = self.executor.plan.head_tokens
        starts = range(0, len(rows), step)
        scale = self.executor.record.train_state.loss_scale / total
        with self._weights(grad=grad, parts=len(starts)), self.executor.device.computing():
            d_flat = torch.zeros_like(flat) if grad else None
            for start in starts:
                part = rows[start : start + step]
                x = flat[part].requires_grad_(grad)
                with torch.set_grad_enabled(grad):
                    logits = self._logits(x[None])[0]
                    if self.on_logits is not None:
                        self.on_logits(logits.detach(), labels[part])
                    loss = self.slice_loss(logits.float(), labels[part])
                    if d_flat is not None:
                        del logits
                        (loss * scale).backward()
                        assert x.grad is not None
                        d_flat[part] = x.grad
                losses.append(loss.detach())
        loss_sum = torch.stack(losses).sum() if losses else flat.new_zeros((), dtype=torch.float32)
        loss = self._over_ranks(loss_sum / total)
        return loss, None if d_flat is None else d_flat.view_as(hidden)

    def run_logp_loss(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        labels: torch.Tensor,
        logp_loss: LogpLoss,
        *,
        grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a loss over log-probabilities and, with `grad`, the gradient of `hidden`.

        The head runs once for the log-probabilities and, with `grad`, once more for the gradients,
        weighted by the derivative of `logp_loss`. As in `run`, those of the weights are added to
        the sink.
        """
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        step = self.executor.plan.head_tokens
        slices = rows.split(step) if len(rows) else ()
        scale = self.executor.record.train_state.loss_scale

        def losses(
            x: torch.Tensor, part: torch.Tensor, on_logits: OnLogits | None = None
        ) -> torch.Tensor:
            logits = self._logits(x[None])[0]
            if on_logits is not None:
                on_logits(logits, labels[part])
            return nn.functional.cross_entropy(logits.float(), labels[part], reduction="none")

        with self._weights(grad=grad, parts=len(slices)), self.executor.device.computing():
            with torch.no_grad():
                logps_of_slices = [-losses(flat[part], part, self.on_logits) for part in slices]
            logps = torch.cat([flat.new_zeros(0, dtype=torch.float32), *logps_of_slices])
            with torch.set_grad_enabled(grad):
                all_reduce_sum = self.executor.collectives.all_reduce_sum
                loss = logp_loss(logps.requires_grad_(grad), all_reduce_sum)
            d_flat = None
            if grad:
                (weights,) = torch.autograd.grad(loss, logps)
                d_flat = torch.zeros_like(flat)
                for part, weight in zip(slices, weights.split(step), strict=True):
                    x = flat[part].requires_grad_()
                    with torch.enable_grad():
                        (losses(x, part) @ (-scale * weight)).backward()
                    assert x.grad is not None
                    d_flat[part] = x.grad
        total = self._over_ranks(loss.detach())
        return total, None if d_flat is None else d_flat.view_as(hidden)

    def _over_ranks(self, part: torch.Tensor) -> torch.Tensor:
        return part if self.ranks_apart else self.executor.collectives.loss(part)

    @contextmanager
    def _weights(self, *, grad: bool, parts: int) -> Iterator[None]:
        if self.wrapped is None:  # The head shares resident weights.
            yield
            return
        executor, wrapped = self.executor, self.wrapped
        with executor.block_runner.weights(wrapped, training=grad) as tensors:
            if grad:
                tensors = executor.collector.leaves(wrapped.site, tensors, parts=parts)
            with wrapped.installed(tensors):
                yield

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        def ready(*_: Any, **__: Any) -> Any:
            return self._output_type(last_hidden_state=hidden)

        with _standing_in(self.decoder, ready):
            logits: torch.Tensor = self._original(input_ids=None).logits
            return logits


@cache
def _lazy(kind: type) -> type:
    return type(kind.__name__, (LazyLogits, kind), {})


class _HeadFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: SlicedHead,
        rows: torch.Tensor,
        labels: torch.Tensor,
        total: float,
        logp_loss: LogpLoss | None,
        _: torch.Tensor,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        executor = head.executor
        ctx.head = head
        groups = head.wrapped.site.groups if head.wrapped is not None else ()
        ctx.uses = GroupUses(executor, groups, ctx)
        executor.in_head = True
        try:
            if logp_loss is None:
                loss, ctx.d_hidden = head.run(hidden, rows, labels, total, grad=True)
            else:
                loss_and_gradient = head.run_logp_loss(hidden, rows, labels, logp_loss, grad=True)
                loss, ctx.d_hidden = loss_and_gradient
        finally:
            executor.in_head = False
        # The gradients are kept here until backward, so that a loss that is dropped frees them.
        ctx.grads = {key: executor.collector.sink.take(key) for key in groups}
        return loss

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_loss: torch.Tensor) -> Any:
        head, executor = ctx.head, ctx.head.executor
        ctx.uses.claim(executor, "the head")
        with executor.guarded():
            executor.enter_backward()
            # The value is read on the CPU only, because reading it from a device would wait for the
            # device.
            factor = float(d_loss) if d_loss.device.type == "cpu" else d_loss
            d_hidden, ctx.d_hidden = ctx.d_hidden, None
            scale_(d_hidden, factor)
            if head.wrapped is not None:
                executor.collector.fetch_aside(ctx.grads)
                for key, grads in ctx.grads.items():
                    executor.collector.sink.add_scaled(key, grads, factor=factor)
                ctx.grads = None
                executor.scheduler.begin_backward(head.wrapped.number)
                executor.collector.finish(head.wrapped.number)
        return (None, None, None, None, None, None, d_hidden)
