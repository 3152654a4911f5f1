"""Engines of models of one shape choose their execution path once a process: the next one installs what was chosen."""

from __future__ import annotations

from typing import Any

from torch import nn

from rollout.engine.cpu import select_path
from rollout.engine.cpu.decoder import NativeDecoder
from rollout.engine.cpu.exact_modules import plain_products
from rollout.engine.cpu.functions import callers
from rollout.engine.cpu.int8_modules import codes_in
from rollout.engine.cpu.products import NativeProducts, products_of
from rollout.engine.forward.interface import ExecutionPath
from rollout.engine.forward.summed import summed_of

chosen: dict[Any, ExecutionPath] = {}
"""by shape: the path of a model that was compared in full"""
STEPS = ("_logits", "check_products", "why_not", "products_like_torch", "use_whole_vectors", "unreached", "use_products")
PLAIN = {name: getattr(select_path, name) for name in STEPS}
"""functions of a comparison: if a test has replaced one of them, models are compared"""


def decide_once(
    module: nn.Module, name: str, asked: dict[int, dict[str, Any]], module_forward: Any, isa: str, whole: bool
) -> ExecutionPath:
    """Do what `select_path.decide` does. For a model whose class, configuration, parameters and products were those of one
    before, the comparisons are left out: their result is that of the one before. One in which anything differs is not kept."""
    products = products_of(isa)
    known = all(getattr(select_path, each) is plain for each, plain in PLAIN.items()) and isinstance(products, NativeProducts)
    summed = any(summed_of(each) is not None for each in module.modules())  # with other ranks, which must compare as much
    if not known or summed or codes_in(module):
        return select_path.decide(module, name, asked, module_forward, isa, whole)
    shapes = ((each, *tensor.shape, tensor.dtype) for each, tensor in module.state_dict(keep_vars=True).items())
    key = type(module), repr(module.config), isa, whole, repr(asked), tuple(shapes)
    if key in chosen:
        plain_products(module)
        with callers(module) as called:
            select_path._logits_of_rows(module_forward, module)
        select_path.install(module, products, called)
        decoder = None if chosen[key].why else NativeDecoder(module, asked, products.kernels)
        return chosen[key]._replace(decoder=decoder)
    path = select_path.decide(module, name, asked, module_forward, isa, whole)
    unlike = "differ" in path.why or path.arithmetic != products.arithmetic or not path.batch_invariant
    if not unlike and bool(path.why) == (path.decoder is None):
        chosen[key] = path._replace(decoder=None)
    return path
