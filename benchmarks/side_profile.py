"""A child of forecast.py that measures the machine under the conditions of the other children."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from children import tell


def main() -> None:
    spec = json.loads(sys.argv[1])
    from lohan.engine.probes import profile

    result = profile([Path(spec["ssd"])])
    Path(spec["out"]).write_text(result.to_toml())
    tell({"adam": result.adam})


if __name__ == "__main__":
    main()
