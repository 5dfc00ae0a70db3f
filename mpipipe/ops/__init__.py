"""Our own operators: the random ones, on a stream that no layout changes, and the compiled kernels' door."""

from mpipipe.ops.accumulate import accumulate
from mpipipe.ops.adamw import adamw
from mpipipe.ops.attention import attention
from mpipipe.ops.batch_norm import batch_norm
from mpipipe.ops.bias_gelu import bias_gelu
from mpipipe.ops.draws import bernoulli, bernoulli_like, integers, normal, normal_like, uniform, uniform_like
from mpipipe.ops.dropout import dropout
from mpipipe.ops.embedding import embedding
from mpipipe.ops.flash_attention import flash_attention
from mpipipe.ops.gemm import add_gemm, gemm
from mpipipe.ops.layer_norm import layer_norm, rms_norm
from mpipipe.ops.linear_cross_entropy import linear_cross_entropy
from mpipipe.ops.max_pool2d import max_pool2d
from mpipipe.ops.native import KERNELS_VERSION, kernels
from mpipipe.ops.norms import norms
from mpipipe.ops.philox import philox_words, stream_key
from mpipipe.ops.replace import draws, replacement
from mpipipe.ops.swiglu import swiglu

__all__ = [
    "KERNELS_VERSION",
    "accumulate",
    "adamw",
    "add_gemm",
    "attention",
    "batch_norm",
    "bernoulli",
    "bernoulli_like",
    "bias_gelu",
    "draws",
    "dropout",
    "embedding",
    "flash_attention",
    "gemm",
    "integers",
    "kernels",
    "layer_norm",
    "linear_cross_entropy",
    "max_pool2d",
    "normal",
    "normal_like",
    "norms",
    "philox_words",
    "replacement",
    "rms_norm",
    "stream_key",
    "swiglu",
    "uniform",
    "uniform_like",
]
