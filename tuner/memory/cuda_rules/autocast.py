"""CUDA's autocast on CPU fakes: its cast lists, its default type, its weight cache, GradScaler.

`torch.autocast("cuda")` is switched off where there is no GPU, and the CPU's own lists differ: CUDA
runs `exp`, `softmax`, `layer_norm`, losses, `sum`, `pow` and others in fp32, which a CPU does not,
and leaves alone what only the CPU casts. So a context for `cuda` becomes one for the CPU, whose
kernels at the dispatch key `AutocastCPU` are replaced by CUDA's policies while tracing. Casts to
the lower type of what both devices list, and the cache of low-precision weights that lives until
the outermost context ends, are PyTorch's own; what CUDA alone lists has a cache of the same rules.

Not seen: that CUDA refuses `binary_cross_entropy` under autocast; threads that the step starts.

Source: the lists in aten/src/ATen/autocast_mode.h (`AT_FORALL_*`) and `CachedCast` there; softmax
with `half_to_float` in aten/src/ATen/native/SoftMax.cpp.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tuner.memory.cuda_rules.casting import cast, is_eligible, without_autocast
from tuner.memory.patches import replaced
from tuner.memory.rules import Journal

NAME = "CUDA autocast"
_KEY = "AutocastCPU"

# AT_FORALL_LOWER_PRECISION_FP, as far as the CPU does not list it already.
_LOWER = ("_convolution", "convolution", "prelu", "addmv", "addr", "mv", "einsum", "chain_matmul",
          "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell",
          "rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention")  # fmt: skip
# AT_FORALL_FP32
_FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
    "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm",
    "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim",
    "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
    "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
# AT_FORALL_FP32_SET_OPT_DTYPE, and the norms that take their type as an argument
_FP32_OUTPUT = ("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum",
                "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum",
                "sum.dim_IntList")  # fmt: skip
# AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: to the overload that takes the type
_FP32_APPENDED = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
# AT_FORALL_PROMOTE
_PROMOTE = ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put",
            "tensordot", "scatter_add")  # fmt: skip
_HALF_TO_FLOAT = {"softmax.int": torch._softmax, "log_softmax.int": torch._log_softmax}


@contextlib.contextmanager
def cuda_autocast(journal: Journal) -> Iterator[None]:
    """Let autocast contexts and gradient scalers for `cuda` work as on a GPU.

    The cast lists are replaced when the first context is made: most steps have none.
    """
    with contextlib.ExitStack() as stack:
        for patch in _patches(journal, stack):
            stack.enter_context(patch)
        yield


def _patches(
    journal: Journal, stack: contextlib.ExitStack
) -> Iterator[contextlib.AbstractContextManager[None]]:
    context, modes = torch.amp.autocast_mode.autocast, torch.amp.autocast_mode
    original, original_cast = context.__init__, modes._cast

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **options: Any) -> None:
        if device_type in ("cuda", "cpu"):  # fakes say `cpu` to who asks for their device
            if NAME not in journal.rules:
                journal.rules.setdefault(NAME)
                cache = _WeightCache()
                stack.enter_context(cache.cleared_with_the_other())
                stack.enter_context(_cuda_cast_lists(cache))
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, *args, **options)

    def cast_inputs(value: Any, device_type: str, dtype: Any) -> Any:  # of `custom_fwd`
        return original_cast(value, "cpu" if device_type == "cuda" else device_type, dtype)

    yield replaced(context, "__init__", init)
    yield replaced(modes, "_cast", cast_inputs)
    yield replaced(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        yield replaced(torch, name, _asking_the_cpu(getattr(torch, name)))
    yield replaced(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cuda"))


def _asking_the_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    enabled = torch.is_autocast_enabled

    def asked(device_type: str = "cuda") -> Any:
        active = function is enabled or enabled("cpu")
        return function("cpu" if device_type == "cuda" and active else device_type)

    return asked


@contextlib.contextmanager
def _cuda_cast_lists(cache: _WeightCache) -> Iterator[None]:
    library: Any = _new_library()
    policies = {
        **dict.fromkeys(_only_on_the_cpu(), torch.library.fallthrough_kernel),
        **{name: _lower_precision(_overload(name), cache) for name in _LOWER},
        **{name: _in_fp32(_overload(name)) for name in _FP32},
        **{name: _with_fp32_output(name) for name in _FP32_OUTPUT},
        **{name: _with_fp32_appended(name, other) for name, other in _FP32_APPENDED.items()},
        **{name: _promoting(_overload(name)) for name in _PROMOTE},
    }
    try:
        for name, kernel in policies.items():
            library.impl(name, kernel, _KEY, allow_override=True)
        yield
    finally:
        library._destroy()


def _new_library() -> Any:
    return torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def _only_on_the_cpu() -> list[str]:
    """Return what this build's CPU autocast lists but CUDA's does not; matrix products are on both."""
    both = ("conv", "_convolution", "mm", "bmm", "addmm", "addbmm", "baddbmm", "matmul", "linear",
            "linalg_vecdot", "scaled_dot_product_attention", "_native_multi_head", "_addmm_act")  # fmt: skip
    return [
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEY)
        and not name.removeprefix("aten::").startswith(both)
    ]


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _without_autocast(operator: Any, args: Any, kwargs: Any) -> Any:
    with without_autocast():
        return operator(*args, **kwargs)


class _WeightCache:
    """Low-precision copies of weights, for the operators that CUDA alone lists.

    As `cached_cast` has it: fp32 leaves that need a gradient and are no views, until the outermost
    context ends, which clears PyTorch's own cache too.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def cast(self, values: Any, dtype: torch.dtype) -> Any:
        return tree_map(lambda leaf: self._cast(leaf, dtype) if is_eligible(leaf) else leaf, values)

    def _cast(self, leaf: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if leaf.dtype is dtype:
            return leaf
        kept = leaf.dtype is torch.float32 and leaf.is_leaf and leaf.requires_grad and not leaf._is_view()
        if not kept or not torch.is_autocast_cache_enabled():
            return leaf.to(dtype)
        if id(leaf) not in self._copies:
            self._copies[id(leaf)] = (leaf, leaf.to(dtype))
        return self._copies[id(leaf)][1]

    @contextlib.contextmanager
    def cleared_with_the_other(self) -> Iterator[None]:
        original = torch.clear_autocast_cache

        def clear() -> None:
            self._copies.clear()
            original()

        with replaced(torch, "clear_autocast_cache", clear):
            yield
        self._copies.clear()


def _lower_precision(operator: Any, cache: _WeightCache) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        return _without_autocast(operator, cache.cast(args, dtype), cache.cast(kwargs, dtype))

    return kernel


def _in_fp32(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _without_autocast(operator, cast(args, torch.float32), cast(kwargs, torch.float32))

    return kernel


def _promoting(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        widest = torch.get_autocast_dtype("cpu")
        if any(is_eligible(leaf) and leaf.dtype is torch.float32 for leaf in tree_leaves((args, kwargs))):
            widest = torch.float32
        return _without_autocast(operator, cast(args, widest), cast(kwargs, widest))

    return kernel


def _with_fp32_appended(name: str, other: str) -> Callable[..., Any]:
    arguments, operator = _overload(name)._schema.arguments, _overload(other)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        rest = [kwargs.get(given.name, given.default_value) for given in arguments[len(args) :]]
        dtype = torch.float32 if is_eligible(args[0]) else args[0].dtype
        return _without_autocast(operator, (*args, *rest), {"dtype": dtype})

    return kernel


def _with_fp32_output(name: str) -> Callable[..., Any]:
    operator = _overload(name)
    names = [argument.name for argument in operator._schema.arguments]
    place = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not is_eligible(args[0]) or (args[place : place + 1] or [kwargs.get("dtype")])[0] is not None:
            return _without_autocast(operator, args, kwargs)
        if args[0].dtype is torch.float16 and name in _HALF_TO_FLOAT:
            return _without_autocast(_HALF_TO_FLOAT[name], (args[0], args[1], True), {})
        return _without_autocast(operator, args[:place], {**kwargs, "dtype": torch.float32})

    return kernel
