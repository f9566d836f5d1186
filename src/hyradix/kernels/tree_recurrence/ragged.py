"""The draft trees of one step, one after the other: the flat form that compiled kernels take.

Owns: the numpy tables that all layers share, and how they follow from parents.
Does not know: tokens, pools, which mode keeps the states.

Invariants: those of ``topology.py``; there is no padding here, trees have their own lengths. A
path is listed root first, its own node last.
Read next: ``topology.py`` (the padded twin).
"""

from __future__ import annotations

from dataclasses import dataclass
from sys import byteorder

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
_NUMBER_BYTES = 4


@dataclass(frozen=True, slots=True)
class FlatTrees:
    """M trees with ``total`` nodes.

    cu_nodes: ``int32[M+1]``. parents: ``int32[total]`` node numbers within the own tree, -1 at a
    root. depths: ``int32[total]``, 0 at a root. path_offsets: ``int32[total+1]``, path_nodes:
    ``int32[*]``: the path of node i is path_nodes[path_offsets[i] : path_offsets[i+1]], as node
    numbers within the own tree.
    """

    cu_nodes: Int32Array
    parents: Int32Array
    depths: Int32Array
    path_offsets: Int32Array
    path_nodes: Int32Array

    @property
    def num_trees(self) -> int:
        """M."""
        return len(self.cu_nodes) - 1

    @property
    def are_roots(self) -> bool:
        """Whether no tree has another node."""
        return len(self.parents) == self.num_trees

    @classmethod
    def of(cls, cu_nodes: Int32Array, parents: Int32Array) -> FlatTrees:
        """Describe trees. Cost: once a step; proportional to the lengths of all paths."""
        count = len(parents)
        if count == len(cu_nodes) - 1 and (parents == -1).all():  # roots alone: plain decode
            zeros = np.zeros(count, np.int32)
            return cls(cu_nodes, parents, zeros, np.arange(count + 1, dtype=np.int32), zeros)
        paths: list[bytes] = []  # int32 each: joining them copies memory, lists would box numbers
        root = 0
        for parent in parents.tolist():
            if parent < 0:
                root = len(paths)
                paths.append(bytes(_NUMBER_BYTES))
            else:
                node = len(paths) - root
                paths.append(paths[root + parent] + node.to_bytes(_NUMBER_BYTES, byteorder))
        lengths = np.fromiter(map(len, paths), np.int32, count) // np.int32(_NUMBER_BYTES)
        offsets = np.zeros(count + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        nodes = np.frombuffer(bytearray().join(paths), np.int32)  # of a bytearray: writable
        return cls(cu_nodes, parents, lengths - np.int32(1), offsets, nodes)

    def path(self, tree: int, node: int) -> Int32Array:
        """Nodes of tree ``tree`` from its root to ``node``, both included."""
        i = int(self.cu_nodes[tree]) + node
        return self.path_nodes[self.path_offsets[i] : self.path_offsets[i + 1]]


@dataclass(frozen=True, slots=True)
class RaggedTrees:
    """What a recurrent layer needs of a step's trees.

    first_token: ``int32[M]``: token of the step (row of ``projected``) at which a tree begins.
    slots: ``int32[M]`` base states, never written by a verify. rows: ``int32[M]`` of the draft
    buffers. num_log_rows: ``int32[M]`` valid log rows, ancestors of every node (0 without a log).
    taps: ``int32[total, K]``: the raw columns that a node's convolution sees, oldest first, its
    own last. A value c >= 0 is column c of the row's ``conv`` buffer; c < 0 is column -1 - c of the
    base's window in the state pool.
    """

    trees: FlatTrees
    first_token: Int32Array
    slots: Int32Array
    rows: Int32Array
    num_log_rows: Int32Array
    taps: Int32Array


def taps_of(
    trees: FlatTrees, num_log_rows: Int32Array, *, width: int, first_node: int, first_row: int
) -> Int32Array:
    """``RaggedTrees.taps`` for buffers whose node t has column ``first_node`` + t.

    Row j of the log has column ``first_row`` + j; the base's window stays in the pool.
    """
    sizes = np.diff(trees.cu_nodes)
    bases, logs = np.repeat(trees.cu_nodes[:-1], sizes), np.repeat(num_log_rows, sizes)
    taps = np.empty((len(trees.parents), width), np.int32)
    node = np.arange(len(trees.parents), dtype=np.int32) - bases
    for tap in range(width - 1, -1, -1):  # up the tree; -n: the n-th column before the root
        row = logs + node
        before = np.where(row >= 0, first_row + row, -(width + row))
        taps[:, tap] = np.where(node >= 0, first_node + node, before)
        parent = trees.parents[bases + np.maximum(node, 0)]
        node = np.where(node >= 0, parent, node - 1)
    return taps


def window_taps(counts: Int32Array, *, width: int, first_row: int) -> Int32Array:
    """Columns of the window after ``counts`` ``int32[J]`` rows: ``int32[J, K-1]``, as ``taps``."""
    row = counts[:, None] + np.arange(1 - width, 0, dtype=np.int32)
    return np.where(row >= 0, first_row + row, -(width + row)).astype(np.int32)
