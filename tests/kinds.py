"""A tiny case of every kind of model, two steps each.

Where there is BatchNorm, on ragged micro-batches and with evaluations between.
"""

from __future__ import annotations

from built_in_tiny import BuiltInCase, tiny_layers, tiny_varying
from hf_tiny import HolesCase, tiny_moe, tiny_t5
from tiny import Case

KINDS: list[Case] = [
    BuiltInCase("resnet", batch=7, evaluate=True, steps=2),
    BuiltInCase("unet", batch=7, evaluate=True, steps=2),
    BuiltInCase("resnet", bits="fast", batch=7, evaluate=True, steps=2),
    BuiltInCase("lstm", steps=2),
    BuiltInCase("dlrm", steps=2),
    BuiltInCase("llama", steps=2),
    BuiltInCase("encoder_decoder", steps=2),
    tiny_varying(steps=2),
    tiny_layers(batch=10, evaluate=True, steps=2),
    tiny_t5(steps=2),
    tiny_moe(steps=2),
    HolesCase("gpt2", bits="fast", batch=7, evaluate=True, steps=2),
]
