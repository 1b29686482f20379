"""Object stores: paths that are URLs, and reading and writing there through fsspec. Imports common."""

from .fetched_file import FetchedFile
from .mirror import Mirror
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
    "check_store",
    "home_of",
    "is_url",
    "spool_folder",
    "store_of",
]
