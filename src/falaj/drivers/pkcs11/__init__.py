"""Root keys in a PKCS#11 token: a hardware security module, or SoftHSM2."""
