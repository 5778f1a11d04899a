"""The runner of edge bundles: its Ed25519 against `cryptography`, its rows, and its errors."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.registry.exports.runtime import edge_runner
from falaj.registry.exports.runtime.edge_runner import BundleError, L, P, RowTensors, is_signed

# --------------------------------------------------------------------------------------------- signatures


def accepted_by_cryptography(key: bytes, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300), st.binary(min_size=32, max_size=32))
def test_what_was_signed_is_accepted_and_the_key_of_another_is_not(message: bytes, seed: bytes) -> None:
    private = Ed25519PrivateKey.from_private_bytes(seed)
    key, signature = private.public_key().public_bytes_raw(), private.sign(message)
    other = Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key().public_bytes_raw()

    assert is_signed(key, message, signature)
    assert not is_signed(key, message + b"x", signature)
    assert is_signed(other, message, signature) is (other == key)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 96 * 8 - 1))
def test_a_flipped_bit_is_judged_as_cryptography_does(bit: int) -> None:
    private = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
    data = bytearray(private.public_key().public_bytes_raw() + private.sign(b"message"))
    data[bit // 8] ^= 1 << bit % 8
    key, signature = bytes(data[:32]), bytes(data[32:])

    assert is_signed(key, b"message", signature) is accepted_by_cryptography(key, b"message", signature)
    assert not is_signed(key, b"message", signature)


def test_the_first_vectors_of_rfc_8032() -> None:
    key = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    signature = bytes.fromhex(
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46b"
        "d25bf5f0595bbe24655141438e7a100b"
    )

    assert is_signed(key, b"", signature)
    assert not is_signed(key, b"\x00", signature)


def test_a_second_signature_made_from_the_first_is_refused() -> None:
    """S + L satisfies the same equation: without the bound every signature could be changed."""
    private = Ed25519PrivateKey.generate()
    key, signature = private.public_key().public_bytes_raw(), private.sign(b"m")
    s = int.from_bytes(signature[32:], "little") + L

    assert not is_signed(key, b"m", signature[:32] + s.to_bytes(32, "little"))


def small_order_points() -> list[bytes]:
    """The encodings of points whose order divides eight, canonical and not."""
    y8 = 2707385501144840649318225287225658788936804267575313519463743609750303021660
    ys = {0, 1, P - 1, P, P + 1, y8, P - y8}
    return [(y | sign << 255).to_bytes(32, "little") for y in ys for sign in (0, 1) if y < 1 << 255]


@pytest.mark.parametrize("key", small_order_points(), ids=bytes.hex)
def test_a_key_of_small_order_signs_nothing(key: bytes) -> None:
    """With such a key and S = 0 the neutral point would be a signature of many messages."""
    neutral = (1).to_bytes(32, "little")

    for message in (bytes([n]) for n in range(24)):
        for r in (neutral, key):
            assert not is_signed(key, message, r + bytes(32))


@pytest.mark.parametrize(("key", "signature"), [(31, 64), (33, 64), (32, 63), (32, 65), (0, 0)])
def test_other_lengths_are_refused(key: int, signature: int) -> None:
    assert not is_signed(bytes(key), b"", bytes(signature))


# ---------------------------------------------------------------------------------------------------- rows


def tensor(name: str, dtype: str = "float32", shape: Any = (-1, 2), features: Any = ()) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(shape), "features": list(features)}


def row_tensors(*inputs: dict[str, Any]) -> RowTensors:
    return RowTensors({"inputs": list(inputs), "outputs": [tensor("y", shape=(-1, 1))]})


def arrays(text: str, *inputs: dict[str, Any], how: str = "csv", ignore_extra: bool = False) -> list[Any]:
    rows = row_tensors(*inputs)
    read = edge_runner.read_rows(io.StringIO(text), "in", how, rows, ignore_extra=ignore_extra)
    return rows.arrays(list(read), ignore_extra=ignore_extra)


def test_columns_are_found_by_name_in_any_order() -> None:
    (found,) = arrays("b,a\n2,1\n4,nan\n", tensor("x", features=("a", "b")))

    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([[1, 2], [np.nan, 4]], np.float32))


def test_inputs_of_several_types_are_columns_of_their_own() -> None:
    inputs = (
        tensor("amount", "float64", (-1, 1)),
        tensor("city", "string", (-1,)),
        tensor("flag", "bool", (-1, 1)),
        tensor("z", "int64", (-1, 2)),
    )

    amount, city, flag, z = arrays('amount,city,flag,z[0],z[1]\n1.5,"Al Ain",true,-3,4\n', *inputs)

    assert (amount.tolist(), city.tolist(), flag.tolist(), z.tolist()) == (
        [[1.5]],
        ["Al Ain"],
        [[True]],
        [[-3, 4]],
    )


def test_json_lines_take_whole_tensors() -> None:
    image = tensor("image", "uint8", (-1, 2, 2))

    (found,) = arrays('{"image": [[1, 2], [3, 4]]}\n\n{"image": [[[5, 6], [7, 8]]]}\n', image, how="jsonl")

    assert found.tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no line"),
        ("a\n1\n", "without 'b'"),
        ("a,b,c\n1,2,3\n", "--ignore-extra"),
        ("a,a,b\n1,2,3\n", "twice 'a'"),
        ("a,b\n1\n", "in line 2"),
        ("a,b\n1,x\n", "in line 2, b"),
        ("a,b\n1,\n", "write nan"),
        ("a,b\n1,1e60\n", "type float32"),
        ('a,b\n1,"2\n', "RFC 4180"),
    ],
)
def test_a_bad_table_is_refused_with_its_place(text: str, words: str) -> None:
    with pytest.raises((BundleError, ValueError), match=words.replace("[", r"\[")):
        arrays(text, tensor("x", features=("a", "b")))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1, 2]", "a list"),
        ("{", "no JSON"),
        ('{"x": [1]}', r"shape \[1\]"),
        ('{"x": [[1, 2], [3]]}', "shape"),
        ('{"x": []}', "an empty list"),
        ('{"x": [1, "two"]}', "'two'"),
        ('{"x": [1, true]}', "True"),
        ('{"z": 1}', "unknown column"),
        ("{}", "nothing"),
        ('{"x[0]": 1}', r"x\[1\]"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_a_bad_line_of_json_is_refused_with_its_place(line: str, words: str) -> None:
    with pytest.raises((BundleError, ValueError), match=words) as refused:
        arrays(f"{line}\n", tensor("x"), how="jsonl")

    assert "in line 1" in str(refused.value)


@pytest.mark.parametrize(
    ("value", "dtype", "wanted"),
    [
        ("127", "int8", 127),
        ("128", "int8", None),
        ("-1", "uint8", None),
        ("1.0", "int32", None),
        (3.0, "int32", 3),
        (3.5, "int32", None),
        (True, "int32", None),
        ("65504", "float16", 65504.0),
        ("65505", "float16", None),
        ("-inf", "float32", float("-inf")),
        ("False", "bool", False),
        ("2", "bool", None),
        (5, "string", None),
        (10**400, "float64", None),
        ("18446744073709551615", "uint64", 2**64 - 1),
    ],
)
def test_values_are_held_to_their_type(value: Any, dtype: str, wanted: Any) -> None:
    if wanted is None:
        with pytest.raises(BundleError, match=dtype):
            edge_runner.number_of("here", value, dtype)
    else:
        assert edge_runner.number_of("here", value, dtype) == wanted


def test_all_faults_of_a_batch_are_named_at_once_up_to_a_number() -> None:
    text = "a,b\n" + "x,1\n" * 50

    with pytest.raises(ValueError, match="line 2") as refused:
        arrays(text, tensor("x", features=("a", "b")))

    assert str(refused.value).count("in line") == edge_runner.MOST_FAULTS


def test_a_pin_is_written_once_and_compared_later(tmp_path: Any) -> None:
    pin = tmp_path / "pin"

    first = edge_runner.require_pinned(pin, "aa")
    again = edge_runner.require_pinned(pin, "aa")

    assert "first use" in first
    assert "pinned in" in again
    with pytest.raises(BundleError, match="the pinned key aa"):
        edge_runner.require_pinned(pin, "bb")
    with pytest.raises(BundleError, match="can be written"):
        edge_runner.require_pinned(tmp_path / "absent" / "pin", "aa")
    assert os.listdir(tmp_path) == ["pin"]
