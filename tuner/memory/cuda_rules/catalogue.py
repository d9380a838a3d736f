"""Every rule of CUDA targets: what it changes, where that is written, what it does not see."""

from __future__ import annotations

from typing import NamedTuple

from tuner.memory.rules import COMPILED


class Rule(NamedTuple):
    """A rule, for people.

    Attributes:
        name: As a prediction lists it.
        effect: What it changes.
        source: Where CUDA's behaviour is written or was measured.
        limits: What it does not see.
    """

    name: str
    effect: str
    source: str
    limits: str


CATALOGUE = (
    Rule(
        "multi-tensor optimizers",
        "An optimizer that chooses for itself takes the multi-tensor path: it updates all parameters at "
        "once, with lists of temporaries as large as all of them. `foreach=`, `fused=` and "
        "`capturable=` are kept as given.",
        "torch/optim/optimizer.py, torch/utils/_foreach_utils.py; measured: steps.csv (one parameter at "
        "a time)",
        "Optimizers of other libraries are traced as they are written.",
    ),
    Rule(
        "CUDA autocast",
        "`torch.autocast('cuda')` casts by CUDA's lists: matrix products, convolutions and attention to "
        "half, softmax, norms, losses, `sum`, `pow` and others to fp32. Half copies of weights live "
        "until the outermost context ends. GradScaler runs.",
        "aten/src/ATen/autocast_mode.h (`AT_FORALL_*`), autocast_mode.cpp (`cached_cast`); "
        "measured: steps.csv",
        "Contexts made when a module is imported; that CUDA refuses `binary_cross_entropy`; a "
        "weight that goes to an operator that the CPU lists and to one that only CUDA lists is "
        "copied twice.",
    ),
    Rule(
        "dropout",
        "A mask of one byte an element is kept for backward, where a CPU keeps a tensor of the input's type.",
        "`is_fused_kernel_acceptable` in aten/src/ATen/native/Dropout.cpp",
        "Dropout inside C++ compositions other than attention and recurrent layers.",
    ),
    Rule(
        "attention backends",
        "`scaled_dot_product_attention` runs on the backend that PyTorch would choose by type, mask, "
        "head size, compute capability and switches: flash, efficient, cuDNN or math. Each has its own "
        "saved tensors and, in backward, fp32 accumulators. The backend is noted.",
        "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, sdp_utils_cpp.h, attention.cpp; "
        "flash_attn/flash_api.cpp, mem_eff_attention/kernel_backward.h",
        "Nested tensors; cuDNN before 9.15; the efficient backend's tiles, which round its "
        "accumulators up; cuDNN's own workspace is taken as flash attention's.",
    ),
    Rule(
        "fused RMSNorm",
        "`rms_norm` is one kernel that keeps its input and a statistic a row, where a CPU composes it "
        "of six operators.",
        "`_fused_rms_norm` in native_functions.yaml and derivatives.yaml, `rms_norm_symint` in "
        "aten/src/ATen/native/layer_norm.cpp",
        "Transforms of torch.func, below which it is composed; partial sums of the weight's gradient.",
    ),
    Rule(
        "cuDNN recurrent layers",
        "LSTM, GRU and RNN are one cuDNN call each: output, states, a reserve for backward, a "
        "workspace, and one buffer that all weight gradients are views of. Under autocast the weights "
        "are copied at each call.",
        "aten/src/ATen/native/cudnn/RNN.cpp, aten/src/ATen/cudnn/AutocastRNN.cpp",
        "The sizes of reserve and workspace are cuDNN's and not published: gates and states of every "
        "step are taken, and the prediction says so. Cells (`LSTMCell`) are traced as on a CPU.",
    ),
    Rule(
        "cuBLAS workspaces",
        "Each thread that multiplies matrices keeps a workspace in the allocator: one in inference, two "
        "in training. 8,519,680 B, 32 MiB from compute capability 9.0 on; `CUBLAS_WORKSPACE_CONFIG` "
        "decides.",
        "ATen/cuda/CublasHandlePool.cpp, ATen/native/cuda/Blas.cpp; measured: modules.csv, attention.csv",
        "Several streams; sizes that the workload sets by itself.",
    ),
    Rule(
        "cuDNN convolution workspaces",
        "Not modelled as bytes: cuDNN chooses an algorithm by what is free, so its workspace is a band, "
        "not a point. A step with convolutions has a wider prior (`tuner/memory/calibration.py`), and "
        "trials of the same kind correct it.",
        "measured: nvml_rows.csv, where under a cap the same work moves by -16 to +4 %",
        "`torch.backends.cudnn.benchmark`, which tries large workspaces and leaves their segments.",
    ),
    Rule(
        "softmax backward",
        "The product of gradient and output is built first: one temporary of the output's size.",
        "`softmax_backward_cuda_out` in aten/src/ATen/native/cuda/SoftMax.cu; measured: modules.csv",
        "`softmax` of fp16 with `dtype=float32` outside autocast, which CUDA does without an fp32 copy.",
    ),
    Rule(
        "embedding backward",
        "Above 3,072 indices they are sorted, and partial sums are built beside the dense gradient.",
        "aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu; measured: modules.csv",
        "Bags, sparse gradients, `scale_grad_by_freq`; the sort's own scratch.",
    ),
    Rule(
        "host copies",
        "A copy to the host (`.cpu()`, `.to('cpu')`) takes nothing on the GPU, nor does what is computed of "
        "host tensors alone; back on the GPU it counts.",
        "aten/src/ATen/native/TensorConversions.cpp",
        "Tensors made without naming a device count as the GPU's; modules moved to the host; pinned memory.",
    ),
    Rule(
        "index backward",
        "Adding at indices (the gradient of `x[indices]`) sorts them: four arrays of their number.",
        "`index_put_with_sort_kernel` in aten/src/ATen/native/cuda/Indexing.cu",
        "The sort's own scratch; values that must be expanded.",
    ),
    Rule(
        "matrix copies",
        "A matrix that BLAS cannot read as it lies (an expanded gradient, every second column) is copied for "
        "the time of the product, on a CPU as well.",
        "`prepare_matrix_for_cublas` in aten/src/ATen/native/cuda/Blas.cpp; measured: the CPU's profiler",
        "Batched products on a CPU.",
    ),
    Rule(
        "layer norm statistics",
        "Mean and deviation are fp32 where the input is half.",
        "aten/src/ATen/native/cuda/layer_norm_kernel.cu; measured: modules.csv",
        "Partial sums of the gradients of weight and bias.",
    ),
    Rule(
        "gradient accumulation in place",
        "The second gradient of a tensor is added into the first, as in a real run; fakes would add "
        "into a third. The recorder does it on every target.",
        "`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp",
        "Gradients of sparse layout.",
    ),
    Rule(
        "step counters on the host",
        "An optimizer's step counters lie in host memory unless it is `capturable` or `fused`: they are "
        "left out of the device's bytes. The trace does it on every CUDA target.",
        "`_init_group` of the optimizers in torch/optim",
        "State of zero dimensions of other libraries is taken for a counter.",
    ),
    Rule(
        COMPILED,
        "Nothing is compiled; the step is traced as written, which is no evidence for the compiled one. "
        "The prediction says so and its band is widest.",
        "torch/_dynamo/eval_frame.py (stances)",
        "What fusion saves or recomputation costs.",
    ),
)
