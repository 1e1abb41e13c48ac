"""`axonn_tune.models` and `axonn_tune.machines`: what can be named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from axonn_tune.errors import AxonnTuneError, UnknownNameError
from axonn_tune.specs.catalog import Kind, Loaded, available, load_machine, load_model
from axonn_tune.specs.document import Document
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model

if TYPE_CHECKING:
    import pandas as pd

D = TypeVar("D", bound=Document)


def models() -> Catalog[Model]:
    """The models that can be named, as `axonn-tune models list` lists them.

    >>> import axonn_tune
    >>> axonn_tune.models()["80b"].document.hidden
    12288
    """
    return Catalog("model", load_model)


def machines() -> Catalog[Machine]:
    """The machines that can be named, as `axonn-tune machines list` lists them.

    >>> import axonn_tune
    >>> axonn_tune.machines()["perlmutter"].document.accelerator.memory_gib
    39.4
    """
    return Catalog("machine", load_machine)


class Catalog(Mapping[str, Loaded[D]], Generic[D]):
    """Documents by name, in natural order (5b before 10b); each is loaded when it is asked for."""

    def __init__(self, kind: Kind, load: Callable[[str], Loaded[D]]) -> None:
        self.kind = kind
        self._load = load
        self._paths = available(kind)
        self._loaded: dict[str, Loaded[D]] = {}

    def __getitem__(self, name: str) -> Loaded[D]:
        """The document of a name in any case; KeyError if there is none, DocumentError if its file is wrong."""
        key = name.lower()
        if key not in self._paths:
            raise KeyError(str(UnknownNameError(self.kind, name, self._paths)))
        if key not in self._loaded:
            self._loaded[key] = self._load(str(self._paths[key]))
        return self._loaded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def broken(self) -> dict[str, AxonnTuneError]:
        """What is wrong with files that cannot be used, by name; they are left out of what is shown."""
        found: dict[str, AxonnTuneError] = {}
        for name in self:
            try:
                self[name]
            except AxonnTuneError as error:
                found[name] = error
        return found

    @property
    def frame(self) -> pd.DataFrame:
        """One row for each document, with units in the names of columns."""
        import pandas as pd

        from axonn_tune.report.documents import documents_records

        names, rows = documents_records(self.kind, self._sound())
        return pd.DataFrame(rows, columns=names)

    def to_dict(self) -> dict[str, Any]:
        """All documents with name, file and hash: what `--format json` prints."""
        from axonn_tune.report.documents import documents_json

        return documents_json(self.kind, self._sound())

    def render(self) -> str:
        """The table that the command line prints."""
        from axonn_tune.report.documents import documents_table

        return documents_table(self.kind, self._sound())

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        return f"<Catalog of {len(self)} {self.kind}s: {', '.join(self)}>"

    def _repr_html_(self) -> str:
        from axonn_tune.api.shown import html_text
        from axonn_tune.report.documents import documents_cells

        return html_text(*documents_cells(self.kind, self._sound()))

    def _sound(self) -> list[tuple[str, Loaded[D]]]:
        broken = self.broken
        return [(name, self[name]) for name in self if name not in broken]
