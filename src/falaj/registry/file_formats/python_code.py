"""Recognize models that are Python source by their name, and by what they define; nothing of them is run."""

from __future__ import annotations

import ast
import warnings
from pathlib import PurePosixPath

from falaj.errors import shorten
from falaj.registry.file_formats.range_reader import RangeReader

NAME = "model.py"
SOURCE_LIMIT = 1 << 20


def is_python_model(reader: RangeReader) -> bool:
    """Return whether a file is called model.py and defines predict() or a class Model with that method.

    Raise InvalidInput if a file of that name is not Python. One that defines neither accompanies a model as text.
    """
    if PurePosixPath(reader.name).name != NAME:
        return False
    return any(_predicts(node) for node in _parsed(reader).body)


def require_definition(reader: RangeReader, name: str) -> None:
    """Raise InvalidInput unless a file is Python source that defines the class or function `name`, at its top level."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    defined = [node.name for node in _parsed(reader).body if isinstance(node, kinds)]
    if name not in defined:
        shown = ", ".join(defined[:20]) or "no class and no function"
        raise reader.rejection(f"source that does not define {name}: it defines {shown}")


def _parsed(reader: RangeReader) -> ast.Module:
    """Return the syntax of a file. Raise InvalidInput if it is not Python."""
    if reader.size_bytes > SOURCE_LIMIT:
        raise reader.rejection(f"Python source of more than {SOURCE_LIMIT >> 20} MiB")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(reader.at(0, reader.size_bytes).decode("utf-8-sig"))
    except SyntaxError as error:
        raise reader.rejection(f"not Python: line {error.lineno}: {shorten(error.msg)}") from None
    except UnicodeDecodeError:
        raise reader.rejection("not Python: it is not UTF-8") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise reader.rejection(f"Python that cannot be parsed: {shorten(error)}") from None


def _predicts(node: ast.stmt) -> bool:
    if isinstance(node, ast.ClassDef) and node.name == "Model":
        return any(isinstance(each, ast.FunctionDef) and each.name == "predict" for each in node.body)
    return isinstance(node, ast.FunctionDef) and node.name == "predict"
