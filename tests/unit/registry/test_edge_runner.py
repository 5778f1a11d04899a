"""The runner of edge bundles: its ECDSA against `cryptography`, its rows, and its errors."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key
from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.registry.exports.runtime import edge_runner
from falaj.registry.exports.runtime.edge_runner import KEY_PREFIX, BundleError, N, P, RowTensors, is_signed

# --------------------------------------------------------------------------------------------- signatures


SHA256 = ec.ECDSA(hashes.SHA256())


def key_pair(secret: int) -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    private = ec.derive_private_key(secret, ec.SECP256R1())
    return private, private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def accepted_by_cryptography(key: bytes, message: bytes, signature: bytes) -> bool:
    try:
        public = load_der_public_key(key)
        assert isinstance(public, ec.EllipticCurvePublicKey)
        public.verify(signature, message, SHA256)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, AssertionError):
        return False
    return True


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300), st.integers(1, N - 1))
def test_what_was_signed_is_accepted_and_the_key_of_another_is_not(message: bytes, secret: int) -> None:
    private, key = key_pair(secret)
    signature = private.sign(message, SHA256)
    _, other = key_pair(7)

    assert is_signed(key, message, signature)
    assert not is_signed(key, message + b"x", signature)
    assert is_signed(other, message, signature) is (other == key)


@pytest.mark.parametrize("secret", [1, 2, 3, N - 1, N - 2, 1 << 255])
def test_keys_at_the_ends_of_the_group_verify(secret: int) -> None:
    private, key = key_pair(secret)

    assert all(is_signed(key, bytes([n]), private.sign(bytes([n]), SHA256)) for n in range(8))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, (91 + 68) * 8 - 1))
def test_a_flipped_bit_is_judged_as_cryptography_does(bit: int) -> None:
    private, key = key_pair(12345)
    data = bytearray(key + private.sign(b"message", SHA256))
    place = bit % (len(data) * 8)
    data[place // 8] ^= 1 << place % 8
    key, signature = bytes(data[:91]), bytes(data[91:])

    assert is_signed(key, b"message", signature) is accepted_by_cryptography(key, b"message", signature)
    assert not is_signed(key, b"message", signature)


def test_a_vector_of_rfc_6979() -> None:
    """A.2.5: P-256 with SHA-256, message "sample"."""
    x = bytes.fromhex("60FED4BA255A9D31C961EB74C6356D68C049B8923B61FA6CE669622E60F29FB6")
    y = bytes.fromhex("7903FE1008B8BC99A41AE9E95628BC64F2F1B20C2D7E9F5177A3C294D4462299")
    r = 0xEFD48B2AACB6A8FD1140DD9CD45E81D69D2C877B56AAF991C34D0EA84EAF3716
    s = 0xF7CB1C942D657C41D436C7A1B6E29F65F3E900DBB9AFF4064DC4AB2F843ACDA8

    assert is_signed(KEY_PREFIX + x + y, b"sample", encode_dss_signature(r, s))
    assert not is_signed(KEY_PREFIX + x + y, b"Sample", encode_dss_signature(r, s))


def test_numbers_outside_of_the_group_are_refused() -> None:
    private, key = key_pair(99)
    r, s = decode_dss_signature(private.sign(b"m", SHA256))

    for pair in ((0, s), (r, 0), (N, s), (r, N), (r + N, s), (r, s + N), (0, 0)):
        assert not is_signed(key, b"m", encode_dss_signature(*pair))


def test_longer_encodings_of_the_same_numbers_are_refused() -> None:
    private, key = key_pair(99)
    signature = private.sign(b"m", SHA256)
    r_bytes = signature[3]
    padded = bytes([0x30, signature[1] + 1, 2, r_bytes + 1, 0]) + signature[4:]

    for wrong in (
        padded,
        signature + b"\0",
        b"\x31" + signature[1:],
        signature[:-1],
        b"\x30\x81" + signature[1:],
    ):
        assert not is_signed(key, b"m", wrong)


def test_a_point_that_is_not_on_the_curve_signs_nothing() -> None:
    private, key = key_pair(99)
    signature = private.sign(b"m", SHA256)
    x, y = key[-64:-32], key[-32:]
    other_y = (P - int.from_bytes(y, "big")).to_bytes(32, "big")

    assert is_signed(KEY_PREFIX + x + y, b"m", signature)
    for point in (bytes(64), y + x, x + other_y, x + bytes(32), b"\xff" * 64):
        assert not is_signed(KEY_PREFIX + point, b"m", signature)


@pytest.mark.parametrize(("key", "signature"), [(90, 70), (92, 70), (91, 7), (91, 0), (0, 0)])
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
