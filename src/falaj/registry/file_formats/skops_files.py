"""Check the models that skops writes: which types its schema names, and how each of them is made.

skops looks a type up by module and name, makes an object of it, and fills it. So a file runs what its schema names: the
types here are those of scikit-learn and what its models are made of, and no function but NumPy's on arrays. A file
that passes is still never loaded by the platform outside of a sandbox: the arrays of a tree are not checked by anyone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from falaj.errors import shorten
from falaj.registry.file_formats.strict_json import parse_json

SCHEMA = "schema.json"
SCHEMA_LIMIT = 64 << 20
PROTOCOL = 2
"""The one that is known; a lower one would choose other loaders."""
MEMBER = re.compile(r"schema\.json|\d{1,20}\.(?:npy|npz|bin)")
DEPTH_LIMIT = 200

_PARTS = """
    calibration cluster compose covariance cross_decomposition decomposition discriminant_analysis dummy ensemble
    feature_extraction feature_selection gaussian_process impute isotonic kernel_approximation kernel_ridge linear_model
    manifold mixture model_selection multiclass multioutput naive_bayes neighbors neural_network pipeline preprocessing
    random_projection semi_supervised svm tree
"""
ESTIMATOR = re.compile(
    rf"""
    sklearn\.(?:{"|".join(_PARTS.split())})(?:\._?[a-z][a-z0-9_]*)*\._?[A-Z]\w*
    |sklearn\.metrics\._dist_metrics\.[A-Z]\w*
    |sklearn\.metrics\._scorer\._PassthroughScorer
    |sklearn\._loss\.(?:link|loss)\.[A-Z]\w*
    """,
    re.VERBOSE,
)
_DTYPE = r"numpy\.(?:bool_?|u?int(?:8|16|32|64)|float(?:16|32|64)|complex(?:64|128)|str_|bytes_|datetime64|timedelta64)"
_FUNCTIONS = """
    abs absolute add arccos arccosh arcsin arcsinh arctan arctanh cbrt ceil cos cosh deg2rad degrees divide exp exp2
    expm1 fabs floor log log10 log1p log2 maximum minimum multiply negative positive power rad2deg radians reciprocal
    rint sign sin sinh sqrt square subtract tan tanh true_divide trunc
"""
RULES: Mapping[str, re.Pattern[str]] = {
    "BytearrayNode": re.compile(r"builtins\.bytearray"),
    "BytesNode": re.compile(r"builtins\.bytes"),
    "CachedNode": re.compile(r".*"),
    "DTypeNode": re.compile(r"numpy\.dtype"),
    "DefaultDictNode": re.compile(r"collections\.defaultdict"),
    "DictNode": re.compile(r"builtins\.dict|collections\.OrderedDict"),
    "FunctionNode": re.compile(
        rf"numpy\.(?:{'|'.join(_FUNCTIONS.split())})|scipy\.special\.(?:expit|logit|log1p)"
    ),
    "JsonNode": re.compile(r"builtins\.(?:str|int|float|bool|NoneType)"),
    "ListNode": re.compile(r"builtins\.list"),
    "LossNode": re.compile(r"sklearn\._loss\._loss\.Cy\w+|sklearn\.linear_model\._sgd_fast\.[A-Z]\w*"),
    "MaskedArrayNode": re.compile(r"numpy\.ma(?:\.core)?\.MaskedArray"),
    "NdArrayNode": re.compile(rf"numpy\.ndarray|{_DTYPE}"),
    "ObjectNode": ESTIMATOR,
    "RandomGeneratorNode": re.compile(r"numpy\.random\._generator\.Generator"),
    "RandomStateNode": re.compile(r"numpy\.random\.mtrand\.RandomState"),
    "SetNode": re.compile(r"builtins\.set"),
    "SliceNode": re.compile(r"builtins\.slice"),
    "SparseMatrixNode": re.compile(r"scipy\.sparse\._(?:csr|csc|coo|bsr|dia)\.[a-z]{3}_(?:matrix|array)"),
    "TreeNode": re.compile(r"sklearn\.tree\._tree\.Tree"),
    "TupleNode": re.compile(r"builtins\.tuple"),
    "TypeNode": re.compile(rf"builtins\.(?:str|int|float|bool)|{_DTYPE}"),
}
"""The loaders of skops that are known, and what each may load. Others call methods, or functions with arguments."""
BIT_GENERATORS = frozenset({"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"})


def is_skops(names: Mapping[str, bytes]) -> bool:
    """Tell whether an archive is one of skops, by its members."""
    return SCHEMA in names and b'"_skops_version"' in names[SCHEMA]


def skops_fault(members: Mapping[str, bytes]) -> str | None:
    """Return what is wrong with an archive of skops, given its members, with all of its schema; none if nothing is."""
    strange = next((name for name in members if not MEMBER.fullmatch(name)), None)
    if strange is not None:
        return f"a member that skops does not write, {shorten(strange)}"
    if len(members[SCHEMA]) > SCHEMA_LIMIT:
        return f"a schema of more than {SCHEMA_LIMIT >> 20} MiB"
    try:
        schema = parse_json(members[SCHEMA])
    except ValueError as error:
        return f"a schema that cannot be read: {error}"
    if not isinstance(schema, dict) or schema.get("protocol") != PROTOCOL:
        return f"a schema that is not of protocol {PROTOCOL}; save it again with skops 0.12 or newer"
    return next(_faults(schema, frozenset(members), 0), None) or _root_fault(schema)


def _root_fault(schema: dict[str, Any]) -> str | None:
    return None if "__loader__" in schema else "a schema without a model"


def _faults(value: Any, members: frozenset[str], depth: int) -> Iterator[str]:
    if depth > DEPTH_LIMIT:
        yield "a schema that is nested too deeply"
    elif isinstance(value, dict):
        if any(key in value for key in ("__loader__", "__class__", "__module__")):
            yield from _node_faults(value, members)
        for inner in value.values():
            yield from _faults(inner, members, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            yield from _faults(inner, members, depth + 1)


def _node_faults(node: dict[str, Any], members: frozenset[str]) -> Iterator[str]:
    loader, module, name = (str(node.get(key)) for key in ("__loader__", "__module__", "__class__"))
    rule = RULES.get(loader)
    if rule is None or not rule.fullmatch(f"{module}.{name}"):
        yield f"the type {shorten(f'{module}.{name}')} ({shorten(loader)}), which is not one that is trusted"
    file = node.get("file")
    if file is not None and file not in members:
        yield f"an array that is not in it, {shorten(file)}"
    if loader == "RandomGeneratorNode" and _bit_generator(node) not in BIT_GENERATORS:
        yield "a random generator that NumPy does not have"


def _bit_generator(node: dict[str, Any]) -> str | None:
    """Return the name that skops looks up in `numpy.random` and calls."""
    try:
        return str(
            parse_json(node["content"]["bit_generator"]["content"]["bit_generator"]["content"].encode())
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        return None
