"""What use costs: the table [prices] of the settings file. Without one nothing has a price, and nobody is shown money."""

import os
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from nexus_bus.errors import Refused

Price = Annotated[float, Meta(ge=0)]


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one unit, in `currency`."""

    currency: Annotated[str, Meta(min_length=1, max_length=8)]
    device_s: Price = 0.0  # a second of a trainer's or an inference worker's device
    session_s: Price = 0.0  # a second that an environment session is held
    stored_gb_day: Price = 0.0  # 1e9 bytes for a day

    def cost(self, device_s: float, session_s: float, stored_gb_day: float) -> float:
        """Of what was used."""
        return self.device_s * device_s + self.session_s * session_s + self.stored_gb_day * stored_gb_day


FIELDS = frozenset(field.name for field in msgspec.structs.fields(Prices))


def load(file: Path | None = None) -> Prices | None:
    """Prices of the settings file, by default the one that NEXUS_CONFIG names; None where it has none.

    Raises:
        Refused: the file cannot be read, or a price is none; names it.
    """
    path = file or (Path(os.environ["NEXUS_CONFIG"]) if os.environ.get("NEXUS_CONFIG") else None)
    if path is None:
        return None
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("prices")
        return msgspec.convert(table, Prices) if table is not None else None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Refused(f"settings file {path}: {error}") from error
    except msgspec.ValidationError as error:
        raise Refused(f"settings file {path} [prices]: {error}") from error
