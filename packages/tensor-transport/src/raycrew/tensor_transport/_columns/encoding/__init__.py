"""Columns as bytes and back: checked frames to send, files to keep, checksums to tell rows apart."""

from raycrew.tensor_transport._columns.encoding.checksums import row_checksums
from raycrew.tensor_transport._columns.encoding.files import read_columns, write_columns
from raycrew.tensor_transport._columns.encoding.frame import decode_columns, encode_columns

__all__ = [
    "decode_columns",
    "encode_columns",
    "read_columns",
    "row_checksums",
    "write_columns",
]
