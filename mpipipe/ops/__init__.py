"""Our own operators: the random ones, on a stream that no layout changes, and the compiled kernels' door."""

from mpipipe.ops.accumulate import accumulate
from mpipipe.ops.adamw import adamw
from mpipipe.ops.attention import attention
from mpipipe.ops.draws import bernoulli, bernoulli_like, integers, normal, normal_like, uniform, uniform_like
from mpipipe.ops.dropout import dropout
from mpipipe.ops.embedding import embedding
from mpipipe.ops.flash_attention import flash_attention
from mpipipe.ops.linear_cross_entropy import linear_cross_entropy
from mpipipe.ops.native import KERNELS_VERSION, kernels
from mpipipe.ops.norms import norms
from mpipipe.ops.philox import philox_words, stream_key
from mpipipe.ops.replace import draws, replacement

__all__ = [
    "KERNELS_VERSION",
    "accumulate",
    "adamw",
    "attention",
    "bernoulli",
    "bernoulli_like",
    "draws",
    "dropout",
    "embedding",
    "flash_attention",
    "integers",
    "kernels",
    "linear_cross_entropy",
    "normal",
    "normal_like",
    "norms",
    "philox_words",
    "replacement",
    "stream_key",
    "uniform",
    "uniform_like",
]
