"""What each lane of a warp holds of the matrices that mma.sync multiplies, m16n8k16, in NumPy.

An instruction multiplies A [16, 16] by B [16, 8] and adds the product to C [16, 8]. No lane sees a
whole matrix: each of the 32 brings eight numbers of A, four of B and four of C, and the map of lane
and register to row and column is fixed by the hardware (PTX ISA, "Matrix Fragments for
mma.m16n8k16"). Registers are arrays with the lane first.
"""

from dataclasses import dataclass

import numpy as np

from mla_ref.checks import describe
from mla_ref.teaching.tile_memory import E4M3, Array

LANES = 32
# Lane = 4 g + t. All maps are written with these two.
G, T = np.divmod(np.arange(LANES), 4)


@dataclass(frozen=True)
class Fragment:
    """Which lane holds which element of a matrix.

    Attributes:
        name: The matrix.
        shape: Rows and columns.
        row: [32, numbers], the row of each number that a lane holds, in the order of its registers.
        column: The same for the column.
    """

    name: str
    shape: tuple[int, int]
    row: Array
    column: Array

    def take(self, matrix: Array) -> Array:
        """The registers of all lanes, [32, numbers], of a matrix."""
        if matrix.shape != self.shape:
            raise ValueError(f"matrix must be {self.shape}, got {describe(matrix)}")
        return matrix[self.row, self.column]

    def put(self, registers: Array) -> Array:
        """The matrix that the lanes' registers make up."""
        if registers.shape != self.row.shape:
            raise ValueError(f"registers must be {self.row.shape}, got {describe(registers)}")
        matrix = np.zeros(self.shape, registers.dtype)
        matrix[self.row, self.column] = registers
        return matrix

    def owners(self) -> Array:
        """The lane that holds each element."""
        return self.put(np.repeat(np.arange(LANES)[:, None], self.row.shape[1], axis=1))


def _map(name: str, shape: tuple[int, int], row: list[Array], column: list[Array]) -> Fragment:
    return Fragment(name, shape, np.stack(row, axis=1), np.stack(column, axis=1))


_K = [2 * T, 2 * T + 1]
# Two 16-bit numbers fill a register: A has four registers, B two, and C four of float32.
A = _map("A", (16, 16), [G, G, G + 8, G + 8] * 2, [*_K, *_K, *(k + 8 for k in _K * 2)])
B = _map("B", (16, 8), [*_K, *(k + 8 for k in _K)], [G] * 4)
C = _map("C", (16, 8), [G, G, G + 8, G + 8], [*_K, *_K])


def multiply(c: Array, a: Array, b: Array) -> Array:
    """mma.sync: C + A B. Every lane brings its registers and gets its four numbers of C back.

    Args:
        c: [32, 4] in float32.
        a: [32, 8].
        b: [32, 4].
    """
    return c + C.take(np.matmul(A.put(a), B.put(b), dtype=np.float32))


def transpose_8x8(pairs: Array) -> Array:
    """movmatrix: of an 8 x 8 matrix a lane holds (row g, columns 2t, 2t + 1), before and after."""
    matrix = np.zeros((8, 8), pairs.dtype)
    matrix[G[:, None], np.stack(_K, axis=1)] = pairs
    return matrix.T[G[:, None], np.stack(_K, axis=1)]


def token_of(r: Array) -> Array:
    """The token of a tile that stands in row r of an operand: 0 4 1 5 2 6 3 7, then those + 8.

    In this order no two lanes that are served at once want the same banks; see `warp_memory`.
    """
    return np.where(r < 8, 0, 8) + (r % 2) * 4 + r % 8 // 2


def keys_operand(low: Array, high: Array) -> Array:
    """Registers of A from four E4M3 bytes of token row g and four of row g + 8, [32, 4] each.

    The four stand for k = 2t, 2t + 1, 2t + 8, 2t + 9: the order in which a sum runs is free, as
    long as B has the same one.
    """
    low, high = E4M3[low].astype(np.float16), E4M3[high].astype(np.float16)
    return np.concatenate([low[:, :2], high[:, :2], low[:, 2:], high[:, 2:]], axis=1)


def values_operand(tokens: Array) -> tuple[Array, Array]:
    """Registers of A = V^T for two tiles of 16 latent numbers, from four bytes of four tokens.

    Args:
        tokens: [32, 4 tokens, 4 bytes]: those that stand for k = 2t, 2t + 1, 2t + 8, 2t + 9.
            Byte 0 is row g of the first tile, byte 1 its row g + 8; 2 and 3 are of the second.
    """
    numbers = E4M3[tokens].astype(np.float16)
    parts = [
        np.concatenate([numbers[:, k, byte] for k in (slice(0, 2), slice(2, 4)) for byte in pair],
                       axis=1)
        for pair in ((0, 1), (2, 3))
    ]  # fmt: skip
    return parts[0], parts[1]
