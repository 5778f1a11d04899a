"""Files of each model format, written by its library: accepted whole, and refused when they lie about what they are."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import model_files as files
from falaj.errors import InvalidInput
from falaj.records.registry import FileFormat
from falaj.registry.file_formats import archives
from falaj.registry.file_formats.pickles import packed
from falaj.registry.file_formats.range_reader import RangeReader
from falaj.registry.formats import recognize
from framework_models import litert_bytes

ROWS = np.random.default_rng(7).random((120, 4))
LABELS = (ROWS[:, 0] > 0.5).astype(int)
CATBOOST = Path(__file__).parents[2] / "data" / "catboost-categories.cbm"


def read(data: bytes) -> FileFormat:
    return recognize(
        RangeReader("model.bin", len(data), lambda offset, length: data[offset : offset + length])
    )


def refusal(data: bytes) -> str:
    with pytest.raises(InvalidInput) as refused:
        read(data)
    (fault,) = refused.value.faults
    return f"{fault.given} / {fault.fix}"


# ---------------------------------------------------------------------------------------------- real files


def xgboost(layout: str) -> bytes:
    booster = pytest.importorskip("xgboost").XGBClassifier(n_estimators=5).fit(ROWS, LABELS).get_booster()
    return bytes(booster.save_raw(raw_format=layout))


def lightgbm(**options: Any) -> bytes:
    found = pytest.importorskip("lightgbm").LGBMClassifier(n_estimators=7, verbose=-1, **options)
    return found.fit(ROWS, LABELS).booster_.model_to_string().encode()


def litert() -> bytes:
    return litert_bytes(np.ones((2, 1), "float32"), np.ones(1, "float32"))


REAL: dict[FileFormat, Callable[[], bytes]] = {
    FileFormat.LITERT: litert,
    FileFormat.LIGHTGBM: lightgbm,
    FileFormat.CATBOOST: CATBOOST.read_bytes,
}


@pytest.mark.parametrize(("kind", "make"), REAL.items())
def test_a_file_of_the_library_is_accepted_and_a_cut_one_is_refused(
    kind: FileFormat, make: Callable[[], bytes]
) -> None:
    data = make()

    assert read(data) is kind
    for cut in (40, len(data) // 3, len(data) // 2):
        refusal(data[:cut])


@pytest.mark.parametrize("layout", ["json", "ubj"])
def test_xgboost_is_read_to_its_end(layout: str) -> None:
    data = xgboost(layout)

    assert read(data) is FileFormat.XGBOOST
    for wrong in (
        data[:-1],
        data[: len(data) // 2],
        data + b"{",
        data.replace(b"objective", b"objectivf", 1),
    ):
        refusal(wrong)


def test_lightgbm_with_names_that_are_not_ascii_is_accepted() -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(ROWS, columns=["رصيد", "b", "c", "d"])
    model = pytest.importorskip("lightgbm").LGBMClassifier(n_estimators=3, verbose=-1).fit(frame, LABELS)

    assert read(model.booster_.model_to_string().encode()) is FileFormat.LIGHTGBM


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.replace(b"tree_sizes=", b"tree_sizes=1", 1), "where its header says"),
        (lambda data: data.replace(b"Tree=3", b"Tree=4", 1), "tree 3"),
        (lambda data: data.replace(b"end of trees", b"end of forest"), "end of its trees"),
        (lambda data: data + b"\x00", "not text"),
        (lambda data: data + b"\xff", "not text"),
        (lambda data: data.replace(b"max_feature_idx", b"min_feature_idx"), "header"),
        (lambda data: b"tree\nversion=v4\nnum_class=1\n", "header"),
    ],
)
def test_lightgbm_that_lies_is_refused(change: Callable[[bytes], bytes], says: str) -> None:
    assert says in refusal(change(lightgbm()))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x1c\0\0\0TFL3" + bytes(64), "damaged"),
        (b"\xff\xff\xff\x7fTFL3" + bytes(64), "out of the file"),
        (b"\x08\0\0\0TFL3" + bytes(4), "damaged"),
        (files.catboost(form=b"FlabuffersModel_v2"), "unknown version"),
        (files.catboost(more=b"\x7fELF"), "something else"),
        (b"CBM1" + struct.pack("<I", 16) + bytes(16), "damaged"),
        (b'{"learner": {}, "version": [3, 0, 0]}', "without gradient_booster"),
        (b'{"learner": 1}', "without gradient_booster"),
        (b'{"learner": {}, "learner": {}}', "twice"),
        (b"{L" + struct.pack(">q", 7) + b"learner{}" + b"}", "without gradient_booster"),
        (b"{L" + struct.pack(">q", 7) + b"learner" + b"[" * 100_000, "damaged"),
        (b"{L" + struct.pack(">q", 7) + b"learner[$d#L" + struct.pack(">q", 1 << 62), "damaged"),
        (b"{L" + struct.pack(">q", 7) + b"learner[#L" + struct.pack(">q", -1), "damaged"),
        (b"{L" + struct.pack(">q", 7) + b"learner[$Z#L" + struct.pack(">q", 1 << 62) + b"}", "without"),
    ],
)
def test_a_file_that_only_begins_like_a_model_is_refused(data: bytes, says: str) -> None:
    assert says in refusal(data)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["litert", "catboost", "ubj"]), st.data())
def test_altered_bytes_give_an_answer_or_a_typed_error(kind: str, data: st.DataObject) -> None:
    made = {"litert": files.litert, "catboost": files.catboost, "ubj": files.xgboost_ubj}[kind]()
    place = data.draw(st.integers(0, len(made) - 1))
    altered = made[:place] + data.draw(st.binary(min_size=1, max_size=8)) + made[place + 1 :]

    with suppress(InvalidInput):
        read(altered)


# --------------------------------------------------------------------------------------------------- skops


def skops(model: Any, **options: Any) -> bytes:
    import skops.io

    return bytes(skops.io.dumps(model, **options))


def estimators() -> list[Any]:
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.compose import ColumnTransformer
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.linear_model import LogisticRegression, SGDClassifier
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
    from sklearn.svm import SVC

    columns = ColumnTransformer([("a", StandardScaler(), [0, 1]), ("b", OneHotEncoder(), [2])])
    return [
        LogisticRegression(),
        make_pipeline(columns, RandomForestClassifier(3)),
        HistGradientBoostingClassifier(max_iter=3),
        SGDClassifier(),
        SVC(),
        KNeighborsClassifier(),
        MLPClassifier((3,), max_iter=2),
        CalibratedClassifierCV(LogisticRegression(), cv=2),
        make_pipeline(FunctionTransformer(np.log1p), LogisticRegression()),
        make_pipeline(TfidfTransformer(), LogisticRegression()),
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(10))
def test_models_of_scikit_learn_by_skops_are_accepted(number: int) -> None:
    model = estimators()[number].fit(np.round(ROWS, 1), LABELS)

    assert read(skops(model)) is FileFormat.SKOPS
    assert read(skops(model, compression=zipfile.ZIP_DEFLATED)) is FileFormat.SKOPS


def test_sparse_weights_are_accepted_and_what_is_in_them_is_checked() -> None:
    from sklearn.linear_model import LogisticRegression

    data = skops(LogisticRegression().fit(ROWS, LABELS).sparsify())
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (sparse,) = [name for name in members if name.endswith(".npz")]

    assert read(data) is FileFormat.SKOPS
    for wrong in (
        files.archive({"a.npy": files.array("'|O'")}),
        files.archive({"a.pkl": b"N."}),
        b"plain",
        b"",
    ):
        refusal(files.archive(members | {sparse: wrong}))


def shout(values: Any) -> Any:
    return values


def test_a_function_of_ones_own_is_not_trusted() -> None:
    from sklearn.preprocessing import FunctionTransformer

    said = refusal(skops(FunctionTransformer(shout)))

    assert "not one that is trusted" in said
    assert "shout" in said


def with_schema(change: Callable[[dict[str, Any]], Any]) -> bytes:
    from sklearn.linear_model import LogisticRegression

    with zipfile.ZipFile(io.BytesIO(skops(LogisticRegression().fit(ROWS, LABELS)))) as archive:
        members: dict[str, bytes | str] = {name: archive.read(name) for name in archive.namelist()}
    schema = json.loads(members["schema.json"])
    made = change(schema)
    members["schema.json"] = json.dumps(schema if made is None else made)
    return files.archive(members)


def node(loader: str, module: str, name: str, **more: Any) -> dict[str, Any]:
    return {"__loader__": loader, "__module__": module, "__class__": name, "content": {}} | more


@pytest.mark.parametrize(
    "hostile",
    [
        node("FunctionNode", "os", "system"),
        node("FunctionNode", "numpy", "load"),
        node("FunctionNode", "numpy.testing", "exp"),
        node("TypeNode", "subprocess", "Popen"),
        node("ObjectNode", "os", "system"),
        node("ObjectNode", "sklearn.utils._testing", "TempMemmap"),
        node("ObjectNode", "sklearn.datasets._base", "RemoteFileMetadata"),
        node("ObjectNode", "sklearn.linear_model._base.os", "system"),
        node("PartialNode", "functools", "partial"),
        node("MethodNode", "sklearn.linear_model", "LogisticRegression"),
        node("OperatorFuncNode", "operator", "methodcaller"),
        node("ConstructorFromReduceNode", "builtins", "eval"),
        node("LossNode", "builtins", "exec"),
        node("JsonNode", "builtins", "eval"),
        node("NdArrayNode", "numpy", "memmap"),
        node("NdArrayNode", "numpy", "ndarray", file="elsewhere.npy"),
        node("RandomGeneratorNode", "numpy.random._generator", "Generator"),
        {"__class__": "system", "__module__": "os"},
    ],
    ids=lambda each: f"{each.get('__loader__')}-{each['__module__']}.{each['__class__']}",
)
def test_a_schema_that_names_anything_else_is_refused(hostile: dict[str, Any]) -> None:
    def hide(schema: dict[str, Any]) -> None:
        schema["content"]["deep"] = [{"in": hostile}]

    assert "a model of skops with" in refusal(with_schema(hide))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda schema: schema.update(protocol=0), "protocol 2"),
        (lambda schema: schema.pop("__loader__") and None, "not one that is trusted"),
        (lambda schema: {"protocol": 2, "_skops_version": "1"}, "without a model"),
    ],
)
def test_another_schema_is_refused(change: Callable[[dict[str, Any]], Any], says: str) -> None:
    assert says in refusal(with_schema(change))


@pytest.mark.parametrize("extra", ["run.py", "1.npy.exe", "sub/1.npy"])
def test_a_member_that_skops_does_not_write_is_refused(extra: str) -> None:
    from sklearn.linear_model import LogisticRegression

    data = io.BytesIO(skops(LogisticRegression().fit(ROWS, LABELS)))
    with zipfile.ZipFile(data, "a") as archive:
        archive.writestr(extra, "print()")

    assert "does not write" in refusal(data.getvalue())


def test_a_pickle_among_the_arrays_of_skops_is_refused() -> None:
    from sklearn.linear_model import LogisticRegression

    data = io.BytesIO(skops(LogisticRegression().fit(ROWS, LABELS)))
    with zipfile.ZipFile(data, "a") as archive:
        archive.writestr("1.bin", pickle.dumps(Bomb()))

    assert "holds a pickle" in refusal(data.getvalue())


# ------------------------------------------------------------------------------------------------- pickles


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def tar(members: dict[str, bytes], mode: str = "w") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return data.getvalue()


def fitted() -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression().fit(ROWS, LABELS)


def joblib_bytes(model: Any, **options: Any) -> bytes:
    import joblib

    data = io.BytesIO()
    joblib.dump(model, data, **options)
    return data.getvalue()


def torch_checkpoint() -> bytes:
    torch = pytest.importorskip("torch")
    data = io.BytesIO()
    torch.save(torch.nn.Linear(2, 1), data)
    return data.getvalue()


PACKED: dict[str, tuple[Callable[[], bytes], str]] = {
    "pickle": (lambda: pickle.dumps(fitted()), "a pickle of sklearn;"),
    "old protocol": (lambda: pickle.dumps(fitted(), protocol=0), "a pickle of sklearn;"),
    "joblib": (lambda: joblib_bytes(fitted()), "a pickle of sklearn;"),
    "joblib, zlib": (lambda: joblib_bytes(fitted(), compress=3), "a pickle of sklearn;"),
    "joblib, gzip": (lambda: joblib_bytes(fitted(), compress=("gzip", 3)), "a pickle of sklearn;"),
    "joblib, xz": (lambda: joblib_bytes(fitted(), compress=("xz", 1)), "a pickle of sklearn;"),
    "gz": (lambda: gzip.compress(pickle.dumps(fitted())), "a pickle of sklearn;"),
    "bz2": (lambda: bz2.compress(pickle.dumps(fitted())), "a pickle of sklearn;"),
    "xz": (lambda: lzma.compress(pickle.dumps(fitted())), "a pickle of sklearn;"),
    "tar": (lambda: tar({"a.txt": b"x", "m/model.bin": pickle.dumps(fitted())}), "sklearn, m/model.bin"),
    "tar.gz": (lambda: tar({"model.pkl": pickle.dumps(fitted())}, "w:gz"), "sklearn, model.pkl"),
    "zip": (lambda: files.archive({"a": b"x", "model.bin": pickle.dumps(fitted())}), "sklearn, model.bin"),
    "zip in tar.gz": (
        lambda: tar({"inner.zip": files.archive({"m.bin": pickle.dumps(fitted())})}, "w:gz"),
        "sklearn, inner.zip/m.bin",
    ),
    "gz in zip": (
        lambda: files.archive({"a": b"x", "model.gz": gzip.compress(pickle.dumps(fitted()))}),
        "sklearn, model.gz",
    ),
    "torch": (torch_checkpoint, "a pickle of torch"),
}


@pytest.mark.parametrize(("make", "says"), PACKED.values(), ids=PACKED)
def test_a_pickle_is_found_wherever_it_is_packed_and_the_safe_way_is_named(
    make: Callable[[], bytes], says: str
) -> None:
    said = refusal(make())

    assert says in said
    assert ("torch.export.save" if "torch" in says else "skops") in said


def test_object_arrays_of_numpy_are_refused_with_their_safe_way() -> None:
    data = io.BytesIO()
    np.save(data, np.array([{"a": 1}], dtype=object), allow_pickle=True)

    said = refusal(data.getvalue())

    assert "Python objects" in said
    assert "allow_pickle=False" in said


@pytest.mark.parametrize(
    ("package", "way"),
    [("xgboost", "model.ubj"), ("lightgbm", "model.txt"), ("catboost", "model.cbm"), ("os", "skops")],
)
def test_each_flavour_has_its_safe_way(package: str, way: str) -> None:
    assert way in refusal(b"c%s.core\nModel\n." % package.encode())


def test_archives_without_a_pickle_are_refused_too() -> None:
    assert "tar archive" in refusal(tar({"weights.bin": bytes(100)}))
    assert "compressed (gzip)" in refusal(gzip.compress(files.onnx()))
    assert "no torch export" in refusal(files.archive({"weights.bin": bytes(100)}))


def bomb(levels: int) -> bytes:
    data = bytes(32 << 20)
    for _ in range(levels):
        data = gzip.compress(data * 4 if len(data) < 1 << 20 else data)
    return data


@pytest.mark.parametrize(
    "make",
    [
        lambda: gzip.compress(bytes(200 << 20), 1),
        lambda: bomb(4),
        lambda: zlib.compress(bytes(200 << 20), 1),
        lambda: tar({f"{n}.gz": gzip.compress(bytes(8 << 20), 1) for n in range(40)}),
        lambda: files.archive(
            {f"{n}.bin": bytes(1 << 20) for n in range(80)}, compression=zipfile.ZIP_DEFLATED
        ),
    ],
    ids=["gzip", "nested", "zlib", "many", "zip"],
)
def test_a_bomb_is_refused_after_a_bounded_amount_of_unpacking(
    make: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make()
    unpacked = []
    take = packed._Budget.take

    def counted(self: Any, content: Any) -> bytes:
        found = take(self, content)
        unpacked.append(len(found))
        return found

    monkeypatch.setattr(packed._Budget, "take", counted)

    refusal(data)

    assert sum(unpacked) <= packed.UNPACKED_LIMIT


def test_a_zip_that_claims_more_than_it_should_unpack_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "UNPACKED_LIMIT", 1 << 20)
    data = files.archive({"schema.json": bytes(8 << 20)}, compression=zipfile.ZIP_DEFLATED)

    assert "very much more" in refusal(data)
