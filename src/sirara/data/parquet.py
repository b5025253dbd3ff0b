"""Text columns of parquet files; alone in a file because pyarrow is optional and heavy to import."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from sirara.errors import DataError


def column(path: str, field: str) -> Iterator[str | None]:
    """The texts of the column `field`, row by row.  Raises DataError when the file or column is no text."""
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            if field not in schema.names:
                raise DataError(f"no column {field!r} (it has {', '.join(schema.names[:8])})")
            kind = schema.field(field).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise DataError(f"column {field!r} is {kind}, not text")
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                yield from batch.column(0).to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"the parquet file is damaged: {error}") from error
