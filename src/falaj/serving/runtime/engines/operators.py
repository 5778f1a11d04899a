"""Tell from an ONNX file, before it is opened, whether the work of a run follows from the shapes of its inputs.

A model whose every operator is listed here, and makes nothing from constants alone, takes as long and as much memory
on any values as on those of a trial of the same shapes. Of any other model nothing is known: a loop may run as often
as a value says, and a tensor may become as large; the smallest whole number divided by -1 ends the process. What cannot
be read counts as other.

The file is walked as protobuf, field by field, without copying weights. Where a field is given more than once, which
parsers resolve in different ways, all of its values count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

MAX_FIELDS = 2_000_000
"""Fields that are walked; a file with more is not a model of our days."""

_PLAIN = {
    "": """
        Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization BitShift BitwiseAnd
        BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Celu Clip Compress Concat Constant Conv ConvInteger Cos Cosh
        CumSum DepthToSpace DequantizeLinear Det Dropout DynamicQuantizeLinear Einsum Elu Equal Erf Exp Flatten
        Floor GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater
        GreaterOrEqual GroupNormalization HardSigmoid HardSwish Hardmax Identity InstanceNormalization IsInf IsNaN LRN
        LSTM LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax LpNormalization LpPool MatMul MatMulInteger
        Max MaxPool Mean MeanVarianceNormalization Min Mish Mul Neg NonZero Not Or PRelu Pow QLinearConv
        QLinearMatMul QuantizeLinear RMSNormalization RNN Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp
        ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape ReverseSequence Round
        ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign
        SpaceToDepth Split Sqrt Squeeze Sub Sum Swish Tan Tanh ThresholdedRelu TopK Transpose Trilu Unique Unsqueeze
        Where Xor
        """,
    "ai.onnx.ml": """
        ArrayFeatureExtractor Binarizer CastMap CategoryMapper FeatureVectorizer Imputer LabelEncoder LinearClassifier
        LinearRegressor Normalizer OneHotEncoder SVMClassifier SVMRegressor Scaler TreeEnsemble TreeEnsembleClassifier
        TreeEnsembleRegressor
        """,
    "com.microsoft": """
        BiasGelu DynamicQuantizeMatMul FastGelu FusedConv FusedGemm FusedMatMul Gelu MatMulIntegerToFloat NhwcMaxPool
        QGemm QLinearAdd QLinearAveragePool QLinearConcat QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul
        QLinearSigmoid QLinearSoftmax QuickGelu SkipLayerNormalization
        """,
}
PLAIN = {(domain, name) for domain, names in _PLAIN.items() for name in names.split()}
"""Operators whose outputs are bounded by the shapes of their inputs and by their attributes."""

AMOUNTS = {"Expand": (1,), "Pad": (1,), "Resize": (2, 3), "Tile": (1,), "OneHot": (1,)}
"""Operators that are plain if these inputs, which say how large the output is, are constants."""

DIVIDING = frozenset(["Div", "Mod"])
"""Operators that are plain on floating-point numbers only: an overflow of whole numbers ends the process."""

TYPED_BY: dict[str, int | None] = {
    "CastLike": 1,
    "OneHot": 2,
    "Where": 1,
    **dict.fromkeys(
        ("ArgMax", "ArgMin", "CastMap", "CategoryMapper", "LabelEncoder", "NonZero", "Shape", "Size")
    ),
    **dict.fromkeys(("Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual")),
    **dict.fromkeys(("ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QuantizeLinear")),
}
"""Operators whose first output has the type of another input than the first, or of none."""

FLOATING = frozenset(
    [
        *(
            "DequantizeLinear",
            "MatMulIntegerToFloat",
            "FeatureVectorizer",
            "Normalizer",
            "OneHotEncoder",
            "Scaler",
        ),
        *("LinearRegressor", "SVMRegressor", "TreeEnsemble", "TreeEnsembleRegressor"),
    ]
)
"""Operators that return floating-point numbers, whatever they are given."""
CLASSIFIERS = frozenset(["LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier"])
"""Operators that return labels, and then scores as floating-point numbers."""
FLOAT_TYPES = frozenset([1, 10, 11, 16])
"""float, float16, double and bfloat16, as the file names types."""

RESHAPING = frozenset(
    ["Cast", "DequantizeLinear", "Identity", "QuantizeLinear", "Reshape", "Squeeze", "Transpose", "Unsqueeze"]
)
"""Operators that may work on constants alone: they make nothing larger, and ONNX Runtime computes them on loading."""


class _Unreadable(Exception):
    """The bytes are not protobuf as it is written for ONNX."""


def reason_unbounded(content: bytes) -> str | None:
    """Return why a run of this model may take any time and memory, in a few words; None if it is bounded."""
    walk, graph = _Walk(), _Graph()
    try:
        model = list(walk.fields(memoryview(content)))
        if any(number == MODEL_FUNCTION for number, _ in model):
            return "it has functions of its own"
        parts = [part for number, part in model if number == MODEL_GRAPH]
        for part in parts:  # several are one, in parts
            for number, value in walk.fields(part):
                graph.add(walk, number, value)
        return graph.reason() if parts else "it has no graph"
    except (_Unreadable, UnicodeDecodeError):
        return "its file cannot be read in full"


MODEL_GRAPH, MODEL_FUNCTION = 7, 25
GRAPH_NODE, GRAPH_INITIALIZER, GRAPH_INPUT, GRAPH_SPARSE_INITIALIZER = 1, 5, 11, 15
NODE_INPUT, NODE_OUTPUT, NODE_OPERATOR, NODE_ATTRIBUTE, NODE_DOMAIN = 1, 2, 4, 5, 7
ATTRIBUTE_NAME, ATTRIBUTE_INTEGER, ATTRIBUTE_TENSOR, ATTRIBUTE_GRAPH, ATTRIBUTE_GRAPHS = 1, 3, 5, 6, 11
ATTRIBUTE_SPARSE = 22, 23
TENSOR_DIMENSIONS, TENSOR_TYPE, TENSOR_NAME = 1, 2, 8
INPUT_NAME, INPUT_TYPE, TYPE_TENSOR, TYPE_ELEMENT = 1, 2, 1, 1
INTEGER = 7
VALUE_TYPES = {
    b"value_float": 1,
    b"value_floats": 1,
    b"value_int": INTEGER,
    b"value_ints": INTEGER,
    b"value_string": 8,
    b"value_strings": 8,
}
"""The types of constants that are no tensors, by the name of their attribute."""
MAX_DIMENSIONS = 64


@dataclass(slots=True)
class _Node:
    operators: list[str] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    """The types that attributes name: of a constant, or of the result of a cast."""
    reason: str | None = None

    @property
    def name(self) -> str:
        return self.operators[-1] if self.operators else "?"


class _Graph:
    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self._constants: set[str] = set()
        self._types: dict[str, list[int]] = {}
        """Types of inputs and weights."""
        self._reason: str | None = None

    def add(self, walk: _Walk, number: int, part: memoryview) -> None:
        if number == GRAPH_NODE:
            self._nodes.append(_node(walk, part))
        elif number == GRAPH_INITIALIZER:
            names, types, reason = _tensor(walk, part)
            self._constants.update(names)
            self._take_types(names, types)
            self._reason = self._reason or reason
        elif number == GRAPH_INPUT:
            self._take_types(*_input(walk, part))
        elif number == GRAPH_SPARSE_INITIALIZER:
            self._reason = "it has sparse weights"

    def reason(self) -> str | None:
        """Return the first reason; nodes stand in the order in which they run."""
        constants = set(self._constants)
        floats = {name for name, types in self._types.items() if _are_floats(types)}
        for node in self._nodes:
            reason = self._reason or node.reason or _reason(node, constants, floats)
            if reason is not None:
                return reason
            floats.update(_floating_outputs(node, floats))
            if node.name == "Constant" or (node.inputs and constants.issuperset(node.inputs)):
                constants.update(node.outputs)
        return self._reason

    def _take_types(self, names: list[str], types: list[int]) -> None:
        for name in names:
            self._types.setdefault(name, []).extend(types or [INTEGER])


def _are_floats(types: list[int]) -> bool:
    return bool(types) and FLOAT_TYPES.issuperset(types)


def _floating_outputs(node: _Node, floats: set[str]) -> list[str]:
    """Return the outputs of a node that are floating-point numbers for certain; `floats` are those before it."""
    if len(node.operators) != 1 or len(node.domains) > 1:
        return []
    if node.name in ("Cast", "Constant"):
        return node.outputs if _are_floats(node.types) else []
    if node.name in FLOATING:
        return node.outputs
    if node.name in CLASSIFIERS:
        return node.outputs[1:]
    place = TYPED_BY.get(node.name, 0)
    if place is None or floats.isdisjoint(node.inputs[place : place + 1]):
        return []
    return node.outputs if node.name == "Split" else node.outputs[:1]


def _reason(node: _Node, constants: set[str], floats: set[str]) -> str | None:
    for operator in node.operators or ["?"]:
        for domain in node.domains or [""]:
            known = "" if domain == "ai.onnx" else domain
            if known == "" and operator in AMOUNTS:
                places = [place for place in AMOUNTS[operator] if place < len(node.inputs)]
                amounts = {node.inputs[place] for place in places} - {""}
                if not amounts <= constants:
                    return f"the size of what {operator} returns depends on values"
            elif known == "" and operator in DIVIDING:
                if floats.isdisjoint(node.inputs):
                    return f"{operator} may divide whole numbers"
            elif (known, operator) not in PLAIN:
                return f"it has the operator {f'{domain}.' if domain else ''}{operator}"[:200]
    alone = not (set(node.inputs) - {""} - constants)
    if alone and node.name != "Constant" and not RESHAPING.issuperset(node.operators):
        return f"{node.name} computes from constants alone"
    return None


def _node(walk: _Walk, part: memoryview) -> _Node:
    node = _Node()
    for number, value in walk.fields(part):
        if number == NODE_INPUT:
            node.inputs.append(str(value, "utf-8"))
        elif number == NODE_OUTPUT:
            node.outputs.append(str(value, "utf-8"))
        elif number == NODE_OPERATOR:
            node.operators.append(str(value, "utf-8"))
        elif number == NODE_DOMAIN:
            node.domains.append(str(value, "utf-8"))
        elif number == NODE_ATTRIBUTE:
            _add_attribute(walk, node, value)
    return node


def _add_attribute(walk: _Walk, node: _Node, part: memoryview) -> None:
    """Add to `node` the type that an attribute names, and the reason that it gives."""
    names, integers, tensors = set[bytes](), list[int](), list[memoryview]()
    for number, value in walk.fields(part, varints=True):
        if number in (ATTRIBUTE_GRAPH, ATTRIBUTE_GRAPHS):
            node.reason = node.reason or "an operator has a graph of its own, like a loop or a branch"
            return
        if number in ATTRIBUTE_SPARSE:
            node.reason = node.reason or "it has sparse weights"
            return
        if number == ATTRIBUTE_TENSOR:
            tensors.append(value)
        elif number == ATTRIBUTE_NAME:
            names.add(bytes(value))
        elif number == ATTRIBUTE_INTEGER:
            integers += _integers(value)
    if len(tensors) > 1:
        raise _Unreadable
    for tensor in tensors:
        _, types, reason = _tensor(walk, tensor)
        node.types += types or [INTEGER]
        node.reason = node.reason or reason
    node.types += [VALUE_TYPES[name] for name in names if name in VALUE_TYPES]
    if b"to" in names:
        node.types += integers or [INTEGER]


def _input(walk: _Walk, part: memoryview) -> tuple[list[str], list[int]]:
    """Return the names of an input of the graph, and the types of its values."""
    names, types = list[str](), list[int]()
    for number, value in walk.fields(part):
        if number == INPUT_NAME:
            names.append(str(value, "utf-8"))
        elif number == INPUT_TYPE:
            for kind, tensor in walk.fields(value):
                for place, found in walk.fields(tensor, varints=True) if kind == TYPE_TENSOR else ():
                    types += _integers(found) if place == TYPE_ELEMENT else ()
    return names, types


def _tensor(walk: _Walk, part: memoryview) -> tuple[list[str], list[int], str | None]:
    """Return names and types of a tensor, and a reason if it claims to be larger than its bytes are."""
    names: list[str] = []
    types: list[int] = []
    dimensions: list[int] = []
    for number, value in walk.fields(part, varints=True):
        if number == TENSOR_NAME:
            names.append(str(value, "utf-8"))
        elif number == TENSOR_TYPE:
            types += _integers(value)
        elif number == TENSOR_DIMENSIONS:
            dimensions += _integers(value)
            if len(dimensions) > MAX_DIMENSIONS:
                raise _Unreadable
    too_large = prod(dimensions) > 2 * len(part) + 1  # the smallest types have half a byte
    return names, types, "a weight is larger than its bytes" if too_large else None


def _integers(value: memoryview) -> list[int]:
    """Return packed integers; a negative one is very large."""
    found, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        found.append(number)
    return found


class _Walk:
    """Walks messages, up to a number of fields in all."""

    def __init__(self) -> None:
        self._left = MAX_FIELDS

    def fields(self, data: memoryview, *, varints: bool = False) -> Iterator[tuple[int, memoryview]]:
        """Yield number and bytes of the fields that have bytes, with `varints` also of integers."""
        at = 0
        while at < len(data):
            self._left -= 1
            tag, at = _varint(data, at)
            kind, began = tag & 7, at
            if not self._left or not 0 < tag >> 3 < 2**29:
                raise _Unreadable
            if kind == 0:
                _, at = _varint(data, at)
                if varints:
                    yield tag >> 3, data[began:at]
            elif kind == 2:
                length, at = _varint(data, at)
                if at + length > len(data):
                    raise _Unreadable
                yield tag >> 3, data[at : at + length]
                at += length
            elif kind in (1, 5):
                at += 8 if kind == 1 else 4
            else:
                raise _Unreadable
        if at != len(data):
            raise _Unreadable


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        if at + place >= len(data):
            raise _Unreadable
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise _Unreadable
