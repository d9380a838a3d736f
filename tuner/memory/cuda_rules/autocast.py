"""CUDA's autocast on CPU fakes: its cast lists, its default type, its weight cache, GradScaler.

`torch.autocast("cuda")` is switched off where there is no GPU, and the CPU's own lists differ: CUDA
runs `exp`, `softmax`, `layer_norm`, losses, `sum`, `pow` and others in fp32, which a CPU does not,
and leaves alone what only the CPU casts. So a context for `cuda` becomes one for the CPU, whose
kernels at the dispatch key `AutocastCPU` are replaced by CUDA's policies while tracing. Casts to
the lower type of what both devices list, and the cache of low-precision weights that lives until
the outermost context ends, are PyTorch's own.

Source: the lists in aten/src/ATen/autocast_mode.h (`AT_FORALL_*`) and `CachedCast` there; softmax
with `half_to_float` in aten/src/ATen/native/SoftMax.cpp.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tuner.memory.rules import Journal

NAME = "CUDA autocast"
_KEY = "AutocastCPU"

# AT_FORALL_LOWER_PRECISION_FP, as far as the CPU does not list it already.
_LOWER = ("prelu", "addmv", "addr", "mv", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell",
          "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")  # fmt: skip
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
    context = torch.amp.autocast_mode.autocast
    original = context.__init__

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **options: Any) -> None:
        if device_type == "cuda":
            if NAME not in journal.rules:
                journal.rules.setdefault(NAME)
                stack.enter_context(_cuda_cast_lists())
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, *args, **options)

    yield _set(context, "__init__", init)
    yield _set(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        yield _set(torch, name, _asking_the_cpu(getattr(torch, name)))


def _asking_the_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def asked(device_type: str = "cuda") -> Any:
        active = function is not torch.get_autocast_dtype or torch.is_autocast_enabled("cpu")
        return function("cpu" if device_type == "cuda" and active else device_type)

    return asked


@contextlib.contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _cuda_cast_lists() -> Iterator[None]:
    library: Any = _new_library()
    policies = {
        **dict.fromkeys(_only_on_the_cpu(), torch.library.fallthrough_kernel),
        **{name: _lower_precision(_overload(name)) for name in _LOWER},
        **{name: _in_fp32(_overload(name)) for name in _FP32},
        **{name: _with_fp32_output(name) for name in _FP32_OUTPUT},
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
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        return operator(*args, **kwargs)


def _is_eligible(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype is not torch.float64


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda leaf: leaf.to(dtype) if _is_eligible(leaf) else leaf, values)


def _lower_precision(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        return _without_autocast(operator, _cast(args, dtype), _cast(kwargs, dtype))

    return kernel


def _in_fp32(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _without_autocast(operator, _cast(args, torch.float32), _cast(kwargs, torch.float32))

    return kernel


def _promoting(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        widest = torch.get_autocast_dtype("cpu")
        if any(_is_eligible(leaf) and leaf.dtype is torch.float32 for leaf in tree_leaves((args, kwargs))):
            widest = torch.float32
        return _without_autocast(operator, _cast(args, widest), _cast(kwargs, widest))

    return kernel


def _with_fp32_output(name: str) -> Callable[..., Any]:
    operator = _overload(name)
    names = [argument.name for argument in operator._schema.arguments]
    place = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not _is_eligible(args[0]) or (args[place : place + 1] or [kwargs.get("dtype")])[0] is not None:
            return _without_autocast(operator, args, kwargs)
        if args[0].dtype is torch.float16 and name in _HALF_TO_FLOAT:
            return _without_autocast(_HALF_TO_FLOAT[name], (args[0], args[1], True), {})
        return _without_autocast(operator, args[:place], {**kwargs, "dtype": torch.float32})

    return kernel
