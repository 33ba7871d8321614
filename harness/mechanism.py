"""What a fault does, without how it is called: two faults with one mechanism are one fault with two names."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap

from harness.catalogue import Entry
from harness.seams import describe_seam


def mechanism(spec: Entry) -> tuple[str, str]:
    """Return where an entry attaches (whichever side) and the normal form of its code.

    Two entries with the same result differ in names, documentation and constants only.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(spec.factory)))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list = []
    bound = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {n.arg for n in ast.walk(function) if isinstance(n, ast.arg)}
    bound |= {n.name for n in ast.walk(function) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    plain = _Normal(bound).visit(function)
    return re.sub(r"\((trainer|rollout|both)\b", "(", describe_seam(spec.seam)), ast.dump(plain)


class _Normal(ast.NodeTransformer):
    """Drops docstrings and values of constants, and numbers the names that are bound in the function."""

    def __init__(self, bound: set[str]) -> None:
        self._bound = bound
        self._numbers: dict[str, str] = {}

    def _number(self, name: str) -> str:
        return self._numbers.setdefault(name, f"v{len(self._numbers)}") if name in self._bound else name

    def visit(self, node: ast.AST) -> ast.AST:
        """Bring one node into normal form."""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
            node.name = self._number(node.name)
        elif isinstance(node, ast.Name):
            node.id = self._number(node.id)
        elif isinstance(node, ast.arg):
            node.arg, node.annotation = self._number(node.arg), None
        elif isinstance(node, ast.Constant):
            return ast.Constant(value=0)
        return self.generic_visit(node)
