"""Object stores: paths that are URLs, and reading and writing there through fsspec. Imports common."""

from .fetched_file import FetchedFile
from .local_copy import at_hand, copy_out, local_copy, local_folder, send_folder, writing_local_file
from .mirror import Mirror
from .node_copy import node_copy
from .paths import AnyPath, StorePath, any_path, as_path, is_url
from .pending import Pending
from .probe import check_store
from .spool import home_of, spool_folder
from .store import Listed, Store, store_of
from .upload import Upload

__all__ = [
    "AnyPath",
    "FetchedFile",
    "Listed",
    "Mirror",
    "Pending",
    "Store",
    "StorePath",
    "Upload",
    "any_path",
    "as_path",
    "at_hand",
    "check_store",
    "copy_out",
    "home_of",
    "is_url",
    "local_copy",
    "local_folder",
    "node_copy",
    "send_folder",
    "spool_folder",
    "store_of",
    "writing_local_file",
]
