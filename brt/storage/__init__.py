"""Where files are: in a directory, or in a bucket of which brt keeps a local copy.

All code reads and writes local files. For a place in a bucket, these are the files of a `Mirror`,
which copies objects when they are needed, and copies back what has changed. `of` returns the
`Storage` of a path. This is the mirror that the path belongs to, or, for all other local files, an
object whose methods do nothing.
"""

from brt.storage.inputs import matching as matching
from brt.storage.inputs import tokenizer as tokenizer
from brt.storage.mirror import Storage as Storage
from brt.storage.mirror import discard_all as discard_all
from brt.storage.mirror import local as local
from brt.storage.mirror import new_directory as new_directory
from brt.storage.mirror import of as of
from brt.storage.mirror import publish_all as publish_all
from brt.storage.mirror import readable as readable
from brt.storage.mirror import shown as shown
from brt.storage.mirror import writable as writable
from brt.storage.places import settled as settled
from brt.storage.places import source as source
