"""Reads syntax trees, for tests of what sources contain."""

from __future__ import annotations

import ast


def dotted(node: ast.expr) -> str:
    """a.b.c of such an expression, "" of any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}" if dotted(node.value) else ""
    return ""
