"""A torch export is accepted if nothing in its program can run code, or reach a file, where it is loaded."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

import model_files as files
from falaj.errors import InvalidInput
from falaj.records.registry import FileFormat
from falaj.registry.file_formats.range_reader import RangeReader
from falaj.registry.formats import recognize

CODE = "__import__('os').system('true')"
SPEC = '[1, {"type": "builtins.dict", "context": "[\\"%s\\"]", "children_spec": []}]'


def read(data: bytes) -> FileFormat:
    return recognize(
        RangeReader("model.pt2", len(data), lambda offset, length: data[offset : offset + length])
    )


def refusal(data: bytes) -> str:
    with pytest.raises(InvalidInput) as refused:
        read(data)
    return str(refused.value.faults[0].given)


def export(program: str) -> bytes:
    return files.torch_export(**{"models__model.json": program})


@pytest.mark.parametrize(
    "target",
    [
        "torch.ops.aten.add.Tensor",
        "torch.ops.aten._softmax.default",
        "torch.ops.aten.__and__.Tensor",
        "torch.ops.higher_order.cond",
        "torch.sym_max",
        "_operator.floordiv",
        "math.ceil",
    ],
)
def test_operators_are_accepted(target: str) -> None:
    assert read(export(files.torch_program(target=target))) is FileFormat.TORCH_EXPORT


@pytest.mark.parametrize(
    "target",
    [
        "torch.serialization.os.system",
        "torch.load",
        "torch.ops.load_library",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.save",
        "torch.ops.aten.__class__.mro",
        "torch.ops.image.read_file.default",
        "torch.ops.higher_order.call_torchbind",
        "_operator.attrgetter",
        "_operator.call",
        "math.__loader__",
        "#mine:thing",
        "",
    ],
)
def test_other_functions_are_refused(target: str) -> None:
    assert "could run code" in refusal(export(files.torch_program(target=target)))


EXPRESSIONS = [
    "3",
    "Symbol('s77', positive=True, integer=True)",
    "Mul(Integer(4), Max(Integer(1), Add(Symbol('s0', integer=True), Integer(-2))))",
    "FloorDiv(s27, 2)*s17 + 1.5e3",
    "Float('0.5', precision=53)",
]
CONDITIONS = [
    "L['x'].size()[2] >= 3",
    "(max(1, (-2) + L['batch']['a'].size()[3])*max(1, L['x'].size()[2])) != 1",
    "((L['x'].size()[1] // 2) % 3) == 0 and not math.isnan(L['rate'])",
]
HOSTILE = [
    CODE,
    "s0.__class__",
    "Symbol('s0').func",
    "sympify('1')",
    "lambda: 1",
    "[s0 for s0 in ()]",
    'Symbol("s0")',
    "s0\n",
    "1.1" * 3000 + "?",
    "s1" * 6000,
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_sizes_of_tensors_are_accepted(expression: str) -> None:
    program = files.torch_program(tensor_values={"x": {"sizes": [{"as_expr": {"expr_str": expression}}]}})

    assert read(export(program)) is FileFormat.TORCH_EXPORT


@pytest.mark.parametrize("condition", CONDITIONS)
def test_conditions_on_inputs_are_accepted(condition: str) -> None:
    assert read(export(files.torch_program(guards_code=[condition]))) is FileFormat.TORCH_EXPORT


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_that_are_evaluated_hold_no_code(text: str) -> None:
    sizes = files.torch_program(tensor_values={"x": {"sizes": [{"as_expr": {"expr_str": text}}]}})

    assert "expr_str" in refusal(export(sizes))
    assert "guards_code" in refusal(export(files.torch_program(guards_code=["L['x'] == 1", text])))


def test_a_text_inside_a_size_is_no_code_either() -> None:
    """SymPy evaluates it, too."""
    value = {"as_expr": {"expr_str": "Max('os.system')"}}

    assert "expr_str" in refusal(export(files.torch_program(tensor_values={"x": {"sizes": [value]}})))


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": [{"as_tensor": {"name": f"x={CODE}"}}]},
        {"input_specs": [{"parameter": {"parameter_name": 'w") or exit("'}}]},
        {"tensor_values": {f"x={CODE}": {}}},
        {"signature": {"in_spec": SPEC % "mask=exit()"}},
        {"signature": {"in_spec": "not JSON"}},
        {"nodes": [{"as_operator": "torch.load"}]},
        {"tensor_values": {"metadata": {"sizes": [{"as_expr": {"expr_str": CODE}}]}}},
        {"tensor_values": {"as_string": {"sizes": [{"as_expr": {"expr_str": CODE}}]}}},
        {"custom_obj_values": {"metadata": {"name": CODE}}},
    ],
    ids=[
        *("input", "weight", "tensor", "keyword", "specification", "operator"),
        *("a tensor metadata", "a tensor as_string", "an object metadata"),
    ],
)
def test_names_that_become_source_text_are_names(fields: dict[str, Any]) -> None:
    assert "could run code" in refusal(export(files.torch_program(**fields)))


def test_values_may_be_any_text() -> None:
    program = files.torch_program(
        nodes=[
            {"arg": {"as_string": "bij,bjk->bik (x)"}, "metadata": {"stack_trace": 'File "a.py", line 1'}}
        ],
        signature={"in_spec": SPEC % "mask", "fqn": "conv.0"},
    )

    assert read(export(program)) is FileFormat.TORCH_EXPORT


@pytest.mark.parametrize(
    "program",
    [
        "",
        "{",
        "[]",
        '{"schema_version": {"major": 9}}',
        '{"schema_version": {"major": 8}, "target": "torch.load"}',
    ],
)
def test_a_program_that_is_not_understood_is_refused(program: str) -> None:
    assert "could run code" in refusal(export(program))


@pytest.mark.parametrize("name", ["opaque_obj_0", "custom_obj_0", "../weights/weight_0"])
def test_constants_that_torch_unpickles_by_their_name_are_refused(name: str) -> None:
    listed = json.dumps({"config": {"c": {"path_name": name, "use_pickle": False}}})

    assert "pickled weights" in refusal(
        files.torch_export(**{"data__constants__model_constants_config.json": listed})
    )


# ------------------------------------------------------------------------------------------ exports of torch


def program_text(data: bytes) -> str:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(next(name for name in archive.namelist() if "/models/" in name)).decode()


def changed(data: bytes, old: str, new: str) -> bytes:
    """Replace a text in the program of an export."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(written, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if "/models/" in name:
                assert old.encode() in content
                content = content.replace(old.encode(), new.encode(), 1)
            target.writestr(name, content)
    return written.getvalue()


@pytest.mark.slow
def test_exports_of_torch_are_accepted_and_refused_once_they_hold_code(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Network(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(
                torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()
            )
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: Any, *, mask: Any) -> Any:
            found = (self.body(x).mean((2, 3)) * self.scale)[:, : x.shape[2] // 2]
            return {"found": torch.where(mask, found, 0.0), "any": (found > 0) & mask}

    sizes = {0: torch.export.Dim("batch", max=512), 2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    program = torch.export.export(
        Network().eval(),
        (torch.randn(2, 3, 8, 8),),
        {"mask": torch.ones(1, dtype=torch.bool)},
        dynamic_shapes={"x": sizes, "mask": None},
    )
    program._example_inputs = None
    written, mark = io.BytesIO(), tmp_path / "ran"
    torch.export.save(program, written)
    size = re.search(r"Symbol\('s\d+', positive=True, integer=True\)", program_text(written.getvalue()))
    assert size is not None
    hostile = changed(written.getvalue(), size[0], f"__import__('os').mkdir('{mark}')")

    with pytest.raises(Exception, match=r"."):  # what was made there is no size
        torch.export.load(io.BytesIO(hostile))

    assert mark.exists()
    assert "expr_str" in refusal(hostile)
    assert read(written.getvalue()) is FileFormat.TORCH_EXPORT


# ---------------------------------------------------------------------------------------- example inputs

TENSOR = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00((X\x07\x00\x00\x00storageq\x01ctorch\nFloatStorage\nq\x02"
    b"X\x01\x00\x00\x000q\x03X\x03\x00\x00\x00cpuq\x04K\x01tq\x05QK\x00K\x01\x85q\x06K\x01\x85q\x07\x89"
    b"ccollections\nOrderedDict\nq\x08)Rq\ttq\nRq\x0b\x85q\x0c}q\r\x86q\x0e."
)
"""What torch.save writes of one tensor of one number, and of no keyword arguments."""


def with_examples(pickled: bytes, **members: bytes) -> bytes:
    inner = {"m/data.pkl": pickled, "m/byteorder": b"little", "m/data/0": bytes(4), "m/version": b"3\n"}
    inner |= {f"m/{name}": content for name, content in members.items()}
    return files.torch_export(**{"data__sample_inputs__model.pt": files.archive(inner)})


def test_example_inputs_that_are_tensors_are_accepted() -> None:
    assert read(with_examples(TENSOR)) is FileFormat.TORCH_EXPORT


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"cos\nsystem\n(X\x04\x00\x00\x00truetR.", "names os system"),
        (TENSOR.replace(b"_rebuild_tensor_v2", b"_rebuild_from_type"), "names torch._utils"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00)R}b.", "BUILD"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.", "could run code"),
        (b"(S'true'\nios\nsystem\n.", "could run code"),
        (TENSOR[:-1], "cannot be followed"),
        (b"", "cannot be followed"),
    ],
)
def test_example_inputs_that_could_run_code_are_refused(pickled: bytes, message: str) -> None:
    assert message in refusal(with_examples(pickled))


def test_example_inputs_with_anything_else_beside_them_are_refused() -> None:
    assert "does not write" in refusal(with_examples(TENSOR, **{"code.py": b"x"}))
