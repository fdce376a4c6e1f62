"""For the reference, an extension of Griffe: the comment behind a field is its description, and shapes stay strings."""

import ast
import io
import tokenize
from typing import Any

import griffe


class Comments(griffe.Extension):
    """`width: int = 512  # D` in a class gets the docstring “D”; a docstring that is there stays."""

    def on_attribute_instance(self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and isinstance(node, ast.AST) and (comment := comment_behind(attr)):
            attr.docstring = griffe.Docstring(comment, parent=attr)

    def on_function_instance(self, *, node: ast.AST | griffe.ObjectNode, func: griffe.Function, **_: Any) -> None:
        """`Int[Array, "B"]` is not read as a forward reference to a type B."""
        if not isinstance(node, ast.FunctionDef):
            return
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if argument.annotation is not None:
                func.parameters[argument.arg].annotation = as_written(argument.annotation, func)
        if node.returns is not None:
            func.returns = as_written(node.returns, func)


def as_written(annotation: ast.expr, func: griffe.Function) -> Any:
    return griffe.get_expression(annotation, parent=func.parent, parse_strings=False)


def comment_behind(attr: griffe.Attribute) -> str:
    """The comment in the last line of a definition."""
    try:
        tokens = [*tokenize.generate_tokens(io.StringIO(attr.source).readline)]
    except (tokenize.TokenError, SyntaxError):
        return ""
    return " ".join(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)
