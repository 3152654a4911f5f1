"""Products for `exact` by cuBLASLt, for those shapes of a model for which a check at load proves that they do not depend on the
batch; otherwise by Triton.

cuBLASLt chooses a kernel, and whether to split the sum along the inputs, by the shape of a product. torch can forbid splits,
but for 1,024 outputs of 3,072 inputs few rows still have other sums (seen on an H200, cuBLAS 13.1). So each shape is
proven (`rollout.engine.cuda.proofs`), and a product is never called with a number of rows that was not: rows are padded to the
next one that was, and more than the most are cut into pieces.

The name of the arithmetic has the library's version and a digest of the proven shapes and of the results of their proofs, in
which sums of another order show: exact_lt/1/cublas13.1.0-5f0c2a91."""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from rollout.engine.cuda import exact
from rollout.engine.cuda.exact import Tile
from rollout.engine.cuda.proofs import Linear, Unproven, WeightShape, prove_row_invariant, shapes_of

log = logging.getLogger(__name__)

LIBRARY = "exact_lt/1"
"""beginning of the name of the library's products; a change of how they are called increases the version"""
ROWS = (*range(1, 257), *range(288, 1025, 32), *range(1280, 8193, 256))
"""numbers of rows with which the library is called"""
ALIGNED_BYTES = 256
"""of the address of a matrix: the library chooses by it, too"""
FEW_ROWS = 64
BY_ROWS = Tile(64, 32, 64, 4, 4), Tile(128, 128, 64, 8, 4)
"""tiles of Triton's product for at most FEW_ROWS, in 16 bits, and for more: with the inputs at a time of the fixed tile"""
TILED_ROWS = (1, 2, 17, 33, 64, 65, 128, 200, 256, 1000)
"""numbers of rows at which their bits are compared with those of the fixed tile, whose kernel is the same for all"""

_settings = threading.Lock()
"""held while torch's settings, which are the process's, are those of a product"""


class ExactProducts(NamedTuple):
    """Products whose rows do not depend on the number of rows."""

    multiply: Linear
    name: str


class PaddedProduct:
    """A product that is called with proven numbers of rows only."""

    def __init__(self, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], rows: Sequence[int] = ROWS) -> None:
        """multiply: of x [rows, inputs] and a weight [outs, inputs]. rows: ascending."""
        self.multiply, self.rows = multiply, tuple(rows)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return [rows, outs]: the product, rounded once, and then the sum with the bias."""
        weight = aligned(weight)
        made = [self._piece(piece, weight) for piece in x.split(self.rows[-1])]
        out = made[0] if len(made) == 1 else torch.cat(made) if made else x.new_empty(0, len(weight))
        return out if bias is None else out + bias

    def _piece(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = self.rows[bisect.bisect_left(self.rows, len(x))]
        if rows == len(x):
            return self.multiply(aligned(x), weight)
        padded = x.new_zeros(rows, x.shape[1])
        padded[: len(x)] = x
        return self.multiply(padded, weight)[: len(x)]


class ProvenProduct:
    """A product by a library for weights of proven shapes; Triton's for others, such as those of an adapter."""

    def __init__(self, product: PaddedProduct, shapes: Sequence[WeightShape], others: Linear | None = None) -> None:
        """others: Triton's; None: with the fixed tile."""
        self.product, self.others = product, others
        self.sizes = {(outs, shape.inputs) for shape in shapes for outs in (*shape.outs, sum(shape.outs))}

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return [rows, outs]."""
        multiply: Linear = self.product if tuple(weight.shape) in self.sizes else self.others or exact.product
        return multiply(x, weight, bias)


def aligned(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix as the proof has it: contiguous, at an aligned address."""
    matrix = matrix.contiguous()
    return matrix if matrix.data_ptr() % ALIGNED_BYTES == 0 else matrix.clone()


@contextmanager
def without_splits() -> Iterator[None]:
    """Let torch multiply by cuBLASLt, with sums in fp32 that are not split along the inputs."""
    settings: Any = torch.backends.cuda.matmul
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    with _settings:
        before = [(getattr(settings, name), getattr(settings, f"{name}_split_k")) for name in names]
        library = torch.backends.cuda.preferred_blas_library()
        try:
            torch.backends.cuda.preferred_blas_library("cublaslt")
            for name in names:
                setattr(settings, name, (False, False))
            yield
        finally:
            for name, value in zip(names, before, strict=True):
                setattr(settings, name, value)
            torch.backends.cuda.preferred_blas_library(library)


def by_library(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return [rows, outs] of x [rows, inputs] and a weight [outs, inputs], by cuBLASLt."""
    with without_splits():
        return torch.mm(x, weight.T)


def library_version() -> str:
    """Return the version of the cuBLASLt that torch has loaded, such as "13.1.0". Raises Unproven if it is unknown."""
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or 'none').partition('.')[0]}")
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        found = int(library.cublasLtGetVersion())
    except (OSError, AttributeError) as error:
        raise Unproven(f"cuBLASLt's version is unknown ({error})") from error
    return f"{found // 10000}.{found // 100 % 100}.{found % 100}"


def library_products(module: nn.Module) -> ExactProducts:
    """Return cuBLASLt's products for a model in 16 bits on CUDA. Raises Unproven if their rows depend on the number of rows for
    every shape."""
    like = next(module.parameters())
    if like.device.type != "cuda" or like.element_size() != 2:
        raise Unproven(f"cuBLASLt multiplies in 16 bits on CUDA, and the model is in {like.dtype} on {like.device}")
    if not hasattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction_split_k"):
        raise Unproven(f"torch {torch.__version__} cannot forbid split sums")
    shapes, version = shapes_of(module), library_version()
    return proven(PaddedProduct(by_library), shapes, version, like, tiled(shapes, like))


def proven(
    product: PaddedProduct, shapes: Sequence[WeightShape], version: str, like: torch.Tensor, others: Linear | None = None
) -> ExactProducts:
    """Return products with their name: the library's for the shapes for which that is proven, `others` for the rest. Raises
    Unproven if no shape is."""
    digests: dict[WeightShape, str] = {}
    why = "the model has no linear layers"
    for shape in shapes:
        try:
            digests[shape] = prove_row_invariant(product, [shape], product.rows, like)
        except Unproven as error:
            why = str(error)
        except RuntimeError as error:  # torch's: no memory, or no kernel
            why = f"a product failed: {str(error)[:200]}"
    if not digests:
        raise Unproven(why)
    if len(digests) < len(shapes):
        log.info("cuBLASLt multiplies %d of %d shapes, Triton the others reason=%r", len(digests), len(shapes), why)
    digest = hashlib.blake2b(repr(sorted(digests.items())).encode(), digest_size=4).hexdigest()
    return ExactProducts(ProvenProduct(product, list(digests), others), f"{LIBRARY}/cublas{version}-{digest}")


def triton_products(module: nn.Module) -> ExactProducts:
    """Return Triton's products: with a tile by the number of rows, if that has the bits of the fixed tile on this device."""
    return ExactProducts(tiled(shapes_of(module), next(module.parameters(), torch.empty(0))), exact.ARITHMETIC)


def tiled(shapes: Sequence[WeightShape], like: torch.Tensor) -> Linear:
    """Return Triton's product with a tile by the number of rows, if that has the bits of the fixed tile for these shapes and
    the dtype and device of `like`; otherwise with the fixed one."""
    from triton.runtime.errors import TritonError

    if like.device.type == "cuda" and like.element_size() == 2:
        try:
            prove_row_invariant(by_rows, shapes, TILED_ROWS, like, against=exact.product)
            return by_rows
        except (Unproven, RuntimeError, TritonError) as error:  # the last: more shared memory than there is
            log.info("the exact product has one tile for all rows reason=%r", str(error)[:200])
    return exact.product


def by_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return Triton's product in 16 bits, with a tile by the number of rows."""
    return exact.product(x, weight, bias, BY_ROWS[len(x) > FEW_ROWS])


def choose_products(module: nn.Module, library: bool) -> ExactProducts:
    """Return the library's products if they are asked for and proven, else Triton's."""
    if library:
        try:
            return library_products(module)
        except Unproven as error:
            log.info("exact products are Triton's, not cuBLASLt's reason=%r", str(error))
    return triton_products(module)
