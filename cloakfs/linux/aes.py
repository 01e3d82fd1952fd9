"""AES of many blocks at once, by OpenSSL's libcrypto, which Python's own hashlib uses (EVP_EncryptInit(3ssl))."""

import _hashlib
import ctypes

BLOCK = 16
"""Bytes of a block, and of a key."""

_lib = ctypes.CDLL(_hashlib.__file__)  # and with it the libcrypto that it uses
_lib.EVP_CIPHER_CTX_new.restype = _lib.EVP_aes_128_ecb.restype = ctypes.c_void_p
_lib.EVP_CIPHER_CTX_free.argtypes = (ctypes.c_void_p,)
_lib.EVP_EncryptInit_ex.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_encrypt = _lib.EVP_EncryptUpdate
_encrypt.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)


class Aes:
    """AES with one key of 128 bits, of each block by itself. Not for several threads at once.

    Raises:
        OSError: libcrypto refuses.
    """

    def __init__(self, key: bytes) -> None:
        self._context = _lib.EVP_CIPHER_CTX_new()
        self._length = ctypes.c_int()
        self._address = ctypes.addressof(self._length)
        if not self._context or not _lib.EVP_EncryptInit_ex(self._context, _lib.EVP_aes_128_ecb(), None, key, None):
            raise OSError("AES is not available (OpenSSL)")

    def __del__(self) -> None:
        _lib.EVP_CIPHER_CTX_free(self._context)

    def encrypt(self, blocks: bytes) -> bytes:
        """Return the encrypted blocks."""
        # OpenSSL may write one block more than there is, by its own documentation.
        encrypted = ctypes.create_string_buffer(len(blocks) + BLOCK)
        if not _encrypt(self._context, encrypted, self._address, blocks, len(blocks)):
            raise OSError("AES failed (OpenSSL)")
        return ctypes.string_at(encrypted, len(blocks))
