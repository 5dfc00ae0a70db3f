"""Of the compiled module (kernels/bind.cpp). Addresses are `tensor.data_ptr()`; n counts elements."""

from typing import Any

version: str

def words(key: int, step: int, micro: int, start: int, out: int, n: int, threads: int) -> None: ...
def reference_words(key: int, step: int, micro: int, start: int, out: int, n: int) -> None: ...
def reference_cipher(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> tuple[int, int, int, int]: ...
def dropout_f32(
    key: int, step: int, micro: int, threshold: int, scale: float, x: int, y: int, n: int, threads: int
) -> None: ...
def dropout_f64(
    key: int, step: int, micro: int, threshold: int, scale: float, x: int, y: int, n: int, threads: int
) -> None: ...
def dropout_bf16(
    key: int, step: int, micro: int, threshold: int, scale: float, x: int, y: int, n: int, threads: int
) -> None: ...
def adamw_f32(
    param: int, grad: int, m: int, v: int, master: int, n: int, factor: float, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, step: int, threads: int,
) -> None: ...  # fmt: skip
def adamw_bf16(
    param: int, grad: int, m: int, v: int, master: int, n: int, factor: float, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, step: int, threads: int,
) -> None: ...  # fmt: skip
def norms_f32(x: int, offsets: int, counts: int, n: int, out: int, threads: int) -> None: ...
def norms_bf16(x: int, offsets: int, counts: int, n: int, out: int, threads: int) -> None: ...
def accumulate_bf16(sum: int, x: int, n: int, zero: bool, threads: int) -> None: ...
def attention_f32(*problem_and_results: Any) -> None: ...  # kernels/include/mpipipe/attention.h, in its order
def attention_bf16(*problem_and_results: Any) -> None: ...
def attention_backward_f32(*problem_and_results: Any) -> None: ...
def attention_backward_bf16(*problem_and_results: Any) -> None: ...
def batch_norm_f32(*tensors_and_sizes: Any) -> None: ...  # kernels/include/mpipipe/batch_norm.h, in its order
def batch_norm_bf16(*tensors_and_sizes: Any) -> None: ...
def batch_norm_backward_f32(*tensors_and_sizes: Any) -> None: ...
def batch_norm_backward_bf16(*tensors_and_sizes: Any) -> None: ...
def cross_entropy_forward_f32(
    logits: int, rows: int, columns: int, bias: int, labels: int, first: int, ignored: int, state: int,
    threads: int,
) -> None: ...  # fmt: skip
def cross_entropy_backward_f32(
    logits: int, rows: int, columns: int, bias: int, labels: int, first: int, ignored: int, log_sum: int,
    on_label: float, on_all: float, scale: float, threads: int,
) -> None: ...  # fmt: skip
def cross_entropy_forward_bf16(
    logits: int, rows: int, columns: int, bias: int, labels: int, first: int, ignored: int, state: int,
    threads: int,
) -> None: ...  # fmt: skip
def cross_entropy_backward_bf16(
    logits: int, rows: int, columns: int, bias: int, labels: int, first: int, ignored: int, log_sum: int,
    on_label: float, on_all: float, scale: float, threads: int,
) -> None: ...  # fmt: skip
def reference_cross_entropy_forward_f32(
    logits: int, rows: int, columns: int, bias: int, labels: int, first: int, ignored: int, state: int,
    threads: int,
) -> None: ...  # fmt: skip
def reference_cross_entropy_backward_f32(
    logits: int, rows: int, columns: int, bias: int, labels: int, first: int, ignored: int, log_sum: int,
    on_label: float, on_all: float, scale: float, threads: int,
) -> None: ...  # fmt: skip
def reference_cross_entropy_forward_bf16(
    logits: int, rows: int, columns: int, bias: int, labels: int, first: int, ignored: int, state: int,
    threads: int,
) -> None: ...  # fmt: skip
def reference_cross_entropy_backward_bf16(
    logits: int, rows: int, columns: int, bias: int, labels: int, first: int, ignored: int, log_sum: int,
    on_label: float, on_all: float, scale: float, threads: int,
) -> None: ...  # fmt: skip
def evict(p: int, nbytes: int) -> bool: ...
